"""Products of few rows with weights of 16 bits, at the speed of loading the weights. One kernel, also for gate and up.

K runs in steps, in order, operands as stored, in fp32. Some sizes have two sums, one for the first half of K and one
for the second, which are added; their results have 16 bits. On Hopper some sizes have explicit layouts
(`few_rows_gluon.py`).
Leaves out: many rows, and sizes at which the library is as fast (`linear.py`); 32-bit activations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ..device.masked_loads_and_stores import fetch
from ..device.programmatic_dependent_launch import wait_alone
from ..device.tile_dot_fp32 import dot
from ..runtime import INTERPRETED, ceil_div, explicit, launch, power_of_2, tile

SMALLEST_DOT = 16
HALVED = (32, 4096)  # maximum rows and minimum columns of products with two sums, each over half of K
HALF = 256  # the first half is a multiple of it, and so consists of whole steps of every shape
Shape = dict[str, int]
LONG, TALL = {"NT": 32, "KT": 256, "warps": 4, "stages": 4}, {"NT": 64, "KT": 128, "warps": 4, "stages": 5}
MANY = {"NT": 128, "KT": 64, "warps": 8, "stages": 5}
# On a GPU (LOG.md), keyed by the rows of a tile and whether it is gated: the minimum number of columns, and the columns
# and part of K of a program. For a missing key there are too few columns to be faster than the library.
SHAPES: dict[tuple[int, bool], tuple[tuple[int, Shape], ...]] = {
    (16, False): ((65536, TALL), (1024, LONG)), (16, True): ((0, LONG),),
    (32, False): ((65536, TALL), (10240, LONG | {"stages": 3})), (32, True): ((0, TALL),),
    (128, False): ((10240, MANY),), (128, True): ((0, {"NT": 32, "KT": 128, "warps": 8, "stages": 4}),),
}  # fmt: skip
# The same with explicit layouts (`few_rows_gluon.product`). Fp32 results never come from a pair: their
# rounding is declared as one sum.
ALONE: Shape = {"NT": 64, "KT": 128, "STEPS": 9, "warps": 4, "registers": 64, "programs": 132, "pair": 0}
PAIRS: Shape = ALONE | {"programs": 66, "pair": 1}  # two programs that have half of K each
TILE: Shape = {"NT": 128, "KT": 64, "warps": 8, "programs": 132, "pair": 0}
STAGED: dict[tuple[int, bool], tuple[tuple[int, Shape], ...]] = {
    (8, False): ((4096, PAIRS),), (8, True): ((4096, ALONE | {"NT": 32}),),
    (16, False): ((4096, PAIRS),), (16, True): ((4096, ALONE | {"NT": 32}),),
    (32, False): ((4096, PAIRS | {"STEPS": 8}),), (32, True): ((4096, ALONE | {"NT": 32}),),
    (128, False): ((10240, TILE | {"STEPS": 6, "registers": 104}),),
    (128, True): ((8192, TILE | {"NT": 64, "STEPS": 5, "registers": 160}),),  # and 32
}  # fmt: skip

staged = explicit("products.few_rows_gluon")


def shape_for(rows: int, columns: int, gated: bool, of: Mapping[Any, Any] = SHAPES) -> Shape | None:
    """Choose the shape of a launch; None if the library is as fast."""
    known = of.get((_tall(rows, of), gated), ()) if rows else ()
    return next((shape for least, shape in known if columns >= least), None)


def _tall(rows: int, of: Mapping[tuple[int, bool], Any]) -> int:
    """Number of rows of a tile. With explicit layouts they are columns of the tensor cores' tile and may be 8."""
    return max(power_of_2(rows), min(tall for tall, _ in of))


def halved(rows: int, columns: int, depth: int) -> int:
    """Length of the first sum over K in a product that is not gated; all of K if there is no second sum.

    It depends neither on the kernel that runs the product, nor on the number of rows as long as it is small.
    """
    return depth if rows > HALVED[0] or columns < HALVED[1] else min(HALF * ceil_div(depth, 2 * HALF), depth)


def fits(x: torch.Tensor, weight: torch.Tensor, gated: bool = False, head: bool = False) -> bool:
    """Return whether `product` is meant for these. head: for `largest`, or with fp32 results."""
    narrow = x.is_cuda and x.dtype == weight.dtype and x.dtype.itemsize == 2 and x.stride(1) == weight.stride(1) == 1
    if not narrow:
        return False
    columns = len(weight) // (1 + gated)
    return shape_for(len(x), columns, gated) is not None or (not head and _ahead(x, weight, gated) is not None)


