"""`_carry` of `blocks.py` by two groups of warps: one takes only what the next block waits for, the other reads out.

It has the arithmetic of `_carry`, in its order, and gives the same bits. With one group of warps the many instructions
of a block wait for each other (LOG.md). The second group copies operands ahead (bulk copies), multiplies queries and
the tile of weights, and writes the read-out.
Leaves out: what does not fit (`fits`), and interpretation.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..layout import Part
from .address import flat, given
from .early import wait
from .layouts import (
    TensorDescriptor,
    along,
    barrier,
    bulk_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .runtime import ceil_div, launch, launches_early

KEYS, COLUMNS, WARPS = 128, 32, 4
STAGES = 3  # blocks whose operands are in shared memory, or on their way
REGISTERS = 152  # of the second group
SWIZZLED = gl.NVMMASharedLayout(128, 16, rank=2)


def fits(part: Part, core: torch.Tensor) -> bool:
    """Whether `carry` can run this part."""
    plain = part.read.scales is None and (part.store is None or part.store.scales is None)
    whole = part.read.pool.shape[-2] == KEYS and core.shape[2] % COLUMNS == 0
    return plain and whole and core.is_cuda and launches_early(core.device)


def carry(
    part: Part, core: torch.Tensor, values: tuple[Any, ...], between: tuple[torch.Tensor, ...], group: int, tokens: int
) -> None:
    """Take the place of `_carry`. values: v and its steps; between: what `_prepare` made, q and k first."""
    heads, width = core.shape[1:]
    *operands, gates = between

    def tiles(x: torch.Tensor) -> TensorDescriptor:
        flattened = x.view(-1, x.shape[-1])
        return TensorDescriptor.from_tensor(flattened, [tokens, x.shape[-1]], SWIZZLED)

    launch(
        _carry, (ceil_div(width, COLUMNS), heads, part.begin.numel()), *values, *map(tiles, operands), gates,
        core, core.stride(0), core.stride(1), part.begin, part.count, part.read.units, part.fresh,
        *flat(part.read, 3, part.read), *flat(part.store, 3, part.read), given(part.store), group,
        C=tokens, KT=KEYS, VT=COLUMNS, STAGES=STAGES, REGISTERS=REGISTERS, warps=WARPS,
    )  # fmt: skip


@gluon.jit
def _begin(at, heads, group, tiles, places, full, C: gl.constexpr, KT: gl.constexpr):
    """Begin to copy what a block has between the two kernels; `full` is passed when all of it has come."""
    of_queries, of_keys, of_inverses, of_weights = tiles
    queries, keys, inverses, weights = places
    mbarrier.expect(full, 2 * (2 * C * KT + 2 * C * C))
    by_key, by_value = (at // group * C).to(gl.int32), (at * C).to(gl.int32)
    bulk_copy(of_keys, [by_key, 0], full, keys)
    bulk_copy(of_inverses, [by_value, 0], full, inverses)
    bulk_copy(of_queries, [by_key, 0], full, queries)
    bulk_copy(of_weights, [by_value, 0], full, weights)


@gluon.jit
def _beside(gates, values, v_row, i, i_row, at_v, live, C: gl.constexpr):
    """Of a block with `live` rows: decay since its start, until its end, beta; decay of all of it; values."""
    there = i_row < gl.where(live > 0, C, 0)
    return (
        gl.load(gates + i_row, mask=there, other=0.0), gl.load(gates + C + i_row, mask=there, other=0.0),
        gl.load(gates + 2 * C + i_row, mask=there, other=0.0), gl.load(gates + C - 1, mask=live > 0, other=0.0),
        gl.load(values + i * v_row + at_v, mask=i < live, other=0.0),
    )  # fmt: skip


@gluon.jit
def _chain(
    v, v_row, gates, rows, heads, column, read, known, read_k, read_v, store, kept, store_k, store_v,
    keys, inverses, narrow, residual, leaving, added, full, empty, has_state, has_update, is_read,
    C: gl.constexpr, KT: gl.constexpr, VT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The first group: the state, and what every token adds to it."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, VT, 16])
    i, i_row, at_k = along(0, C, ACC), gl.arange(0, C, gl.SliceLayout(1, ACC)), along(0, KT, ACC)
    at_v = column + along(1, VT, ACC)
    state = gl.load(read + at_k * read_k + at_v * read_v, mask=(at_k >= 0) & (known != 0), other=0.0).to(gl.float32)
    barrier()  # the slot that is read here may be the slot that is stored later
    since, until, write, whole, values = _beside(gates, v, v_row, i, i_row, at_v, rows, C)
    none, no_state = gl.full((C, VT), 0.0, gl.float32, ACC), gl.full((KT, VT), 0.0, gl.float32, ACC)
    here, turn, block = 0, 0, 0
    for first in range(0, rows, C):
        side, phase = block % 2, (block // 2) & 1
        mbarrier.wait(is_read.index(side), phase ^ 1)
        narrow.index(side).store(state.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(has_state.index(side), count=1)
        mbarrier.wait(full.index(here), turn)
        seen = warpgroup_mma(keys.index(here), narrow.index(side), none, use_acc=False, is_async=True)
        v, gates = v + C * v_row, gates + heads * 3 * C  # what stands beside the next block comes meanwhile
        following = _beside(gates, v, v_row, i, i_row, at_v, rows - first - C, C)
        seen = warpgroup_mma_wait(0, deps=[seen])
        residual.store(((values - seen * gl.expand_dims(since, 1)) * gl.expand_dims(write, 1)).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        # tiles of token pairs lie as [j, i]
        update = warpgroup_mma(inverses.index(here).permute((1, 0)), residual, none, use_acc=False, is_async=True)
        state = state * whole
        update = warpgroup_mma_wait(0, deps=[update])
        leaving.store((update * gl.expand_dims(until, 1)).to(gl.bfloat16))
        added.index(side).store(update.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(has_update.index(side), count=1)
        grown = warpgroup_mma(keys.index(here).permute((1, 0)), leaving, no_state, use_acc=False, is_async=True)
        grown = warpgroup_mma_wait(0, deps=[grown])
        barrier()
        mbarrier.arrive(empty.index(here), count=1)
        state = state + grown
        since, until, write, whole, values = following
        here, block = here + 1, block + 1
        if here == STAGES:
            here, turn = 0, turn ^ 1
    if kept != 0:
        gl.store(store + at_k * store_k + at_v * store_v, state.to(store.dtype.element_ty))


@gluon.jit
def _read_out(
    gates, rows, heads, column, core, core_row, at, group, tiles, keys, inverses, queries, weights, narrow, added,
    full, empty, has_state, has_update, is_read,
    C: gl.constexpr, KT: gl.constexpr, VT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The second group: operands, and read-outs."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, VT, 16])
    i, i_row = along(0, C, ACC), gl.arange(0, C, gl.SliceLayout(1, ACC))
    at_v, none = column + along(1, VT, ACC), gl.full((C, VT), 0.0, gl.float32, ACC)
    for ahead in gl.static_range(STAGES - 1):
        if ahead * C < rows:
            places = queries.index(ahead), keys.index(ahead), inverses.index(ahead), weights.index(ahead)
            _begin(at + ahead * heads, heads, group, tiles, places, full.index(ahead), C, KT)
    here, turn, block = 0, 0, 0
    for first in range(0, rows, C):
        side, phase = block % 2, (block // 2) & 1
        since = gl.load(gates + i_row)
        gates += heads * 3 * C
        if first + (STAGES - 1) * C < rows:  # into the place of the block before, when the chain is through with it
            free = (here + STAGES - 1) % STAGES
            mbarrier.wait(empty.index(free), (((block + STAGES - 1) // STAGES) & 1) ^ 1)
            places = queries.index(free), keys.index(free), inverses.index(free), weights.index(free)
            _begin(at + (STAGES - 1) * heads, heads, group, tiles, places, full.index(free), C, KT)
        mbarrier.wait(full.index(here), turn)
        mbarrier.wait(has_state.index(side), phase)
        out = warpgroup_mma(queries.index(here), narrow.index(side), none, use_acc=False, is_async=True)
        mbarrier.wait(has_update.index(side), phase)
        more = warpgroup_mma(weights.index(here).permute((1, 0)), added.index(side), none, use_acc=False, is_async=True)
        out, more = warpgroup_mma_wait(0, deps=[out, more])
        barrier()
        mbarrier.arrive(is_read.index(side), count=1)
        out = out * gl.expand_dims(since, 1) + more
        gl.store(core + i * core_row + at_v, out.to(core.dtype.element_ty), mask=first + i < rows)
        core, at, here, block = core + C * core_row, at + heads, here + 1, block + 1
        if here == STAGES:
            here, turn = 0, turn ^ 1


@gluon.jit(do_not_specialize=["has_store"])
def _carry(
    v, v_row, v_head, of_queries, of_keys, of_inverses, of_weights, gates, core, core_row, core_head,
    begin, count, units, fresh,
    read, read_units, read_columns, read_unit, read_column, read_h, read_k, read_v,
    store, store_units, store_columns, store_unit, store_column, store_h, store_k, store_v, has_store, group,
    C: gl.constexpr, KT: gl.constexpr, VT: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """One request, one value head, VT columns of V, all blocks in order. Grid (V tiles, HV, B)."""
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * VT, 16, rank=2)
    if EARLY:
        wait()
    request, head, heads = gl.program_id(2), gl.program_id(1).to(gl.int64), gl.num_programs(1)
    unit, rows = gl.load(units + request), gl.load(count + request).to(gl.int32)
    if (unit < 0) | (rows <= 0):
        return  # core is zero there already
    lane, before = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), unit * 0
    for other in range(0, request, 32):  # blocks of the requests before this one
        before += gl.sum((gl.load(count + other + lane, mask=other + lane < request, other=0) + C - 1) // C, axis=0)
    at, start, column = before * heads + head, gl.load(begin + request), gl.program_id(0) * VT
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, KT], of_keys.layout)
    queries = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, KT], of_keys.layout)
    inverses = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], of_keys.layout)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], of_keys.layout)
    narrow = gl.allocate_shared_memory(gl.bfloat16, [2, KT, VT], NARROW)
    residual = gl.allocate_shared_memory(gl.bfloat16, [C, VT], NARROW)
    leaving = gl.allocate_shared_memory(gl.bfloat16, [C, VT], NARROW)
    added = gl.allocate_shared_memory(gl.bfloat16, [2, C, VT], NARROW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    has_state = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    has_update = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    is_read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for side in gl.static_range(2):
        mbarrier.init(has_state.index(side), count=1)
        mbarrier.init(has_update.index(side), count=1)
        mbarrier.init(is_read.index(side), count=1)
    fence_async_shared()
    barrier()
    goal = gl.load(store_units + request)
    kept = ((has_store != 0) & (goal >= 0)).to(gl.int32)
    known = (gl.load(fresh + request) == 0).to(gl.int32)
    read += unit * read_unit + gl.load(read_columns + request) * read_column + head * read_h
    store += goal * store_unit + gl.load(store_columns + request) * store_column + head * store_h
    v, core, gates = v + start * v_row + head * v_head, core + start * core_row + head * core_head, gates + at * 3 * C
    tiles = of_queries, of_keys, of_inverses, of_weights
    gl.warp_specialize(
        [
            (_chain, (v, v_row, gates, rows, heads, column, read, known, read_k, read_v, store, kept, store_k, store_v,
                      keys, inverses, narrow, residual, leaving, added, full, empty, has_state, has_update, is_read,
                      C, KT, VT, STAGES)),
            (_read_out, (gates, rows, heads, column, core, core_row, at, group, tiles, keys, inverses, queries, weights,
                         narrow, added, full, empty, has_state, has_update, is_read, C, KT, VT, STAGES)),
        ],
        [gl.num_warps()], [REGISTERS],
    )  # fmt: skip
