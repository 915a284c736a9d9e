"""The residual stream between two halves of layers: a sum that the next norm computes; or several streams.

Leaves out: the terms of the sum (`mlp.py`, `gdn.py`, `attention.py`).
"""

from typing import NamedTuple

import torch

from instep_reference.contract.place_names import Place

from ..ops.family_op_protocols import StreamWeights
from ..ops.fused import add_norm
from ..ops.op_protocols import AddNorm, Ops

STRENGTHS = {"normed": "strength", "post_normed": "post_strength"}  # by the rows that a block reads


class Streams(NamedTuple):
    """Rows x [N, S*D] of S streams, and how strongly the next result is added to each: strength [N, S]."""

    x: torch.Tensor
    strength: torch.Tensor

    def plus(self, ops: Ops, y: torch.Tensor, to: Place) -> "Residual":
        """Add the result y [N, D] of a block."""
        assert ops.add_streams is not None, "checked when the engine was built"
        return Residual(ops.add_streams(x=self.x, y=y, strength=self.strength, to=to))


Rows = torch.Tensor | Streams  # that the result of a block is added to


class ReadRows(NamedTuple):
    """total: the rows themselves;  normed [N, D]: a mixture of their streams, or without a strength the last rows."""

    total: Rows
    normed: torch.Tensor


class Residual(NamedTuple):
    """Rows x [N, D]; or x + y, not added yet, whose place will be `to`. With streams x [N, S*D] alone."""

    x: torch.Tensor
    y: torch.Tensor | None = None
    to: Place | None = None

    def summed(self, ops: Ops) -> "Residual":
        """Return the rows with the sum computed."""
        if self.y is None or self.to is None:
            return self
        return Residual(ops.add(x=self.x, y=self.y, to=self.to))

    def normed(self, ops: Ops, weight: torch.Tensor | StreamWeights, eps: float, to: Place) -> AddNorm | ReadRows:
        """Return the rows themselves, and their norm, or the mixture of their streams."""
        if isinstance(weight, StreamWeights):
            return self._mixed(ops, weight, eps, to)
        if self.y is None or self.to is None:
            return AddNorm(self.x, ops.norm(x=self.x, weight=weight, eps=eps, to=to))
        return add_norm(ops, x=self.x, y=self.y, weight=weight, eps=eps, to=(self.to, to))

    def _mixed(self, ops: Ops, weights: StreamWeights, eps: float, to: Place) -> ReadRows:
        assert ops.read_streams is not None, "checked when the engine was built"
        places = (to,) if weights.inject is None else (to, to._replace(component=STRENGTHS[to.component]))
        normed, *strength = ops.read_streams(x=self.x, weights=weights, eps=eps, to=places)
        return ReadRows(Streams(self.x, *strength) if strength else self.x, normed)
