"""The `columns` strategy: a slot has a place per window position, and a mark says which one holds the request's state.

Leaves out: tree windows. Verify writes every place, a commit moves the mark alone. Traffic per layer and request:
(T + 1) states. Mirrors vLLM, where a request owns T slots; here they are columns of one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from instep_reference.contract.config import ModelConfig

from ..batch import Batch, Group
from ..layout import Address, Part
from ..memory import Memory
from ..memory.budget import Component, Sizes, mark, positions
from ..memory.pool import Demand
from ..ops.base import Ops
from .base import AcceptedWindows, BoundStrategy, StrategySpec, Table, printed
from .marks import Marks
from .snapshot import taken


def may_change(component: Component, name: str) -> Table:
    """What each event may write, per component and its mark: a verify any column, everything else one."""
    slot: Table = {action: {component: "slot"} for action in ("prefill", "verify", "decode")}
    both: Table = {action: {component: "slot", name: "slot"} for action in ("release", "restore")}
    return {"claim": {name: "slot"}, **slot, "commit": {name: "slot"}, **both}


MAY_CHANGE = may_change("state", "column")


class Columns:
    __doc__ = f"""Addresses of the columns strategy, for windows of at most `width` tokens.

    The mark is the column that is read. Row t of a window is stored in column t, prefill and decode store where they
    read. Whatever the width in force, the strides are those of the widest: a column stays where it is when the step
    count changes, and a mark beyond a narrower window is right. Between verify and commit the marked column may hold
    the state after some row: it belongs to nobody. What an event may change (units in brackets):
{printed(MAY_CHANGE)}
    """

    component: Component = "state"
    mark = "column"
    may = MAY_CHANGE

    def __init__(self, config: ModelConfig, sizes: Sizes, memory: Memory, width: int) -> None:
        self._marks, self._width = Marks(memory[self.mark].units(0)), width
        self._columns = {
            layer: self._by_column(memory[self.component].units(layer), sizes.widest)
            for layer in memory.layers(self.component)
        }

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        return positions(cls.component, config, sizes), mark(cls.mark, sizes)

    def bind(self, ops: Ops, batch: Batch) -> BoundStrategy:
        marked = [(group, self._marks.read(ops, group.slots)) for group in batch.groups]
        return BoundStrategy(
            lambda layer: tuple(self._part(self._columns[layer], group, column) for group, column in marked)
        )

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        self._marks.write(ops, accepted.slots, accepted.nodes)

    def peek(self, ops: Ops, slot: int, length: int) -> dict[int, torch.Tensor]:
        column = self._marks.of(slot) if length else 0
        return {layer: taken(columns[slot, column], length) for layer, columns in self._columns.items()}

    def restore(self, slot: int, length: int, units: Mapping[int, torch.Tensor]) -> None:
        self._marks.put(slot, 0)
        if length:
            for layer, columns in self._columns.items():
                columns[slot, 0] = units[layer]

    def claim(self, slot: int) -> None:
        self._marks.put(slot, 0)

    @staticmethod
    def _by_column(units: torch.Tensor, widest: int) -> torch.Tensor:
        """[slots, columns, *block]."""
        return units

    def _part(self, columns: torch.Tensor, group: Group, column: torch.Tensor) -> Part:
        own = Address(columns, group.slots, column)
        verify = group.kind == "verify"
        return group.part(
            own,
            store=None if verify else own,
            per_row=Address(columns[:, : self._width], group.slots) if verify else None,
        )


COLUMNS = StrategySpec(Columns.demands, Columns)
