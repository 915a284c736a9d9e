"""Kept states: a request's logical state read out of its slot and pages, and written back into them.

Bits are copied and never computed, so the written bits equal the read ones, except for states of tracked prefixes that
are kept narrower (`NarrowStates`). Leaves out: when that happens (`engine.py`), and the physical form of conv windows
and states, which only the commit strategy knows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from instep_reference.contract.declared_rounding import CHUNK, KEPT, Blocked, Storage, kept_in
from instep_reference.contract.place_names import AFTER_LAYERS

from ..ops.op_protocols import Types
from ..ops.plain.scaled_tiles import packed
from ..transfer.to_device import ints
from . import Memory
from .component_cells import cells
from .tiled_units import Block, Copied, Units, shown, tensors

ByLayer = Mapping[int, Copied]
Peeked = Mapping[str, ByLayer]  # blocks by component, as the commit strategies give copies of them


@dataclass(frozen=True)
class Kept:
    """Copies of a request's memory, in the canonical layout (`RequestState`), and of its slot table fields.

    memory: component -> layer -> its copy. Memory in tiles is copied as it is stored, with its scales
    root [] int64;  proposal [n] int64 and proposed [D], or None without a draft head
    final [D]: only for a tracked prefix. A prefix has none of these three, 1 + i rows less of MTP layer i, and a tail
    before its last row
    """

    memory: Mapping[str, ByLayer] = field(default_factory=dict)
    root: torch.Tensor | None = None
    proposal: torch.Tensor | None = None
    proposed: torch.Tensor | None = None
    final: torch.Tensor | None = None

    def __getitem__(self, component: str) -> ByLayer:
        """Return the copies of a component by layer; empty if there are none."""
        return self.memory.get(component, {})

    def changed(self, **components: ByLayer) -> "Kept":
        """Return the same with other copies of these components."""
        return replace(self, memory={**self.memory, **components})

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, with a name for messages."""
        for name, by_layer in self.memory.items():
            for layer, copied in by_layer.items():
                for tensor, what in zip(tensors(copied), ("", ", scales"), strict=False):
                    yield f"{name} (layer {layer}{what})", tensor
        for name in ALONE:
            if (held := getattr(self, name)) is not None:
                yield name, held


ALONE = ("root", "proposal", "proposed", "final")


@dataclass(frozen=True)
class NarrowStates:
    """How tracked prefixes store states (`CHUNK`, `KEPT` of the contract); without entries in `rounds`: as the pool.

    pool: dtype of the states of requests
    """

    rounds: Mapping[str, Storage]
    pool: Storage

    @classmethod
    def of(cls, types: Types) -> "NarrowStates":
        named: tuple[tuple[str, Storage | None], ...] = (CHUNK, types.chunk), (KEPT, types.kept)
        return cls({name: storage for name, storage in named if storage is not None}, types.state)

    def keep(self, states: ByLayer, *, forward: bool) -> dict[int, Copied]:
        """Round the copies of states, once. forward: whether a forward made them, or a commit."""
        return {layer: self._rounded(state, forward) for layer, state in states.items()}

    def _rounded(self, state: Copied, forward: bool) -> Copied:
        for storage in kept_in(self.rounds, forward=forward):
            wide = shown(state)
            if isinstance(storage, Blocked):
                state = Block(*packed(wide, storage.dtype, storage.grid(*wide.shape)))
            else:
                state = wide.to(storage)
        return state

    def give(self, kept: Kept) -> Kept:
        """Read the states of a prefix as a request continues from them, in the dtype of its pool."""
        if not self.rounds or kept.final is None or isinstance(self.pool, Blocked):
            return kept
        return kept.changed(state={layer: shown(state).to(self.pool) for layer, state in kept["state"].items()})


