"""The `columns` strategy: a slot has one column per window position; a mark points to the request's state.

A verify writes the state after row t into column t. A commit moves only the mark. Traffic per layer and request:
(T + 1) states. Mirrors vLLM, where a request owns T slots; here one slot has T columns.
"""

from collections.abc import Mapping

import torch

from instep_reference.contract.config import ModelConfig

from ..memory import Memory
from ..memory.budget import Component, Sizes, mark, positions
from ..memory.pool import Demand
from ..memory.tiled_units import Copied, Units
from ..memory_addresses import Part
from ..ops.op_protocols import Ops
from ..packed_batch import Batch, Group
from .base import AcceptedWindows, BoundStrategy, StrategySpec, Table, printed
from .slot_marks import Marks


def may_change(component: Component, name: str) -> Table:
    """Table of writes to a component and its mark: a verify writes any column, every other event one column."""
    slot: Table = {action: {component: "slot"} for action in ("prefill", "verify", "decode")}
    both: Table = {action: {component: "slot", name: "slot"} for action in ("release", "restore")}
    return {"claim": {name: "slot"}, **slot, "commit": {name: "slot"}, **both}


MAY_CHANGE = may_change("state", "column")


class Columns:
    __doc__ = f"""Addresses of the columns strategy, for windows of at most `width` tokens.

    The mark is the column that the next step reads. A verify stores row t of its window in column t. A prefill and a
    decode store into the column that they read. The pool always has the columns of the widest window, so a column
    stays in place when the step count changes, and a mark may point past a narrower window. Example: node 5 of a window
    of 8 tokens was accepted; the next window has 4 tokens, reads column 5 and writes columns 0 to 3.
    Between a verify and its commit the marked column may hold the state after some row: it belongs to no request then.
    Writes that an event may make (units in brackets):
{printed(MAY_CHANGE)}
    """

    component: Component = "state"
    mark = "column"
    may = MAY_CHANGE

    def __init__(self, config: ModelConfig, sizes: Sizes, memory: Memory, width: int) -> None:
        self._marks, self._width = Marks(memory[self.mark].units(0)), width
        self._columns = {
            layer: self._by_column(memory.units(self.component, layer), sizes.widest)
            for layer in memory.layers(self.component)
        }

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        return positions(cls.component, config, sizes), mark(cls.mark, sizes)

    def bind(self, ops: Ops, batch: Batch) -> BoundStrategy:
        # The marks are read once: all layers of a forward use the same columns.
        marked = [(group, self._marks.read(ops, group.slots)) for group in batch.groups]
        return BoundStrategy(
            lambda layer: tuple(self._part(self._columns[layer], group, column) for group, column in marked)
        )

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        self._marks.write(ops, accepted.slots, accepted.nodes)

    def peek(self, ops: Ops, slot: int, length: int) -> dict[int, Copied]:
        column = self._marks.of(slot) if length else 0  # before the first token no column is read
        return {layer: columns.taken(slot, column, length=length) for layer, columns in self._columns.items()}

    def peek_node(self, ops: Ops, slot: int, length: int, row: int, node: int) -> dict[int, Copied]:
        return {layer: columns.taken(slot, node) for layer, columns in self._columns.items()}

    def restore(self, slot: int, length: int, units: Mapping[int, Copied]) -> None:
        self._marks.put(slot, 0)  # a restored state goes to column 0
        if length:
            for layer, columns in self._columns.items():
                columns.put((slot, 0), units[layer])

    def claim(self, slot: int) -> None:
        self._marks.put(slot, 0)

    @staticmethod
    def _by_column(units: Units, widest: int) -> Units:
        """View the pool as [slots, columns, *block]; it has this form already."""
        return units

    def _part(self, columns: Units, group: Group, column: torch.Tensor) -> Part:
        own = columns.at(group.slots, column)
        verify = group.kind == "verify"
        # A window of this step count cannot write past its own columns: the address is cut to them.
        return group.part(
            own,
            store=None if verify else own,
            per_row=columns.until(self._width).at(group.slots) if verify else None,
        )


COLUMNS = StrategySpec(Columns.demands, Columns)
