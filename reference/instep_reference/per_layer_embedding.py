"""Per-layer embeddings (PLE) and residual streams of Qwen4-Exp: hashed n-grams added before a layer, mixed streams.

A model with S streams keeps S residual rows per token. A layer reads a mixture of them and adds its result to each. A
PLE adds to the streams what the last tokens say: their n-grams, hashed into tables, then a dilated convolution. Its
memory is the last N - 1 tokens and the convolution's window. No model type is read from a file yet, because every
release has sparse attention. Leaves out: the layers between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

from .norms import rms_norm

LEAST_SCORE = 1e-6  # below it a score counts as this before its root
MASK = (1 << 64) - 1
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64 (Steele, 2014)
PER_LAYER = 10007  # between the seeds of two PLE layers


@dataclass(frozen=True)
class PleShape:
    """Sizes of a PLE: N tokens of the longest n-gram, W taps of its convolution, S streams.

    heads  hashed heads of each order of n-grams, 2 to N;  vocab  tokens;  least  entries of the smallest table
    index  number of this PLE among those of the model, from 0;  eos  token at which n-grams begin again
    """

    ngram: int
    taps: int
    streams: int
    heads: int
    vocab: int
    least: int
    eos: int
    index: int = 0
    seed: int = 1234

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Entries of the table of each head, order by order: distinct primes, over all PLE layers of a model."""
        count = (self.ngram - 1) * self.heads
        skipped, found, number = self.index * count, list[int](), self.least - 1
        while len(found) < skipped + count:
            number += 1
            if number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
                found.append(number)
        return tuple(found[skipped:])

    @cached_property
    def multipliers(self) -> tuple[int, ...]:
        """An odd number per place of an n-gram, small enough for a product with a token to fit into 63 bits."""
        bound = max(1, ((1 << 63) - 1) // self.vocab // 2)
        seed = self.seed + PER_LAYER * self.index
        return tuple(2 * (split_mix(seed + GOLDEN * (place + 1)) % bound) + 1 for place in range(self.ngram))

    @property
    def reach(self) -> int:
        """Rows before the own one that the convolution reads: its taps are N rows apart."""
        return (self.taps - 1) * self.ngram


def split_mix(value: int) -> int:
    """Return the number of SplitMix64 after this one."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class PleWeights:
    """table [sum of sizes or more, E / heads in all]; key [S*D, E], value [D, E]; conv [S*D, W]; norms [S*D], 0 is 1.

    E: width of the embeddings of all heads side by side
    """

    table: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    conv: torch.Tensor
    key_norm: torch.Tensor
    query_norm: torch.Tensor
    conv_norm: torch.Tensor


@dataclass(frozen=True)
class PleMemory:
    """A PLE's memory of a request: its last N - 1 tokens, and the window [S*D, (W-1)*N] of its conv, oldest first."""

    tokens: tuple[int, ...]
    window: torch.Tensor


def empty(shape: PleShape, width: int, dtype: torch.dtype) -> PleMemory:
    """Return the memory before the first token. width: S * D"""
    return PleMemory((shape.eos,) * (shape.ngram - 1), torch.zeros(width, shape.reach, dtype=dtype))


def entries(shape: PleShape, tokens: tuple[int, ...], before: tuple[int, ...]) -> torch.Tensor:
    """Look up the rows of the table that each token's n-grams are hashed to: (T, heads in all).

    An n-gram of order n is the xor of its tokens, each times its multiplier, modulo the size of a head's table. It does
    not reach beyond an earlier end of a text: there and before it has eos.
    """
    line, found = (*before, *tokens), []
    for at in range(len(before), len(line)):
        back = [line[at]]
        for step in range(1, shape.ngram):
            ended = shape.eos in line[at - step : at]
            back.append(shape.eos if ended else line[at - step])
        hashed, mixed = [], back[0] * shape.multipliers[0]
        for token, multiplier in zip(back[1:], shape.multipliers[1:], strict=True):
            mixed ^= token * multiplier
            hashed.append(mixed)
        begin, rows = 0, []
        for head, size in enumerate(shape.sizes):
            rows.append(begin + hashed[head // shape.heads] % size)
            begin += size
        found.append(rows)
    return torch.tensor(found, dtype=torch.int64)


def embed(
    shape: PleShape, weights: PleWeights, hidden: torch.Tensor, tokens: tuple[int, ...], memory: PleMemory, eps: float
) -> tuple[torch.Tensor, PleMemory]:
    """Add the n-grams of T consecutive tokens of one request to its streams.

        g <- sqrt|k . q / sqrt D|, with the sign of k . q;   y <- sigmoid(g) v;   x + y + silu(conv(norm(y)))

    Shapes:  hidden (T, S*D)  ->  (T, S*D), and the memory after the last token
    Mirrors: transformers 5.24 `Qwen4ExpTextPLELayer`; differs in the width (HF: norms in fp32).
    """
    T, S = len(tokens), shape.streams
    rows = weights.table[entries(shape, tokens, memory.tokens)].flatten(1)  # (T, E)
    key = norm_streams(rows @ weights.key.T, weights.key_norm, S, eps)  # (T, S, D)
    query = norm_streams(hidden, weights.query_norm, S, eps)  # (T, S, D)
    score = (key * query).sum(-1) / math.sqrt(key.shape[-1])  # (T, S)
    opened = torch.sigmoid(score.sign() * score.abs().clamp(min=LEAST_SCORE).sqrt())  # (T, S)
    written = (opened[..., None] * (rows @ weights.value.T)[:, None]).flatten(1)  # (T, S*D)
    line = torch.cat([memory.window.T, norm_streams(written, weights.conv_norm, S, eps).flatten(1)])
    taps = [weights.conv[:, tap] * line[tap * shape.ngram :][:T] for tap in range(shape.taps)]
    after = PleMemory((*memory.tokens, *tokens)[T:], line[T:].T)
    return hidden + written + F.silu(torch.stack(taps).sum(0)), after


@dataclass(frozen=True)
class StreamWeights:
    """Weights by which a layer reads and writes S streams: norm [S*D]; down [R, S*D], up [S*D, R]; inject [S, S*D].

    inject: None after the last layer, which only reads
    """

    norm: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    inject: torch.Tensor | None


def read(weights: StreamWeights, hidden: torch.Tensor, streams: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix the streams to the row that a layer reads, and say how strongly its result goes to each: (T, D), (T, S).

    Shapes:  hidden (T, S*D)
    Mirrors: transformers 5.24 `Qwen4ExpTextGatedResidual`; differs in the width (HF: the norm in fp32).
    """
    normed = norm_streams(hidden, weights.norm, streams, eps)  # (T, S, D)
    flat = normed.flatten(1)
    share = torch.sigmoid(F.silu(flat @ weights.down.T / streams) @ weights.up.T).reshape(normed.shape)
    strength = flat[:, :0] if weights.inject is None else 2 * torch.sigmoid(flat @ weights.inject.T / streams)
    return (share * normed).mean(1), strength


def add(hidden: torch.Tensor, made: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """Add a layer's result (T, D) to every stream, by its strength (T, S)."""
    return hidden + (strength[..., None] * made[:, None]).flatten(1)


def norm_streams(x: torch.Tensor, weight: torch.Tensor, streams: int, eps: float) -> torch.Tensor:
    """Norm each stream of x (T, S*D) by itself, with its own part of the weight: (T, S, D)."""
    return rms_norm(x.reshape(len(x), streams, -1), weight.reshape(streams, -1), eps)
