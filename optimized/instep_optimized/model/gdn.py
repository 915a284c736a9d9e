"""A layer with a recurrence: ops and views only.

Leaves out: the memory that is read and written; the commit strategy chooses the addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from instep_reference.contract.checkpoint_tensor_shapes import layer_norms
from instep_reference.contract.config import LATENT_TYPES, OLMO, ModelConfig
from instep_reference.contract.place_names import Place

from .. import weights as w
from ..commit.strategy_pair import BoundPair, Mixes
from ..ops.fused import linears, prefill_gdn
from ..ops.op_protocols import Ops
from .mlp import Half
from .residual import Residual


@dataclass(frozen=True)
class GdnLayer:
    """One layer, frozen: its number, weights and sizes. Calling it runs it."""

    layer: int
    norm: torch.Tensor
    weights: w.GdnWeights
    half: Half
    config: ModelConfig

    @classmethod
    def of(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> GdnLayer:
        norm = stored.norm(f"{prefix}.{layer_norms(config, layer)[0]}.weight", config)
        of_type = {**dict.fromkeys(LATENT_TYPES, w.kda), OLMO: w.olmo}.get(config.model_type, w.gdn)
        weights = of_type(stored, prefix, config)
        return cls(layer, norm, weights, Half.of(stored, prefix, layer, config), config)

    def __call__(self, ops: Ops, hidden: Residual, bound: Mixes, stage: str) -> Residual:
        """Map hidden [N, D] -> [N, D]; `bound` runs the part that has the addresses of conv windows and states."""

        def at(component: str) -> Place:
            return Place(stage, self.layer, component)

        weights, config = self.weights, self.config
        places = ("qkv", "z", "b", "a") if weights.z is None else ("qkv", "z_low", "b", "a_low")
        rows, x = hidden.normed(ops, self.norm, config.eps, at("normed"))  # [N, D]
        qkv, z, b, a = linears(
            ops, x=x, weight=weights.inputs, to=tuple(map(at, places)),
            shapes=tuple(config.lengths(config.recurrence.places[place]) for place in places),
        )  # [N, C], [N, HV, V], [N, HV], [N, HV], or a [N, HV, K]; of low rank z_low [N, V], a_low [N, K]
        if weights.z is not None and weights.a is not None:
            z, a = (
                ops.linear(x=low, weight=second, shape=config.lengths(config.recurrence.places[place]), to=at(place))
                for place, low, second in (("z", z, weights.z), ("a", a, weights.a))
            )
        core = bound.mix(ops, partial(self._core, stage, x.dtype), (qkv, a, b), z)  # [N, HV, V]
        gated = ops.gated_norm(
            core=core, z=z, weight=weights.norm, eps=config.core_eps, gate=config.output_gate, to=at("gated")
        )
        mixer = ops.linear(x=gated, weight=weights.out, shape=(config.hidden,), to=at("mixer"))  # [N, D]
        return self.half(ops, rows, mixer, stage)

    def _core(
        self, stage: str, dtype: torch.dtype, ops: Ops, bound: BoundPair, qkv: torch.Tensor, a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        """Run conv and delta rule on the memory of requests: the part that no graph of a prompt contains."""

        def at(component: str) -> Place:
            return Place(stage, self.layer, component)

        weights, config = self.weights, self.config
        windows = bound.conv(self.layer)
        parts = bound.state(self.layer)  # the addresses at which the op reads and writes the states
        return prefill_gdn(
            ops, x=qkv, weight=weights.conv, windows=windows, a=a, b=b, A_log=weights.A_log,
            dt_bias=weights.dt_bias, key_heads=config.key_heads, key_dim=config.key_dim, parts=parts, dtype=dtype,
            row=config.recurrence, bounds=config.gate_bounds,
            to=tuple(map(at, ("mixed", "q", "k", "v", "log_decay", "beta", "core"))),
        )  # [N, HV, V]; on its way q, k [N, H, K], v [N, HV, V], log_decay, beta [N, HV]
