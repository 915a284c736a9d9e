"""Products of few rows with explicit layouts: weights are copied while the previous launches still run.

Two warps of a program copy weights and rows of many steps ahead by TMA. They copy the weights of the first steps
without waiting for the launch that computes the rows, so that the memory is not idle between two products. Only a few
of these steps are requested at a time, because they share a queue with the loads of the previous launches (LOG.md).
The other warps multiply.

A tile of the tensor cores has at least 64 rows. Columns of the weights fill them; in a gated product of 128 rows the
rows do (`gated_128_rows_gluon.py`). A program has all of a sum, or each program of a pair has half of K. So 66 tiles of
columns keep 132 multiprocessors busy. Each sum runs over K in order, as in `few_rows.py`. Leaves out: which sizes take
which form (`few_rows.py`), and other GPUs than Hopper.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import (
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
from ..runtime import ceil_div, hopper, launch
from .cluster_pair_messages import (
    barriers,
    both,
    buffer,
    cluster_arrive,
    cluster_wait,
    idle,
    rank,
    received,
    send,
    tell,
)
from .gated_128_rows_gluon import AT_ONCE as PARTS_AT_ONCE
from .gated_128_rows_gluon import _linear_parts

ALIGNED = 16  # bytes: alignment of boxes and rows
BYTES = gl.constexpr(2)  # bytes of a number of x and weight
TALL = 128  # rows of a gated product that fill the tile's rows (`gated_128_rows_gluon.py`)
AT_ONCE = gl.constexpr(3)  # how many of the first steps are requested before one of them has arrived
COPIER_REGISTERS = 40  # registers of a thread that copies


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether boxes of x [M, K] and weight [N, K], of 16 bits and with contiguous rows, can be copied."""
    return hopper(x.device) and all(
        one.data_ptr() % ALIGNED == one.stride(0) * one.element_size() % ALIGNED == 0 for one in (x, weight)
    )


def product(x: torch.Tensor, weight: torch.Tensor, gated: bool, out: torch.Tensor, shape: dict[str, int]) -> None:
    """Compute `product` of `few_rows.py` into `out`, whose numbers have 16 bits, or 32 if it is not gated.

    shape: a step has MT rows, NT columns and KT of K; STEPS steps are copied ahead; `programs` is the maximum number of
    programs, or of pairs, whose second program begins at the step `cut`
    """
    assert not gated or out.dtype == x.dtype, "fp32 results are of one product"
    (rows, depth), columns = x.shape, out.shape[1]
    tall, wide, deep, cut = shape["MT"], shape["NT"], shape["KT"], shape["cut"]
    tiles, steps, pair = ceil_div(columns, wide), ceil_div(depth, deep), cut > 0
    assert not pair or (cut < steps and not gated), "each has a part"
    assert shape["STEPS"] >= max(AT_ONCE.value, PARTS_AT_ONCE.value), "the first steps have places"
    if gated and tall == TALL:
        launch(
            _linear_parts, (ceil_div(columns, wide + wide // 2),),
            *(_boxes(of, size, deep, False) for of, size in ((x, tall), (weight, wide), (weight, wide // 2))), out,
            rows, columns, steps, P=wide, MT=tall, KT=deep, STEPS=shape["STEPS"], COPIER_REGISTERS=COPIER_REGISTERS,
            warps=shape["warps"], registers=shape["registers"],
        )  # fmt: skip
        return
    launch(
        _linear_staged, (min(tiles, shape["programs"]),), *(_boxes(of, size, deep, pair) for of, size in
                                                            ((x, tall), (weight, wide))), out,
        rows, columns, steps, tiles, cut, MT=tall, NT=wide, KT=deep, STEPS=shape["STEPS"], GATED=gated,
        PAIR=pair, COPIER_REGISTERS=COPIER_REGISTERS, warps=shape["warps"], registers=shape["registers"],
        num_ctas=1 + pair,
    )  # fmt: skip


def _boxes(x: torch.Tensor, rows: int, depth: int, pair: bool) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 8 * x.element_size(), rank=2, cga_layout=[[0, 0]] if pair else [])
    return TensorDescriptor.from_tensor(x, [rows, depth], layout)


@gluon.constexpr_function
def _tile(pair):
    return gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=both(2, pair))


@gluon.constexpr_function
def _sums(warps, columns, pair):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16], cga_layout=both(2, pair))


@gluon.constexpr_function
def _stored(warps, pair):
    return gl.BlockedLayout([8, 1], [4, 8], [1, warps], [0, 1], cga_layout=both(2, pair))


@gluon.jit
def _ask(weight, memory, full, at, work, NT: gl.constexpr, KT: gl.constexpr, ALL: gl.constexpr, GATED: gl.constexpr):
    """Begin to copy the weights of a step; nothing after the last tile. at: the step's tile, and its place in K

    ALL: bytes that `full` waits for
    """
    tile, step = at
    live, k, column = tile < work[1], (step * KT).to(gl.int32), (tile * NT).to(gl.int32)
    mbarrier.expect(full, ALL, pred=live)
    if GATED:  # the up half follows the gate half
        load_box(weight, [column, k], full, memory.slice(0, NT), pred=live)
        load_box(weight, [column + work[5], k], full, memory.slice(NT, NT), pred=live)
    else:
        load_box(weight, [column, k], full, memory, pred=live)


@gluon.jit
def _ask_rows(x, memory, full, at, work, KT: gl.constexpr):
    """Begin to copy the rows of a step. Rows after the last, and columns after K, become 0."""
    tile, step = at
    load_box(x, [0, (step * KT).to(gl.int32)], full, memory, pred=tile < work[1])


@gluon.jit
def _behind(at, work):
    """Return the step after a step."""
    tile, step = at
    last = step + 1 == work[4]
    return gl.where(last, tile + work[2], tile), gl.where(last, work[3], step + 1)


@gluon.jit
def _places(
    DTYPE: gl.constexpr, ALL: gl.constexpr, MT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, PAIR: gl.constexpr
):  # fmt: skip
    """Allocate shared memory for STEPS steps  ->  weights, rows; barriers for a full and for a free place.

    A further barrier is for the weights of a first step: the place of such a step is full when it has its rows.
    """
    TILE: gl.constexpr = _tile(PAIR)
    BARRIERS: gl.constexpr = barriers(PAIR)
    weights = gl.allocate_shared_memory(DTYPE, [STEPS, ALL, KT], TILE)
    given = gl.allocate_shared_memory(DTYPE, [STEPS, MT, KT], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STEPS, BARRIERS[0]], BARRIERS[1])
    free = gl.allocate_shared_memory(gl.int64, [STEPS, BARRIERS[0]], BARRIERS[1])
    come = gl.allocate_shared_memory(gl.int64, [STEPS, BARRIERS[0]], BARRIERS[1])
    return weights, given, full, free, come


