"""Kept states: a request's logical state read out of its slot and pages, and written back into them.

Bits are copied and never computed, so the written bits equal the read ones, except for states of tracked prefixes that
are kept narrower (`NarrowStates`). Leaves out: when that happens (`engine.py`), and the physical form of conv windows
and states, which only the commit strategy knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from instep_reference.contract.declared_rounding import CHUNK, KEPT, Blocked, Storage, kept_in
from instep_reference.contract.place_names import AFTER_LAYERS

from ..ops.op_protocols import Types
from ..ops.plain.scaled_tiles import packed
from ..transfer.to_device import ints
from . import Memory
from .tiled_units import Block, Copied, Units, shown, tensors

PAGED = ("keys", "values", "draft_keys", "draft_values", "block_keys", "block_values")


@dataclass(frozen=True)
class Kept:
    """Copies of a request's memory per layer, in the canonical layout (`RequestState`), and of its slot table fields.

    Memory in tiles is copied as it is stored, with its scales.

    root [] int64;  proposal [n] int64 and proposed [D], or None without a draft head
    tail: the target's rows of the last tokens, under AFTER_LAYERS, if the slot table has them
    final [D]: only for a tracked prefix. A prefix has none of the first three, 1 + i rows less of MTP layer i, and a
    tail before its last row
    """

    conv: dict[int, Copied]
    state: dict[int, Copied]
    keys: dict[int, Copied]
    values: dict[int, Copied]
    draft_keys: dict[int, Copied]
    draft_values: dict[int, Copied]
    block_keys: dict[int, Copied]
    block_values: dict[int, Copied]
    tail: dict[int, Copied]
    root: torch.Tensor | None
    proposal: torch.Tensor | None
    proposed: torch.Tensor | None
    final: torch.Tensor | None = None

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, with a name for messages."""
        for field in fields(self):
            held = getattr(self, field.name)
            if isinstance(held, dict):
                for layer, copied in held.items():
                    for tensor, what in zip(tensors(copied), ("", ", scales"), strict=False):
                        yield f"{field.name} (layer {layer}{what})", tensor
            elif held is not None:
                yield field.name, held


ByLayer = Mapping[int, Copied]
Peeked = tuple[ByLayer, ByLayer]  # conv windows and states, as the commit strategy gives copies of them


@dataclass(frozen=True)
class NarrowStates:
    """How tracked prefixes store states (`CHUNK`, `KEPT` of the contract); without entries in `rounds`: as the pool.

    pool: dtype of the states of requests
    """

    rounds: Mapping[str, Storage]
    pool: Storage

    @classmethod
    def of(cls, types: Types) -> NarrowStates:
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
        return replace(kept, state={layer: shown(state).to(self.pool) for layer, state in kept.state.items()})


def read(
    memory: Memory, request: str, length: int, conv: ByLayer, state: ByLayer, final: torch.Tensor | None = None
) -> Kept:
    """Copy everything that a request has after `length` tokens.

    conv, state  copies that the commit strategy made (`peek`), because only it knows their physical form
    final        if the tokens are a prefix to track: the target's final row of the last one
    """
    at, slot, slot_table = _places(memory, request, length), memory.slots.of(request), memory.slot_table

    # Indexed by (page, offset) of every position: the pages of a request need not be neighbours.
    def rows(name: str) -> dict[int, Copied]:
        # MTP layer i has read i + 1 tokens after its row, and the tokens after a prefix are not known.
        less = name.startswith("draft_") and final is not None
        counts = {layer: max(0, length - less * (1 + layer)) for layer in memory.layers(name)}
        return {layer: memory.units(name, layer).rows((at[0][:n], at[1][:n])) for layer, n in counts.items()}

    drafts = bool(memory.layers("draft_keys")) and final is None
    return Kept(
        conv=dict(conv), state=dict(state), keys=rows("keys"), values=rows("values"),
        draft_keys=rows("draft_keys"), draft_values=rows("draft_values"),
        block_keys=rows("block_keys"), block_values=rows("block_values"),
        tail={layer: units.rows(there) for layer, units, there in _tail(memory, slot, length, final is not None)},
        root=slot_table.window[slot, 0].clone() if final is None else None,
        proposal=slot_table.proposals[slot].clone() if drafts else None,
        proposed=slot_table.proposed[slot].clone() if drafts else None,
        final=None if final is None else final.clone(),
    )


def copied(kept: Kept, how: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Kept:
    """Copy every part with the same bits into new memory. how: function that copies a tensor."""
    copies: dict[str, Any] = {field.name: _copy(getattr(kept, field.name), how) for field in fields(kept)}
    return Kept(**copies)


def write(memory: Memory, request: str, length: int, kept: Kept) -> None:
    """Reverse `read`, without conv windows and states: the commit strategy writes those (`restore`).

    The request must own its slot, and pages for all its tokens. The length of a prefix is too small then, until the
    draft head is extended by its last rows.
    """
    at, slot, slot_table = _places(memory, request, length), memory.slots.of(request), memory.slot_table
    for name in PAGED:
        for layer, rows in getattr(kept, name).items():
            count = len(tensors(rows)[0])
            memory.units(name, layer).put((at[0][:count], at[1][:count]), rows)
    prefix = kept.final is not None
    for layer, units, there in _tail(memory, slot, length, prefix):
        units.put(there, kept.tail[layer])
    slot_table.length[slot].fill_(length - prefix * extended_by(memory, length))
    if kept.root is not None:
        slot_table.window[slot, 0] = kept.root
    if kept.proposal is not None and kept.proposed is not None:
        slot_table.proposals[slot], slot_table.proposed[slot] = kept.proposal, kept.proposed


def extended_by(memory: Memory, length: int) -> int:
    """Number of rows by which a prefix of `length` tokens extends the draft head: one for each MTP layer."""
    return min(length, max(1, len(memory.layers("draft_keys"))))


def _tail(
    memory: Memory, slot: int, length: int, prefix: bool
) -> Iterator[tuple[int, Units, tuple[torch.Tensor, torch.Tensor]]]:
    """Locate the final rows of the last tokens in the slot table; empty if it has none.

    In a prefix the last one is kept separately, as its final row.
    """
    line, last = memory.slot_table.tail, length - prefix
    first = max(0, length - (len(memory.layers("draft_keys")) - (not prefix)))
    if line is not None and first < last:
        at = torch.tensor([(slot, p % line.shape[1]) for p in range(first, last)], device=memory.device)
        yield AFTER_LAYERS, Units(line), (at[:, 0], at[:, 1])


def _copy(
    kept: torch.Tensor | dict[int, Copied] | None, how: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | dict[int, Copied] | None:
    if isinstance(kept, dict):
        return {layer: Block(*map(how, x)) if isinstance(x, Block) else how(x) for layer, x in kept.items()}
    return None if kept is None else how(kept)


def _places(memory: Memory, request: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return page and offset of every position, on the pools' device."""
    locations = memory.pages.locations(request, 0, length)
    at = ints(locations, memory.device)
    return at // memory.pages.size, at % memory.pages.size
