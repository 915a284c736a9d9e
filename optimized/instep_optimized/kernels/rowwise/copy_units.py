"""Copies units of memory bit by bit, and entries within a pool: the commits of snapshots and of trees.

Leaves out: the choice of units.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import triton
import triton.language as tl

from ...memory_addresses import Address
from ...ops.fused import fuses
from ...ops.integer_op_protocols import Moved
from ..device.programmatic_dependent_launch import wait
from ..runtime import ceil_div, launch, power_of_2, tile

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ELEMENTS = 2048  # per program on a GPU
AXES = 3  # maximum number of axes of a unit: [HV, K, V]


def move(*, source: Address, target: Address) -> None:
    """`Move` of the seam. Elements move as whole numbers, so -0 and the bits of a NaN survive. -1 skips a request."""
    _moved(source, target)


@fuses(move=move)
def moves(*, pairs: tuple[Moved, ...]) -> None:
    """Implement `Moves`: one launch if all layers have the same requests and are equally far apart in memory."""
    first = pairs[0] if pairs else None
    steps = [_step(sides) for sides in zip(*pairs, strict=True)]
    if first is not None and None not in steps:
        _moved(first.source, first.target, len(pairs), [step or 0 for step in steps])
        return
    for pair in pairs:
        move(source=pair.source, target=pair.target)


def _step(sides: tuple[Address, ...]) -> int | None:
    """Return the elements from one layer's pool to the next one's; None if they differ in more than that."""
    first, pools = sides[0], [side.pool for side in sides]
    alike = all(
        side.units is first.units and side.column is first.column and side.scales is None
        and (side.pool.shape, side.pool.stride()) == (first.pool.shape, first.pool.stride()) for side in sides
    )
    steps = {two.data_ptr() - one.data_ptr() for one, two in pairwise(pools)} or {0}
    same = len({pool.untyped_storage().data_ptr() for pool in pools}) == 1
    return steps.pop() // first.pool.element_size() if alike and same and len(steps) == 1 else None


def _moved(source: Address, target: Address, layers: int = 1, steps: Sequence[int] = (0, 0)) -> None:
    """Copy the units of `layers` pools, each `steps` elements after the previous one."""
    if source.scales is not None and target.scales is not None:
        _moved(replace(source, pool=source.scales, scales=None), replace(target, pool=target.scales, scales=None))
    assert source.pool.dtype == target.pool.dtype, "bits move between equal dtypes"
    inner = source.pool.dim() - 1 - (source.column is not None)
    shape = source.pool.shape[-inner:]
    assert shape == target.pool.shape[-inner:], "both sides have the same unit"
    near, far = source.pool.stride()[-inner:], target.pool.stride()[-inner:]
    order = sorted(range(inner), key=lambda axis: -far[axis])  # the target's contiguous axis runs fastest
    pad = (AXES - inner) * [0]
    sizes = [*(1 for _ in pad), *(shape[axis] for axis in order)]  # always AXES axes: missing ones have size 1, step 0
    elements = math.prod(shape)
    block = min(power_of_2(elements), tile(ELEMENTS, 1 << 16))
    whole = [math.prod(sizes[axis + 1 :]) for axis in range(AXES)]  # steps of a unit without gaps
    steps_of = ([*pad, *(side[axis] for axis in order)] for side in (near, far))
    flat = all(size == 1 or one == two == step for size, one, two, step in zip(sizes, *steps_of, whole, strict=True))
    launch(
        _move, (ceil_div(elements, block), source.units.numel(), layers),
        *_leading(source), *pad, *(near[axis] for axis in order), steps[0],
        *_leading(target), *pad, *(far[axis] for axis in order), steps[1],
        elements, sizes[1], sizes[2], FLAT=flat, BLOCK=block,
    )  # fmt: skip


def move_rows(*, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """`MoveRows` of the seam. An entry has at most AXES axes, and moves as whole numbers."""
    bits = pool.view(BITS[pool.element_size()])
    shape, steps = pool.shape[2:], pool.stride()[2:]
    sizes, steps = ((AXES - len(x)) * (fill,) + tuple(x) for x, fill in ((shape, 1), (steps, 0)))
    elements = math.prod(shape)
    block = min(power_of_2(elements), tile(ELEMENTS, 1 << 16))
    launch(
        _move_rows, (ceil_div(elements, block), source.shape[0]), bits, *bits.stride()[:2], *steps, bits.shape[1],
        source, *source.stride(), target, *target.stride(), source.shape[1], elements, sizes[1], sizes[2], BLOCK=block,
    )  # fmt: skip


def _leading(address: Address) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """(pool as whole numbers, units, columns, unit step, column step); absent columns: the units, with step 0."""
    pool = address.pool.view(BITS[address.pool.element_size()])
    if address.column is None:
        return pool, address.units, address.units, pool.stride(0), 0
    return pool, address.units, address.column, pool.stride(0), pool.stride(1)


@triton.jit
def _move(
    source, source_units, source_columns, source_unit, source_column, source_0, source_1, source_2, source_layer,
    target, target_units, target_columns, target_unit, target_column, target_0, target_1, target_2, target_layer,
    elements, size_1, size_2,
    FLAT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK elements of one unit of one layer. FLAT: contiguous on both sides. Grid (blocks, B, layers)."""
    if EARLY:
        wait()
    layer = tl.program_id(2).to(tl.int64)
    request = tl.program_id(1)
    here, there = tl.load(source_units + request), tl.load(target_units + request)
    if (here < 0) | (there < 0):
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i, j, k = at // size_2 // size_1, at // size_2 % size_1, at % size_2
    near = source + layer * source_layer + here * source_unit + tl.load(source_columns + request) * source_column
    far = target + layer * target_layer + there * target_unit + tl.load(target_columns + request) * target_column
    if FLAT:
        tl.store(far + at, tl.load(near + at, mask=at < elements), mask=at < elements)
    else:
        bits = tl.load(near + i * source_0 + j * source_1 + k * source_2, mask=at < elements)
        tl.store(far + i * target_0 + j * target_1 + k * target_2, bits, mask=at < elements)


@triton.jit
def _move_rows(
    pool, pool_unit, pool_entry, pool_0, pool_1, pool_2, entries,
    source, source_row, source_column, target, target_row, target_column, width, elements, size_1, size_2,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK elements of the entries of one request, one entry after the other. Grid (blocks, B)."""
    if EARLY:
        wait()
    request = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inner = at // size_2 // size_1 * pool_0 + at // size_2 % size_1 * pool_1 + at % size_2 * pool_2
    for j in range(width):
        here = tl.load(source + request * source_row + j * source_column)
        there = tl.load(target + request * target_row + j * target_column)
        if (here >= 0) & (there >= 0):
            near = pool + here // entries * pool_unit + here % entries * pool_entry
            far = pool + there // entries * pool_unit + there % entries * pool_entry
            bits = tl.load(near + inner, mask=at < elements)
            tl.debug_barrier()  # a later entry of the path may be written over this one: all threads have read it
            tl.store(far + inner, bits, mask=at < elements)
