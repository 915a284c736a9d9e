"""Row-invariant matrix products: linear layers, the dense MLP and the head, with one kernel and fixed tiles.

Leaves out: splitting a product along its inner axis, and tiles that follow the number of rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from instep_reference.contract.place_names import Place

from ..device.tile_dot_fp32 import dot
from ..rowwise.pointwise import silu_mul, square
from ..runtime import INTERPRETED, ceil_div, launch, power_of_2


class Tile(NamedTuple):
    """rows of x, columns of the result, and elements of the inner axis per step."""

    rows: int
    columns: int
    inner: int


# Tiles for 16-bit operands on a GPU, the widest first. The first one that gives at least PROGRAMS programs is taken,
# else the last. With 64 rows a decode is still bound by reading weights. STAGES steps of any tile fit in 100 KB on the
# chip.
NARROW = (Tile(64, 128, 64), Tile(64, 64, 64), Tile(64, 32, 128), Tile(64, 16, 128))
FULL = Tile(16, 32, 32)  # fp32 operands are multiplied outside the tensor cores, from registers
SMALL = Tile(8, 128, 64)  # interpreted
PROGRAMS = 96
WARPS, STAGES = 4, 4


def linear(*, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor:
    """`Linear` of the seam."""
    return multiply(x.flatten(1), weight, x.dtype).view(x.shape[0], *shape)


def mlp(*, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor:
    """`Mlp` of the seam: two products and one kernel between them, rounded where `products.mlp` rounds."""
    return clamped_mlp(x=x, gate_up=gate_up, down=down, to=to, limit=None)


def clamped_mlp(
    *, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Place, limit: float | None
) -> torch.Tensor:
    """`mlp`, and with a limit a clamped SwiGLU."""
    return multiply(silu_mul(multiply(x, gate_up, x.dtype), limit), down, x.dtype)


def squared_mlp(*, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor:
    """`SquaredMlp` of the seam."""
    return multiply(square(multiply(x, up, x.dtype)), down, x.dtype)


def lm_head(*, x: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
    """`LmHead` of the seam: narrow operands, fp32 logits."""
    return multiply(x, weight, torch.float32)


def multiply(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute x [N, in] weight [out, in]^T -> [N, out] in `dtype`; each row gets the bits that it gets alone.

    Reason: an element of the result is one chain of instructions along the inner axis, in steps whose size depends only
    on the weight. Each instruction takes a row of x, a column of the weight and the element's own fp32 accumulator.
    Other rows, padding included, fill other places of the same instruction. A tensor core treats all rows of an
    instruction alike. The height of the tile never changes, so it is always the same instruction.
    """
    assert x.stride(1) == 1, "rows are contiguous"
    rows, inner = x.shape
    columns = weight.shape[0]
    out = x.new_empty(rows, columns, dtype=torch.float32 if INTERPRETED else dtype)
    tile = tile_of(columns, x.element_size())
    launch(
        _multiply, (ceil_div(rows, tile.rows), ceil_div(columns, tile.columns)),
        x, x.stride(0), weight, *weight.stride(), out, rows, inner, columns,
        MT=tile.rows, NT=min(tile.columns, max(power_of_2(columns), NARROW[-1].columns)),
        KT=min(tile.inner, max(power_of_2(inner), NARROW[-1].columns)),
        WIDEN=INTERPRETED, ORDERED=INTERPRETED, warps=WARPS, stages=STAGES,
    )  # fmt: skip
    return out.to(dtype)  # the interpreter would truncate instead of rounding as a GPU does


def tile_of(columns: int, element_size: int) -> Tile:
    """Choose the tile for a weight with `columns` rows: by that and the dtype, never by the number of rows of x."""
    if INTERPRETED:
        return SMALL
    if element_size > 2:
        return FULL
    return next((tile for tile in NARROW if columns >= PROGRAMS * tile.columns), NARROW[-1])


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, x_row, weight, weight_row, weight_column, out, rows, inner, columns,
    MT: tl.constexpr, NT: tl.constexpr, KT: tl.constexpr, WIDEN: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Multiply MT rows by NT columns. Grid (row tiles, column tiles): programs that share a weight are adjacent."""
    row = tl.program_id(0).to(tl.int64) * MT + tl.arange(0, MT)
    column = tl.program_id(1).to(tl.int64) * NT + tl.arange(0, NT)
    live, there = (row < rows)[:, None], (column < columns)[None, :]
    source, matrix = x + (row * x_row)[:, None], weight + (column * weight_row)[None, :]
    total = tl.zeros((MT, NT), tl.float32)
    for start in range(0, inner, KT):
        k = start + tl.arange(0, KT)
        left = tl.load(source + k[None, :], mask=live & (k < inner)[None, :], other=0.0)
        right = tl.load(matrix + (k * weight_column)[:, None], mask=there & (k < inner)[:, None], other=0.0)
        total += dot(left, right, WIDEN, ORDERED)
    tl.store(out + (row * columns)[:, None] + column[None, :], total.to(out.dtype.element_ty), mask=live & there)
