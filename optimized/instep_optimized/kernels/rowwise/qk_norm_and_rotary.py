"""Attention inputs: queries and keys normed per head, then rotated on their first channels; and those with latents.

Leaves out: attention itself (`dispatch.py`) and the output gate (`pointwise.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl

from instep_reference.contract.place_names import Place

from ...ops.attention_protocols import LatentInputs
from ...ops.fused import fuses
from ...ops.op_protocols import AttentionInputs
from ..device.pool_address import Pool, Rows
from ..device.programmatic_dependent_launch import wait
from ..runtime import ceil_div, launch, power_of_2, tile
from .copy_units import BITS
from .gather_and_scatter_rows import store_rows

HEADS = 4  # per program on a GPU: with all heads of a row in one, a batch of few rows would leave most of the GPU idle


def attention_inputs(
    *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
    k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, to: tuple[Place, Place],
) -> AttentionInputs:  # fmt: skip
    """`MakeAttentionInputs` of the seam. Channel i of the first half turns by position * theta^(-2i/rotary_dim)."""
    query = projected.new_empty(*projected.shape[:2], projected.shape[3])
    made = AttentionInputs(query, key_raw.new_empty(key_raw.shape))
    keys = Pool.of(made.key[None])._replace(per_page=0)
    _turned(projected, key_raw, positions, q_norm, k_norm, eps, rotary_dim, theta, made.query, keys)
    return made


@fuses(attention_inputs=attention_inputs, store_rows=store_rows)
def kv_inputs(
    *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
    k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, value: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor], locations: torch.Tensor, to: tuple[Place, Place],
) -> torch.Tensor:  # fmt: skip
    """`KvInputs` of the seam: a program has heads of queries, of keys or of values."""
    keys, values = pools
    assert keys.dtype == key_raw.dtype and values.dtype == value.dtype, "equal dtypes"
    query = projected.new_empty(*projected.shape[:2], projected.shape[3])
    assert keys.stride(3) == values.stride(3) == value.stride(2) == 1 and value.shape == key_raw.shape, "heads alike"
    assert locations.is_contiguous(), "locations are contiguous"
    source, target = (x.view(BITS[x.element_size()]) for x in (value, values))
    _turned(projected, key_raw, positions, q_norm, k_norm, eps, rotary_dim, theta, query, Pool.of(keys),
            (Rows.of(source), Pool.of(target), locations, keys.shape[1]))  # fmt: skip
    return query


def _turned(
    projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor,
    eps: float, rotary_dim: int, theta: float, made: torch.Tensor, keys: Pool,
    stored: tuple[object, ...] = (None,) * 4,
) -> None:
    """Launch the kernel.

    stored: values and their pool, locations, page size; without it row n of the keys is entry n.
    """
    query, (rows, heads, width) = projected[:, :, 0], key_raw.shape
    assert query.stride(2) == key_raw.stride(2) == 1, "heads are contiguous"
    assert positions.is_contiguous(), "positions are contiguous"
    tall, high = tile(HEADS, 32), tile(1, 16)
    blocks, more = ceil_div(query.shape[1], tall), ceil_div(heads, tall)
    launch(
        _rotary, (ceil_div(rows, high), blocks + more * (1 if stored[0] is None else 2)),
        Rows.of(query), q_norm, made, query.shape[1], Rows.of(key_raw), k_norm, keys, heads, *stored, blocks, more,
        positions, rows, width, eps, rotary_dim // 2,
        _halves(-2.0 / rotary_dim * math.log2(theta)), _halves(math.tau),
        RT=high, HT=tall, CT=power_of_2(width), ST=power_of_2(rotary_dim),
    )  # fmt: skip


def latent_inputs(
    *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor, eps: float,
    rotary_dim: int, theta: float, to: tuple[Place, Place, Place],
) -> LatentInputs:  # fmt: skip
    """`MakeLatentInputs` of the seam: programs have heads of queries, or the row's latent and shared key."""
    (rows, heads, channels), (latent,) = projected.shape, norm.shape
    made = LatentInputs(projected.new_empty(rows, heads, channels - 1), key_raw.new_empty(rows, 1, rotary_dim),
                        key_raw.new_empty(rows, 1, latent))  # fmt: skip
    assert projected.stride(2) == key_raw.stride(2) == 1, "heads are contiguous"
    assert positions.is_contiguous() and key_raw.shape[2] == latent + rotary_dim, "the shared key turns as a whole"
    tall, high = tile(HEADS, 32), tile(1, 16)
    blocks = ceil_div(heads, tall)
    launch(
        _latent_rows, (ceil_div(rows, high), blocks + 1), Rows.of(projected), heads, Rows.of(key_raw), norm, *made,
        blocks, positions, rows, channels - 1, latent, eps, rotary_dim // 2,
        _halves(-2.0 / rotary_dim * math.log2(theta)), _halves(math.tau),
        RT=high, HT=tall, CT=power_of_2(max(channels - 1 - rotary_dim, 1)), LT=power_of_2(latent),
        ST=power_of_2(rotary_dim),
    )  # fmt: skip
    return made


