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
from .runtime import ceil_div, launch, power_of_2, tile


def attention_inputs(
    *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
    k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, to: tuple[Place, Place],
) -> AttentionInputs:  # fmt: skip
    """`MakeAttentionInputs` of the seam. Channel i of the first half turns by position * theta^(-2i/rotary_dim)."""
    raw_query = projected[:, :, 0]
    return AttentionInputs(
        *(
            _norm_and_rotate(x, positions, weight, eps, rotary_dim, theta)
            for x, weight in ((raw_query, q_norm), (key_raw, k_norm))
        )
    )


def _norm_and_rotate(
    x: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, eps: float, rotary_dim: int, theta: float
) -> torch.Tensor:
    assert x.stride(2) == 1, "heads are contiguous"
    rows, heads, width = x.shape
    out = x.new_empty(rows, heads, width)
    tall = tile(4, 32)
    launch(
        _rotary, (ceil_div(rows * heads, tall),), x, x.stride(0), x.stride(1), positions, weight, out,
        rows * heads, heads, width, eps, rotary_dim // 2, *_halves(-2.0 / rotary_dim * math.log2(theta)),
        *_halves(math.tau), RT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return out


def _halves(x: float) -> tuple[float, float]:
    """x as a sum of two fp32 numbers, exact to about 48 bits, because a kernel takes a float argument as fp32."""
    upper: float = struct.unpack("f", struct.pack("f", x))[0]
    return upper, x - upper


@triton.jit
def _rotary(
    x, x_row, x_head, positions, weight, out, pairs, heads, width, eps, half, step, step_rest, turn, turn_rest,
    RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """RT (row, head) pairs. Every lane norms its channel and the channel's partner, `half` channels away.

    The angle is formed in fp64, and reduced to less than one turn there: in fp32 the angle at position 100 000 would
    have lost five digits. Channel i turns by 2^(i * (step + step_rest)) per position; 2 pi is turn + turn_rest.
    """
    pair = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    row, head, at = pair // heads, pair % heads, tl.arange(0, CT)
    live, turns = pair < pairs, at < 2 * half
    inside = live[:, None] & (at < width)[None, :]
    # Channels behind the first 2 * half are normed only: they are their own partners.
    other = tl.where(turns, tl.where(at < half, at + half, at - half), at)
    source = x + (row * x_row + head * x_head)[:, None]
    value = tl.load(source + at[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + other[None, :], mask=inside, other=0.0).to(tl.float32)
    # The partner is normed here too, so that no program waits for another one's result.
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)[:, None]
    value = value * scale * (1.0 + tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32))[None, :]
    partner = partner * scale * (1.0 + tl.load(weight + other, mask=at < width, other=0.0).to(tl.float32))[None, :]

    channel = tl.where(at < half, at, at - half).to(tl.float64)
    position = tl.load(positions + row, mask=live, other=0).to(tl.float64)
    angle = position[:, None] * tl.exp2(channel * step + channel * step_rest)[None, :]
    whole = tl.floor(angle / turn)  # one more or less does not matter: sine and cosine stay the same
    angle = (angle - whole * turn - whole * turn_rest).to(tl.float32)
    # first * cos - second * sin for the first half, second * cos + first * sin for the second
    sign = tl.where(at < half, -1.0, 1.0)[None, :]
    turned = value * tl.cos(angle) + sign * partner * tl.sin(angle)
    value = tl.where(turns[None, :], turned, value)
    tl.store(out + pair[:, None] * width + at[None, :], value.to(out.dtype.element_ty), mask=inside)
