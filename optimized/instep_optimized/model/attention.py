"""A full-attention layer over paged KV: ops and views only. The draft head's layer is one of these.

Leaves out: pages and positions, which come with the batch.
"""

from dataclasses import dataclass
from functools import partial

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place

from .. import weights as w
from ..ops.fused import gated_attend, kv_inputs, linears, store_rows
from ..ops.op_protocols import Ops
from ..packed_batch import Batch
from .layer import StoringLayer
from .residual import Residual, Rows


@dataclass(frozen=True)
class ProjectedAttentionLayer(StoringLayer[w.ProjectedWeights]):
    """One layer whose queries, keys and values are as they are projected: without norms, positions and gates."""

    @classmethod
    def read(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> w.ProjectedWeights:
        return w.projected(stored, prefix)

    def __call__(self, ops: Ops, hidden: Residual, batch: Batch, stage: str) -> Residual:
        """Map hidden [N, D] -> [N, D]."""
        at = partial(Place, stage, self.layer)
        config, stored = self.config, (self.config.kv_heads, self.config.head_dim)
        rows, x = hidden.normed(ops, self.norm, config.eps, at("normed"))  # [N, D]
        query, key, value = linears(
            ops, x=x, weight=self.weights.inputs, shapes=((config.heads, config.head_dim), stored, stored),
            to=(at("query"), at("key"), at("value")),
        )  # [N, heads, head_dim], [N, kv_heads, head_dim] twice
        # Stored before they are read: a row also attends to itself and to the rows before it in this launch.
        for made, pool in zip((key, value), (self.keys, self.values), strict=True):
            store_rows(ops, rows=made, units=pool, locations=batch.locations)
        attended = ops.attend(query=query, pages=batch.pages(self.keys, self.values), to=at("attended"))
        mixed = ops.linear(x=attended, weight=self.weights.o, shape=(config.hidden,), to=at("mixer"))  # [N, D]
        return self.half(ops, rows, mixed, stage)


@dataclass(frozen=True)
class AttentionLayer(StoringLayer[w.AttentionWeights]):
    """A layer of attention. Calling it runs it."""

    @classmethod
    def read(cls, stored: w.Stored, prefix: str, layer: int, config: ModelConfig) -> w.AttentionWeights:
        return w.attention(stored, prefix, config)

    def __call__(self, ops: Ops, hidden: Residual, batch: Batch, stage: str) -> Residual:
        """Map hidden [N, D] -> [N, D]."""
        at = partial(Place, stage, self.layer)
        weights, config = self.weights, self.config
        key_shape = (config.kv_heads, config.head_dim)
        rows: Rows
        if self.half.after:
            rows = x = hidden.summed(ops).x  # [N, D]
        else:
            rows, x = hidden.normed(ops, self.norm, config.eps, at("normed"))  # [N, D]
        projected, key_raw, value = linears(
            ops, x=x, weight=weights.inputs, to=(at("projected"), at("key_raw"), at("value")),
            shapes=((config.heads, 1 + config.attention_gate, config.head_dim), key_shape, key_shape),
        )  # [N, heads, 2, head_dim]: query, then gate, if there is one; [N, kv_heads, head_dim] twice
        inputs = self._of_rows if config.row_norms else self._of_heads
        query = inputs(ops, batch, projected, key_raw, value, (at("query"), at("key")))  # [N, heads, head_dim]
        pages = batch.pages(self.keys, self.values)
        opened = gated_attend(
            ops, query=query, pages=pages, projected=projected, to=(at("attended"), at("opened")),
        ) if config.attention_gate else ops.attend(query=query, pages=pages, to=at("attended"))  # [N, heads, head_dim]
        mixer = ops.linear(x=opened, weight=weights.o, shape=(config.hidden,), to=at("mixer"))  # [N, D]
        if self.half.after:
            assert isinstance(self.norm, torch.Tensor), "such a layer has no streams"
            mixer = ops.norm(x=mixer, weight=self.norm, eps=config.eps, to=at("mixer_normed"))
        return self.half(ops, x if config.residual_factors else rows, mixer, stage)

    # Both store keys and values before `attend`: a row also attends to itself and to the rows before it in this launch.

    def _of_heads(
        self, ops: Ops, batch: Batch, projected: torch.Tensor, key_raw: torch.Tensor, value: torch.Tensor,
        to: tuple[Place, Place],
    ) -> torch.Tensor:
        """Norm queries and keys head by head, and turn them -> query [N, heads, head_dim]."""
        weights, config = self.weights, self.config
        return kv_inputs(
            ops, projected=projected, key_raw=key_raw, positions=batch.positions, q_norm=weights.q_norm,
            k_norm=weights.k_norm, eps=config.eps, rotary_dim=config.rotary_dim, theta=config.rope_theta, value=value,
            pools=(self.keys, self.values), locations=batch.locations, to=to,
        )

    def _of_rows(
        self, ops: Ops, batch: Batch, projected: torch.Tensor, key_raw: torch.Tensor, value: torch.Tensor,
        to: tuple[Place, Place],
    ) -> torch.Tensor:
        """Norm all heads of a row together, without positions -> query [N, heads, head_dim]."""
        each = (projected[:, :, 0], self.weights.q_norm), (key_raw, self.weights.k_norm)
        query, key = (
            ops.norm(x=x, weight=weight, eps=self.config.eps, to=place)
            for (x, weight), place in zip(each, to, strict=True)
        )
        for rows, pool in ((key, self.keys), (value, self.values)):
            store_rows(ops, rows=rows, units=pool, locations=batch.locations)
        return query
