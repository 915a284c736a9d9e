"""`read_chunk` of `prefill_chunks.py` with explicit layouts: the same bits, with products and softmax overlapped.

Persistent programs walk the tiles of rows. Keys, values and queries of a tile are copied while the previous tile ends.
Two groups of warps have half of a tile's rows each: one computes weights while the products of the other run. If few
programs would run, tiles have half as many rows, and one group reads them.

Leaves out: the device functions (`warp_specialized_steps_gluon.py`), and which tiles a program reads
(`prefill_tile_schedule_gluon.py`).
"""

# ruff: noqa: SIM102 (a test for an absent argument is a separate `if`, so that the branch is not compiled)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import (
    along,
    async_copy,
    barrier,
    begin_copy,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    mbarrier,
    stage_and_phase,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .prefill_tile_schedule_gluon import TOLD, copy_tiles, tile_of, told
from .warp_specialized_steps_gluon import holes, over_columns, places, seen, weighed

# The compiler puts a wait for products before all arithmetic that needs none of them. A single group of warps would
# then compute weights after the product instead of during it. The compiler moves no wait over a barrier; threads would
# reach this one if sums of weights were less than 0, which none is. Two groups fill each other's gaps without it.
_MADE = gl.constexpr(
    "{ .reg .pred p; .reg .f32 both; add.f32 both, $2, $3; setp.lt.f32 p, both, 0f00000000; @p bar.sync 15, 128; "
    "mov.f32 $0, $2; mov.f32 $1, $3; }"
)


