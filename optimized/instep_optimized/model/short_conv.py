"""A gated short convolution: a layer whose conv window is its only memory. Ops and views only.

Leaves out: the windows that are read and written; the form of conv windows chooses the addresses.
"""

from dataclasses import dataclass
from functools import partial

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place

from .. import weights as w
from ..commit.strategy_pair import BoundPair, Mixes
from ..ops.fused import linears
from ..ops.op_protocols import Ops
from .layer import Layer
from .residual import Residual


@dataclass(frozen=True)
class ShortConvLayer(Layer[w.ShortConvWeights]):
    """A layer with a short convolution. Calling it runs it."""

    @classmethod
    def read(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> w.ShortConvWeights:
        return w.short_conv(stored, prefix)

    def __call__(self, ops: Ops, hidden: Residual, bound: Mixes, stage: str) -> Residual:
        """Map hidden [N, D] -> [N, D]; `bound` runs the part that has the addresses of conv windows."""
        at = partial(Place, stage, self.layer)
        weights, config = self.weights, self.config
        assert ops.multiply is not None, "checked when the engine was built"
        rows, normed = hidden.normed(ops, self.norm, config.eps, at("normed"))  # [N, D]
        in_gate, out_gate, x = linears(
            ops, x=normed, weight=weights.inputs, shapes=((config.hidden,),) * 3,
            to=(at("in_gate"), at("out_gate"), at("x")),
        )  # [N, D] each
        given = ops.multiply(x=in_gate, y=x, to=at("qkv"))  # [N, D]
        mixed = bound.mix(ops, partial(self._conv, at("mixed")), (given,), given)  # [N, D]
        gated = ops.multiply(x=out_gate, y=mixed, to=at("gated"))
        mixer = ops.linear(x=gated, weight=weights.out, shape=(config.hidden,), to=at("mixer"))  # [N, D]
        return self.half(ops, rows, mixer, stage)

    def _conv(self, to: Place, ops: Ops, bound: BoundPair, given: torch.Tensor) -> torch.Tensor:
        """Run the conv on the windows of requests: the part that no graph of a prompt contains."""
        assert ops.short_conv is not None, "checked when the engine was built"
        return ops.short_conv(x=given, weight=self.weights.conv, parts=bound.conv(self.layer), to=to)
