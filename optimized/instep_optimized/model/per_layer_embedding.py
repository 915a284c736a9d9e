"""An embedding of n-grams before a mixer (Qwen4-Exp): ops and views only.

Leaves out: the tokens and windows that are read and written; the commit strategies choose the addresses.
"""

from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place

from .. import weights as w
from ..commit.strategy_pair import BoundPair, Mixes
from ..ops.fused import linears
from ..ops.op_protocols import Ops
from .residual import Residual


@dataclass(frozen=True)
class PerLayerEmbedding:
    """The embedding before one layer. Calling it adds it to the streams."""

    layer: int
    weights: w.PleWeights
    config: ModelConfig

    @classmethod
    def of(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> Self:
        return cls(layer, w.per_layer_embedding(stored, prefix, layer, config), config)

    def __call__(self, ops: Ops, hidden: Residual, tokens: torch.Tensor, bound: Mixes, stage: str) -> Residual:
        """Map hidden [N, S*D] and the tokens of the rows [N] -> [N, S*D]."""
        return Residual(bound.mix(ops, partial(self._embed, stage), (hidden.x, tokens), hidden.x))

    def _embed(self, stage: str, ops: Ops, bound: BoundPair, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Run it on the memory of requests: no graph of a prompt contains it."""
        at = partial(Place, stage, self.layer)
        weights, config = self.weights, self.config
        assert ops.ngrams and ops.gate_streams and ops.norm_streams and ops.dilated_conv, "checked when it was built"
        rows = ops.ngrams(
            tokens=tokens, tables=weights.tables, hashes=weights.hashes, parts=bound.parts("ngram", self.layer),
            to=at("ngrams"))  # [N, E]
        key, value = linears(
            ops, x=rows, weight=weights.inputs, to=(at("ple_key"), at("ple_value")),
            shapes=(x.shape[1:], (config.hidden,)))  # [N, S*D], [N, D]
        written = ops.gate_streams(
            x=x, key=key, value=value, key_norm=weights.key_norm, query_norm=weights.query_norm, eps=config.eps,
            to=at("ple_written"))  # [N, S*D]
        normed = ops.norm_streams(
            x=written, weight=weights.conv_norm, streams=config.streams, eps=config.eps, to=at("ple_normed"))
        mixed = ops.dilated_conv(
            x=normed, weight=weights.conv, distance=config.ple_before(self.layer).ngram,
            parts=bound.parts("ple_conv", self.layer), to=at("ple_mixed"))
        made = ops.add(x=written, y=mixed, to=at("ple_made"))
        return ops.add(x=x, y=made, to=at("ple"))
