"""A commit strategy whose snapshots are kept by request row, and the same strategy with one mistake each.

Found by the harness as `--strategy support.wrong.request_snapshots:RIGHT`. Leaves out: ours, whose
snapshots are kept by batch row.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from instep_optimized.commit.base import AcceptedWindows, BoundStrategy, StrategySpec, Table
from instep_optimized.commit.slot_marks import Marks
from instep_optimized.memory import Memory
from instep_optimized.memory.budget import Sizes, mark, snapshots, units
from instep_optimized.memory.pool import Demand
from instep_optimized.memory.tiled_units import Copied
from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.packed_batch import Batch, Group
from instep_reference.contract.config import ModelConfig

KEPT, ROW = "kept_state", "request_row"  # the snapshots by request row, and the request row of every slot


MAY: Table = {
    "claim": {ROW: "slot"}, "verify": {KEPT: "request"}, "release": {"state": "slot", ROW: "slot", KEPT: "request"},
    "prefill": {"state": "slot"}, "decode": {"state": "slot"}, "commit": {"state": "slot"},
    "restore": {"state": "slot"},
}
MAY_OF_DECODES: Table = {**MAY, "decode": {"state": "slot", KEPT: "request"}}
MAY_BY_ROW: Table = {**MAY, "verify": {KEPT: "row"}, "release": {"state": "slot", ROW: "slot"}}


class ByRequest:
    """A verify stores the state after every row by the request's row; the slot has that row as its mark."""

    may = MAY
    spare = 1  # units of the pool in addition to one for each request: row 0, which is reserved

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        kept = replace(snapshots("state", config, sizes), name=KEPT, by="request",
                       units=len(sizes.capacity.slots) + cls.spare)  # fmt: skip
        return units("state", config, sizes), kept, mark(ROW, sizes)

    def __init__(self, config: ModelConfig, sizes: Sizes, memory: Memory, width: int) -> None:
        self.memory, self.rows = memory, Marks(memory[ROW].units(0))
        self.layers = {
            layer: (memory.units("state", layer), memory.units(KEPT, layer).until(width))
            for layer in memory.layers("state")
        }

    def rows_of(self, ops: Ops, slots: torch.Tensor) -> torch.Tensor:
        """The request rows; -1 for an idle slot."""
        return self.rows.read(ops, slots).where(slots >= 0, -1)

    def bind(self, ops: Ops, batch: Batch) -> BoundStrategy:
        groups = [(group, self.rows_of(ops, group.slots)) for group in batch.groups]
        return BoundStrategy(lambda layer: tuple(self.part(*self.layers[layer], *one) for one in groups))

    def part(self, live: Any, kept: Any, group: Group, rows: torch.Tensor) -> Part:
        own, verify = live.at(group.slots), group.kind == "verify"
        return group.part(own, store=None if verify else own, per_row=kept.at(rows) if verify else None)

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        rows = self.rows_of(ops, accepted.slots)
        for live, kept in self.layers.values():
            ops.move(source=kept.at(rows, accepted.nodes), target=live.at(accepted.slots))

    def peek(self, ops: Ops, slot: int, length: int) -> dict[int, Copied]:
        return {layer: live.taken(slot, length=length) for layer, (live, _) in self.layers.items()}

    def restore(self, slot: int, length: int, units: Mapping[int, Copied]) -> None:
        for layer, (live, _) in self.layers.items() if length else ():
            live.put((slot,), units[layer])

    def claim(self, slot: int) -> None:
        self.rows.put(slot, self.memory.request_row_at(slot))


class Decoding(ByRequest):
    """A decode also stores the state after its row, in the first column."""

    may = MAY_OF_DECODES

    def part(self, live: Any, kept: Any, group: Group, rows: torch.Tensor) -> Part:
        part = super().part(live, kept, group, rows)
        return replace(part, per_row=kept.at(rows)) if group.kind == "decode" else part


class ByBatchRow(ByRequest):
    """Takes the place in the batch for the request row."""

    def rows_of(self, ops: Ops, slots: torch.Tensor) -> torch.Tensor:
        return torch.arange(1, 1 + len(slots), device=slots.device).where(slots >= 0, -1)


class Small(ByRequest):
    """Has no unit for row 0, so none for the last request either."""

    spare = 0


class Kept(ByRequest):
    """Declares its pool by batch row, although it uses the request row."""

    may = MAY_BY_ROW

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        live, kept, row = super().demands(config, sizes)
        return live, replace(kept, by="row"), row


def _spec(kind: type[ByRequest]) -> StrategySpec:
    return StrategySpec(kind.demands, kind)


RIGHT, DECODING, BY_BATCH_ROW, SMALL, AS_ROWS = map(_spec, (ByRequest, Decoding, ByBatchRow, Small, Kept))
