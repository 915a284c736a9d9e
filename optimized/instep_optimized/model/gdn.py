"""A layer with a recurrence: ops and views only.

Leaves out: the memory that is read and written; the commit strategy chooses the addresses.
"""

from dataclasses import dataclass
from functools import partial

import torch

from instep_reference.contract.config import LATENT_TYPES, OLMO, ModelConfig
from instep_reference.contract.nemotron_config import NEMOTRON
from instep_reference.contract.place_names import Place

from .. import weights as w
from ..commit.strategy_pair import BoundPair, Mixer, Mixes
from ..ops.fused import linears, prefill_gdn
from ..ops.op_protocols import Ops
from .layer import Layer
from .residual import Residual


@dataclass(frozen=True)
class GdnLayer(Layer[w.GdnWeights]):
    """A layer of a recurrence with a conv. Calling it runs it."""

    @classmethod
    def read(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> w.GdnWeights:
        types = {**dict.fromkeys(LATENT_TYPES, w.kda), OLMO: w.olmo, NEMOTRON: w.mamba2}
        return types.get(config.model_type, w.gdn)(stored, prefix, config)

    def __call__(self, ops: Ops, hidden: Residual, bound: Mixes, stage: str) -> Residual:
        """Map hidden [N, D] -> [N, D]; `bound` runs the part that has the addresses of conv windows and states."""
        at = partial(Place, stage, self.layer)
        weights, config = self.weights, self.config
        row, low = config.recurrence, {} if weights.z is None else {"z": "z_low", "a": "a_low"}
        places = [low.get(name, name) for name in ("qkv", "z", *row.gates)]
        rows, x = hidden.normed(ops, self.norm, config.eps, at("normed"))  # [N, D]
        qkv, z, *gates = linears(
            ops, x=x, weight=weights.inputs, to=tuple(map(at, places)),
            shapes=tuple(config.lengths(row.places[place]) for place in places),
        )  # [N, C], [N, HV, V], [N, HV], [N, HV], or a [N, HV, K]; of low rank z_low [N, V], a_low [N, K]
        if weights.z is not None and weights.a is not None:
            z, gates[-1] = (
                ops.linear(x=first, weight=second, shape=config.lengths(row.places[place]), to=at(place))
                for place, first, second in (("z", z, weights.z), ("a", gates[-1], weights.a))
            )
        run: Mixer = self._selective if row.inputs == "selective" else self._core
        core = bound.mix(ops, partial(run, stage, x.dtype), (qkv, *reversed(gates)), z)  # [N, HV, V]
        gated = self._gated(ops, core, z, at("gated"))
        mixer = ops.linear(x=gated, weight=weights.out, shape=(config.hidden,), to=at("mixer"))  # [N, D]
        return self.half(ops, rows, mixer, stage)

    def _gated(self, ops: Ops, core: torch.Tensor, z: torch.Tensor, to: Place) -> torch.Tensor:
        weight, config = self.weights.norm, self.config
        if config.recurrence.norm == "group":
            assert ops.gated_group_norm is not None, "checked when the engine was built"
            return ops.gated_group_norm(
                core=core, z=z, weight=weight, eps=config.eps, groups=config.key_heads, to=to)
        return ops.gated_norm(core=core, z=z, weight=weight, eps=config.core_eps, gate=config.output_gate, to=to)

    def _selective(
        self, stage: str, dtype: torch.dtype, ops: Ops, bound: BoundPair, qkv: torch.Tensor, a: torch.Tensor,
    ) -> torch.Tensor:
        """Do as `_core` for Mamba2."""
        at = partial(Place, stage, self.layer)
        weights, config = self.weights, self.config
        assert ops.selective_inputs and ops.add_skip and ops.biased_conv, "checked when the engine was built"
        assert weights.skip is not None, "weights of Mamba2 have it"
        given = {"x": qkv, "weight": weights.conv}
        conv = ops.conv if weights.conv_bias is None else partial(ops.biased_conv, bias=weights.conv_bias)
        mixed = conv(**given, parts=bound.conv(self.layer), to=at("mixed"))  # [N, C]
        inputs = ops.selective_inputs(
            mixed=mixed, a=a, A_log=weights.A_log, dt_bias=weights.dt_bias, key_heads=config.key_heads,
            key_dim=config.key_dim, to=tuple(map(at, ("q", "k", "v", "log_decay", "write"))),
        )  # q, k [N, H, K], v [N, HV, V], log_decay, write [N, HV]
        core = ops.recurrence(config.recurrence)(
            inputs=inputs, parts=bound.state(self.layer), dtype=dtype, to=at("core"))  # [N, HV, V]
        return ops.add_skip(core=core, v=inputs.v, weight=weights.skip, to=at("skip"))

    def _core(
        self, stage: str, dtype: torch.dtype, ops: Ops, bound: BoundPair, qkv: torch.Tensor, a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        """Run conv and delta rule on the memory of requests: the part that no graph of a prompt contains."""
        at = partial(Place, stage, self.layer)
        weights, config = self.weights, self.config
        windows = bound.conv(self.layer)
        parts = bound.state(self.layer)  # the addresses at which the op reads and writes the states
        return prefill_gdn(
            ops, x=qkv, weight=weights.conv, windows=windows, a=a, b=b, A_log=weights.A_log,
            dt_bias=weights.dt_bias, key_heads=config.key_heads, key_dim=config.key_dim, parts=parts, dtype=dtype,
            row=config.recurrence, bounds=config.gate_bounds,
            to=tuple(map(at, ("mixed", "q", "k", "v", "log_decay", "beta", "core"))),
        )  # [N, HV, V]; on its way q, k [N, H, K], v [N, HV, V], log_decay, beta [N, HV]
