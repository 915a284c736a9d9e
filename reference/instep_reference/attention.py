"""Full attention: norms of queries and keys, partial rotary, softmax over all positions so far, an output gate.

Keys and values are two plain tensors. Leaves out: pages, and computing by blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .contract.config import ModelConfig
from .contract.place_names import At
from .norms import rms_norm
from .weights import AttentionWeights, NopeWeights


@dataclass(frozen=True)
class AttentionMemory:
    """An attention layer's memory of a request: keys (normed, rotated) and values [L, kv_heads, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


def empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> AttentionMemory:
    """Return the memory before the first token: no rows."""
    rows = torch.zeros(0, config.kv_heads, config.head_dim, dtype=dtype, device=device)
    return AttentionMemory(rows, rows)


def mix(
    config: ModelConfig, weights: AttentionWeights, normed: torch.Tensor, memory: AttentionMemory,
    positions: torch.Tensor, at: At, read: "Read | None" = None,
) -> tuple[torch.Tensor, AttentionMemory]:
    """Run the attention layer between its input norm and its residual: T consecutive tokens of one request.

    read: reads other rows of the memory than `attend` does
    Shapes:  normed (T, D)   positions (T,)  ->  (T, D), and the memory with the T new rows after the old ones.
    Mirrors: transformers `Qwen3_5Attention`, and without gates and positions, with norms over all heads of a row,
             `OlmoHybridAttention` of 5.24; differs in the width (HF: norms, rotary and softmax in fp32).
    """
    T, heads, kv_heads, width = normed.shape[0], config.heads, config.kv_heads, config.head_dim
    parts = 1 + config.attention_gate  # of a head's projection: the query, and its gate
    projected = at("projected", (normed @ weights.query_gate.T).reshape(T, heads, parts, width))
    key_raw = at("key_raw", (normed @ weights.key.T).reshape(T, kv_heads, width))  # (T, kv_heads, head_dim)
    query = at("query", rotate(_normed(projected[:, :, 0], weights.query_norm, config), positions, config))
    key = at("key", rotate(_normed(key_raw, weights.key_norm, config), positions, config))
    value = at("value", (normed @ weights.value.T).reshape(T, kv_heads, width))  # (T, kv_heads, head_dim)
    after = AttentionMemory(torch.cat([memory.keys, key]), torch.cat([memory.values, value]))
    attended = at("attended", (read or attend)(query, after.keys, after.values))  # (T, heads, head_dim)
    opened = attended
    if config.attention_gate:
        opened = at("opened", attended * torch.sigmoid(projected[:, :, 1]))  # (T, heads, head_dim)
    return at("mixer", opened.flatten(1) @ weights.out.T), after


def _normed(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Norm each head of x (T, heads, head_dim) with weight (head_dim), or its rows with weight (heads*head_dim)."""
    if not config.head_norms:
        return x
    if config.row_norms:
        return rms_norm(x.flatten(1), weight, config.eps).reshape(x.shape)
    return rms_norm(x, weight, config.eps)


def mix_as_projected(
    config: ModelConfig, weights: NopeWeights, normed: torch.Tensor, memory: AttentionMemory,
    positions: torch.Tensor, at: At, read: "Read | None" = None,
) -> tuple[torch.Tensor, AttentionMemory]:
    """Do as `mix` with queries, keys and values as they are projected: without norms, positions and gates.

    Mirrors: transformers 5.24 `NemotronHAttention`; differs in the width (HF: softmax in fp32).
    """
    T, heads, kv_heads, width = normed.shape[0], config.heads, config.kv_heads, config.head_dim
    query = at("query", (normed @ weights.query.T).reshape(T, heads, width))  # (T, heads, head_dim)
    key = at("key", (normed @ weights.key.T).reshape(T, kv_heads, width))  # (T, kv_heads, head_dim)
    value = at("value", (normed @ weights.value.T).reshape(T, kv_heads, width))  # (T, kv_heads, head_dim)
    after = AttentionMemory(torch.cat([memory.keys, key]), torch.cat([memory.values, value]))
    attended = at("attended", (read or attend)(query, after.keys, after.values))  # (T, heads, head_dim)
    return at("mixer", attended.flatten(1) @ weights.out.T), after


Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend causally with softmax. The T queries are those of the last T rows; each sees the rows up to its own.

    Shapes:  query (T, heads, head_dim)   keys, values (L, kv_heads, head_dim), L >= T  ->  (T, heads, head_dim)
    Query head h reads kv head h // (heads / kv_heads).
    """
    (tokens, heads, width), (length, kv_heads, _) = query.shape, keys.shape
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,lhd->htl", query, keys) * width**-0.5  # (heads, T, L)
    # Query t belongs to row L - T + t: later rows are masked.
    later = torch.ones(tokens, length, dtype=torch.bool, device=query.device).triu(length - tokens + 1)
    shares = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("htl,lhd->thd", shares, values)


def attend_both_ways(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend without a mask: every query sees every row, those after its own too. Otherwise as `attend`."""
    (_, heads, width), kv_heads = query.shape, keys.shape[1]
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    shares = (torch.einsum("thd,lhd->htl", query, keys) * width**-0.5).softmax(-1)
    return torch.einsum("htl,lhd->thd", shares, values)


def rotate(x: torch.Tensor, positions: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Turn channel pairs (i, i + R/2) of the first R = rotary_dim channels by position * theta ** (-2i / R).

    Shapes:  x (T, heads, head_dim)   positions (T,)  ->  (T, heads, head_dim)
    Mirrors: transformers `apply_rotary_pos_emb`; angles are in the dtype of x (HF: fp32), which must be fp32 or fp64 so
             that it holds every position. For text, mRoPE equals this.
    """
    R = config.rotary_dim
    exponents = torch.arange(0, R, 2, dtype=x.dtype, device=x.device) / R
    angles = positions.to(x.dtype)[:, None, None] * config.rope_theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = torch.split(x, [R // 2, R // 2, x.shape[-1] - R], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
