"""RMS norms over rows: the plain one times (1 + w), and those of a read-out times w, with a gate before or after.

Leaves out: the norms of queries and keys, which are made with the inputs of their ops (`gdn_inputs.py`,
`qk_norm_and_rotary.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from instep_reference.contract.place_names import Place

from ...ops.fused import fuses
from ...ops.op_protocols import AddNorm
from ..device.programmatic_dependent_launch import wait_before_product
from ..runtime import ceil_div, launch, power_of_2, tile
from .gather_and_scatter_rows import concat, embed
from .pointwise import add


def norm(*, x: torch.Tensor, weight: torch.Tensor, eps: float, to: Place) -> torch.Tensor:
    """`Norm` of the seam: x / rms(x) * (1 + weight) over the axes of weight."""
    return _normed(x.flatten(-weight.dim()).flatten(0, -2), weight, eps).view(x.shape)


@fuses(add=add, norm=norm)
def add_norm(
    *, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, to: tuple[Place, Place]
) -> AddNorm:
    """`MakeAddNorm` of the seam: the sum is rounded where `add` rounds it, and the norm is made of the rounded sum."""
    total = x.new_empty(x.shape)
    return AddNorm(total, _normed(x, weight, eps, y, total))


def _normed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor | None = None, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalize x, or x + y, which is stored in `total`. One kernel has one order of the sum, so the bits are equal."""
    assert x.stride(1) == 1 and (y is None or y.stride(1) == 1), "rows are contiguous"
    out = x.new_empty(x.shape)
    rows, width = x.shape
    tall = tile(1, 16)
    launch(
        _norm, (ceil_div(rows, tall),), x, x.stride(0), y, 0 if y is None else y.stride(0), total, weight, out,
        rows, width, eps, RT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return out


@fuses(embed=embed, norm=norm, concat=concat)
def draft_inputs(
    *, tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor],
    eps: float, to: tuple[Place, Place, Place, Place],
) -> torch.Tensor:
    """`DraftInputs` of the seam: a program norms embeddings of its rows, or their hidden rows."""
    assert table.dtype == hidden.dtype and table.stride(1) == hidden.stride(1) == 1, "equal dtypes, contiguous rows"
    assert tokens.is_contiguous(), "tokens are contiguous"
    (rows, width), tall = hidden.shape, tile(1, 16)
    out = hidden.new_empty(rows, 2 * width)
    launch(
        _draft_inputs, (ceil_div(rows, tall), 2), tokens, table, table.stride(0), hidden, hidden.stride(0),
        *weights, out, rows, width, eps, RT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return out


def gated_norm(
    *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float,
    gate: Literal["silu", "sigmoid"], to: Place,
) -> torch.Tensor:
    """`GatedNorm` of the seam: norm over V in fp32, times weight, times the gate of z, one cast at the end."""
    assert core.stride(2) == z.stride(2) == 1, "heads are contiguous"
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    rows, heads, width = core.shape
    tall = tile(4, 32)
    launch(
        _gated_norm, (ceil_div(rows * heads, tall),), core, core.stride(0), core.stride(1),
        z, z.stride(0), z.stride(1), weight, out, rows * heads, heads, width, eps,
        SILU=gate == "silu", RT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return out


def gated_group_norm(
    *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, groups: int, to: Place
) -> torch.Tensor:
    """`GatedGroupNorm` of the seam: y = core silu(z), normed over the heads of each group in fp32, times weight."""
    assert core.stride(2) == z.stride(2) == 1, "heads are contiguous"
    out = torch.empty_like(core, memory_format=torch.contiguous_format)
    rows, heads, width = core.shape
    tall, each = tile(1, 16), heads // groups * width
    launch(
        _gated_group_norm, (ceil_div(rows * groups, tall),), core, core.stride(0), core.stride(1),
        z, z.stride(0), z.stride(1), weight, out, rows * groups, groups, each, width, eps,
        RT=tall, CT=power_of_2(each),
    )  # fmt: skip
    return out


@triton.jit
def _norm(
    x, x_row, y, y_row, total, weight, out, rows, width, eps,
    RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """RT rows. y: what is added first; where it is None, Triton leaves it out. Grid (row tiles)."""
    row = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    at = tl.arange(0, CT)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    scale = 1.0 + tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    if EARLY:
        wait_before_product()
    value = tl.load(x + row[:, None] * x_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        value += tl.load(y + row[:, None] * y_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row[:, None] * width + at[None, :], rounded, mask=inside)
        value = rounded.to(tl.float32)
    value = _scaled(value, scale, width, eps)
    tl.store(out + row[:, None] * width + at[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _draft_inputs(
    tokens, table, table_row, hidden, hidden_row, left, right, out, rows, width, eps,
    RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """RT embeddings, or RT hidden rows. The embedding of a token of -1 (padding) is zeros. Grid (row tiles, 2)."""
    row = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    at, half = tl.arange(0, CT), tl.program_id(1)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    if half == 0:
        weight = tl.load(left + at, mask=at < width, other=0.0)
    else:
        weight = tl.load(right + at, mask=at < width, other=0.0)
    if EARLY:
        wait_before_product()
    if half == 0:
        number = tl.load(tokens + row, mask=row < rows, other=-1)
        there = inside & (number >= 0)[:, None]
        value = tl.load(table + number[:, None] * table_row + at[None, :], mask=there, other=0.0)
    else:
        value = tl.load(hidden + row[:, None] * hidden_row + at[None, :], mask=inside, other=0.0)
    value = _scaled(value.to(tl.float32), 1.0 + weight.to(tl.float32), width, eps)
    goal = out + row[:, None] * (2 * width) + (half * width + at)[None, :]
    tl.store(goal, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(value, scale, width, eps):
    """Normalize rows in fp32. Channels that pad the tile are 0; the mean divides by the real width."""
    return value * tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)[:, None] * scale[None, :]


@triton.jit
def _gated_norm(
    core, core_row, core_head, z, z_row, z_head, weight, out, rows, heads, width, eps,
    SILU: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """RT (row, head) pairs."""
    pair = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    row, head, at = pair // heads, pair % heads, tl.arange(0, CT)
    inside = (pair < rows)[:, None] & (at < width)[None, :]
    scale = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    if EARLY:
        wait_before_product()
    value = tl.load(core + (row * core_row + head * core_head)[:, None] + at[None, :], mask=inside, other=0.0)
    gate = tl.load(z + (row * z_row + head * z_head)[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    value = value.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)[:, None]
    value = value * scale[None, :]
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if SILU:
        opened = opened * gate
    tl.store(out + pair[:, None] * width + at[None, :], (value * opened).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_group_norm(
    core, core_row, core_head, z, z_row, z_head, weight, out, rows, groups, each, width, eps,
    RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """RT (row, group) pairs; a group has `each` channels, of heads of `width` channels."""
    pair, at = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    row, channel = pair // groups, (pair % groups * each)[:, None] + at[None, :]
    inside, head = (pair < rows)[:, None] & (at < each)[None, :], channel // width
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        wait_before_product()
    value = tl.load(core + (row * core_row)[:, None] + head * core_head + channel % width, mask=inside, other=0.0)
    gate = tl.load(z + (row * z_row)[:, None] + head * z_head + channel % width, mask=inside, other=0.0)
    gate = gate.to(tl.float32)
    value = value.to(tl.float32) * (gate / (1.0 + tl.exp(-gate)))
    value = value * tl.rsqrt(tl.sum(value * value, axis=1) / each + eps)[:, None] * scale
    tl.store(out + (row * groups * each)[:, None] + channel, value.to(out.dtype.element_ty), mask=inside)
