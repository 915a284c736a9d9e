"""Per-layer embeddings (PLE) and residual streams of Qwen4-Exp: hashed n-grams added before a layer, mixed streams.

A model with S streams keeps S residual rows per token. A block reads a mixture of them and adds its result to each. A
PLE adds to the streams what the last tokens say: their n-grams, hashed into tables, then a dilated convolution. Its
memory is the last N - 1 tokens and the convolution's window. Leaves out: the blocks between (`trunk.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch.nn import functional as F

from .contract.place_names import At
from .contract.qwen4_config import PleShape
from .gdn import GdnMemory
from .norms import rms_norm
from .weights import PleWeights, StreamWeights

LEAST_SCORE = 1e-6  # below it a score counts as this before its root
MASK = (1 << 64) - 1
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64 (Steele, 2014)
PER_LAYER = 10007  # between the seeds of two PLE layers

# The n-grams of rows: shape, tokens (T,) and the tokens before -> rows of the table (T, heads in all).
Entries = Callable[[PleShape, tuple[int, ...], tuple[int, ...]], torch.Tensor]
# The conv: rows x (T, C), weight (C, W), window (C, R), distance of two taps -> (T, C).
Conv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class PleMemory(GdnMemory):
    """The memory of a layer with a PLE: that of its mixer; the last tokens, each plus one, [N-1] int64, 0: none; and

    the window [S*D, R] of the PLE's conv. Both have the oldest first.
    """

    ngram: torch.Tensor
    ple_conv: torch.Tensor


def empty(shape: PleShape, hidden: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the PLE's part of a memory before the first token. hidden: D"""
    return {
        "ngram": torch.zeros(shape.ngram - 1, dtype=torch.int64, device=device),
        "ple_conv": torch.zeros(shape.streams * hidden, shape.reach, dtype=dtype, device=device),
    }


@lru_cache(maxsize=64)
def multipliers(shape: PleShape) -> tuple[int, ...]:
    """An odd number per place of an n-gram, small enough for a product with a token to fit into 63 bits."""
    bound = max(1, ((1 << 63) - 1) // shape.vocab // 2)
    seed = shape.seed + PER_LAYER * shape.index
    return tuple(2 * (split_mix(seed + GOLDEN * (place + 1)) % bound) + 1 for place in range(shape.ngram))


def split_mix(value: int) -> int:
    """Return the number of SplitMix64 after this one."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


def entries(shape: PleShape, tokens: tuple[int, ...], before: tuple[int, ...]) -> torch.Tensor:
    """Look up the rows of the table that each token's n-grams are hashed to: (T, heads in all).

    An n-gram of order n is the xor of its tokens, each times its multiplier, modulo the size of a head's table. It does
    not reach beyond an earlier end of a text: there and before it has eos.
    """
    line, found, by = (*before, *tokens), [], multipliers(shape)
    begins = (0, *accumulate(shape.sizes))
    for at in range(len(before), len(line)):
        back = [line[at]]
        for step in range(1, shape.ngram):
            ended = shape.eos in line[at - step : at]
            back.append(shape.eos if ended else line[at - step])
        hashed, mixed = [], back[0] * by[0]
        for token, multiplier in zip(back[1:], by[1:], strict=True):
            mixed ^= token * multiplier
            hashed.append(mixed)
        found.append([begins[head] + hashed[head // shape.heads] % size for head, size in enumerate(shape.sizes)])
    return torch.tensor(found, dtype=torch.int64)


def dilated_conv(x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, distance: int) -> torch.Tensor:
    """Convolve rows x (T, C) with taps `distance` rows apart, after the window (C, R): (T, C)."""
    line = torch.cat([window.T, x])
    taps = [weight[:, tap] * line[tap * distance :][: len(x)] for tap in range(weight.shape[1])]
    return torch.stack(taps).sum(0)


def embed(
    shape: PleShape, weights: PleWeights, hidden: torch.Tensor, tokens: torch.Tensor, memory: PleMemory, eps: float,
    at: At, grams: Entries = entries, conv: Conv = dilated_conv,
) -> tuple[torch.Tensor, PleMemory]:
    """Add the n-grams of T consecutive tokens of one request to its streams.

        g <- sqrt|k . q / sqrt D|, with the sign of k . q;   y <- sigmoid(g) v;   x + y + silu(conv(norm(y)))

    grams, conv: in other forms than `entries` and `dilated_conv`
    Shapes:  hidden (T, S*D)   tokens (T,)  ->  (T, S*D), and the memory after the last token
    Mirrors: transformers 5.24 `Qwen4ExpTextPLELayer`; differs in the width (HF: norms in fp32).
    """
    T, S = len(tokens), shape.streams
    before = tuple(kept - 1 if kept else shape.eos for kept in memory.ngram.tolist())
    found = grams(shape, tuple(tokens.tolist()), before).to(hidden.device)
    rows = at("ngrams", weights.table[found].flatten(1))  # (T, E)
    key = at("ple_key", rows @ weights.key.T)  # (T, S*D)
    value = at("ple_value", rows @ weights.value.T)  # (T, D)
    score = (norm_streams(key, weights.key_norm, S, eps) * norm_streams(hidden, weights.query_norm, S, eps)).sum(-1)
    score = score / math.sqrt(value.shape[-1])  # (T, S)
    opened = torch.sigmoid(score.sign() * score.abs().clamp(min=LEAST_SCORE).sqrt())  # (T, S)
    written = at("ple_written", (opened[..., None] * value[:, None]).flatten(1))  # (T, S*D)
    normed = at("ple_normed", norm_streams(written, weights.conv_norm, S, eps).flatten(1))  # (T, S*D)
    mixed = at("ple_mixed", F.silu(conv(normed, weights.conv, memory.ple_conv, shape.ngram)))  # (T, S*D)
    made = at("ple_made", written + mixed)
    after = replace(
        memory, ngram=torch.cat([memory.ngram, tokens.to(memory.ngram) + 1])[T:],
        ple_conv=torch.cat([memory.ple_conv, normed.T], 1)[:, T:])
    return at("ple", hidden + made), after


def read_streams(
    weights: StreamWeights, hidden: torch.Tensor, streams: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Mix the streams to the row that a block reads, and say how strongly its result goes to each: (T, D), (T, S).

    Shapes:  hidden (T, S*D)
    Mirrors: transformers 5.24 `Qwen4ExpTextGatedResidual`; differs in the width (HF: the norm in fp32).
    """
    normed = norm_streams(hidden, weights.norm, streams, eps)  # (T, S, D)
    flat = normed.flatten(1)
    share = torch.sigmoid(F.silu(flat @ weights.down.T / streams) @ weights.up.T).reshape(normed.shape)
    strength = None if weights.inject is None else 2 * torch.sigmoid(flat @ weights.inject.T / streams)
    return (share * normed).mean(1), strength


def add_to_streams(hidden: torch.Tensor, made: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """Add a block's result (T, D) to every stream, by its strength (T, S)."""
    return hidden + (strength[..., None] * made[:, None]).flatten(1)


def norm_streams(x: torch.Tensor, weight: torch.Tensor, streams: int, eps: float) -> torch.Tensor:
    """Norm each stream of x (T, S*D) by itself, with its own part of the weight: (T, S, D)."""
    return rms_norm(x.reshape(len(x), streams, -1), weight.reshape(streams, -1), eps)
