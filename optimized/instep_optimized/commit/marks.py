"""A mark: a whole number per slot, on the device, that tells how a request's memory is to be read.

Leaves out: what it means; its strategy says. A freed slot's mark is poison like its memory, so it is written before it
is read: when the slot is given to a request.
"""

from __future__ import annotations

import torch

from ..ops.base import Ops


class Marks:
    """The marks of one pool [slots, 1]. `at`: the view [slots] for ops that read it themselves."""

    def __init__(self, units: torch.Tensor) -> None:
        self._units, self.at = units, units[:, 0]

    def read(self, ops: Ops, slots: torch.Tensor) -> torch.Tensor:
        """[B] marks of these slots; 0 for a slot of -1."""
        return ops.select(x=self._units, index=slots)[:, 0]

    def write(self, ops: Ops, slots: torch.Tensor, marks: torch.Tensor) -> None:
        """marks [B]; a slot of -1 is skipped."""
        ops.store_rows(rows=marks, pool=self._units, locations=slots)

    # Aside from the hot path

    def of(self, slot: int) -> int:
        """One mark, on the host."""
        return int(self.at[slot])

    def put(self, slot: int, mark: int) -> None:
        """One mark, from the host."""
        self.at[slot].fill_(mark)  # an assignment of a number waits for the device
