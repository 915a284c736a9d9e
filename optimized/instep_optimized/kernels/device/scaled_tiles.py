"""Numbers that are stored in tiles with a scale each, as device functions: a scale, its place, rows that are packed.

Leaves out: states (`token_by_token.py`, `chunk16_fp32.py`) and attention (`attention/`), which use them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from instep_reference.contract.declared_rounding import SCALE_BITS, STATE_ROWS

from ..runtime import launch, power_of_2
from .stochastic_rounding import fallen

ROWS = tl.constexpr(STATE_ROWS)
MOST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)  # the smallest scale: that of a tile of zeros
CUT = tl.constexpr((1 << 24 - SCALE_BITS) - 1)  # the bits of a scale that are 0


@triton.jit
def scales_at(states, unit, column, head, at_v, V):
    """Return the address of the scale of each row of V of a head.  at_v [VT]  ->  [VT]"""
    scales = states.scales + unit * states.scales_per_unit + column * states.scales_per_column
    return scales + head * tl.cdiv(V, ROWS) + at_v // ROWS


@triton.jit
def scale_of(largest):
    """Turn the largest number of every row of V [VT] into the scale of its tile [VT] of ROWS rows, or of all VT."""
    tall: tl.constexpr = largest.shape[0] if largest.shape[0] < ROWS else ROWS
    tiles = tl.reshape(largest, (largest.shape[0] // tall, tall))
    each = tl.broadcast_to(tl.max(tiles, axis=1)[:, None], tiles.shape)
    return rounded_up(tl.reshape(each, (largest.shape[0],)))


@triton.jit
def rounded_up(largest):
    """Turn a tile's largest number into its scale, as `Blocked` of the contract defines."""
    scale = tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + MOST), LEAST)
    return ((scale.to(tl.int32, bitcast=True) + CUT) & ~CUT).to(tl.float32, bitcast=True)


@triton.jit
def packed(x, scale, by=None):
    """Convert x / scale to 8-bit numbers; both have one shape. by: as in `fallen`"""
    scaled = tl.div_rn(x, scale)
    if by is not None:
        scaled = fallen(scaled, by, tl.float8e4nv)
    return scaled.to(tl.float8e4nv)


def store_packed(rows: torch.Tensor, pool: torch.Tensor, locations: torch.Tensor, scales: torch.Tensor) -> None:
    """Store rows [N, heads, width] at their locations, with one scale per row and head."""
    heads, width = rows.shape[1:]
    assert rows.stride(2) == pool.stride(3) == 1 and scales[0].is_contiguous(), "heads are contiguous"
    launch(
        _store, (rows.shape[0], heads), rows, *rows.stride()[:2], locations, pool, *pool.stride()[:3],
        scales, scales.stride(0), pool.shape[1], width, DT=power_of_2(width),
    )  # fmt: skip


@triton.jit
def _store(
    rows, row_step, head_step, locations, pool, pool_page, pool_entry, pool_head, scales, scales_page, page_size, width,
    DT: tl.constexpr,
):  # fmt: skip
    """Store one row of one head. Grid (rows, heads)."""
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DT)
    place = tl.load(locations + row)
    if place < 0:
        return
    page, entry = place // page_size, place % page_size
    x = tl.load(rows + row * row_step + head * head_step + d, mask=d < width, other=0.0).to(tl.float32)
    scale = rounded_up(tl.zeros_like(x) + tl.max(tl.abs(x), axis=0))
    tl.store(pool + page * pool_page + entry * pool_entry + head * pool_head + d, packed(x, scale), mask=d < width)
    tl.store(scales + page * scales_page + entry * tl.num_programs(1) + head + d, scale, mask=d == 0)
