"""`read_chunk` of `attend_chunk.py` with explicit layouts: a group of warps copies, two others compute.

It takes the steps of that kernel in its order, in the layouts that the compiler chooses there. So it gives the same
bits, and a GPU runs it in place of `read_chunk` wherever it fits. Leaves out: what does not fit, and interpretation.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .layouts import along, async_copy, barrier, begin_copy, gdc_launch_dependents, gdc_wait


@gluon.jit
def copy(
    keys, keys_page, keys_entry, values, values_page, values_entry, line, table_column, reach, width,
    key_tiles, value_tiles, full_keys, full_values, free_keys, free_values,
    NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Positions 0 .. reach - 1, NT at a time: keys and values into places that are free. What is absent becomes 0."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DT, DT // 8], [gl.num_warps(), 1], [1, 0])
    position, d = gl.arange(0, NT, gl.SliceLayout(1, ROWS)), along(1, DT, ROWS)
    here, turn = 0, 1
    for step in range(0, reach, NT):
        at = step + position
        page = gl.load(line + at // PAGE * table_column, mask=at < reach, other=-1)
        inside = gl.expand_dims(page >= 0, 1) & (d < width)
        mbarrier.wait(free_keys.index(here), turn)
        source = keys + gl.expand_dims(page * keys_page + at % PAGE * keys_entry, 1) + d
        begin_copy(key_tiles.index(here), source, mask=inside)
        async_copy.mbarrier_arrive(full_keys.index(here), increment_count=False)
        mbarrier.wait(free_values.index(here), turn)
        source = values + gl.expand_dims(page * values_page + at % PAGE * values_entry, 1) + d
        begin_copy(value_tiles.index(here), source, mask=inside)
        async_copy.mbarrier_arrive(full_values.index(here), increment_count=False)
        here += 1
        if here == STAGES:
            here = 0
            turn = turn ^ 1
    async_copy.wait_group(0)


@gluon.jit
def weigh(score, best, total, scale, at, last, reach, line, table_column, missing, PAGE: gl.constexpr, ALL: gl.constexpr):
    """Scores of a step -> weights, the factor of what was summed before, the new maximum and sum. ALL: all are seen."""
    if not ALL:
        sees = at < reach
        if missing != 0:
            sees = gl.load(line + at // PAGE * table_column, mask=at < reach, other=-1) >= 0
        score = gl.where(sees & (at <= gl.expand_dims(last, 1)), score, float("-inf"))
    higher = gl.maximum(best, gl.max(score, axis=1) * scale)
    shift = gl.where(higher == float("-inf"), 0.0, higher)
    kept = gl.exp2(best - shift)
    shift = gl.expand_dims(shift, 1)
    weight = gl.exp2(gl.fma(score, gl.zeros_like(score) + scale, gl.zeros_like(score) - shift))
    return weight, kept, higher, total * kept + gl.sum(weight, axis=1)


@gluon.jit
def compute(
    query, query_row, query_head, into, into_row, into_head, tokens, first, rows, known, group, width, scale, reach,
    line, table_column, query_tile, key_tiles, value_tiles, full_keys, full_values, free_keys, free_values,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
    FENCE: gl.constexpr = True,
):  # fmt: skip
    """MT rows of the tile, those behind PART * MT others. The next scores are made while these are weighed."""
    W: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, NT, 16])
    MEANS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, DT, 16])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_MEAN: gl.constexpr = gl.SliceLayout(1, MEANS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MEANS, 2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DT, DT // 8], [W, 1], [1, 0])

    m, d = PART * MT + along(0, MT, LOADED), along(1, DT, LOADED)
    token = first + m // group
    inside = (m // group < tokens) & (token < rows) & (d < width)
    query_tile.store(gl.load(query + token * query_row + m % group * query_head + d, mask=inside, other=0.0))
    fence_async_shared()
    barrier()

    last = known + first + (PART * MT + gl.arange(0, MT, OF_ROW)) // group
    at = along(1, NT, SCORES)
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [W], [0]))
    missing = 0
    for begun in range(0, reach, 32 * PAGE):
        pages = gl.load(line + (begun // PAGE + lanes) * table_column, mask=begun + lanes * PAGE < reach, other=0)
        missing = gl.maximum(missing, gl.max((pages < 0).to(gl.int32), axis=0))
    whole = gl.where(missing != 0, 0, (known + first + 1) // NT)  # steps that all rows see

    none = gl.full((MT, NT), 0.0, gl.float32, SCORES)
    best, total = gl.full((MT,), float("-inf"), gl.float32, OF_ROW), gl.full((MT,), 0.0, gl.float32, OF_ROW)
    mean = gl.full((MT, DT), 0.0, gl.float32, MEANS)
    steps = gl.cdiv(reach, NT)
    mbarrier.wait(full_keys.index(0), 0)
    if FENCE:
        fence_async_shared()
    score = warpgroup_mma(query_tile, key_tiles.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(free_keys.index(0), count=1)
    weight, kept, best, total = weigh(
        score, best, total, scale, at, last, reach, line, table_column, missing, PAGE, False
    )  # fmt: skip
    mean = mean * gl.expand_dims(gl.convert_layout(kept, OF_MEAN), 1)
    place, turn = 0, 0
    weights = gl.convert_layout(weight.to(value_tiles.dtype), WEIGHTS)
    for step in range(1, steps):
        after, after_turn = place + 1, turn
        if after == STAGES:
            after = 0
            after_turn = turn ^ 1
        mbarrier.wait(full_keys.index(after), after_turn)
        if FENCE:
            fence_async_shared()
        scores = warpgroup_mma(query_tile, key_tiles.index(after).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(full_values.index(place), turn)
        if FENCE:
            fence_async_shared()
        means = warpgroup_mma(weights, value_tiles.index(place), mean, is_async=True)
        score = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(free_keys.index(after), count=1)
        if step < whole:
            weight, kept, best, total = weigh(
                score, best, total, scale, at + step * NT, last, reach, line, table_column, missing, PAGE, True
            )  # fmt: skip
        else:
            weight, kept, best, total = weigh(
                score, best, total, scale, at + step * NT, last, reach, line, table_column, missing, PAGE, False
            )  # fmt: skip
        mean, weights = warpgroup_mma_wait(0, deps=[means, weights])
        mbarrier.arrive(free_values.index(place), count=1)
        mean = mean * gl.expand_dims(gl.convert_layout(kept, OF_MEAN), 1)
        weights = gl.convert_layout(weight.to(value_tiles.dtype), WEIGHTS)
        place = after
        turn = after_turn
    mbarrier.wait(full_values.index(place), turn)
    if FENCE:
        fence_async_shared()
    means = warpgroup_mma(weights, value_tiles.index(place), mean, is_async=True)
    mean, weights = warpgroup_mma_wait(0, deps=[means, weights])

    total = gl.expand_dims(gl.convert_layout(total, OF_MEAN), 1)
    mean = mean / gl.where(total == 0.0, 1.0, total)
    m, d = PART * MT + along(0, MT, MEANS), along(1, DT, MEANS)
    token = first + m // group
    inside = (m // group < tokens) & (token < rows) & (d < width)
    gl.store(into + token * into_row + m % group * into_head + d, mean.to(into.dtype.element_ty), mask=inside)


@gluon.jit
def read_chunk_apart(
    query, query_row, query_head,
    keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, window,
    group, width, scale, attended, attended_row, attended_head, tokens,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, COPYING: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """`tokens` rows of one request for the `group` query heads of one KV head. Grid (KV heads, row tiles, B)."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    request, kv_head = gl.program_id(2), gl.program_id(0)
    rows, slot, row = gl.load(count + request), gl.load(slots + request), gl.load(begin + request)
    first = (gl.num_programs(1) - 1 - gl.program_id(1)) * tokens
    if (first >= rows) | (slot < 0) | (rows <= window):
        return
    if ancestors is not None:
        if gl.load(ancestors + row * ancestors_step) != 0:
            return
    DTYPE: gl.constexpr = query.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    query_tiles = gl.allocate_shared_memory(DTYPE, [2, MT // 2, DT], TILE)
    key_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, NT, DT], TILE)
    value_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, NT, DT], TILE)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(stage), count=32 * COPYING)
        mbarrier.init(full_values.index(stage), count=32 * COPYING)
        mbarrier.init(free_keys.index(stage), count=2)
        mbarrier.init(free_values.index(stage), count=2)
    fence_async_shared()
    barrier()
    known, rows = gl.load(before + request).to(gl.int32), rows.to(gl.int32)
    reach = gl.minimum(known + gl.minimum(first + tokens, rows), held).to(gl.int32)
    line = table + slot * table_row
    query += row * query_row + kv_head.to(gl.int64) * group * query_head
    attended += row * attended_row + kv_head.to(gl.int64) * group * attended_head
    keys += kv_head.to(gl.int64) * keys_head
    values += kv_head.to(gl.int64) * values_head
    gl.warp_specialize(
        [
            (compute, (query, query_row, query_head, attended, attended_row, attended_head, tokens, first, rows, known,
                       group, width, scale, reach, line, table_column, query_tiles.index(0), key_tiles, value_tiles,
                       full_keys, full_values, free_keys, free_values, MT // 2, NT, DT, PAGE, STAGES, 0)),
            (compute, (query, query_row, query_head, attended, attended_row, attended_head, tokens, first, rows, known,
                       group, width, scale, reach, line, table_column, query_tiles.index(1), key_tiles, value_tiles,
                       full_keys, full_values, free_keys, free_values, MT // 2, NT, DT, PAGE, STAGES, 1)),
            (copy, (keys, keys_page, keys_entry, values, values_page, values_entry, line, table_column, reach, width,
                    key_tiles, value_tiles, full_keys, full_values, free_keys, free_values, NT, DT, PAGE, STAGES)),
        ],
        [4, COPYING], [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
