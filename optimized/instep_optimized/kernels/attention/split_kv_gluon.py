"""`read_parts` of `split_kv.py` with explicit layouts: the same bits, with copies and arithmetic overlapped.

One group of warps computes the weights of an item, for one tile or two, and passes them on through shared memory. One
more group per tile multiplies the values. So the scores of a step are computed while the values of the previous step
are summed. Values of 8 bits have one group for both tiles, so that each value is widened once.

Stored parts stay in the cache for the join (`evict_last`). Without that hint they would go to memory while keys and
values are read from there, which takes longer than their bytes suggest.

Leaves out: tree positions that the nodes see differently, and calls that do not fit; the items and the copies
(`split_kv_work_items_gluon.py`); how numbers of 8 bits are loaded (`eight_bit_kv_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import along, barrier, fence_async_shared, gdc_wait, mbarrier, mma_v2, stage_and_phase
from .eight_bit_kv_gluon import (
    NARROW_PIECE,
    SHUFFLED,
    in_columns,
    key_scales_of,
    keys_of,
    scale_places,
    shuffled,
    shuffled_from,
    values_of,
)
from .split_kv_work_items_gluon import Work, chosen, copy, listed, of_one
from .warp_specialized_steps_gluon import holes, over_columns, places, seen, weights_of

HANDED = gl.constexpr(2)  # steps whose weights wait for their values, at most
PIECE = gl.constexpr(64)  # numbers of a key that are multiplied at a time: fewer registers


@gluon.jit
def _hands(DTYPE: gl.constexpr, MT: gl.constexpr, NT: gl.constexpr, SIDES: gl.constexpr, TO: gl.constexpr):
    """Allocate shared memory between the groups: weights of a step, four factors per row (`_weigh`), and barriers.

    The barriers are for a full and for a free place. TO: groups of warps. Each factor has a separate buffer, because
    the compiler puts a barrier between stores to the same buffer.
    """
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    FACTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights = gl.allocate_shared_memory(DTYPE, [HANDED, SIDES * MT, NT], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    kept = gl.allocate_shared_memory(gl.float32, [HANDED, SIDES * MT], FACTOR)
    old = gl.allocate_shared_memory(gl.float32, [HANDED, SIDES * MT], FACTOR)
    own = gl.allocate_shared_memory(gl.float32, [HANDED, SIDES * MT], FACTOR)
    sees = gl.allocate_shared_memory(gl.float32, [HANDED, SIDES * MT], FACTOR)
    full = gl.allocate_shared_memory(gl.int64, [HANDED, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [HANDED, 1], BARRIER)
    for hand in gl.static_range(HANDED):
        mbarrier.init(full.index(hand), count=1)
        mbarrier.init(free.index(hand), count=TO)
    fence_async_shared()
    barrier()
    return weights, (kept, old, own, sees), full, free


@gluon.constexpr_function
def _by_thread(rows):
    """Layout of a tensor [rows, 4]: a thread has all four numbers of the rows that it has of a product."""
    registers = [[0, 1], [0, 2], *([row, 0] for row in (8, 16) if row < rows)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [rows, 4])


@gluon.jit
def _by_warp(x):
    """[rows, NT] -> [rows, 4, NT // 4]: of the 4 a warp has one"""
    ROWS: gl.constexpr = x.shape[0]
    NT: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [ROWS, NT // 32, 4, 8]), (0, 2, 1, 3)), [ROWS, 4, NT // 4])


@gluon.jit
def _highest(of_warps, OF_ROW: gl.constexpr):
    """The maximum of each row, from those of four warps"""
    return gl.convert_layout(gl.max(of_warps.load(_by_thread(of_warps.shape[0])), axis=1), OF_ROW)


@gluon.jit
def _added(of_warps, OF_ROW: gl.constexpr):
    """The sum of each row, from those of four warps, in the compiler's own order: first those that are 2 apart"""
    x = of_warps.load(_by_thread(of_warps.shape[0]))
    near, far = gl.split(gl.permute(gl.reshape(x, [of_warps.shape[0], 2, 2]), (0, 2, 1)))
    even, odd = gl.split(near + far)
    return gl.convert_layout(even + odd, OF_ROW)


@gluon.jit
def _scored(query_tile, key_tile, TILE: gl.constexpr):
    """Multiply all rows with the keys of a step; the products are not yet scaled."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, TILE, 2)
    score = gl.full((query_tile.shape[0], key_tile.shape[0]), 0.0, gl.float32, TILE)
    if query_tile.dtype != key_tile.dtype:
        for piece in gl.static_range(key_tile.shape[1] // NARROW_PIECE):
            left = query_tile.slice(piece * NARROW_PIECE, NARROW_PIECE, dim=1).load(LEFT)
            score = mma_v2(left, keys_of(key_tile, piece, query_tile.dtype, RIGHT), score)
    else:
        for piece in gl.static_range(key_tile.shape[1] // PIECE):
            left = query_tile.slice(piece * PIECE, PIECE, dim=1).load(LEFT)
            right = key_tile.slice(piece * PIECE, PIECE, dim=1).permute((1, 0)).load(RIGHT)
            score = mma_v2(left, right, score)
    return score


@gluon.jit
def _summed(weights, value, beside, kv_head, mean, position, step, stop, KV: gl.constexpr):
    """Add the values of a step, by their weights, to `mean`.

    weights: loaded, or their place in shared memory if values have 8 bits; beside: the scales of values, or None;
    position: along the keys of a step, or of a piece
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, mean.type.layout, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, mean.type.layout, 2)
    if beside is None:
        if step + value.shape[0] <= stop:
            mean = mma_v2(weights, value.load(RIGHT), mean)
        else:  # values after the last position may be NaN
            there = gl.expand_dims(position, 1) < stop - step
            mean = mma_v2(weights, gl.where(there, value.load(RIGHT), 0.0).to(value.dtype), mean)
    else:
        for piece in gl.static_range(value.shape[0] // SHUFFLED):
            weight = weights.slice(piece * SHUFFLED, SHUFFLED, dim=1).load(LEFT)
            there = position < stop - step - piece * SHUFFLED
            mean = mma_v2(weight, values_of(value, beside, kv_head, piece, there, RIGHT, KV), mean)
    return mean


@gluon.jit
def _factors(best, total, more, sum_of_more):
    """`joined` of `online_softmax.py` without means: maximum, sum, factors of both means, rows that see anything."""
    higher = gl.maximum(best, more)
    shift = gl.where(higher == float("-inf"), 0.0, higher)
    kept, new = gl.exp2(best - shift), gl.exp2(more - shift)
    sees = sum_of_more != 0.0  # also where it is NaN
    total = gl.where(sees, total * kept + sum_of_more * new, total)
    return gl.where(sees, higher, best), total, kept, new, gl.where(sees, 1.0, 0.0)


@gluon.jit
def _weigh(
    given, work, query_tile, tiles, beside, hands, exchanged,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, GROUP: gl.constexpr, BT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, SIDES: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    """Compute the weights of every step, with the tiles of an item below each other, and four factors for each row.

    The first factor rescales what was summed so far of the part. In the last step of a part there are three more: the
    factor of the earlier parts, the factor of this part, and whether the row sees anything of it (if not, neither
    counts).
    beside: the scales of keys, or None

    Each warp has a quarter of a step's positions. Maxima and sums of the quarters go through shared memory here, with
    one barrier each; the compiler's own reduction uses three.
    """
    query, group, scale, _, sums, room = given
    paged = work.paged
    key_tiles, _, full_keys, _, free_keys, _ = tiles
    weights, factors, full, free = hands
    kept_of, old_of, own_of, sees_of = factors
    maxima, totals = exchanged
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = SIDES * MT
    TILE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DT, DT // 8], [W, 1], [1, 0])
    if EARLY:
        gdc_wait()
    skipped, kv_heads, tokens = work.skipped, work.kv_heads, work.tokens
    lists, each = listed(work, PT, GROUP, BT, SIDES)
    begins = gl.load(paged.begin + lists[0], mask=lists[0] < work.requests, other=0)
    done = 0
    for item in range(gl.program_id(0), gl.max(lists[8], axis=0), gl.num_programs(0)):
        of, start, stop = chosen(item, lists, work, PT * each, SIDES)
        request, slot, kv_head, first, behind_last, known, unit, base = of
        line, row = paged.table + slot.to(gl.int64) * paged.table_row, of_one(lists[0] == request, begins)
        head = kv_head * group
        m, d = along(0, ROWS, LOADED), along(1, DT, LOADED)
        token = first + m // MT * tokens + m % MT // group
        inside = (m % MT // group < tokens) & (token < behind_last) & (d >= 0)
        source = query.at + (row + token) * query.per_row + (head + m % MT % group) * query.per_head + d
        loaded = gl.load(source, mask=inside, other=0.0)
        missing = holes(line, paged.table_column, start, stop, PAGE)
        barrier()
        query_tile.store(loaded if beside is None else shuffled(loaded))
        barrier()
        m = gl.arange(0, ROWS, OF_ROW)
        token = first + m // MT * tokens + m % MT // group
        last = known + token
        full_rows = gl.where(missing != 0, 0, gl.minimum(known + first + 1, stop))  # all rows see the positions before
        none, nothing = gl.full((ROWS,), float("-inf"), gl.float32, OF_ROW), gl.full((ROWS,), 0.0, gl.float32, OF_ROW)
        best, total = none, nothing
        for part in range(start, stop, PT):
            more, sum_of_more = none, nothing
            behind = gl.minimum(part + PT, stop)
            for step in range(part, behind, NT):
                place, phase = stage_and_phase(done, STAGES)
                hand, hand_phase = stage_and_phase(done, HANDED)
                mbarrier.wait(full_keys.index(place), phase)
                score = _scored(query_tile, key_tiles.index(place), TILE)
                if beside is not None:
                    scales = key_scales_of(beside.index(place), kv_head, gl.SliceLayout(0, TILE), NT, KV)
                    score *= gl.expand_dims(scales, 0)
                if step + NT > full_rows:
                    score = seen(score, step, stop, last, (line, paged.table_column), missing, NT, PAGE)
                maxima.store(gl.max(_by_warp(score), axis=2))
                barrier()
                mbarrier.arrive(free_keys.index(place), count=1)
                higher = gl.maximum(more, _highest(maxima, OF_ROW) * scale)
                weight, kept = weights_of(score, more, higher, scale)
                mbarrier.wait(free.index(hand), hand_phase ^ 1)
                handed = weight.to(weights.dtype)
                weights.index(hand).store(handed if beside is None else shuffled(handed))
                kept_of.index(hand).store(kept)
                totals.store(gl.sum(_by_warp(weight), axis=2))
                barrier()
                if step + NT < behind:
                    mbarrier.arrive(full.index(hand), count=1)
                new = sum_of_more * kept + _added(totals, OF_ROW)
                if step + NT > full_rows:  # a step after a row's last position does not change the row
                    reached = step <= last
                    higher, new = gl.where(reached, higher, more), gl.where(reached, new, sum_of_more)
                more, sum_of_more = higher, new
                if step + NT >= behind:
                    best, total, old, own, sees = _factors(best, total, more, sum_of_more)
                    old_of.index(hand).store(old)
                    own_of.index(hand).store(own)
                    sees_of.index(hand).store(sees)
                    barrier()
                    mbarrier.arrive(full.index(hand), count=1)
                done += 1
        live = (m % MT // group < tokens) & (token < gl.where(base + unit < room, behind_last, 0))
        spot = ((base + unit).to(gl.int64) * work.most + token - skipped) * (kv_heads * group) + head + m % MT % group
        gl.store(sums + spot * 2, best, mask=live, eviction_policy="evict_last")
        gl.store(sums + spot * 2 + 1, total, mask=live, eviction_policy="evict_last")


@gluon.jit
def _factor(factors, hand, AT: gl.constexpr, ROWS: gl.constexpr, OF_ROW: gl.constexpr):
    """Load a factor for ROWS rows, from row AT on."""
    return gl.expand_dims(factors.index(hand).slice(AT, ROWS).load(OF_ROW), 1)


@gluon.jit
def _gather(
    given, work, tiles, beside, hands,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, GROUP: gl.constexpr, BT: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, SIDES: gl.constexpr, KV: gl.constexpr, SIDE: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """Sum the means of the first or the second tile of every item, or of TILES tiles below each other.

    beside: the scales of values, or None
    """
    _, group, _, means, _, room = given
    _, value_tiles, _, full_values, _, free_values = tiles
    weights, factors, full, free = hands
    kept_of, old_of, own_of, sees_of = factors
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = TILES * MT
    AT: gl.constexpr = SIDE * MT
    TILE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, TILE, 2)
    if EARLY:
        gdc_wait()
    skipped, kv_heads, tokens = work.skipped, work.kv_heads, work.tokens
    position = gl.arange(0, NT if beside is None else SHUFFLED, gl.SliceLayout(1, RIGHT))
    if beside is not None:
        position = shuffled_from(position)
    lists, each = listed(work, PT, GROUP, BT, SIDES)
    done = 0
    for item in range(gl.program_id(0), gl.max(lists[8], axis=0), gl.num_programs(0)):
        of, start, stop = chosen(item, lists, work, PT * each, SIDES)
        kv_head, first, behind_last, known, unit, base = of[2], of[3] + SIDE * tokens, of[4], of[5], of[6], of[7]
        if first >= behind_last:  # a tile without rows
            for _step in range(start, stop, NT):
                place, phase = stage_and_phase(done, STAGES)
                hand, hand_phase = stage_and_phase(done, HANDED)
                mbarrier.wait(full.index(hand), hand_phase)
                mbarrier.arrive(free.index(hand), count=1)
                mbarrier.wait(full_values.index(place), phase)
                mbarrier.arrive(free_values.index(place), count=1)
                done += 1
            stop = start
        m = gl.arange(0, ROWS, OF_ROW)
        token = first + m // MT * tokens + m % MT // group
        last = known + token
        full_rows = gl.minimum(known + first + 1, stop)
        mean = gl.full((ROWS, DT), 0.0, gl.float32, TILE)
        for part in range(start, stop, PT):
            mean_of_more = gl.full((ROWS, DT), 0.0, gl.float32, TILE)
            behind = gl.minimum(part + PT, stop)
            for step in range(part, behind, NT):
                place, phase = stage_and_phase(done, STAGES)
                hand, hand_phase = stage_and_phase(done, HANDED)
                mbarrier.wait(full.index(hand), hand_phase)
                weight = weights.index(hand).slice(AT, ROWS, dim=0)
                weight = weight.load(LEFT) if beside is None else weight
                mean_of_all = mean_of_more * _factor(kept_of, hand, AT, ROWS, OF_ROW)
                mbarrier.wait(full_values.index(place), phase)
                value, scales = value_tiles.index(place), None if beside is None else beside.index(place)
                mean_of_all = _summed(weight, value, scales, kv_head, mean_of_all, position, step, stop, KV)
                mbarrier.arrive(free_values.index(place), count=1)
                if step + NT > full_rows:  # as in `_weigh`
                    mean_of_all = gl.where(gl.expand_dims(step <= last, 1), mean_of_all, mean_of_more)
                mean_of_more = mean_of_all
                if step + NT >= behind:
                    old, own = (_factor(old_of, hand, AT, ROWS, OF_ROW),
                                _factor(own_of, hand, AT, ROWS, OF_ROW))  # fmt: skip
                    sees = _factor(sees_of, hand, AT, ROWS, OF_ROW) != 0.0
                    mean = gl.where(sees, mean * old + mean_of_more * own, mean)
                mbarrier.arrive(free.index(hand), count=1)
                done += 1
        live = (m % MT // group < tokens) & (token < gl.where(base + unit < room, behind_last, 0))
        head = kv_head * group + m % MT % group
        spot = ((base + unit).to(gl.int64) * work.most + token - skipped) * (kv_heads * group) + head
        stored = mean if beside is None else in_columns(mean)
        STORED: gl.constexpr = stored.type.layout
        d = along(1, DT, STORED)
        spot, live = over_columns(spot * DT, gl.SliceLayout(1, STORED)), over_columns(live, gl.SliceLayout(1, STORED))
        gl.store(means + spot + d, stored, mask=live & (d >= 0), eviction_policy="evict_last")


@gluon.jit(do_not_specialize=["most", "skipped", "few", "room", "requests"])
def read_parts_staged(
    query, keys, values, key_scales, value_scales, paged, scale, means, sums, most, skipped, few, room, requests,
    group: gl.constexpr, kv_heads: gl.constexpr, tokens: gl.constexpr, MT: gl.constexpr, NT: gl.constexpr,
    DT: gl.constexpr, PT: gl.constexpr, GROUP: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
    SIDES: gl.constexpr,
):  # fmt: skip
    """Read parts of the positions of one request, for SIDES tiles of rows and the heads of one KV head. Grid: any."""
    DTYPE: gl.constexpr = query.at.dtype.element_ty
    work = Work(paged, most, skipped, few, requests, kv_heads, tokens)
    given = (query, group, scale, means, sums, room)
    query_tile = gl.allocate_shared_memory(DTYPE, [SIDES * MT, DT], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    TO: gl.constexpr = SIDES if key_scales is None else 1  # groups of warps that sum values
    hands = _hands(DTYPE, MT, NT, SIDES, TO)
    OF_WARPS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    exchanged = (gl.allocate_shared_memory(gl.float32, [SIDES * MT, 4], OF_WARPS),
                 gl.allocate_shared_memory(gl.float32, [SIDES * MT, 4], OF_WARPS))  # fmt: skip
    tiles = places(keys.dtype, NT, DT, STAGES, 1, TO)
    scales, beside = (key_scales, value_scales), (None, None)
    if key_scales is not None:
        beside = scale_places(NT, kv_heads, STAGES)
    if TO == 1:
        gl.warp_specialize(
            [
                (_weigh, (given, work, query_tile, tiles, beside[0], hands, exchanged, MT, NT, DT, PT, GROUP, BT, PAGE,
                          STAGES, EARLY, SIDES, kv_heads)),
                (_gather, (given, work, tiles, beside[1], hands, MT, NT, DT, PT, GROUP, BT, STAGES, EARLY, SIDES,
                           kv_heads, 0, SIDES)),
                (copy, (keys, values, scales, work, tiles, beside, NT, DT, PT, GROUP, BT, PAGE, STAGES, EARLY, SIDES,
                        kv_heads)),
            ],
            [4, 1], [REGISTERS, COPIER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_weigh, (given, work, query_tile, tiles, None, hands, exchanged, MT, NT, DT, PT, GROUP, BT, PAGE,
                          STAGES, EARLY, SIDES, kv_heads)),
                (_gather, (given, work, tiles, None, hands, MT, NT, DT, PT, GROUP, BT, STAGES, EARLY, SIDES, kv_heads,
                           0, 1)),
                (_gather, (given, work, tiles, None, hands, MT, NT, DT, PT, GROUP, BT, STAGES, EARLY, SIDES, kv_heads,
                           1, 1)),
                (copy, (keys, values, scales, work, tiles, beside, NT, DT, PT, GROUP, BT, PAGE, STAGES, EARLY, SIDES,
                        kv_heads)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, COPIER_REGISTERS],
        )  # fmt: skip
