"""The rows of a block drafter: keys and values of committed tokens from rows of the target, and the rows of a block.

Leaves out: which tokens and rows run when (`block.py`).
"""

from collections.abc import Sequence
from typing import cast

import torch

from .. import trunk
from ..attention import AttentionMemory, attend_both_ways, rotate
from ..contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, See
from ..norms import rms_norm
from ..weights import AttentionWeights, BlockWeights, Weights

Caches = tuple[AttentionMemory, ...]
CONTEXT, BLOCK = "extend", "block"  # stages


def features(answers: Sequence[torch.Tensor], layers: Sequence[int], see: See) -> torch.Tensor:
    """Rows after these layers of the target (T, D) each, side by side  ->  (T, nD)."""
    found = answers[layers[0]]
    for layer in layers[1:]:
        found = see(Place("trunk", layer, "features"), torch.cat([found, answers[layer]], -1))
    return found


def context(weights: Weights, fed: torch.Tensor, caches: Sequence[AttentionMemory], start: int, see: See) -> Caches:
    """c = norm(fc(features)); every layer computes its key and its value of a committed token from c alone.

    Shapes:  fed (T, nD)  ->  the caches with T more rows. The first is at position start.
    Mirrors: DFlash in SGLang 0.5.23 (`project_target_hidden`, `kv_proj_only`): no input norm, the key normed per head
             and rotated at the token's own position. Norms multiply by 1 + weight, as with its `use_gemma_norm`.
    """
    block, config = cast(BlockWeights, weights.block), weights.config.block_model()
    fused = see(Place(CONTEXT, STAGE_LEVEL, "fused"), fed @ block.fc.T)
    rows = see(Place(CONTEXT, STAGE_LEVEL, "context"), rms_norm(fused, block.hidden_norm, config.eps))
    positions, shape = start + torch.arange(len(fed), device=fed.device), (len(fed), config.kv_heads, config.head_dim)
    after = []
    for index, (layer, cache) in enumerate(zip(block.layers, caches, strict=True)):
        mixer = cast(AttentionWeights, layer.mixer)
        key_raw = see(Place(CONTEXT, index, "key_raw"), (rows @ mixer.key.T).reshape(shape))
        normed = rms_norm(key_raw, mixer.key_norm, config.eps)
        key = see(Place(CONTEXT, index, "key"), rotate(normed, positions, config))
        value = see(Place(CONTEXT, index, "value"), (rows @ mixer.value.T).reshape(shape))
        after.append(AttentionMemory(torch.cat([cache.keys, key]), torch.cat([cache.values, value])))
    return tuple(after)


def rows(
    weights: Weights, tokens: Sequence[int], caches: Sequence[AttentionMemory], start: int, see: See
) -> torch.Tensor:
    """y = norm(layers(embed(tokens))). A row sees the whole context and the whole block, also the rows after it.

    The block's own keys and values are scratch: the caches do not change.

    Shapes:  tokens (T,)  ->  y (T, D). The first is at position start, which is the number of rows of the context.
    """
    block, config = cast(BlockWeights, weights.block), weights.config.block_model()
    x = trunk.embed(weights, torch.tensor(tokens, device=weights.embedding.device), see, BLOCK)
    positions = start + torch.arange(len(tokens), device=x.device)
    forms = {"attention": {"read": attend_both_ways}}
    for index, (layer, cache) in enumerate(zip(block.layers, caches, strict=True)):
        x, _ = trunk.layer(config, layer, index, BLOCK, x, cache, positions, see, forms)
    return see(Place(BLOCK, AFTER_LAYERS, "final"), rms_norm(x, block.norm, config.eps))