@gluon.jit
def _fetch(given, of, query_tile, tokens, MT: gl.constexpr, DT: gl.constexpr, SIDE: gl.constexpr):
    """Begin to copy the queries of MT rows, from row SIDE * MT of a tile on. Absent rows become 0."""
    query, _, group, _ = given
    row, _, kv_head, first, rows, _, _ = of
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DT, DT // 8], [gl.num_warps(), 1], [1, 0])
    source = query.at + (row * query.per_row + kv_head.to(gl.int64) * group * query.per_head)
    m = SIDE * MT + along(0, MT, LOADED)
    token, d = first + m // group, along(1, DT, LOADED)
    inside = (m // group < tokens) & (token < rows) & (d >= 0)
    begin_copy(query_tile, source + token * query.per_row + m % group * query.per_head + d, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _scores(queries, keys, MT: gl.constexpr, NT: gl.constexpr, SCORES: gl.constexpr):
    """Begin a product of the queries with the keys of a place."""
    none = gl.full((MT, NT), 0.0, gl.float32, SCORES)
    return warpgroup_mma(queries, keys.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.constexpr_function
def _wide(rows, width, warps):
    """Lanes of a row swap numbers, so that each stores 8 adjacent numbers."""
    columns = [1 << i for i in range(5, width.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *([0, column] for column in columns), [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [rows, width])


@gluon.jit
def _store(given, of, mean, tokens, MT: gl.constexpr, DT: gl.constexpr, SIDE: gl.constexpr):
    """Store the means of MT rows."""
    _, into, group, _ = given
    row, _, kv_head, first, rows, _, _ = of
    WIDE: gl.constexpr = _wide(MT, DT, gl.num_warps())
    mean = gl.convert_layout(mean.to(into.at.dtype.element_ty), WIDE)
    goal = into.at + (row * into.per_row + kv_head.to(gl.int64) * group * into.per_head)
    m = SIDE * MT + along(0, MT, WIDE)
    token, d = first + m // group, along(1, DT, WIDE)
    inside = (m // group < tokens) & (token < rows) & (d >= 0)
    gl.store(goal + token * into.per_row + m % group * into.per_head + d, mean, mask=inside)


@gluon.jit
def _read(
    given, work, orders, query_tile, tiles,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    SIDES: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Read MT rows of each tile, from row SIDE * MT on. The next scores and means run while scores are weighed."""
    _, _, group, scale = given
    paged, _, _, tokens = work
    key_tiles, value_tiles, full_keys, full_values, free_keys, free_values = tiles
    W: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, NT, 16])
    MEANS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, DT, 16])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_MEAN: gl.constexpr = gl.SliceLayout(1, MEANS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MEANS, 2)

    code = told(orders, 0)
    if code >= 0:
        _fetch(given, tile_of(code, work), query_tile, tokens, MT, DT, SIDE)
    done, turn = 0, 0
    while code >= 0:
        of = tile_of(code, work)
        slot, first, known, reach = of[1], of[3], of[5], of[6]
        line = paged.table + slot * paged.table_row
        missing = holes(line, paged.table_column, 0, reach, PAGE)
        last = known + first + (SIDE * MT + gl.arange(0, MT, OF_ROW)) // group
        full = gl.where(missing != 0, 0, (known + first + 1) // NT * NT)  # all rows see the positions before it
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()

        best, total = gl.full((MT,), float("-inf"), gl.float32, OF_ROW), gl.full((MT,), 0.0, gl.float32, OF_ROW)
        place, phase = stage_and_phase(done, STAGES)
        mbarrier.wait(full_keys.index(place), phase)
        score = _scores(query_tile, key_tiles.index(place), MT, NT, SCORES)
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(free_keys.index(place), count=1)
        if full < NT:
            score = seen(score, 0, reach, last, (line, paged.table_column), missing, NT, PAGE)
        weight, kept, best, total = weighed(score, best, total, scale)
        mean = gl.full((MT, DT), 0.0, gl.float32, MEANS)
        weights = gl.convert_layout(weight.to(value_tiles.dtype), WEIGHTS)
        for step in range(NT, reach, NT):
            place, phase = stage_and_phase(done, STAGES)
            done += 1
            after, after_turn = stage_and_phase(done, STAGES)
            mbarrier.wait(full_keys.index(after), after_turn)
            mbarrier.wait(full_values.index(place), phase)
            scores = _scores(query_tile, key_tiles.index(after), MT, NT, SCORES)
            means = warpgroup_mma(weights, value_tiles.index(place), mean, is_async=True)
            score = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(free_keys.index(after), count=1)
            if step + NT > full:
                score = seen(score, step, reach, last, (line, paged.table_column), missing, NT, PAGE)
            weight, kept, best, total = weighed(score, best, total, scale)
            if SIDES == 1:
                total = gl.inline_asm_elementwise(_MADE, "=f,=f,f,f", [total], gl.float32, False, 2)
            mean, weights = warpgroup_mma_wait(0, deps=[means, weights])  # weights stay until they are read
            mbarrier.arrive(free_values.index(place), count=1)
            mean = mean * over_columns(kept, OF_MEAN)
            weights = gl.convert_layout(weight.to(value_tiles.dtype), WEIGHTS)
        place, phase = stage_and_phase(done, STAGES)
        done += 1
        mbarrier.wait(full_values.index(place), phase)
        means = warpgroup_mma(weights, value_tiles.index(place), mean, is_async=True)
        barrier()  # no warp reads the queries any more
        turn += 1
        after_this = told(orders, turn)
        if after_this >= 0:
            _fetch(given, tile_of(after_this, work), query_tile, tokens, MT, DT, SIDE)
        mean, weights = warpgroup_mma_wait(0, deps=[means, weights])
        mbarrier.arrive(free_values.index(place), count=1)
        mean = mean * over_columns(1.0 / gl.where(total == 0.0, 1.0, total), OF_MEAN)
        _store(given, tile_of(code, work), mean, tokens, MT, DT, SIDE)
        code = after_this


@gluon.jit
def _zero(into, rows, HEADS: gl.constexpr, DT: gl.constexpr):
    """Set all rows to 0."""
    d = gl.arange(0, DT, gl.BlockedLayout([DT // 128], [32], [gl.num_warps()], [0]))
    goal = into.at + (gl.program_id(0).to(gl.int64) * into.per_row + d)
    for _row in range(gl.program_id(0), rows, gl.num_programs(0)):
        for head in range(HEADS):
            gl.store(goal + head * into.per_head, gl.zeros_like(d).to(into.at.dtype.element_ty))
        goal += gl.num_programs(0).to(gl.int64) * into.per_row


@gluon.jit(do_not_specialize=["requests", "rows_of_all"])
def read_chunk_staged(
    query, keys, values, few_keys, few_values, paged, scale, attended, requests, rows_of_all,
    group: gl.constexpr, kv_heads: gl.constexpr, tokens: gl.constexpr,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr, SIDES: gl.constexpr, ALONE: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Attention of row tiles, each `tokens` rows of one request for the `group` query heads of one KV head. Grid: any.

    ALONE: a single request has all rows. They become 0 if it has no slot.
    """
    DTYPE: gl.constexpr = query.at.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    query_tiles = gl.allocate_shared_memory(DTYPE, [SIDES, MT // SIDES, DT], TILE)
    codes = gl.allocate_shared_memory(gl.int64, [TOLD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [TOLD, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(TOLD):
        mbarrier.init(full.index(place), count=1)
    copied_last = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(copied_last, count=1)
    tiles = places(DTYPE, NT, DT, STAGES, SIDES, SIDES)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if ALONE:
        if gl.load(paged.slots) < 0:
            _zero(attended, rows_of_all, kv_heads * group, DT)
    work, given = (paged, requests, kv_heads, tokens), (query, attended, group, scale)
    orders, pools = (codes, full), (keys, values, few_keys, few_values)
    ROWS: gl.constexpr = MT // SIDES
    if SIDES == 2:
        gl.warp_specialize(
            [
                (_read, (given, work, orders, query_tiles.index(0), tiles, ROWS, NT, DT, PAGE, STAGES, SIDES, 0)),
                (_read, (given, work, orders, query_tiles.index(1), tiles, ROWS, NT, DT, PAGE, STAGES, SIDES, 1)),
                (copy_tiles, (pools, work, orders, tiles, copied_last, NT, DT, BT, PAGE, STAGES)),
            ],
            [4, 1], [REGISTERS, COPIER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_read, (given, work, orders, query_tiles.index(0), tiles, ROWS, NT, DT, PAGE, STAGES, SIDES, 0)),
                (copy_tiles, (pools, work, orders, tiles, copied_last, NT, DT, BT, PAGE, STAGES)),
            ],
            [1], [COPIER_REGISTERS],
        )  # fmt: skip