def _halves(x: float) -> tuple[float, float]:
    """Split x into a sum of two fp32 numbers, exact to about 48 bits: a kernel takes a float argument as fp32."""
    upper: float = struct.unpack("f", struct.pack("f", x))[0]
    return upper, x - upper


@triton.jit
def _rotary(
    query, q_norm, query_out, query_heads, key, k_norm, key_out, key_heads, value, value_out, locations, page_size,
    blocks, more, positions, rows, width, eps, half, step, turn,
    RT: tl.constexpr, HT: tl.constexpr, CT: tl.constexpr, ST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate HT heads of RT rows. Grid (row tiles, head tiles).

    The first `blocks` programs have queries, then `more` programs have keys, and the rest have values. All heads of a
    row turn by the same angles. Channel i turns by 2^(i * the sum of `step`) per position; 2 pi is the sum of `turn`.
    ST: width of a tile of the channels that turn.
    No launch writes weights, so they are loaded before the wait. A position may not be written yet, but mostly is. So
    the angles of the position that is in memory are computed before the wait, and again if the position differs after
    the wait.
    """
    row, at = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    number, few = tl.program_id(1), tl.arange(0, ST)  # few: the first 2 * half of these channels turn
    other = tl.where(few < half, few + half, few - half)  # a channel's partner
    channel = tl.where(few < half, few, few - half).to(tl.float64)
    pace = tl.exp2(channel * step[0] + channel * step[1])
    of_queries = number < blocks
    scales = (_scales(q_norm, k_norm, of_queries, at, at >= 2 * half, width),
              _scales(q_norm, k_norm, of_queries, few, few < 2 * half, width),
              _scales(q_norm, k_norm, of_queries, other, few < 2 * half, width))
    guess = row * 0
    cosine, sine = tl.zeros((RT, ST), tl.float32), tl.zeros((RT, ST), tl.float32)
    if EARLY:
        guess = tl.load(positions + row, mask=row < rows, other=0, cache_modifier=".cg")
        cosine, sine = _angles(guess, pace, turn)
        wait()
    position = tl.load(positions + row, mask=row < rows, other=0, cache_modifier=".cg")
    turning = (position, guess, cosine, sine, pace, turn, scales, at, few, other, half)
    if of_queries:
        _turn(query, query_out, row * query_heads * width, width, row < rows, row,
              number * HT + tl.arange(0, HT), rows, query_heads, width, eps, turning, EARLY)  # fmt: skip
    else:
        place, live = row, row < rows
        key_place = row * key_out.per_entry
        if locations is not None:
            # A location is page * page_size + offset, but a page's pitch in memory may be larger: pools have red zones.
            place = tl.load(locations + row, mask=live, other=-1)
            live = place >= 0
            key_place = (place // page_size) * key_out.per_page + (place % page_size) * key_out.per_entry
        if number < blocks + more:
            _turn(key, key_out.at, key_place, key_out.per_head, live, row,
                  (number - blocks) * HT + tl.arange(0, HT), rows, key_heads, width, eps, turning, EARLY)  # fmt: skip
        elif value is not None:
            head = (number - blocks - more) * HT + tl.arange(0, HT)
            inside = (live[:, None] & (head < key_heads)[None, :])[:, :, None] & (at < width)[None, None, :]
            of_head = (row[:, None] * value.per_row + head[None, :] * value.per_head)[:, :, None]
            entry = (place // page_size) * value_out.per_page + (place % page_size) * value_out.per_entry
            goal = value_out.at + entry[:, None, None] + (head * value_out.per_head)[None, :, None] + at[None, None, :]
            tl.store(goal, tl.load(value.at + of_head + at[None, None, :], mask=inside, other=0), mask=inside)


@triton.jit
def _latent_rows(
    query, heads, raw, norm, query_out, key_out, value_out, blocks, positions, rows, width, latent, eps, half, step,
    turn, RT: tl.constexpr, HT: tl.constexpr, CT: tl.constexpr, LT: tl.constexpr, ST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Turn the last 2 * half channels of RT rows: of HT heads of queries, or of the shared key. Grid (row tiles, ..).

    The last program of the second axis has the shared key, which follows the latent [latent] in `raw`, and norms the
    latent. width: of a query. CT, LT, ST: widths of tiles of its first channels, of the latent, of what turns.
    """
    row, few = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, ST)
    other = tl.where(few < half, few + half, few - half)  # a channel's partner
    channel = tl.where(few < half, few, few - half).to(tl.float64)
    pace = tl.exp2(channel * step[0] + channel * step[1])
    if EARLY:
        wait()
    cosine, sine = _angles(tl.load(positions + row, mask=row < rows, other=0), pace, turn)
    turning = (few, other, half, cosine, sine)
    if tl.program_id(1) < blocks:
        head, first = tl.program_id(1) * HT + tl.arange(0, HT), tl.arange(0, CT)
        there, own = ((row < rows)[:, None] & (head < heads)[None, :])[:, :, None], width - 2 * half
        begin = query.at + (row[:, None] * query.per_row + head[None, :] * query.per_head)[:, :, None]
        goal = query_out + ((row[:, None] * heads + head[None, :]) * width)[:, :, None]
        copied = there & (first < own)[None, None, :]
        tl.store(goal + first[None, None, :], tl.load(begin + first[None, None, :], mask=copied, other=0), mask=copied)
        _turn_all(begin + own, goal + own, there, turning)
    else:
        at, live = tl.arange(0, LT), (row < rows)[:, None]
        source, inside = raw.at + (row * raw.per_row)[:, None], live & (at < latent)[None, :]
        value = tl.load(source + at[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 + tl.load(norm + at, mask=at < latent, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, axis=1) / latent + eps)[:, None] * scale[None, :]
        normed = value_out + (row * latent)[:, None] + at[None, :]
        tl.store(normed, value.to(value_out.dtype.element_ty), mask=inside)
        _turn_all((source + latent)[:, :, None], (key_out + (row * 2 * half)[:, None])[:, :, None], live[:, :, None],
                  turning)  # fmt: skip


@triton.jit
def _turn_all(source, goal, there, turning):
    """Turn the 2 * half channels at `source` [RT, heads, 1], unnormed, and store them at `goal`."""
    few, other, half, cosine, sine = turning
    inside = there & (few < 2 * half)[None, None, :]
    own = tl.load(source + few[None, None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + other[None, None, :], mask=inside, other=0.0).to(tl.float32)
    # first * cos - second * sin for the first half, second * cos + first * sin for the second
    sign = tl.where(few < half, -1.0, 1.0)[None, None, :]
    turned = own * cosine[:, None, :] + sign * partner * sine[:, None, :]
    tl.store(goal + few[None, None, :], turned.to(goal.dtype.element_ty), mask=inside)


@triton.jit
def _scales(q_norm, k_norm, of_queries, at, there, width):
    """Load the norm's scale of the channels that are there."""
    if of_queries:
        scale = tl.load(q_norm + at, mask=there & (at < width), other=0.0).to(tl.float32)
    else:
        scale = tl.load(k_norm + at, mask=there & (at < width), other=0.0).to(tl.float32)
    return 1.0 + scale


@triton.jit
def _angles(position, pace, turn):
    """Compute cosine and sine [RT, ST] of the angles by which channels turn."""
    angle = position.to(tl.float64)[:, None] * pace[None, :]
    whole = tl.floor(angle / turn[0])  # one more or less does not matter: sine and cosine stay the same
    angle = (angle - whole * turn[0] - whole * turn[1]).to(tl.float32)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _turn(
    x, out, out_at, out_head, live, row, head, rows, heads, width, eps, turning, GUESSED: tl.constexpr
):
    """Normalize and turn one tile. A row goes to its `out_at` if it is `live`.

    [RT, HT, CT]: all channels are normalized. [RT, HT, ST]: the first 2 * half channels are, and their partners, `half`
    channels away, and turn by angles [RT, ST].

    turning: positions [RT], and others whose cosines and sines are given, if GUESSED; the pace of a channel and one
    turn; the norm's scale of every channel, of those that turn and of their partners; all channels, those that turn,
    their partners; half of those that turn.
    An angle is computed in fp64, and reduced to less than one turn there: in fp32 the angle at position 100 000 would
    have lost five digits. The loads of rows are issued first, and complete during that computation.
    """
    position, guess, cosine, sine, pace, turn, scales, at, few, other, half = turning
    straight, mine, theirs = scales
    there = ((row < rows)[:, None] & (head < heads)[None, :])[:, :, None]
    source = x.at + (row[:, None] * x.per_row + head[None, :] * x.per_head)[:, :, None]
    goal = out + (out_at[:, None] + head[None, :] * out_head)[:, :, None]
    inside, turns = there & (at < width)[None, None, :], there & (few < 2 * half)[None, None, :]
    value = tl.load(source + at[None, None, :], mask=inside, other=0.0).to(tl.float32)
    own = tl.load(source + few[None, None, :], mask=turns, other=0.0).to(tl.float32)
    partner = tl.load(source + other[None, None, :], mask=turns, other=0.0).to(tl.float32)
    if GUESSED:
        if tl.max((position != guess).to(tl.int32), axis=0) != 0:
            cosine, sine = _angles(position, pace, turn)
    else:
        cosine, sine = _angles(position, pace, turn)
    # The partner is normalized here too, so that no program waits for another one's result.
    scale = tl.rsqrt(tl.sum(value * value, axis=2) / width + eps)[:, :, None]
    value = value * scale * straight[None, None, :]
    tl.store(goal + at[None, None, :], value.to(out.dtype.element_ty),
             mask=inside & live[:, None, None] & (at >= 2 * half)[None, None, :])  # fmt: skip
    own, partner = own * scale * mine[None, None, :], partner * scale * theirs[None, None, :]
    # first * cos - second * sin for the first half, second * cos + first * sin for the second
    sign = tl.where(few < half, -1.0, 1.0)[None, None, :]
    turned = own * cosine[:, None, :] + sign * partner * sine[:, None, :]
    tl.store(goal + few[None, None, :], turned.to(out.dtype.element_ty), mask=turns & live[:, None, None])
