"""The reference with the subject's declared storage of states and declared products.

Between events a state has the precision of its storage; during an event it has full width, as in an engine's registers.
Leaves out: all other places, which `see` rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch

from instep_reference.contract.declared_rounding import PREFIXES, Storage, kept_in
from instep_reference.contract.engine import Committed, Forwarded, Path, Row
from instep_reference.contract.place_names import Place, See
from instep_reference.engine import Memories, ReferenceEngine
from instep_reference.gdn import GdnMemory
from instep_reference.speculative_rounds import Standing

from ..oracle.declared_product_rounding import InChunks, Operands
from ..oracle.reordered_arithmetic import stored
from ..oracle.storage_rounding import State

States = Callable[[int, GdnMemory], torch.Tensor]  # (layer, memory) -> its state


class StoringEngine(ReferenceEngine):
    """A reference with declared rounding.

    stored    the storage of states between events;  chance: the generator of stochastic rounding
    rounds    its roundings of tracked prefixes (`kept_in`)
    operands  rounds the operands of products, together with the arithmetic around it
    """

    stored: Storage
    chance: torch.Generator | None = None
    rounds: Mapping[str, Storage] = MappingProxyType({})
    operands: Operands
    _rules: Mapping[int, InChunks] = MappingProxyType({})  # by layer, while a prefill chunk runs

    def watch(self, see: See) -> None:
        """Set the hook. Before it runs, the next op and the read-out of a declared chunk form are recorded."""

        def hooked(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            rule = self._rules.get(place.layer) if place.stage == "trunk" else None
            if rule is not None and place.component == "core":
                tensor = rule.core()
            tensor = see(place, self.operands.added_up(place, tensor))
            if rule is not None:
                rule.keep(place, tensor)
            self.operands.seen(place)
            return tensor

        super().watch(hooked)

    def _prefill(self, row: Row) -> list[int]:
        self.operands.chunk = True
        picks = super()._prefill(row)
        self.operands.chunk = False
        return picks

    def _chunk(
        self, tokens: tuple[int, ...], memory: Memories, start: int, *, inner: bool
    ) -> tuple[torch.Tensor, Memories]:
        if "gdn.chunk" in self.operands.products:
            self._rules = {layer: InChunks(self.operands, one.state) for layer, one in enumerate(memory)
                           if isinstance(one, GdnMemory)}  # fmt: skip
        final, memory = super()._chunk(tokens, memory, start, inner=inner)
        left, self._rules = {layer: rule.state for layer, rule in self._rules.items()}, {}
        if left:
            memory = _with(memory, lambda layer, _: cast(torch.Tensor, left[layer]))
        return final, _with(memory, self._rounded(start + len(tokens))) if inner else memory

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        answer = super().forward(rows)
        self._store(row.request for row in rows)
        for row in rows:
            if row.track:
                memory = self.requests[row.request].standing.memory
                self.saved[row.track] = replace(self.saved[row.track], memory=memory)
            for under in filter(None, (*row.inner, row.track)):
                kept = self.saved[under]
                self.saved[under] = replace(kept, memory=_with(kept.memory, self._narrow(forward=True)))
        return answer

    def commit(
        self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None, track: tuple[str, ...] = (),
        caps: tuple[int, ...] = (),
    ) -> Committed:
        answer = super().commit(requests, accepted, track, caps)
        self._store(requests)
        for name, under in zip(requests, track, strict=False):
            if name in answer.tracked:
                kept = self.saved[under]
                memory = _with(kept.memory, self._rounded(len(kept.tokens)))
                self.saved[under] = replace(kept, memory=_with(memory, self._narrow(forward=False)))
        return answer

    def load(self, request: str, name: str) -> None:
        super().load(request, name)
        if self.rounds.keys() & PREFIXES and self.saved[name].final is not None:
            self._store([request])  # a prefix is read in full width

    def take_path(self, request: str, drafts: tuple[int, ...], bonus: int) -> None:
        """Commit the root and these drafts as one window. The draft head does not run."""
        live = self.requests[request]
        standing = live.standing
        assert standing.root is not None, "a window begins with a root"
        tokens = (standing.root, *drafts)
        _, memory = self.model.advance(tokens, standing.memory, len(standing.tokens), self.see)
        after = replace(standing, tokens=(*standing.tokens, *tokens), root=bonus, memory=memory)
        self.requests[request] = live.then(after)
        self._store([request])

    def as_stored(self, kept: Standing[Any, Any, Any]) -> Standing[Any, Any, Any]:
        """Return a copy of another engine as this one stores it."""
        return replace(kept, memory=_with(kept.memory, self._rounded(len(kept.tokens))))

    def _store(self, requests: Iterable[str]) -> None:
        for name in requests:
            self._keep(name, self._rounded(len(self.requests[name].standing.tokens)))

    def _rounded(self, tokens: int) -> States:
        """The stored states after that many tokens."""
        return lambda layer, memory: stored(memory.state, self.stored, self.chance, State(layer, tokens))

    def _narrow(self, *, forward: bool) -> States:
        """The states that a tracked prefix keeps. forward: whether a forward makes it, or a commit."""
        def narrow(layer: int, memory: GdnMemory) -> torch.Tensor:
            state = memory.state
            for storage in kept_in(self.rounds, forward=forward):
                state = stored(state, storage, self.chance)
            return state

        return narrow

    def _keep(self, name: str, state: States) -> None:
        live = self.requests[name]
        kept = _with(live.standing.memory, state)
        self.requests[name] = replace(live, standing=replace(live.standing, memory=kept))


def _with(memories: Memories, state: States) -> Memories:
    """The memories with another state in every GDN layer."""
    return tuple(
        replace(memory, state=state(layer, memory)) if isinstance(memory, GdnMemory) else memory
        for layer, memory in enumerate(memories)
    )
