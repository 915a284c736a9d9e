"""The second half of every layer: residual, norm, dense MLP or experts, residual.

Leaves out: the mixers (`gdn.py`, `attention.py`). Ops only.
"""

from dataclasses import dataclass
from functools import partial

import torch

from instep_reference.contract.checkpoint_tensor_shapes import layer_norms
from instep_reference.contract.config import MLPS, Block, ModelConfig
from instep_reference.contract.place_names import Place

from .. import weights as w
from ..ops.family_op_protocols import StreamWeights
from ..ops.op_protocols import ExpertWeights, Ops
from .residual import Residual, Rows, Streams


@dataclass(frozen=True)
class Half:
    """residual = hidden + mixer; answer = residual + mlp(norm(residual)).

    after  the layer norms results: answer = residual + norm(mlp(residual)), and the caller has normed `mixer`
    With factors the caller passes its normed rows as `hidden`, and the answer is alpha * norm(residual) + beta * mlp.
    A layer without an MLP has neither norm nor mlp: its answer is hidden + mixer.
    """

    layer: int
    norm: torch.Tensor | StreamWeights | None
    mlp: w.DenseWeights | ExpertWeights | None
    config: ModelConfig
    after: bool

    @classmethod
    def of(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> "Half":
        after = config.mixers[layer] in config.norm_after
        if config.layers[layer][-1] not in MLPS:
            return cls(layer, None, None, config, after)
        norm = stored.read(f"{prefix}.{layer_norms(config, layer)[-1]}", config)
        return cls(layer, norm, w.mlp(stored, prefix, layer, config), config, after)

    def __call__(self, ops: Ops, hidden: Rows, mixer: torch.Tensor, stage: str) -> Residual:
        """Map hidden, mixer [N, D] -> the layer's answer [N, D] as a residual pair; the next norm adds it up."""
        at = partial(Place, stage, self.layer)
        if self.norm is None:
            return self._sum(ops, "", hidden, mixer, at("hidden"))
        factors = bool(self.config.residual_factors)
        total = self._sum(ops, self.config.mixers[self.layer], hidden, mixer, at("residual"))
        residual: Rows
        if self.after and not isinstance(self.norm, StreamWeights):
            residual = total.summed(ops).x
            made = ops.norm(
                x=self._mlp(ops, residual, at("mlp")), weight=self.norm, eps=self.config.eps, to=at("mlp_normed"))
            return Residual(residual, made, at("hidden"))
        residual, normed = total.normed(ops, self.norm, self.config.eps, at("post_normed"))
        made = self._mlp(ops, normed, at("mlp"))
        return self._sum(ops, self.config.layers[self.layer][-1], normed if factors else residual, made, at("hidden"))

    def _sum(self, ops: Ops, block: Block, x: Rows, y: torch.Tensor, to: Place) -> Residual:
        """Add the result y of a block. With factors or streams the sum is computed here, as no norm computes it."""
        if isinstance(x, Streams):
            return x.plus(ops, y, to)
        factors = self.config.factors(block)
        if factors is None:
            return Residual(x, y, to)
        assert ops.scaled_add is not None, "checked when the engine was built"
        return Residual(ops.scaled_add(x=x, y=y, alpha=factors[0], beta=factors[1], to=to))

    def alone(self, ops: Ops, hidden: Residual, stage: str) -> Residual:
        """Run a layer that is an MLP alone."""
        assert self.norm is not None, "the layer is an MLP"
        normed, mlp, answer = (Place(stage, self.layer, name) for name in ("post_normed", "mlp", "hidden"))
        rows, x = hidden.normed(ops, self.norm, self.config.eps, normed)
        assert isinstance(rows, torch.Tensor), "such a layer has no streams"
        return Residual(rows, self._mlp(ops, x, mlp), answer)

    def _mlp(self, ops: Ops, x: torch.Tensor, to: Place) -> torch.Tensor:
        assert self.mlp is not None, "the layer has an MLP"
        if isinstance(self.mlp, w.DenseWeights) and not self.config.mlp_gate:
            assert ops.squared_mlp is not None, "checked when the engine was built"
            return ops.squared_mlp(x=x, up=self.mlp.gate_up, down=self.mlp.down, to=to)
        if isinstance(self.mlp, w.DenseWeights):
            return ops.mlp(x=x, gate_up=self.mlp.gate_up, down=self.mlp.down, to=to)
        config = self.config
        return ops.moe(x=x, weights=self.mlp, top_k=config.experts_per_token, norm_topk=config.norm_topk, to=to)
