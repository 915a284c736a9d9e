"""A layer with lightning attention: a fixed decay per head, no conv. Ops and views only.

Leaves out: the states that are read and written; the commit strategy chooses the addresses.
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

INPUTS = ("q", "k", "v", "log_decay", "write")


@dataclass(frozen=True)
class LightningLayer(Layer[w.LightningWeights]):
    """A layer of lightning attention. Calling it runs it."""

    @classmethod
    def read(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> w.LightningWeights:
        return w.lightning(stored, prefix, layer, config)

    def __call__(self, ops: Ops, hidden: Residual, bound: Mixes, stage: str) -> Residual:
        """Map hidden [N, D] -> [N, D]; `bound` runs the part that has the addresses of states."""
        at = partial(Place, stage, self.layer)
        weights, config = self.weights, self.config
        places = config.recurrence.places
        _, x = hidden.normed(ops, self.norm, config.eps, at("normed"))  # [N, D]
        qkv, z = linears(
            ops, x=x, weight=weights.inputs, shapes=tuple(config.lengths(places[name]) for name in ("qkv", "z")),
            to=(at("qkv"), at("z")),
        )  # [N, HV, 2K + V], [N, HV, V]
        core = bound.mix(ops, partial(self._core, stage, x.dtype), (qkv,), z)  # [N, HV, V]
        gated = ops.gated_norm(
            core=core.flatten(1), z=z.flatten(1), weight=weights.norm, eps=config.core_eps, gate=config.output_gate,
            to=at("gated"),
        )  # [N, HV*V]: all heads of a row are normed together
        mixer = ops.linear(x=gated, weight=weights.out, shape=(config.hidden,), to=at("mixer"))  # [N, D]
        return self.half(ops, x, mixer, stage)

    def _core(self, stage: str, dtype: torch.dtype, ops: Ops, bound: BoundPair, qkv: torch.Tensor) -> torch.Tensor:
        """Run the recurrence on the memory of requests: the part that no graph of a prompt contains."""
        assert ops.lightning_inputs is not None, "checked when the engine was built"
        inputs = ops.lightning_inputs(
            qkv=qkv, log_decay=self.weights.log_decay, key_dim=self.config.key_dim,
            to=tuple(Place(stage, self.layer, name) for name in INPUTS))
        return ops.recurrence(self.config.recurrence)(
            inputs=inputs, parts=bound.state(self.layer), dtype=dtype, to=Place(stage, self.layer, "core"))
