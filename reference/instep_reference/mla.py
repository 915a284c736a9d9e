"""Attention over stored latents (MLA): keys and values of all heads are expanded from one row per token.

Leaves out: pages, computing by blocks, and the absorbed form, which multiplies queries by the expansion instead.
"""

import torch

from .attention import AttentionMemory, Read, attend, rotate
from .contract.config import LATENT_EPS, ModelConfig
from .contract.place_names import At
from .norms import rms_norm
from .weights import LatentWeights


def empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> AttentionMemory:
    """Return the memory before the first token: no rows. keys [L, 1, S]: the part that heads share; values [L, 1, R]:
    the latents.
    """
    widths = config.shared_key, config.latent
    return AttentionMemory(*(torch.zeros(0, 1, width, dtype=dtype, device=device) for width in widths))


def mix(
    config: ModelConfig, weights: LatentWeights, normed: torch.Tensor, memory: AttentionMemory,
    positions: torch.Tensor, at: At, read: Read | None = None,
) -> tuple[torch.Tensor, AttentionMemory]:
    """Run the layer between its input norm and its residual: T consecutive tokens of one request.

    read: reads other rows than `attend` does
    Shapes:  normed (T, D)   positions (T,)  ->  (T, D), and the memory with the T new rows after the old ones.
    Mirrors: transformers 5.24 `KimiLinearAttention`, in which positions play no part, and `BailingHybridAttention`,
             which turns the shared part of queries and keys and has a gate per head. Differs in the width (HF: norm and
             softmax in fp32).
    """
    T, S, R, heads, width = normed.shape[0], config.shared_key, config.latent, config.heads, config.head_dim
    gate = None
    if config.rotary_dim:
        projected = at("projected", (normed @ weights.query.T).reshape(T, heads, width + 1))  # (T, heads, head_dim + 1)
        key_raw = at("key_raw", (normed @ weights.down.T).reshape(T, 1, R + S))  # (T, 1, R + S)
        own, turning, gate = torch.split(projected, [width - S, S, 1], dim=-1)
        query = at("query", torch.cat([own, rotate(turning, positions, config)], -1))  # (T, heads, head_dim)
        key = at("key", rotate(key_raw[..., R:], positions, config))  # (T, 1, S)
    else:
        key_raw = at("key_raw", (normed @ weights.down[:R].T).reshape(T, 1, R))  # (T, 1, R)
        query = at("query", (normed @ weights.query.T).reshape(T, heads, width))  # (T, heads, head_dim)
        key = at("key", (normed @ weights.down[R:].T).reshape(T, 1, S))  # (T, 1, S)
    value = at("value", rms_norm(key_raw[..., :R], weights.latent_norm, LATENT_EPS))  # (T, 1, R)
    after = AttentionMemory(torch.cat([memory.keys, key]), torch.cat([memory.values, value]))
    attended = at("attended", (read or attend)(query, *expand(config, weights.up, after)))  # (T, heads, value_width)
    if gate is not None:
        attended = at("opened", attended * torch.sigmoid(gate))
    return at("mixer", attended.flatten(1) @ weights.out.T), after


def expand(config: ModelConfig, up: torch.Tensor, memory: AttentionMemory) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand stored rows to the keys and values of every head: a key is [of the head | shared].

    Shapes:  memory of L rows  ->  keys (L, heads, head_dim), values (L, heads, value_width)
    """
    own = config.head_dim - config.shared_key
    expanded = (memory.values[:, 0] @ up.T).reshape(-1, config.heads, own + config.value_width)
    shared = memory.keys.expand(-1, config.heads, -1)
    return torch.cat([expanded[..., :own], shared], -1), expanded[..., own:]
