"""`read_chunk` of `attend_chunk.py` with explicit layouts: the same bits, and products run while weights are made.

Leaves out: the device functions (`attend_staged.py`).
"""

# ruff: noqa: SIM102 (what is absent is not compiled: the test for it stands alone)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.layouts import (
    along,
    barrier,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    mbarrier,
    stage_and_phase,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .attend_staged import copied, holes, over_columns, places, seen, weighed


@gluon.jit
def _scores(queries, keys, full, phase, MT: gl.constexpr, NT: gl.constexpr, SCORES: gl.constexpr):
    """Begin a product of the queries with the keys of a place, once they are there."""
    none = gl.full((MT, NT), 0.0, gl.float32, SCORES)
    mbarrier.wait(full, phase)
    return warpgroup_mma(queries, keys.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _means(weights, values, mean, full, phase):
    """Begin to add the weighted values of a place, once they are there."""
    mbarrier.wait(full, phase)
    return warpgroup_mma(weights, values, mean, is_async=True)


@gluon.jit
def _read(
    given, query_tile, tiles,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """MT rows, from row SIDE * MT of the tile on. The next scores and means are made while scores are weighed."""
    (query, query_row, query_head, into, into_row, into_head, tokens, first, rows, known, group, scale, reach, line,
     table_column) = given  # fmt: skip
    key_tiles, value_tiles, full_keys, full_values, free_keys, free_values, _ = tiles
    W: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, NT, 16])
    MEANS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, DT, 16])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_MEAN: gl.constexpr = gl.SliceLayout(1, MEANS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MEANS, 2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DT, DT // 8], [W, 1], [1, 0])

    m = SIDE * MT + along(0, MT, LOADED)
    token, d = first + m // group, along(1, DT, LOADED)
    inside = (m // group < tokens) & (token < rows) & (d >= 0)
    loaded = gl.load(query + token * query_row + m % group * query_head + d, mask=inside, other=0.0)
    missing = holes(line, table_column, 0, reach, PAGE)
    query_tile.store(loaded)
    fence_async_shared()
    barrier()
    last = known + first + (SIDE * MT + gl.arange(0, MT, OF_ROW)) // group
    full = gl.where(missing != 0, 0, (known + first + 1) // NT * NT)  # all rows see the positions before it

    best, total = gl.full((MT,), float("-inf"), gl.float32, OF_ROW), gl.full((MT,), 0.0, gl.float32, OF_ROW)
    score = _scores(query_tile, key_tiles.index(0), full_keys.index(0), 0, MT, NT, SCORES)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(free_keys.index(0), count=1)
    score = seen(score, 0, reach, last, (line, table_column), missing, NT, PAGE)
    weight, _, best, total = weighed(score, best, total, scale)
    mean = gl.full((MT, DT), 0.0, gl.float32, MEANS)
    weights = gl.convert_layout(weight.to(value_tiles.dtype), WEIGHTS)
    for step in range(NT, reach, NT):
        place, phase = stage_and_phase(step // NT - 1, STAGES)
        after, after_turn = stage_and_phase(step // NT, STAGES)
        scores = _scores(query_tile, key_tiles.index(after), full_keys.index(after), after_turn, MT, NT, SCORES)
        means = _means(weights, value_tiles.index(place), mean, full_values.index(place), phase)
        score = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(free_keys.index(after), count=1)
        if step + NT > full:
            score = seen(score, step, reach, last, (line, table_column), missing, NT, PAGE)
        weight, kept, best, total = weighed(score, best, total, scale)
        mean, weights = warpgroup_mma_wait(0, deps=[means, weights])  # weights stay until they are read
        mbarrier.arrive(free_values.index(place), count=1)
        mean = mean * over_columns(kept, OF_MEAN)
        weights = gl.convert_layout(weight.to(value_tiles.dtype), WEIGHTS)
    place, phase = stage_and_phase((reach - 1) // NT, STAGES)
    means = _means(weights, value_tiles.index(place), mean, full_values.index(place), phase)
    mean, weights = warpgroup_mma_wait(0, deps=[means, weights])

    mean = mean * over_columns(1.0 / gl.where(total == 0.0, 1.0, total), OF_MEAN)
    m = SIDE * MT + along(0, MT, MEANS)
    token, d = first + m // group, along(1, DT, MEANS)
    inside = (m // group < tokens) & (token < rows) & (d >= 0)
    gl.store(into + token * into_row + m % group * into_head + d, mean.to(into.dtype.element_ty), mask=inside)


@gluon.jit
def _copy(keys, values, column, reach, line, table_column, tiles,
          NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    copied(0, 0, reach, keys, values, column, (line, table_column), tiles, NT, DT, PAGE, STAGES, True)


@gluon.jit
def read_chunk_staged(
    query, query_row, query_head, keys, values,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, nodes, window,
    group, width, scale, attended, attended_row, attended_head, tokens,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """`tokens` rows of one request for the `group` query heads of one KV head. Grid (KV heads, row tiles, B)."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    request, kv_head = gl.program_id(2), gl.program_id(0)
    rows, slot, row = gl.load(count + request).to(gl.int32), gl.load(slots + request), gl.load(begin + request)
    first = (gl.num_programs(1) - 1 - gl.program_id(1)) * tokens
    if (first >= rows) | (slot < 0) | (rows <= window):
        return
    if ancestors is not None:
        if gl.load(ancestors + row * ancestors_step) != 0:
            return
    DTYPE: gl.constexpr = query.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    query_tiles = gl.allocate_shared_memory(DTYPE, [2, MT // 2, DT], TILE)
    tiles = places(DTYPE, NT, DT, STAGES, 2, 2)
    known = gl.load(before + request).to(gl.int32)
    reach = gl.minimum(known + gl.minimum(first + tokens, rows), held).to(gl.int32)
    line, head = table + slot * table_row, kv_head.to(gl.int64)
    query += row * query_row + head * group * query_head
    attended += row * attended_row + head * group * attended_head
    given = (query, query_row, query_head, attended, attended_row, attended_head, tokens, first, rows, known, group,
             scale, reach, line, table_column)  # fmt: skip
    gl.warp_specialize(
        [
            (_read, (given, query_tiles.index(0), tiles, MT // 2, NT, DT, PAGE, STAGES, 0)),
            (_read, (given, query_tiles.index(1), tiles, MT // 2, NT, DT, PAGE, STAGES, 1)),
            (_copy, (keys, values, kv_head * DT, reach, line, table_column, tiles, NT, DT, PAGE, STAGES)),
        ],
        [4, 1], [REGISTERS, COPIER_REGISTERS],
    )  # fmt: skip
