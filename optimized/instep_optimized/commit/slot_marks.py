"""A mark: one integer per slot, on the device, that determines how the request's memory must be read.

Leaves out: its meaning, which its strategy defines. The mark of a freed slot is poisoned like the slot's memory. So a
mark is written when the slot is given to a request, before it is read.
"""

import torch

from ..ops.op_protocols import Ops


class Marks:
    """The marks of one pool [slots, 1]. `at` is the view [slots], for ops that read the marks themselves."""

    def __init__(self, units: torch.Tensor) -> None:
        self._units, self.at = units, units[:, 0]

    def read(self, ops: Ops, slots: torch.Tensor) -> torch.Tensor:
        """Return [B] marks of these slots; 0 for a slot of -1."""
        return ops.select(x=self._units, index=slots)[:, 0]

    def write(self, ops: Ops, slots: torch.Tensor, marks: torch.Tensor) -> None:
        """Write marks [B]; a slot of -1 is skipped."""
        ops.store_rows(rows=marks, pool=self._units, locations=slots)

    # Not on the hot path: one mark, by the host

    def of(self, slot: int) -> int:
        """Read one mark. The host waits for the device."""
        return int(self.at[slot])

    def put(self, slot: int, mark: int) -> None:
        """Write one mark, without waiting."""
        self.at[slot].fill_(mark)  # `at[slot] = mark` would copy a number from the host and wait for the device