def _ahead(x: torch.Tensor, weight: torch.Tensor, gated: bool, wide: bool = False) -> Shape | None:
    """Choose a launch shape with explicit layouts; None if it does not fit. wide: with fp32 results, as one sum"""
    if gated and wide:
        return None
    (rows, depth), columns = x.shape, len(weight) // (1 + gated)
    shape, cut = shape_for(rows, columns, gated, STAGED), depth if gated or wide else halved(rows, columns, depth)
    if shape is None or staged is None or not staged.fits(x, weight) or (shape["pair"] and cut == depth):
        return None
    return shape | {"MT": _tall(rows, STAGED), "cut": cut // shape["KT"] if shape["pair"] else 0}


def product(
    x: torch.Tensor, weight: torch.Tensor, gated: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute x [M, K] weight [N, K]^T -> [M, N] in `dtype` (None: x's dtype).

    gated: compute silu(a) * b [M, N/2] instead, where a and b are the fp32 sums with weight's first and second half.
    """
    (rows, depth), columns = x.shape, len(weight) // (1 + gated)
    out = x.new_empty(rows, columns, dtype=dtype or x.dtype)
    ahead = _ahead(x, weight, gated, wide=dtype is not None)
    if ahead is not None:
        staged.product(x, weight, gated, out, ahead)
    else:
        _launched(x, weight, gated, out, depth if gated or dtype is not None else halved(rows, columns, depth))
    return out


def largest(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest number per row of the fp32 product and tile of its columns, without storing the product.

    Returns values and columns, [M, tiles] in fp32 and int64. A tie goes to the lowest column; a NaN is never larger
    than anything.
    """
    return _launched(x, weight, False, None, x.shape[1])


def _launched(
    x: torch.Tensor, weight: torch.Tensor, gated: bool, out: torch.Tensor | None, cut: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel. cut: length of the first sum over K"""
    (rows, depth), columns = x.shape, len(weight) // (1 + gated)
    tall, shape = max(power_of_2(rows), SMALLEST_DOT), shape_for(rows, columns, gated)
    assert shape is not None, "the library has other sizes"
    wide, deep = (min(tile(shape[name], 256), max(power_of_2(size), SMALLEST_DOT))
                  for name, size in (("NT", columns), ("KT", depth)))  # fmt: skip
    tiles = ceil_div(columns, wide)
    best = x.new_empty(rows if out is None else 0, tiles, dtype=torch.float32)
    at = best.new_empty(best.shape, dtype=torch.int64)
    launch(
        _linear_slim, (tiles,), x, x.stride(0), weight, weight.stride(0), out,
        *((best, at) if out is None else (None, None)), rows, columns, depth, cut,
        WHOLE=columns % wide == 0 and depth % deep == 0, HALVED=cut < depth, GATED=gated, MT=tall, NT=wide, KT=deep,
        WIDEN=INTERPRETED, warps=shape["warps"], stages=shape["stages"],
    )  # fmt: skip
    return best, at


@triton.jit
def _sums(
    left, right, lower, live, inside, at, begin, end, depth,
    WHOLE: tl.constexpr, GATED: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, KT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sum over K from `begin` to `end`. The second result is 0 if there is no up half."""
    total, other = tl.zeros((MT, NT), tl.float32), tl.zeros((MT, NT), tl.float32)
    for start in range(begin, end, KT):
        k = start + at
        live_k, inside_k = live, inside
        if not WHOLE:
            live_k, inside_k = live & (k < depth)[None, :], inside & (k < depth)[None, :]
        value = tl.load(left + k[None, :], mask=live_k, other=0.0)
        total = dot(value, tl.trans(fetch(right + k[None, :], inside_k, WHOLE)), WIDEN, False, total)
        if GATED:
            other = dot(value, tl.trans(fetch(lower + k[None, :], inside_k, WHOLE)), WIDEN, False, other)
    return total, other


@triton.jit(do_not_specialize=["rows"])
def _linear_slim(
    x, x_row, weight, weight_row, out, best, picked, rows, columns, depth, cut,
    WHOLE: tl.constexpr, HALVED: tl.constexpr, GATED: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr,
    KT: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply all rows with NT columns. Grid (column tiles).

    The result goes to `out`; if that is None, the largest number of each row and its column are stored. The next launch
    starts when this one ends: programs that started earlier would occupy multiprocessors that this launch needs.
    """
    m, n, at = tl.arange(0, MT), tl.program_id(0).to(tl.int64) * NT + tl.arange(0, NT), tl.arange(0, KT)
    left, right = x + (m * x_row)[:, None], weight + (n * weight_row)[:, None]
    lower = weight + ((n + columns) * weight_row)[:, None]  # the up half follows the gate half
    live, inside = (m < rows)[:, None], (n < columns)[:, None]
    if EARLY:
        wait_alone()
    total, other = _sums(
        left, right, lower, live, inside, at, 0, cut, depth, WHOLE, GATED, MT, NT, KT, WIDEN
    )  # fmt: skip
    if HALVED:
        second, _ = _sums(
            left, right, lower, live, inside, at, cut, depth, depth, WHOLE, GATED, MT, NT, KT, WIDEN
        )  # fmt: skip
        total += second
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * other
    if out is None:
        inside = (n < columns)[None, :]
        value = tl.where((total == total) & inside, total, float("-inf"))
        most = tl.max(value, axis=1)
        spot = m * tl.num_programs(0) + tl.program_id(0)
        tl.store(best + spot, most, mask=m < rows)
        lowest = tl.min(tl.where(inside & (value == most[:, None]), n[None, :], columns), axis=1)
        tl.store(picked + spot, lowest, mask=m < rows)
    else:
        tl.store(out + (m * columns)[:, None] + n[None, :], total.to(out.dtype.element_ty),
                 mask=(m < rows)[:, None] & (n < columns)[None, :])  # fmt: skip