@gluon.jit
def _work(steps, tiles, columns, cut, PAIR: gl.constexpr):
    """Work of a program: its first tile, the number of tiles, the step between tiles, its range of steps, columns."""
    begin, end = cut * 0, steps
    if PAIR:
        begin, end = gl.where(rank() > 0, cut, 0), gl.where(rank() > 0, steps, cut)
    return gl.program_id(0), tiles, gl.num_programs(0), begin, end, columns


@gluon.jit
def _ask_first(
    weight, places, work, NT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Request the first weights, which no launch writes, before anything else: the memory would idle otherwise."""
    weights, _, full, free, come = places
    for step in gl.static_range(STEPS):
        mbarrier.init(come.index(step), count=1)
    fence_async_shared()
    barrier()
    at = work[0], work[3]
    for step in gl.static_range(AT_ONCE):
        _ask(weight, weights.index(step), come.index(step), at, work, NT, KT, weights.shape[1] * KT * BYTES, GATED)
        at = _behind(at, work)
    if EARLY:  # all programs run at (nearly) the same time, so those of the next launch take the place of none
        gdc_launch_dependents()
    for step in gl.static_range(STEPS):
        mbarrier.init(full.index(step), count=1)
        mbarrier.init(free.index(step), count=1)
    fence_async_shared()
    barrier()


@gluon.jit
def _copy(
    of, NT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr, PAIR: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Copy the weights of every step, as places become free, and with them the rows of all but the first steps."""
    x, weight, places, work, every = of
    if PAIR:
        cluster_arrive()
    weights, given, full, free, come = places
    ALONE: gl.constexpr = weights.shape[1] * KT * BYTES
    BOTH: gl.constexpr = ALONE + given.shape[1] * KT * BYTES
    at = work[0], work[3]
    for _ in gl.static_range(AT_ONCE):
        at = _behind(at, work)
    for step in gl.static_range(AT_ONCE, STEPS):
        mbarrier.wait(come.index(step - AT_ONCE), 0, pred=step - AT_ONCE < every)
        _ask(weight, weights.index(step), come.index(step), at, work, NT, KT, ALONE, GATED)
        at = _behind(at, work)
    if EARLY:
        gdc_wait()
    for step in range(STEPS, every):
        place, phase = stage_and_phase(step, STEPS)
        mbarrier.wait(free.index(place), phase ^ 1)
        _ask(weight, weights.index(place), full.index(place), at, work, NT, KT, BOTH, GATED)
        _ask_rows(x, given.index(place), full.index(place), at, work, KT)
        at = _behind(at, work)
    if PAIR:
        cluster_wait()


@gluon.jit
def _copy_rows(of, KT: gl.constexpr, STEPS: gl.constexpr, PAIR: gl.constexpr, EARLY: gl.constexpr):
    """Copy the rows of the first steps once they exist, even if not all weights of these steps are requested yet."""
    x, _, places, work, every = of
    if PAIR:
        cluster_arrive()
    _, given, full, _, _ = places
    at = work[0], work[3]
    if EARLY:
        gdc_wait()
    for step in gl.static_range(STEPS):
        mbarrier.expect(full.index(step), given.shape[1] * KT * BYTES, pred=step < every)
        _ask_rows(x, given.index(step), full.index(step), at, work, KT)
        at = _behind(at, work)
    if PAIR:
        cluster_wait()


@gluon.jit
def _multiplied(left, right, places, at, steps, sums, STEPS: gl.constexpr):
    """Sum a tile whose first step is `at`. A product begins while the one before it still runs.

    A place is free when all warps are done with it: the compiler makes them wait for each other before they arrive.
    """
    full, free, come = places
    for step in range(steps):
        place, phase = stage_and_phase(at + step, STEPS)
        if at + step < STEPS:
            mbarrier.wait(come.index(place), 0)
        mbarrier.wait(full.index(place), phase)
        sums = warpgroup_mma(left.index(place), right.index(place).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        mbarrier.arrive(free.index((at + step + STEPS - 1) % STEPS), count=1, pred=step > 0)
    total = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((at + steps + STEPS - 1) % STEPS), count=1)
    return total


@gluon.jit
def _sum_few(
    of, MT: gl.constexpr, NT: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr, PAIR: gl.constexpr
):  # fmt: skip
    """Multiply with columns of weights as the tile's rows. The first program of a pair adds and stores both sums."""
    out, rows, columns, places, work, box = of
    weights, given, full, free, come = places
    W: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = out.dtype.element_ty
    ALL: gl.constexpr = weights.shape[1]
    SUMS: gl.constexpr = _sums(W, MT, PAIR)
    STORED: gl.constexpr = _stored(W, PAIR)
    WIDE: gl.constexpr = DTYPE.primitive_bitwidth > 8 * BYTES and not GATED
    FOUND: gl.constexpr = SUMS if WIDE else STORED  # 8 lanes have 32 bytes of a row; other layouts need shared memory
    at, begin, steps = 0, work[3], work[4] - work[3]
    message = 0
    if PAIR:
        cluster_wait()
    for tile in range(work[0], work[1], work[2]):
        none = warpgroup_mma_init(gl.full((ALL, MT), 0.0, gl.float32, SUMS))
        total = _multiplied(weights, given, (full, free, come), at, steps, none, STEPS)
        at += steps
        if PAIR:
            if begin > 0:
                send(total, box, message, SUMS)
            else:
                total += received(box, message, ALL, MT, SUMS)
            message += 1
        if GATED and NT % (16 * W) == 0:  # a thread has both halves of a column
            gate, up = gl.split(total.reshape([2, NT, MT]).permute((1, 2, 0)))
            found = gl.convert_layout((gate / (1.0 + gl.exp(-gate)) * up).to(DTYPE), STORED)
        elif GATED:
            halves = gl.allocate_shared_memory(gl.float32, [ALL, MT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), total)
            barrier()
            gate, up = halves.slice(0, NT).load(STORED), halves.slice(NT, NT).load(STORED)
            found = (gate / (1.0 + gl.exp(-gate)) * up).to(DTYPE)
        elif WIDE:
            found = total
        else:
            found = gl.convert_layout(total.to(DTYPE), STORED)
        n, m = tile * NT + along(0, NT, FOUND), along(1, MT, FOUND)
        inside = (m < rows) & (n < columns)
        if PAIR:
            inside &= begin == 0
        gl.store(out + (m * columns + n), found, mask=inside)


@gluon.jit(do_not_specialize=["rows"])
def _linear_staged(
    x, weight, out, rows, columns, steps, tiles, cut,
    MT: gl.constexpr, NT: gl.constexpr, KT: gl.constexpr, STEPS: gl.constexpr, GATED: gl.constexpr,
    PAIR: gl.constexpr, COPIER_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Multiply all rows, NT columns at a time. Grid: any. PAIR: of programs; the second begins at the step `cut`."""
    places = _places(x.dtype, 2 * NT if GATED else NT, MT, KT, STEPS, PAIR)
    work = _work(steps, tiles, columns, cut, PAIR)
    _ask_first(weight, places, work, NT, KT, STEPS, GATED, EARLY)
    turns = (tiles - work[0] + work[2] - 1) // work[2]
    box = steps  # not used if there are no pairs
    if PAIR:
        box = buffer(NT * MT)
        cluster_arrive()
    copied = (x, weight, places, work, turns * (work[4] - work[3]))
    summed = (out, rows, columns, places, work, box)
    if PAIR:
        gl.warp_specialize(
            [(_sum_few, (summed, MT, NT, STEPS, GATED, PAIR)), (_copy, (copied, NT, KT, STEPS, GATED, PAIR, EARLY)),
             (_copy_rows, (copied, KT, STEPS, PAIR, EARLY)),
             (tell, (box, gl.where(work[3] > 0, 0, turns))), (idle, (steps,))],
            [1, 1, 1, 1], [COPIER_REGISTERS, COPIER_REGISTERS, 24, 24],  # all warps of a program, for all must come
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_sum_few, (summed, MT, NT, STEPS, GATED, PAIR)), (_copy, (copied, NT, KT, STEPS, GATED, PAIR, EARLY)),
             (_copy_rows, (copied, KT, STEPS, PAIR, EARLY))],
            [1, 1], [COPIER_REGISTERS, COPIER_REGISTERS],
        )  # fmt: skip
