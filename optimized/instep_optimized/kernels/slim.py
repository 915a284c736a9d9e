"""Products of few rows with weights of 16 bits: as fast as the weights come. One kernel, also for gate and up at once.

A program has all of a sum: K runs in steps, in order, operands as stored, in fp32. On Hopper some sizes have explicit
layouts (`slim_staged.py`). Leaves out: many rows, and sizes at which the library is as fast (`products.py`); 32-bit
activations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from .dot import dot
from .early import wait_alone
from .runtime import INTERPRETED, ceil_div, explicit, launch, power_of_2, tile
from .window import fetch

SMALLEST_DOT = 16
Shape = dict[str, int]
LONG, TALL = {"NT": 32, "KT": 256, "warps": 4, "stages": 4}, {"NT": 64, "KT": 128, "warps": 4, "stages": 5}
MANY = {"NT": 128, "KT": 64, "warps": 8, "stages": 5}
# On a GPU (LOG.md), by the rows of a tile and whether it is gated: from how many columns on, and what of them and of K
# a program has. What is missing has fewer columns than the library needs to be slower.
SHAPES: dict[tuple[int, bool], tuple[tuple[int, Shape], ...]] = {
    (16, False): ((65536, TALL), (1024, LONG)), (16, True): ((0, LONG),),
    (32, False): ((65536, TALL), (10240, LONG | {"stages": 3})), (32, True): ((0, TALL),),
    (128, False): ((10240, MANY),), (128, True): ((0, {"NT": 32, "KT": 128, "warps": 8, "stages": 4}),),
}  # fmt: skip
# With explicit layouts, likewise (`slim_staged.product`), where results are not wider than operands.
ALONE: Shape = {"NT": 64, "KT": 128, "STEPS": 9, "warps": 4, "registers": 64, "programs": 132}  # on its multiprocessor
BESIDE: Shape = ALONE | {"STEPS": 4, "programs": 264}  # two on one
STAGED: dict[tuple[int, bool], tuple[tuple[int, Shape], ...]] = {
    (8, False): ((4096, ALONE),), (8, True): ((4096, ALONE | {"NT": 32}),),
    (16, False): ((8192, BESIDE), (4096, ALONE)), (16, True): ((4096, ALONE | {"NT": 32}),),
    (32, False): ((8192, BESIDE), (4096, ALONE)), (32, True): ((4096, ALONE | {"NT": 32}),),
    (128, False): ((12288, {"NT": 128, "KT": 64, "STEPS": 6, "warps": 8, "registers": 104, "programs": 132}),),
    (128, True): ((8192, {"NT": 128, "KT": 64, "STEPS": 4, "warps": 8, "registers": 160, "programs": 132}),),
}  # fmt: skip

staged = explicit("slim_staged")


def shape_for(rows: int, columns: int, gated: bool, of: Mapping[Any, Any] = SHAPES) -> Shape | None:
    """The shape of a launch; None where the library is as fast."""
    known = of.get((_tall(rows, of), gated), ()) if rows else ()
    return next((shape for least, shape in known if columns >= least), None)


def _tall(rows: int, of: Mapping[tuple[int, bool], Any]) -> int:
    """The rows of a tile. With explicit layouts they are the columns of what tensor cores take, which may be 8."""
    return max(power_of_2(rows), min(tall for tall, _ in of))


def fits(x: torch.Tensor, weight: torch.Tensor, gated: bool = False, head: bool = False) -> bool:
    """Whether `product` is meant for these. head: whether with fp32 results, and `largest`."""
    narrow = x.is_cuda and x.dtype == weight.dtype and x.dtype.itemsize == 2 and x.stride(1) == weight.stride(1) == 1
    if not narrow:
        return False
    columns = len(weight) // (1 + gated)
    return shape_for(len(x), columns, gated) is not None or (not head and _ahead(x, weight, gated) is not None)


def _ahead(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> Shape | None:
    """The shape of a launch with explicit layouts; None where it does not fit."""
    shape = shape_for(len(x), len(weight) // (1 + gated), gated, STAGED)
    return None if shape is None or staged is None or not staged.fits(x, weight) else shape


def product(
    x: torch.Tensor, weight: torch.Tensor, gated: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [M, K], weight [N, K] -> x weight^T [M, N] in `dtype`, None: x's own. gated: of weight's first half and its
    second, silu(a) * b [M, N/2], a and b as they are summed."""
    out = x.new_empty(len(x), len(weight) // (1 + gated), dtype=dtype or x.dtype)
    ahead = _ahead(x, weight, gated) if dtype is None else None
    if ahead is None:
        _launched(x, weight, gated, out)
    else:
        staged.product(x, weight, gated, out, ahead | {"MT": _tall(len(x), STAGED)})
    return out


def largest(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of the product in fp32, and of each tile of its columns: the largest number, and its column, the
    lowest on a tie; a NaN is never larger than anything. [M, tiles] fp32 and int64. The product is stored nowhere."""
    return _launched(x, weight, False, None)


def _launched(
    x: torch.Tensor, weight: torch.Tensor, gated: bool, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
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
        *((best, at) if out is None else (None, None)), rows, columns, depth,
        WHOLE=columns % wide == 0 and depth % deep == 0, GATED=gated, MT=tall, NT=wide, KT=deep, WIDEN=INTERPRETED,
        warps=shape["warps"], stages=shape["stages"],
    )  # fmt: skip
    return best, at


@triton.jit(do_not_specialize=["rows"])
def _linear_slim(
    x, x_row, weight, weight_row, out, best, picked, rows, columns, depth,
    WHOLE: tl.constexpr, GATED: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, KT: tl.constexpr,
    WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All rows, NT columns: into `out`; where it is None, the largest of each row and its column. Grid (column tiles).

    The launch behind this one begins when it ends: programs that came sooner would take the place of its own.
    """
    m, n, at = tl.arange(0, MT), tl.program_id(0).to(tl.int64) * NT + tl.arange(0, NT), tl.arange(0, KT)
    left, right = x + (m * x_row)[:, None], weight + (n * weight_row)[:, None]
    lower = weight + ((n + columns) * weight_row)[:, None]  # the up half stands behind the gate half
    total, other = tl.zeros((MT, NT), tl.float32), tl.zeros((MT, NT), tl.float32)
    if EARLY:
        wait_alone()
    for start in range(0, depth, KT):
        k = start + at
        live, inside = (m < rows)[:, None], (n < columns)[:, None]
        if not WHOLE:
            live, inside = live & (k < depth)[None, :], inside & (k < depth)[None, :]
        value = tl.load(left + k[None, :], mask=live, other=0.0)
        total = dot(value, tl.trans(fetch(right + k[None, :], inside, WHOLE)), WIDEN, False, total)
        if GATED:
            other = dot(value, tl.trans(fetch(lower + k[None, :], inside, WHOLE)), WIDEN, False, other)
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
