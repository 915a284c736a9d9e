"""Products of few rows with explicit layouts: weights are on their way while the launches before still run.

One warp of a program copies rows and weights of many steps ahead by TMA, and the weights of the first ones before it
waits for the launch that makes the rows. So the memory is not idle between two products. The other warps multiply. A
tile of the tensor cores has 64 rows at least. Columns of the weights fill them; in a gated product of 128 rows these
rows do. Each sum runs over K in order, as in `slim.py`. Leaves out: which sizes take this form (`slim.py`), and other
GPUs than Hopper.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import (
    TensorDescriptor,
    along,
    barrier,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    load_box,
    mbarrier,
    stage_and_phase,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from .runtime import ceil_div, hopper, launch

ALIGNED = 16  # bytes: where boxes begin, and rows
BYTES = gl.constexpr(2)  # of a number
TALL = 128  # rows of a gated product that are those of the tile
COPIER_REGISTERS = 40  # of a thread that copies


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether boxes of x [M, K] and weight [N, K], of 16 bits and with contiguous rows, can be copied."""
    return hopper(x.device) and all(
        one.data_ptr() % ALIGNED == one.stride(0) * one.element_size() % ALIGNED == 0 for one in (x, weight)
    )


def product(x: torch.Tensor, weight: torch.Tensor, gated: bool, out: torch.Tensor, shape: dict[str, int]) -> None:
    """`product` of `slim.py` into `out`.

    shape: MT rows, NT columns and KT of K are a step; STEPS of them are copied ahead; at most so many programs
    """
    (rows, depth), columns = x.shape, out.shape[1]
    tall, wide, deep = shape["MT"], shape["NT"], shape["KT"]
    tiles = ceil_div(columns, wide)
    launch(
        _linear_staged, (min(tiles, shape["programs"]),), _boxes(x, tall, deep), _boxes(weight, wide, deep), out,
        rows, columns, ceil_div(depth, deep), tiles, MT=tall, NT=wide, KT=deep, STEPS=shape["STEPS"], GATED=gated,
        MANY=gated and tall == TALL, COPIER_REGISTERS=COPIER_REGISTERS, warps=shape["warps"],
        registers=shape["registers"],
    )  # fmt: skip


def _boxes(x: torch.Tensor, rows: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, depth], gl.NVMMASharedLayout(128, 8 * x.element_size(), rank=2))


