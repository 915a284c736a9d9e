"""The `snapshot` strategy: verify keeps a state per window position aside, commit copies the accepted one back.

Leaves out: tree windows. Traffic per layer and request: (T + 3) states; other strategies do with less.
"""

from __future__ import annotations

import torch

from instep_reference.contract.config import ModelConfig

from ..batch import Batch, Group
from ..layout import Address, Part
from ..memory import Memory
from ..memory.budget import Sizes, conv_window, of_kind, state_block
from ..memory.pool import Demand, Pool
from ..ops.base import Ops
from .base import DRAFT_KV, KV, Landing, Strategy, Table, printed

MAY_CHANGE: Table = {
    "prefill": {"conv": "slot", "state": "slot", **KV, **DRAFT_KV},
    "verify": {"snapshot_conv": "row", "snapshot_state": "row", **KV},
    "decode": {"conv": "slot", "state": "slot", **KV, **DRAFT_KV},
    "draft": {**DRAFT_KV},
    "commit": {"conv": "slot", "state": "slot", **DRAFT_KV},
    "release": {
        "conv": "slot", "state": "slot", "keys": "owned", "values": "owned",
        "draft_keys": "owned", "draft_values": "owned",
    },
    "restore": {"conv": "slot", "state": "slot", **KV, **DRAFT_KV},
}


def snapshot_demands(config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
    """A conv window and a state per position of the widest window, for as many rows as a batch can have: one per slot
    that is ever handed out."""
    layers, rows = of_kind(config, "gdn"), len(sizes.capacity.slots)
    conv, state = (sizes.widest, *conv_window(config)), (sizes.widest, *state_block(config))
    return (
        Demand("snapshot_conv", "row", layers, rows, conv, sizes.types.conv),
        Demand("snapshot_state", "row", layers, rows, state, sizes.types.state, transposed=sizes.transposed),
    )


class Snapshot:
    __doc__ = f"""Addresses of the snapshot strategy, for windows of at most `width` tokens.

    Rows are packed by BATCH ROW of the verify forward; the commit's destination is a SLOT.

    Between verify and commit the slot still holds the state before the window: verify stores nothing there.
    Positions from the window's length on are not written. What an event may change (units in brackets;
    "written": the KV pages of the positions that it writes, of which rejected ones stay garbage):
{printed(MAY_CHANGE)}
    """

    may = MAY_CHANGE

    def __init__(self, memory: Memory, width: int) -> None:
        self._layers = memory.layers("state")
        self._conv = {layer: _Pair.of(memory["conv"], memory["snapshot_conv"], layer, width) for layer in self._layers}
        self._state = {
            layer: _Pair.of(memory["state"], memory["snapshot_state"], layer, width) for layer in self._layers
        }

    def conv(self, layer: int, batch: Batch) -> tuple[Part, ...]:
        return tuple(self._conv[layer].part(group) for group in batch.groups)

    def state(self, layer: int, batch: Batch) -> tuple[Part, ...]:
        return tuple(self._state[layer].part(group) for group in batch.groups)

    def commit(self, ops: Ops, landing: Landing) -> None:
        for layer in self._layers:
            for pair in (self._conv[layer], self._state[layer]):
                ops.move(
                    source=Address(pair.snapshots, landing.rows, landing.nodes),
                    target=Address(pair.slots, landing.slots),
                )


class _Pair:
    """One component of one layer: its slots, and its snapshots as far as the width goes."""

    def __init__(self, slots: torch.Tensor, snapshots: torch.Tensor) -> None:
        self.slots, self.snapshots = slots, snapshots

    @classmethod
    def of(cls, slots: Pool, snapshots: Pool, layer: int, width: int) -> _Pair:
        return cls(slots.units(layer), snapshots.units(layer)[:, :width])

    def part(self, group: Group) -> Part:
        """Verify keeps every position's state by row; prefill and decode store the last one in the slot."""
        own = Address(self.slots, group.slots)
        verify = group.kind == "verify"
        return Part(
            form="chunk" if group.kind == "prefill" else "window",
            begin=group.begin,
            count=group.count,
            most=group.most,
            read=own,
            fresh=group.fresh,
            store=None if verify else own,
            each=Address(self.snapshots, group.rows) if verify else None,
        )


SNAPSHOT = Strategy(snapshot_demands, Snapshot)
