"""The `eagle` drafter: one MTP layer, run again for every draft on its own hidden rows.

Leaves out: which rows are drafted for, and the buffers of a chain (`round.py`). Ops only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place import AFTER_LAYERS, STAGE_LEVEL, Place

from .. import weights as w
from ..batch import Batch
from ..memory import Memory
from ..model.attention import AttentionLayer
from ..model.trunk import Head
from ..ops.base import Ops


@dataclass(frozen=True)
class Eagle:
    """Frozen. Row p pairs a hidden row of position p with token p + 1 and has KV index p.

    x = fc([norm(embed(token)) | norm(hidden)]);  y = norm(layer(x));  draft = argmax(lm_head(y))
    """

    head: Head
    weights: w.DraftWeights
    layer: AttentionLayer
    config: ModelConfig

    @classmethod
    def of(cls, stored: w.Stored, config: ModelConfig, head: Head, memory: Memory) -> Eagle:
        """From the target's configuration, which stays as it is: the head has one of its own."""
        own = config.drafter()
        pools = memory["draft_keys"].units(0), memory["draft_values"].units(0)
        layer = AttentionLayer.of(stored, "mtp.layers.0", 0, own, *pools)
        return cls(head, w.draft(stored), layer, own)

    def rows(self, ops: Ops, hidden: torch.Tensor, batch: Batch, stage: str) -> torch.Tensor:
        """hidden [N, D] -> y [N, D]; the rows' draft KV is written on the way."""

        def at(component: str, layer: int = STAGE_LEVEL) -> Place:
            return Place(stage, layer, component)

        weights, eps = self.weights, self.config.eps
        embedding = self.head.embed(ops, batch.tokens, stage)
        left = ops.norm(x=embedding, weight=weights.embedding_norm, eps=eps, to=at("normed"))
        right = ops.norm(x=hidden, weight=weights.hidden_norm, eps=eps, to=at("post_normed"))
        joined = ops.concat(x=left, y=right, to=at("joined"))
        fused = ops.linear(x=joined, weight=weights.fc, shape=(self.config.hidden,), to=at("fused"))
        answer = self.layer(ops, fused, batch, stage)
        return ops.norm(x=answer, weight=weights.norm, eps=eps, to=at("final", AFTER_LAYERS))

    def pick(self, ops: Ops, y: torch.Tensor, stage: str) -> torch.Tensor:
        """y [M, D] -> the head's argmax [M] int64."""
        return self.head.pick(ops, y, stage)
