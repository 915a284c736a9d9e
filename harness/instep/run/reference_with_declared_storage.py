"""The reference with the subject's declared storage of states and declared products.

Between events a state has the precision of its storage; during an event it has full width, as in an engine's registers.
Leaves out: all other places, which `see` rounds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch

from instep_reference.contract.declared_rounding import PREFIXES, RING, Storage, kept_in
from instep_reference.contract.engine import Committed, Forwarded, Path, Row
from instep_reference.contract.place_names import Place, See
from instep_reference.engine import Memories, ReferenceEngine
from instep_reference.gdn import absorb, by_channel
from instep_reference.speculative_rounds import Standing
from instep_reference.trunk import WithState
from instep_reference.verify_by_decoding import Node

from ..oracle.declared_product_rounding import InChunks, Operands
from ..oracle.reordered_arithmetic import in_two_parts, stored
from ..oracle.storage_rounding import State

States = Callable[[int, WithState], torch.Tensor]  # (layer, memory) -> its state
IN_A_RING = ("k", "log_decay", "update")  # the rows that a ring keeps of a token


class StoringEngine(ReferenceEngine):
    """A reference with declared rounding.

    stored    the storage of states between events;  chance: the generator of stochastic rounding
    rounds    its roundings of tracked prefixes (`kept_in`) and of rings (`RING`)
    operands  rounds the operands of products, together with the arithmetic around it
    """

    stored: Storage
    chance: torch.Generator | None = None
    rounds: Mapping[str, Storage] = MappingProxyType({})
    operands: Operands
    _rules: Mapping[int, InChunks] = MappingProxyType({})  # by layer, while a prefill chunk runs
    _window: dict[tuple[int, str], list[torch.Tensor]] | None = None  # rows [T, ..] by layer, while a window runs

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
            if self._window is not None and place.stage == "trunk" and place.component in IN_A_RING:
                self._window.setdefault((place.layer, place.component), []).append(tensor)
            return tensor

        super().watch(hooked)

    def _prefill(self, row: Row) -> list[int]:
        self.operands.chunk = True
        picks = super()._prefill(row)
        self.operands.chunk = False
        return picks

    def _verify(self, row: Row) -> list[int]:
        """Run the window. Its nodes read exact states; a commit takes those that a ring leaves."""
        self._window = {} if RING in self.rounds else None
        picks, window = super()._verify(row), self._window
        self._window = None
        if window is not None:
            live, nodes = self.requests[row.request], list[Node[torch.Tensor, Memories]]()
            for number, (node, parent) in enumerate(zip(live.nodes, live.parents, strict=True)):
                before = nodes[parent].memory if parent >= 0 else live.standing.memory
                rows = {key: shown[number : number + 1] for key, shown in window.items()}
                nodes.append(replace(node, memory=_with(node.memory, self._from_ring(rows, before))))
            self.requests[row.request] = replace(live, nodes=tuple(nodes))
        return picks

    def _from_ring(self, window: Mapping[tuple[int, str], Sequence[torch.Tensor]], before: Memories) -> States:
        """The states that tokens leave on `before` when they are run again from a ring."""
        dtype = self.rounds[RING]
        assert isinstance(dtype, torch.dtype), "checked as a declaration"

        def states(layer: int, memory: WithState) -> torch.Tensor:
            rows = {name: torch.cat(tuple(window[layer, name])) for name in IN_A_RING}
            base = before[layer]
            assert isinstance(base, WithState), "a layer keeps its kind"
            return run_again(rows, base.state, dtype, self.chance)

        return states

    def _chunk(
        self, tokens: tuple[int, ...], memory: Memories, start: int, *, inner: bool
    ) -> tuple[torch.Tensor, Memories]:
        if self.operands.forms[1] in self.operands.products:
            self._rules = {layer: InChunks(self.operands, one.state) for layer, one in enumerate(memory)
                           if isinstance(one, WithState)}  # fmt: skip
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
        self._window = {} if RING in self.rounds else None
        _, memory = self.model.advance(tokens, standing.memory, len(standing.tokens), self.see)
        if self._window is not None:
            memory, self._window = _with(memory, self._from_ring(self._window, standing.memory)), None
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
        def narrow(layer: int, memory: WithState) -> torch.Tensor:
            state = memory.state
            for storage in kept_in(self.rounds, forward=forward):
                state = stored(state, storage, self.chance)
            return state

        return narrow

    def _keep(self, name: str, state: States) -> None:
        live = self.requests[name]
        kept = _with(live.standing.memory, state)
        self.requests[name] = replace(live, standing=replace(live.standing, memory=kept))


def run_again(
    rows: Mapping[str, torch.Tensor], state: torch.Tensor, dtype: torch.dtype, chance: torch.Generator | None = None
) -> torch.Tensor:
    """Run tokens again from a ring that has keys and updates in two parts of `dtype`.

    Shapes:  rows: k (T, H, K), log_decay (T, HV) or (T, HV, K), update (T, HV, V)   state (HV, K, V)
             ->  the state after them
    """
    k, log_decay, update = (rows[name] for name in IN_A_RING)
    k = k.repeat_interleave(update.shape[1] // k.shape[1], dim=1)
    k, update = (in_two_parts(x, dtype, chance) for x in (k, update))
    return absorb(k[None], by_channel(log_decay, update)[None], update[None], state[None])[0]


def _with(memories: Memories, state: States) -> Memories:
    """The memories with another state in every GDN layer."""
    return tuple(
        replace(memory, state=state(layer, memory)) if isinstance(memory, WithState) else memory
        for layer, memory in enumerate(memories)
    )