@gluon.jit
def _ask(weight, tile, full, at, work, NT: gl.constexpr, KT: gl.constexpr, BOTH: gl.constexpr, GATED: gl.constexpr):
    """Begin to copy the weights of a step. Steps are counted through all tiles of a program; none behind the last.

    BOTH: bytes of a step, with its rows
    """
    first, programs, steps, every, columns = work
    live, k = at < every, (at % steps * KT).to(gl.int32)
    column = ((first + at // steps * programs) * NT).to(gl.int32)
    mbarrier.expect(full, BOTH, pred=live)
    if GATED:  # the up half stands behind the gate half
        load_box(weight, [column, k], full, tile.slice(0, NT), pred=live)
        load_box(weight, [column + columns, k], full, tile.slice(NT, NT), pred=live)
    else:
        load_box(weight, [column, k], full, tile, pred=live)


@gluon.jit
def _ask_rows(x, tile, full, at, work, KT: gl.constexpr):
    """The rows of a step likewise. What is behind the last row, or behind K, becomes 0."""
    _, _, steps, every, _ = work
    load_box(x, [0, (at % steps * KT).to(gl.int32)], full, tile, pred=at < every)


@gluon.jit
def _places(DTYPE: gl.constexpr, ALL: gl.constexpr, MT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr):
    """Shared memory for STEPS steps  ->  weights, rows; what says that a place is full, and that it is free"""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    weights = gl.allocate_shared_memory(DTYPE, [STEPS, ALL, KT], TILE)
    given = gl.allocate_shared_memory(DTYPE, [STEPS, MT, KT], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STEPS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STEPS, 1], BARRIER)
    for step in gl.static_range(STEPS):
        mbarrier.init(full.index(step), count=1)
        mbarrier.init(free.index(step), count=1)
    fence_async_shared()
    barrier()
    return weights, given, full, free


@gluon.jit
def _work(steps, tiles, columns):
    """The first tile of a program, from where to the next one, and so on: what `_ask` counts by"""
    first, programs = gl.program_id(0), gl.num_programs(0)
    return first, programs, steps, (tiles - first + programs - 1) // programs * steps, columns


@gluon.jit
def _copy(of, NT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr):
    """Copy weights and rows of every step, as places become free."""
    x, weight, places, work = of
    weights, given, full, free = places
    BOTH: gl.constexpr = (weights.shape[1] + given.shape[1]) * KT * BYTES
    if EARLY:  # all programs run beside each other, or nearly: those of the next launch take the place of none
        gdc_launch_dependents()
    for step in gl.static_range(STEPS):  # weights are nobody's to write
        _ask(weight, weights.index(step), full.index(step), step, work, NT, KT, BOTH, GATED)
    if EARLY:
        gdc_wait()
    for step in gl.static_range(STEPS):
        _ask_rows(x, given.index(step), full.index(step), step, work, KT)
    for at in range(STEPS, work[3]):
        place, phase = stage_and_phase(at, STEPS)
        mbarrier.wait(free.index(place), phase ^ 1)
        _ask(weight, weights.index(place), full.index(place), at, work, NT, KT, BOTH, GATED)
        _ask_rows(x, given.index(place), full.index(place), at, work, KT)


@gluon.jit
def _multiplied(left, right, places, at, steps, sums, STEPS: gl.constexpr):
    """The sums of a tile, whose first step is `at`. A product begins while the one before it still runs.

    A place is free once all warps are done with it: the compiler lets them wait for each other before they arrive.
    """
    full, free = places
    for step in range(steps):
        place, phase = stage_and_phase(at + step, STEPS)
        mbarrier.wait(full.index(place), phase)
        sums = warpgroup_mma(left.index(place), right.index(place).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        mbarrier.arrive(free.index((at + step + STEPS - 1) % STEPS), count=1, pred=step > 0)
    total = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((at + steps + STEPS - 1) % STEPS), count=1)
    return total


@gluon.jit
def _sum_few(of, MT: gl.constexpr, NT: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr):
    """Columns of weights are the rows of the tile."""
    out, rows, columns, tiles, places, work = of
    weights, given, full, free = places
    W: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = out.dtype.element_ty
    ALL: gl.constexpr = weights.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, MT, 16])
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, W], [0, 1])
    at, steps = 0, work[2]
    for tile in range(work[0], tiles, work[1]):
        none = warpgroup_mma_init(gl.full((ALL, MT), 0.0, gl.float32, SUMS))
        total = _multiplied(weights, given, (full, free), at, steps, none, STEPS)
        at += steps
        if GATED and NT % (16 * W) == 0:  # a thread has both halves of a column
            gate, up = gl.split(total.reshape([2, NT, MT]).permute((1, 2, 0)))
            found = gl.convert_layout((gate / (1.0 + gl.exp(-gate)) * up).to(DTYPE), STORED)
        elif GATED:
            halves = gl.allocate_shared_memory(gl.float32, [ALL, MT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), total)
            barrier()
            gate, up = halves.slice(0, NT).load(STORED), halves.slice(NT, NT).load(STORED)
            found = (gate / (1.0 + gl.exp(-gate)) * up).to(DTYPE)
        else:
            found = gl.convert_layout(total.to(DTYPE), STORED)
        n, m = tile * NT + along(0, NT, STORED), along(1, MT, STORED)
        gl.store(out + (m * columns + n), found, mask=(m < rows) & (n < columns))


@gluon.jit
def _sum_many(of, MT: gl.constexpr, NT: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr):
    """So many rows that they are those of the tile: two groups of warps share each weight."""
    out, rows, columns, tiles, places, work = of
    weights, given, full, free = places
    W: gl.constexpr = gl.num_warps()
    ALL: gl.constexpr = weights.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, ALL, 16])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [W, 1], [1, 0])
    at, steps = 0, work[2]
    for tile in range(work[0], tiles, work[1]):
        none = warpgroup_mma_init(gl.full((MT, ALL), 0.0, gl.float32, SUMS))
        total = _multiplied(given, weights, (full, free), at, steps, none, STEPS)
        at += steps
        if GATED:  # a thread has both halves of a column
            gate, up = gl.split(total.reshape([MT, 2, NT]).permute((0, 2, 1)))
            total = gate / (1.0 + gl.exp(-gate)) * up
        found = gl.convert_layout(total.to(out.dtype.element_ty), STORED)
        m, n = along(0, MT, STORED), tile * NT + along(1, NT, STORED)
        gl.store(out + (m * columns + n), found, mask=(m < rows) & (n < columns))


@gluon.jit(do_not_specialize=["rows"])
def _linear_staged(
    x, weight, out, rows, columns, steps, tiles,
    MT: gl.constexpr, NT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr,
    MANY: gl.constexpr, COPIER_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """All rows, and NT columns at a time. Grid: any."""
    places = _places(out.dtype.element_ty, 2 * NT if GATED else NT, MT, KT, STEPS)
    work = _work(steps, tiles, columns)
    copied, summed = (x, weight, places, work), (out, rows, columns, tiles, places, work)
    if MANY:
        gl.warp_specialize(
            [(_sum_many, (summed, MT, NT, STEPS, GATED)), (_copy, (copied, NT, KT, STEPS, GATED, EARLY))],
            [1], [COPIER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_sum_few, (summed, MT, NT, STEPS, GATED)), (_copy, (copied, NT, KT, STEPS, GATED, EARLY))],
            [1], [COPIER_REGISTERS],
        )  # fmt: skip
