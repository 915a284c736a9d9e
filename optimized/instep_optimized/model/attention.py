"""A gated full-attention layer over paged KV: ops and views only. The draft head's layer is one of these.

Leaves out: pages and positions, which come with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place

from .. import weights as w
from ..memory.tiled_units import Units
from ..ops.fused import gated_attend, kv_inputs, linears
from ..ops.op_protocols import Ops
from ..packed_batch import Batch
from .mlp import Half
from .residual import Residual


@dataclass(frozen=True)
class AttentionLayer:
    """One layer, frozen: its number, weights and sizes, and its own KV pools [pages, page_size, kv_heads, head_dim]."""

    layer: int
    norm: torch.Tensor
    weights: w.AttentionWeights
    half: Half
    config: ModelConfig
    keys: Units
    values: Units

    @classmethod
    def of(
        cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig, keys: Units, values: Units
    ) -> AttentionLayer:
        norm = stored.take(f"{prefix}.input_layernorm.weight")
        half = Half.of(stored, prefix, layer, config)
        return cls(layer, norm, w.attention(stored, prefix), half, config, keys, values)

    def __call__(self, ops: Ops, hidden: Residual, batch: Batch, stage: str) -> Residual:
        """Map hidden [N, D] -> [N, D]."""

        def at(component: str) -> Place:
            return Place(stage, self.layer, component)

        weights, config = self.weights, self.config
        key_shape = (config.kv_heads, config.head_dim)
        rows, x = hidden.normed(ops, self.norm, config.eps, at("normed"))  # [N, D]
        projected, key_raw, value = linears(
            ops, x=x, weight=weights.inputs, shapes=((config.heads, 2, config.head_dim), key_shape, key_shape),
            to=(at("projected"), at("key_raw"), at("value")),
        )  # [N, heads, 2, head_dim]: query, then gate; [N, kv_heads, head_dim] twice
        # Stored before `attend`: a row also attends to itself and to the rows before it in this launch.
        query = kv_inputs(
            ops, projected=projected, key_raw=key_raw, positions=batch.positions, q_norm=weights.q_norm,
            k_norm=weights.k_norm, eps=config.eps, rotary_dim=config.rotary_dim, theta=config.rope_theta, value=value,
            pools=(self.keys, self.values), locations=batch.locations, to=(at("query"), at("key")),
        )  # [N, heads, head_dim]
        opened = gated_attend(
            ops, query=query, pages=batch.pages(self.keys, self.values), projected=projected,
            to=(at("attended"), at("opened")),
        )  # [N, heads, head_dim]
        mixer = ops.linear(x=opened, weight=weights.o, shape=(config.hidden,), to=at("mixer"))  # [N, D]
        return self.half(ops, rows, mixer, stage)
