"""Residual streams and embeddings of n-grams (Qwen4-Exp): mixing, adding, hashing, gating.

Leaves out: the dilated conv (`causal_conv.py`). Sums are in at least fp32, with one cast at the end.
"""

from collections.abc import Iterator

import torch

from instep_reference.contract.place_names import Place

from ...memory_addresses import Part
from ..family_op_protocols import Hashes, StreamWeights
from .causal_conv import pieces_of
from .compute_width import wide
from .requests_of_part import Lanes, after, along, before, lanes, scatter

LEAST = 1e-6  # a score that is closer to 0 counts as this far from it


def embed_streams(*, tokens: torch.Tensor, table: torch.Tensor, streams: int, to: Place) -> torch.Tensor:
    """Copy rows of the table, bit by bit, once for each stream."""
    return table[tokens].repeat(1, streams)


def read_streams(
    *, x: torch.Tensor, weights: StreamWeights, eps: float, to: tuple[Place, ...]
) -> tuple[torch.Tensor, ...]:
    """Mix the streams of a row, each normed; and the strengths with which a result is added to them.

    Shapes:  x (N, S*D)  ->  (N, D), and (N, S) if there are weights for it
    """
    streams = weights.streams
    flat = _normed(x, weights.norm, streams, eps).flatten(1)  # (N, S*D)
    inner = flat @ wide(weights.down).T / streams  # (N, R)
    share = torch.sigmoid(inner * torch.sigmoid(inner) @ wide(weights.up).T)  # (N, S*D)
    row = (share * flat).view(len(x), streams, -1).mean(1).to(x.dtype)
    if weights.inject is None:
        return (row,)
    return row, (2 * torch.sigmoid(flat @ wide(weights.inject).T / streams)).to(x.dtype)


def add_streams(*, x: torch.Tensor, y: torch.Tensor, strength: torch.Tensor, to: Place) -> torch.Tensor:
    """x + strength y, stream by stream."""
    streams = wide(x).reshape(*strength.shape, y.shape[1])
    return (streams + wide(strength)[..., None] * wide(y)[:, None]).flatten(1).to(x.dtype)


def norm_streams(*, x: torch.Tensor, weight: torch.Tensor, streams: int, eps: float, to: Place) -> torch.Tensor:
    """x / rms(x) * (1 + weight), stream by stream."""
    return _normed(x, weight, streams, eps).flatten(1).to(x.dtype)


def gate_streams(
    *, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_norm: torch.Tensor, query_norm: torch.Tensor,
    eps: float, to: Place,
) -> torch.Tensor:
    """sigmoid(g) value for each stream, where g is the root of how well key and stream agree, with its sign.

    Shapes:  x, key (N, S*D)   value (N, D)  ->  (N, S*D)
    """
    width = value.shape[1]
    streams = x.shape[1] // width
    score = (_normed(key, key_norm, streams, eps) * _normed(x, query_norm, streams, eps)).sum(-1) * width**-0.5
    root = score.abs().clamp(min=LEAST).sqrt().copysign(score).masked_fill(score == 0, 0)  # (N, S)
    return (torch.sigmoid(root)[..., None] * wide(value)[:, None]).flatten(1).to(x.dtype)


def ngrams(
    *, tokens: torch.Tensor, tables: torch.Tensor, hashes: Hashes, parts: tuple[Part, ...], to: Place
) -> torch.Tensor:
    """Copy the rows of every n-gram that ends with a token.

    Shapes:  tokens (N,)   tables (rows, width)   tokens in memory (N-1,)  ->  (N, heads in all * width)
    """
    out = tables.new_zeros(len(tokens), len(hashes.sizes) * tables.shape[1])
    for who, pieces in pieces_of_tokens(tokens, len(hashes.multipliers), parts):
        scatter(out, who, tables[rows_of(pieces, hashes)].flatten(2))
    return out


def pieces_of_tokens(
    tokens: torch.Tensor, longest: int, parts: tuple[Part, ...]
) -> Iterator[tuple[Lanes, torch.Tensor]]:
    """The N last tokens at every token of each part, each plus one, oldest first; 0: none. Then the memory is written.

    longest: N. Shapes:  tokens (all rows,)  ->  (n, most, N)
    """
    for part in parts:
        who = lanes(part)
        if not len(who.which):
            continue
        line = torch.cat([before(part, who, torch.int64), tokens[who.rows] + 1], dim=1)  # [n, N-1 + most]
        pieces = pieces_of(line, part, who, longest)
        yield who, pieces
        for token, alive in enumerate(who.alive):
            along(part.per_row, who, token, pieces[:alive, token, 1:])
        ends = who.length[:, None] + torch.arange(longest - 1, device=line.device)
        after(part.store, who, line.gather(1, ends))


def rows_of(pieces: torch.Tensor, hashes: Hashes) -> torch.Tensor:
    """Hash n-grams: pieces [.., N], each token plus one, the own one last -> rows of all tables [.., heads in all]."""
    back = pieces.flip(-1) - 1  # the own token first
    ended = (back[..., 1:] == hashes.eos).cumsum(-1) > 0
    back[..., 1:] = back[..., 1:].masked_fill(ended | (back[..., 1:] < 0), hashes.eos)
    mixed, first, found = back[..., 0] * hashes.multipliers[0], 0, list[torch.Tensor]()
    for order in range(1, len(hashes.multipliers)):
        mixed = mixed ^ (back[..., order] * hashes.multipliers[order])
        for size in hashes.sizes[(order - 1) * hashes.heads : order * hashes.heads]:
            found.append(first + mixed % size)
            first += size
    return torch.stack(found, dim=-1)


def _normed(x: torch.Tensor, weight: torch.Tensor, streams: int, eps: float) -> torch.Tensor:
    """[N, S, D], in at least fp32."""
    each = wide(x).reshape(len(x), streams, -1)
    return each * torch.rsqrt(each.square().mean(-1, keepdim=True) + eps) * (1 + wide(weight).view(streams, -1))
