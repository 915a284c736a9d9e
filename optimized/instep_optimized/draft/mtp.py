"""An MTP layer as a head: it runs over rows of hidden states, writes its own KV, and picks tokens.

Leaves out: the choice of rows and of hidden rows. Drafters differ in these two.
"""

from dataclasses import dataclass

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place

from .. import weights as w
from ..memory import Memory
from ..model.attention import AttentionLayer, ProjectedAttentionLayer
from ..model.latent_attention import LatentLayer
from ..model.residual import Residual
from ..model.trunk import ATTENDING, Head
from ..ops.fused import draft_inputs
from ..ops.op_protocols import Ops
from ..packed_batch import Batch


@dataclass(frozen=True)
class MtpLayer:
    """Frozen. Row p combines the hidden row of position p with a token of a later position. Its KV index is p.

    x = fc([norm(embed(token)) | norm(hidden)]);  y = norm(layer(x));  pick = argmax(lm_head(y))
    """

    head: Head
    weights: w.DraftWeights
    layer: AttentionLayer | LatentLayer | ProjectedAttentionLayer
    config: ModelConfig

    @classmethod
    def all(cls, stored: w.Stored, config: ModelConfig, head: Head, memory: Memory) -> "tuple[MtpLayer, ...]":
        """Build all MTP layers of a checkpoint. Each has its own decoder layer and KV; fc, norms and head are shared.

        `config` is the target's. It is not changed: `config.drafter()` is the draft head's own configuration.
        """
        own, weights = config.drafter(), w.draft(stored, config)
        return tuple(
            cls(head, weights, ATTENDING[own.mixers[number]].of(
                stored, f"mtp.layers.{number}", number, own,
                *(memory.units(name, number) for name in ("draft_keys", "draft_values")),
            ), own)
            for number in range(config.mtp_layers)
        )

    def rows(self, ops: Ops, hidden: torch.Tensor, batch: Batch, stage: str) -> torch.Tensor:
        """Run hidden [N, D], paired with `batch.tokens` -> y [N, D], and write the rows' draft KV."""

        def at(component: str, layer: int = STAGE_LEVEL) -> Place:
            return Place(stage, layer, component)

        weights, eps = self.weights, self.config.eps
        joined = draft_inputs(
            ops, tokens=batch.tokens, table=self.head.embedding, hidden=hidden,
            weights=(weights.embedding_norm, weights.hidden_norm), eps=eps,
            to=(at("embedding"), at("normed"), at("post_normed"), at("joined")),
        )
        fused = Residual(ops.linear(x=joined, weight=weights.fc, shape=(self.config.hidden,), to=at("fused")))
        answer = self.layer(ops, fused, batch, stage)
        return answer.normed(ops, weights.norm, eps, at("final", AFTER_LAYERS)).normed

    def pick(self, ops: Ops, y: torch.Tensor, stage: str) -> torch.Tensor:
        """Pick from y [M, D] -> the head's argmax [M] int64."""
        return self.head.pick(ops, y, stage)
