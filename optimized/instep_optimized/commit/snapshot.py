"""The `snapshot` strategy: a verify keeps the state after every window position; a commit copies the accepted one back.

Traffic per layer and request: (T + 3) states; the other strategies need fewer.
"""

from collections.abc import Mapping

from instep_reference.contract.config import ModelConfig

from ..memory import Memory
from ..memory.budget import Component, Sizes, snapshots, units
from ..memory.pool import Demand
from ..memory.tiled_units import Copied, Units
from ..memory.tiled_units import taken as taken
from ..memory_addresses import Part
from ..ops.fused import moves
from ..ops.integer_op_protocols import Moved
from ..ops.op_protocols import Ops
from ..packed_batch import Batch, Group
from .base import AcceptedWindows, BoundStrategy, StrategySpec, Table, printed


def may_change(component: Component) -> Table:
    """Table of writes to a component: its slot; for a verify instead the snapshot row of its window."""
    slot: Table = {action: {component: "slot"} for action in ("prefill", "decode", "commit", "release", "restore")}
    return {**slot, "verify": {f"snapshot_{component}": "row"}}


MAY_CHANGE = may_change("state")


class Snapshot:
    __doc__ = f"""Addresses of the snapshot strategy, for windows of at most `width` tokens.

    Snapshots are indexed by BATCH ROW of the verify forward; the destination of a commit is indexed by SLOT. Example:
    a request in batch row 0 with slot 5: the verify writes snapshots[0, t], the commit copies snapshots[0, node] to
    slots[5]. Between the two the slot still holds the state before the window, because a verify stores nothing there.
    If several batches are in flight, snapshots are indexed by the request's own row (`Options.scratch`).
    Snapshot positions after the window's last row are not written. Writes that an event may make (units in brackets):
{printed(MAY_CHANGE)}
    """

    component: Component = "state"
    may = MAY_CHANGE

    def __init__(self, config: ModelConfig, sizes: Sizes, memory: Memory, width: int) -> None:
        slots, rows = self.component, f"snapshot_{self.component}"
        if sizes.scratch == "request":  # a row belongs to a request, so it is freed with it
            self.may = {action: {**table, rows: "request"} if action in ("verify", "release") else table
                        for action, table in self.may.items()}  # fmt: skip
        self._pairs = {
            layer: _Pair(memory.units(slots, layer), memory.units(rows, layer).until(width))
            for layer in memory.layers(slots)
        }

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        return units(cls.component, config, sizes), snapshots(cls.component, config, sizes)

    def bind(self, ops: Ops, batch: Batch) -> BoundStrategy:
        return BoundStrategy(lambda layer: tuple(self._pairs[layer].part(group) for group in batch.groups))

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        # Nothing is computed: the accepted node's snapshot is copied bit by bit. A row or slot of -1 (idle) is skipped.
        moves(ops, pairs=tuple(
            Moved(
                source=pair.snapshots.at(accepted.rows, accepted.nodes),
                target=pair.slots.at(accepted.slots),
            ) for pair in self._pairs.values()
        ))  # fmt: skip

    def peek(self, ops: Ops, slot: int, length: int) -> dict[int, Copied]:
        return {layer: pair.slots.taken(slot, length=length) for layer, pair in self._pairs.items()}

    def peek_node(self, ops: Ops, slot: int, length: int, row: int, node: int) -> dict[int, Copied]:
        return {layer: pair.snapshots.taken(row, node) for layer, pair in self._pairs.items()}

    def restore(self, slot: int, length: int, units: Mapping[int, Copied]) -> None:
        if length:  # a request without tokens is fresh: its slot is not read
            for layer, pair in self._pairs.items():
                pair.slots.put((slot,), units[layer])

    def claim(self, slot: int) -> None:
        """Write nothing: this strategy keeps no mark, and the first chunk of a request does not read its slot."""


class _Pair:
    """One layer: its units by slot, and its snapshots, cut to the width of the window."""

    def __init__(self, slots: Units, snapshots: Units) -> None:
        self.slots, self.snapshots = slots, snapshots

    def part(self, group: Group) -> Part:
        """Address a group: a verify stores the state after every row, by batch row; others only the last, by slot."""
        own = self.slots.at(group.slots)
        verify = group.kind == "verify"
        return group.part(
            own,
            store=None if verify else own,
            per_row=self.snapshots.at(group.rows) if verify else None,
        )


SNAPSHOT = StrategySpec(Snapshot.demands, Snapshot)


def snapshots_of(name: Component) -> StrategySpec:
    """Return the same strategy on another component."""

    class SnapshotOf(Snapshot):
        component = name
        may = may_change(name)

    return StrategySpec(SnapshotOf.demands, SnapshotOf, name)
