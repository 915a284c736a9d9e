"""The draft head: one MTP layer over rows that combine a hidden row with the next token.

Leaves out: which rows run when (`eagle.py`, `vanilla.py`).
"""

from collections.abc import Sequence
from typing import cast

import torch

from .. import trunk
from ..attention import AttentionMemory
from ..contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, See
from ..norms import rms_norm
from ..weights import DraftWeights, Weights


def rows(
    weights: Weights, layer: int, tokens: Sequence[int], hidden: torch.Tensor, cache: AttentionMemory, start: int,
    stage: str, see: See,
) -> tuple[torch.Tensor, AttentionMemory]:
    """x = fc([norm(embed(token p + 1)) | norm(h_p)]), embedding first; one layer; y = norm(x).

    Shapes:  tokens (T,)   hidden (T, D)  ->  y (T, D), and the cache with T more rows. The first is at position start.
    Mirrors: transformers `MtpModel`. Differs: HF rotates row p at position p + 1; here row p has position p. So the
    keys differ, and y does not, because only differences of positions matter.
    """
    draft, config = cast(DraftWeights, weights.draft), weights.config.drafter()

    def at(component: str, tensor: torch.Tensor, level: int = STAGE_LEVEL) -> torch.Tensor:
        return see(Place(stage, level, component), tensor)

    embedded = trunk.embed(weights, torch.tensor(tokens, device=hidden.device), see, stage)
    embedded = at("normed", rms_norm(embedded, draft.norm_embedding, config.eps))
    fed = at("post_normed", rms_norm(hidden, draft.norm_hidden, config.eps))
    x = at("fused", at("joined", torch.cat([embedded, fed], -1)) @ draft.fc.T)
    positions = start + torch.arange(len(tokens), device=hidden.device)
    x, kept = trunk.layer(config, draft.layers[layer], layer, stage, x, cache, positions, see)
    return at("final", rms_norm(x, draft.norm, config.eps), AFTER_LAYERS), cast(AttentionMemory, kept)
