"""The residual stream between two halves of layers: a sum that the next norm computes.

Leaves out: the terms of the sum (`mlp.py`, `gdn.py`, `attention.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from instep_reference.contract.place_names import Place

from ..ops.fused import AddNorm, add_norm
from ..ops.op_protocols import Ops


class Residual(NamedTuple):
    """Rows x [N, D]; or x + y, not added yet, whose place will be `to`."""

    x: torch.Tensor
    y: torch.Tensor | None = None
    to: Place | None = None

    def summed(self, ops: Ops) -> Residual:
        """Return the rows with the sum computed."""
        if self.y is None or self.to is None:
            return self
        return Residual(ops.add(x=self.x, y=self.y, to=self.to))

    def normed(self, ops: Ops, weight: torch.Tensor, eps: float, to: Place) -> AddNorm:
        """Return the rows themselves, and their norm."""
        if self.y is None or self.to is None:
            return AddNorm(self.x, ops.norm(x=self.x, weight=weight, eps=eps, to=to))
        return add_norm(ops, x=self.x, y=self.y, weight=weight, eps=eps, to=(self.to, to))
