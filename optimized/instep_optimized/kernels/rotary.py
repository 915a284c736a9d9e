"""Attention inputs: queries and keys normed per head, then rotated on their first channels.

Leaves out: attention itself (`attend.py`) and the output gate (`pointwise.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl

from instep_reference.contract.place import Place

from ..ops.base import AttentionInputs
from .early import wait
from .runtime import ceil_div, launch, power_of_2, tile

HEADS = 4  # per program on a GPU: with all heads of a row in one, a batch of few rows would leave most of the card idle


def attention_inputs(
    *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
    k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, to: tuple[Place, Place],
) -> AttentionInputs:  # fmt: skip
    """`MakeAttentionInputs` of the seam. Channel i of the first half turns by position * theta^(-2i/rotary_dim)."""
    query, (rows, heads, width) = projected[:, :, 0], key_raw.shape
    assert query.stride(2) == key_raw.stride(2) == 1, "heads are contiguous"
    assert positions.is_contiguous(), "positions are contiguous"
    made = AttentionInputs(*(x.new_empty(x.shape) for x in (query, key_raw)))
    tall, high = tile(HEADS, 32), tile(1, 16)
    blocks = [ceil_div(x.shape[1], tall) for x in made]
    launch(
        _rotary, (ceil_div(rows, high), sum(blocks)),
        query, query.stride(0), query.stride(1), q_norm, made.query, query.shape[1],
        key_raw, key_raw.stride(0), key_raw.stride(1), k_norm, made.key, heads, blocks[0], positions,
        rows, width, eps, rotary_dim // 2, *_halves(-2.0 / rotary_dim * math.log2(theta)), *_halves(math.tau),
        RT=high, HT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return made


def _halves(x: float) -> tuple[float, float]:
    """x as a sum of two fp32 numbers, exact to about 48 bits, because a kernel takes a float argument as fp32."""
    upper: float = struct.unpack("f", struct.pack("f", x))[0]
    return upper, x - upper


@triton.jit
def _rotary(
    query, query_row, query_head, q_norm, query_out, query_heads, key, key_row, key_head, k_norm, key_out, key_heads,
    blocks, positions, rows, width, eps, half, step, step_rest, turn, turn_rest,
    RT: tl.constexpr, HT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HT heads of RT rows: of queries, and behind these `blocks` programs of keys. Grid (row tiles, head tiles).

    All heads of a row turn by the same angles. Channel i turns by 2^(i * (step + step_rest)) per position; 2 pi is
    turn + turn_rest. The angle is formed in fp64, and reduced to less than one turn there: in fp32 the angle at
    position 100 000 would have lost five digits.
    """
    if EARLY:
        wait()
    row, at = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    channel = tl.where(at < half, at, at - half).to(tl.float64)
    position = tl.load(positions + row, mask=row < rows, other=0).to(tl.float64)
    angle = position[:, None] * tl.exp2(channel * step + channel * step_rest)[None, :]
    whole = tl.floor(angle / turn)  # one more or less does not matter: sine and cosine stay the same
    angle = (angle - whole * turn - whole * turn_rest).to(tl.float32)
    if tl.program_id(1) < blocks:
        _turn(query, query_row, query_head, q_norm, query_out, row, tl.program_id(1) * HT + tl.arange(0, HT), at, rows,
              query_heads, width, eps, half, angle)  # fmt: skip
    else:
        head = (tl.program_id(1) - blocks) * HT + tl.arange(0, HT)
        _turn(key, key_row, key_head, k_norm, key_out, row, head, at, rows, key_heads, width, eps, half, angle)


@triton.jit
def _turn(x, x_row, x_head, weight, out, row, head, at, rows, heads, width, eps, half, angle):
    """[RT, HT, CT]: every lane norms its channel and the channel's partner, `half` channels away, and turns by `angle`
    [RT, CT]. Channels behind the first 2 * half are normed only: they are their own partners."""
    turns = at < 2 * half
    other = tl.where(turns, tl.where(at < half, at + half, at - half), at)
    inside = ((row < rows)[:, None] & (head < heads)[None, :])[:, :, None] & (at < width)[None, None, :]
    source = x + (row[:, None] * x_row + head[None, :] * x_head)[:, :, None]
    value = tl.load(source + at[None, None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + other[None, None, :], mask=inside, other=0.0).to(tl.float32)
    # The partner is normed here too, so that no program waits for another one's result.
    scale = tl.rsqrt(tl.sum(value * value, axis=2) / width + eps)[:, :, None]
    mine, theirs = (1.0 + tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32),
                    1.0 + tl.load(weight + other, mask=at < width, other=0.0).to(tl.float32))  # fmt: skip
    value, partner = value * scale * mine[None, None, :], partner * scale * theirs[None, None, :]
    # first * cos - second * sin for the first half, second * cos + first * sin for the second
    sign = tl.where(at < half, -1.0, 1.0)[None, None, :]
    turned = value * tl.cos(angle)[:, None, :] + sign * partner * tl.sin(angle)[:, None, :]
    goal = out + (row[:, None] * heads + head[None, :])[:, :, None] * width + at[None, None, :]
    tl.store(goal, tl.where(turns[None, None, :], turned, value).to(out.dtype.element_ty), mask=inside)