@dataclass(frozen=True)
class Places:
    """The memory of a request after `length` tokens, or after a prefix of them.

    at      (page, offset) of every position, on the pools' device: the pages of a request need not be neighbours
    peeked  its blocks, which only the commit strategies know in their physical form
    prefix  whether the tokens are a prefix: what depends on later tokens is not part of it
    """

    memory: Memory
    slot: int
    length: int
    at: tuple[torch.Tensor, torch.Tensor]
    peeked: Peeked
    prefix: bool

    @classmethod
    def of(cls, memory: Memory, request: str, length: int, peeked: Peeked, *, prefix: bool) -> "Places":
        at = ints(memory.pages.locations(request, 0, length), memory.device)
        page, offset = at // memory.pages.size, at % memory.pages.size
        return cls(memory, memory.slots.of(request), length, (page, offset), peeked, prefix)

    def blocks(self, name: str) -> ByLayer:
        return dict(self.peeked.get(name, {}))

    def rows(self, name: str) -> ByLayer:
        # MTP layer i has read i + 1 tokens after its row, and the tokens after a prefix are not known.
        less = name.startswith("draft_") and self.prefix
        counts = {layer: max(0, self.length - less * (1 + layer)) for layer in self.memory.layers(name)}
        return {layer: self.memory.units(name, layer).rows((self.at[0][:n], self.at[1][:n]))
                for layer, n in counts.items()}  # fmt: skip

    def last(self, name: str) -> ByLayer:
        return {layer: units.rows(there) for layer, units, there in self._tail()}

    def put_blocks(self, name: str, kept: ByLayer) -> None:
        """Write nothing: the commit strategies write blocks (`restore`)."""

    def put_rows(self, name: str, kept: ByLayer) -> None:
        for layer, rows in kept.items():
            count = len(tensors(rows)[0])
            self.memory.units(name, layer).put((self.at[0][:count], self.at[1][:count]), rows)

    def put_last(self, name: str, kept: ByLayer) -> None:
        for layer, units, there in self._tail():
            units.put(there, kept[layer])

    def _tail(self) -> Iterator[tuple[int, Units, tuple[torch.Tensor, torch.Tensor]]]:
        """Locate the final rows of the last tokens in the slot table; empty if it has none.

        In a prefix the last one is kept separately, as its final row.
        """
        line, last = self.memory.slot_table.tail, self.length - self.prefix
        first = max(0, self.length - (len(self.memory.layers("draft_keys")) - (not self.prefix)))
        if line is not None and first < last:
            at = torch.tensor([(self.slot, p % line.shape[1]) for p in range(first, last)], device=self.memory.device)
            yield AFTER_LAYERS, Units(line), (at[:, 0], at[:, 1])


Reads, Writes = Callable[[Places, str], ByLayer], Callable[[Places, str, ByLayer], None]
COPIES = cells(block=(Places.blocks, Places.put_blocks), rows=(Places.rows, Places.put_rows),
               last=(Places.last, Places.put_last))  # fmt: skip
FORKS = cells(block=Places.blocks, rows=Places.rows, last=Places.last)


def read(memory: Memory, request: str, length: int, peeked: Peeked, final: torch.Tensor | None = None) -> Kept:
    """Copy everything that a request has after `length` tokens.

    peeked  copies of its blocks that the commit strategies made (`peek`)
    final   if the tokens are a prefix to track: the target's final row of the last one
    """
    places, slot_table = Places.of(memory, request, length, peeked, prefix=final is not None), memory.slot_table
    reads = FORKS if final is not None else {name: read for name, (read, _) in COPIES.items()}
    slot, drafts = places.slot, bool(memory.layers("draft_keys")) and final is None
    return Kept(
        {name: read(places, name) for name, read in reads.items()},
        root=slot_table.window[slot, 0].clone() if final is None else None,
        proposal=slot_table.proposals[slot].clone() if drafts else None,
        proposed=slot_table.proposed[slot].clone() if drafts else None,
        final=None if final is None else final.clone(),
    )


def copied(kept: Kept, how: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Kept:
    """Copy every part with the same bits into new memory. how: function that copies a tensor."""
    memory = {name: copy_layers(by_layer, how) for name, by_layer in kept.memory.items()}
    return copied_alone(kept, memory, how)


def copied_alone(kept: Kept, memory: Mapping[str, ByLayer], how: Callable[[torch.Tensor], torch.Tensor]) -> Kept:
    """Copy the slot table fields; `memory` has the copies of the rest."""
    alone = {name: None if (x := getattr(kept, name)) is None else how(x) for name in ALONE}
    return Kept(memory, **alone)


def copy_layers(by_layer: ByLayer, how: Callable[[torch.Tensor], torch.Tensor]) -> ByLayer:
    """Copy the tensors of one component."""
    return {layer: Block(*map(how, x)) if isinstance(x, Block) else how(x) for layer, x in by_layer.items()}


def write(memory: Memory, request: str, length: int, kept: Kept) -> None:
    """Reverse `read`, without blocks: the commit strategies write those (`restore`).

    The request must own its slot, and pages for all its tokens. The length of a prefix is too small then, until the
    draft head is extended by its last rows.
    """
    prefix, slot_table = kept.final is not None, memory.slot_table
    places = Places.of(memory, request, length, {}, prefix=prefix)
    slot = places.slot
    for name, (_, put) in COPIES.items():
        put(places, name, kept[name])
    slot_table.length[slot].fill_(length - prefix * extended_by(memory, length))
    if kept.root is not None:
        slot_table.window[slot, 0] = kept.root
    if kept.proposal is not None and kept.proposed is not None:
        slot_table.proposals[slot], slot_table.proposed[slot] = kept.proposal, kept.proposed


def extended_by(memory: Memory, length: int) -> int:
    """Number of rows by which a prefix of `length` tokens extends the draft head: one for each MTP layer."""
    return min(length, max(1, len(memory.layers("draft_keys"))))
