"""`read_parts` of `attend_parts.py` with explicit layouts: a group of warps copies positions, two others read them.

Leaves out: trees, and what else does not fit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .layouts import along, async_copy, barrier, begin_copy, gdc_launch_dependents, gdc_wait


@gluon.jit
def added(x, y):
    return x + y


@gluon.jit
def listed(
    slots, count, before, held, window, most, skipped, requests, kv_heads, tokens, PT: gl.constexpr, BT: gl.constexpr
):  # fmt: skip
    """Of every request [BT]: pairs of tiles, units, whole units, the first unit, and where its items end in both lists:
    that of whole units and that of broken ones."""
    LANES: gl.constexpr = gl.BlockedLayout([BT // 32], [32], [gl.num_warps()], [0])
    b = gl.arange(0, BT, LANES)
    there = b < requests
    rows, slot = gl.load(count + b, mask=there, other=0), gl.load(slots + b, mask=there, other=-1)
    known = gl.load(before + b, mask=there, other=0)
    here = gl.minimum(rows - skipped, most)
    reach = gl.minimum(known + skipped + here, held)
    rows = gl.where((slot < 0) | (rows > window) | (here < 0), 0, here).to(gl.int32)
    reach = gl.where(rows > 0, reach, 0).to(gl.int32)
    pairs, units, whole = (rows + 2 * tokens - 1) // (2 * tokens), (reach + PT - 1) // PT, reach // PT
    first = gl.associative_scan(units, 0, added) - units
    whole_ends = gl.associative_scan(kv_heads * pairs * whole, 0, added)
    ends = gl.associative_scan(kv_heads * pairs * (units - whole), 0, added) + gl.max(whole_ends, axis=0)
    return b, pairs, whole, first, whole_ends, ends


@gluon.jit
def chosen(item, lists, kv_heads):
    """An item -> its request, KV head, pair of tiles, unit, and the number of the request's first unit."""
    b, pairs, whole, first, whole_ends, ends = lists
    broken = item >= gl.max(whole_ends, axis=0)
    behind = gl.where(broken, ends, whole_ends)
    request = gl.sum((behind <= item).to(gl.int32), axis=0)
    begun = gl.max(gl.where(behind <= item, behind, 0), axis=0)
    begun = gl.where(broken, gl.maximum(begun, gl.max(whole_ends, axis=0)), begun)
    at, mine = item - begun, b == request
    its = gl.maximum(gl.sum(gl.where(mine, pairs, 0), axis=0), 1)
    unit = at // its // kv_heads + gl.where(broken, gl.sum(gl.where(mine, whole, 0), axis=0), 0)
    return request, at // its % kv_heads, at % its, unit, gl.sum(gl.where(mine, first, 0), axis=0)


@gluon.jit
def bounds(request, pair, unit, count, before, held, most, skipped, tokens, PT: gl.constexpr):
    """The first row of a pair of tiles, how many rows there are, and the positions from .. to that these see."""
    rows = gl.minimum(gl.load(count + request).to(gl.int32) - skipped, most)
    known, first = gl.load(before + request).to(gl.int32), skipped + pair * 2 * tokens
    reach = gl.minimum(known + gl.minimum(first + 2 * tokens, skipped + rows), held).to(gl.int32)
    start = unit * PT
    return first, rows, known, start, gl.minimum(start + PT, reach)


@gluon.jit
def copy(
    keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head, table, table_row,
    table_column, held, slots, count, before, window, most, skipped, requests, kv_heads, tokens, items,
    key_tiles, value_tiles, full_keys, full_values, free_keys, free_values,
    NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DT, DT // 8], [gl.num_warps(), 1], [1, 0])
    position, d = gl.arange(0, NT, gl.SliceLayout(1, ROWS)), along(1, DT, ROWS)
    lists = listed(slots, count, before, held, window, most, skipped, requests, kv_heads, tokens, PT, BT)
    here, turn = 0, 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        request, kv_head, pair, unit, _ = chosen(item, lists, kv_heads)
        _, _, _, start, stop = bounds(request, pair, unit, count, before, held, most, skipped, tokens, PT)
        line = table + gl.load(slots + request) * table_row
        of_key, of_value = keys + kv_head.to(gl.int64) * keys_head, values + kv_head.to(gl.int64) * values_head
        for step in range(start, stop, NT):
            at = step + position
            page = gl.load(line + at // PAGE * table_column, mask=at < stop, other=-1)
            inside = gl.expand_dims(page >= 0, 1) & (d >= 0)
            mbarrier.wait(free_keys.index(here), turn)
            source = of_key + gl.expand_dims(page * keys_page + at % PAGE * keys_entry, 1) + d
            begin_copy(key_tiles.index(here), source, mask=inside)
            async_copy.mbarrier_arrive(full_keys.index(here), increment_count=False)
            mbarrier.wait(free_values.index(here), turn)
            source = of_value + gl.expand_dims(page * values_page + at % PAGE * values_entry, 1) + d
            begin_copy(value_tiles.index(here), source, mask=inside)
            async_copy.mbarrier_arrive(full_values.index(here), increment_count=False)
            here += 1
            if here == STAGES:
                here = 0
                turn = turn ^ 1
    async_copy.wait_group(0)


@gluon.jit
def weigh(
    score, best, total, scale, at, last, step, stop, line, table_column, ALL: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    if ALL:
        higher = gl.maximum(best, gl.max(score, axis=1) * scale)
    else:
        sees = (gl.load(line + at // PAGE * table_column, mask=at < stop, other=-1) >= 0) & (at < stop)
        score = gl.where(sees & (at <= gl.expand_dims(last, 1)), score, float("-inf"))
        higher = gl.maximum(best, gl.max(score, axis=1) * scale)
    shift = gl.where(higher == float("-inf"), 0.0, higher)
    kept = gl.exp2(best - shift)
    shift = gl.expand_dims(shift, 1)
    weight = gl.exp2(gl.fma(score, gl.zeros_like(score) + scale, gl.zeros_like(score) - shift))
    return weight, kept, higher, total * kept + gl.sum(weight, axis=1)


@gluon.jit
def joined(best, total, mean, more, sum_of_more, mean_of_more, OF_MEAN: gl.constexpr):
    higher = gl.maximum(best, more)
    shift = gl.where(higher == float("-inf"), 0.0, higher)
    kept, new = gl.exp2(best - shift), gl.exp2(more - shift)
    sees = sum_of_more != 0.0
    both = mean * spread(kept, OF_MEAN) + mean_of_more * spread(new, OF_MEAN)
    mean = gl.where(spread(sees, OF_MEAN), both, mean)
    return gl.where(sees, higher, best), gl.where(sees, total * kept + sum_of_more * new, total), mean


@gluon.jit
def spread(x, OF_MEAN: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(x, OF_MEAN), 1)


@gluon.jit
def compute(
    query, query_row, query_head, table, table_row, table_column, held, slots, begin, count, before, window, group, scale,
    means, sums, most, skipped, room, requests, kv_heads, tokens, items,
    query_tile, key_tiles, value_tiles, full_keys, full_values, free_keys, free_values,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, EACH: gl.constexpr, BT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, TILE, 2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DT, DT // 8], [W, 1], [1, 0])
    lists = listed(slots, count, before, held, window, most, skipped, requests, kv_heads, tokens, PT * EACH, BT)
    column, d = along(1, NT, TILE), along(1, DT, TILE)
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [W], [0]))
    here, turn = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        request, kv_head, pair, unit, base = chosen(item, lists, kv_heads)
        first, rows, known, start, stop = bounds(
            request, pair, unit, count, before, held, most, skipped, tokens, PT * EACH
        )  # fmt: skip
        first += SIDE * tokens
        line, row = table + gl.load(slots + request) * table_row, gl.load(begin + request)
        m = along(0, MT, LOADED)
        inside = (m // group < tokens) & (first + m // group < skipped + rows)
        source = query + (row + first + m // group) * query_row + (kv_head * group + m % group).to(gl.int64) * query_head
        barrier()
        query_tile.store(gl.load(source + along(1, DT, LOADED), mask=inside & (along(1, DT, LOADED) >= 0), other=0.0))
        barrier()
        m = gl.arange(0, MT, OF_ROW)
        last = known + first + m // group
        full = known + first + 1
        missing = 0
        for begun in range(start // PAGE * PAGE, stop, 32 * PAGE):
            pages = gl.load(line + (begun // PAGE + lanes) * table_column, mask=begun + lanes * PAGE < stop, other=0)
            missing = gl.maximum(missing, gl.max((pages < 0).to(gl.int32), axis=0))
        full = gl.where(missing != 0, 0, full)
        best, total = gl.full((MT,), float("-inf"), gl.float32, OF_ROW), gl.full((MT,), 0.0, gl.float32, OF_ROW)
        mean = gl.full((MT, DT), 0.0, gl.float32, TILE)
        for part in range(start, stop, PT):
            best_of, total_of = gl.full((MT,), float("-inf"), gl.float32, OF_ROW), gl.full((MT,), 0.0, gl.float32, OF_ROW)
            mean_of = gl.full((MT, DT), 0.0, gl.float32, TILE)
            for step in range(part, gl.minimum(part + PT, stop), NT):
                score = gl.full((MT, NT), 0.0, gl.float32, TILE)
                mbarrier.wait(full_keys.index(here), turn)
                for piece in gl.static_range(DT // PIECE):
                    left = query_tile.slice(piece * PIECE, PIECE, dim=1).load(LEFT)
                    right = key_tiles.index(here).slice(piece * PIECE, PIECE, dim=1).permute((1, 0)).load(RIGHT)
                    score = mma_v2(left, right, score)
                mbarrier.arrive(free_keys.index(here), count=1)
                if step + NT <= gl.minimum(full, stop):
                    weight, kept, best_of, total_of = weigh(
                        score, best_of, total_of, scale, step + column, last, step, stop, line, table_column, True, PAGE
                    )  # fmt: skip
                    mean_of = mean_of * spread(kept, OF_ROW)
                else:
                    weight, kept, higher, new_total = weigh(
                        score, best_of, total_of, scale, step + column, last, step, stop, line, table_column, False, PAGE
                    )  # fmt: skip
                    reached = step <= last
                    best_of, total_of = gl.where(reached, higher, best_of), gl.where(reached, new_total, total_of)
                    weight = gl.where(gl.expand_dims(reached, 1), weight, 0.0)
                    mean_of = gl.where(gl.expand_dims(reached, 1), mean_of * spread(kept, OF_ROW), mean_of)
                weights = gl.convert_layout(weight.to(value_tiles.dtype), LEFT)
                mbarrier.wait(full_values.index(here), turn)
                mean_of = mma_v2(weights, value_tiles.index(here).load(RIGHT), mean_of)
                mbarrier.arrive(free_values.index(here), count=1)
                here += 1
                if here == STAGES:
                    here = 0
                    turn = turn ^ 1
            if EACH == 1:
                best, total, mean = best_of, total_of, mean_of
            else:
                best, total, mean = joined(best, total, mean, best_of, total_of, mean_of, OF_ROW)
        token = first + m // group
        live = (m // group < tokens) & (token < gl.where(base + unit < room, skipped + rows, 0))
        spot = ((base + unit).to(gl.int64) * most + token - skipped) * (kv_heads * group) + kv_head * group + m % group
        gl.store(means + gl.expand_dims(spot * DT, 1) + d, mean, mask=gl.expand_dims(live, 1) & (d >= 0))
        gl.store(sums + spot * 2, best, mask=live)
        gl.store(sums + spot * 2 + 1, total, mask=live)


@gluon.jit(do_not_specialize=["rows_of_all", "most", "skipped", "room", "requests", "tokens"])
def read_parts_apart(
    query, query_row, query_head,
    keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head,
    table, table_row, table_column, held, slots, begin, count, before, window,
    group, scale, attended, attended_row, attended_head, rows_of_all, means, sums, most, skipped, room, requests,
    kv_heads, tokens,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, EACH: gl.constexpr, BT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PIECE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Parts of the positions of one request, for `2 * tokens` rows and the heads of one KV head. Grid: any."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    W: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([BT // 32], [32], [W], [0])
    ALONG: gl.constexpr = gl.BlockedLayout([DT // 32 // W], [32], [W], [0])
    DTYPE: gl.constexpr = query.dtype.element_ty
    TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    b, d = gl.arange(0, BT, LANES), gl.arange(0, DT, ALONG)
    begins = gl.load(begin + b, mask=b < requests, other=0)
    served = gl.where(gl.load(slots + b, mask=b < requests, other=-1) < 0, 0, 1)
    behind = begins + served * gl.load(count + b, mask=b < requests, other=0)
    for some_row in range(gl.program_id(0), rows_of_all, gl.num_programs(0)):
        if gl.max(((begins <= some_row) & (some_row < behind)).to(gl.int32), axis=0) == 0:  # of no request
            for some_head in range(kv_heads * group):
                into = attended + some_row.to(gl.int64) * attended_row + some_head * attended_head
                gl.store(into + d, gl.full((DT,), 0.0, attended.dtype.element_ty, ALONG))
    lists = listed(slots, count, before, held, window, most, skipped, requests, kv_heads, tokens, PT * EACH, BT)
    items = gl.max(lists[5], axis=0)
    if gl.program_id(0) >= items:
        return
    query_tiles = gl.allocate_shared_memory(DTYPE, [2, MT, DT], TILE)
    key_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, NT, DT], TILE)
    value_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, NT, DT], TILE)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(stage), count=128)
        mbarrier.init(full_values.index(stage), count=128)
        mbarrier.init(free_keys.index(stage), count=2)
        mbarrier.init(free_values.index(stage), count=2)
    barrier()
    gl.warp_specialize(
        [
            (compute, (query, query_row, query_head, table, table_row, table_column, held, slots, begin, count, before,
                       window, group, scale, means, sums, most, skipped, room, requests, kv_heads, tokens, items,
                       query_tiles.index(0), key_tiles, value_tiles, full_keys, full_values, free_keys, free_values,
                       MT, NT, DT, PT, EACH, BT, PAGE, STAGES, PIECE, 0)),
            (compute, (query, query_row, query_head, table, table_row, table_column, held, slots, begin, count, before,
                       window, group, scale, means, sums, most, skipped, room, requests, kv_heads, tokens, items,
                       query_tiles.index(1), key_tiles, value_tiles, full_keys, full_values, free_keys, free_values,
                       MT, NT, DT, PT, EACH, BT, PAGE, STAGES, PIECE, 1)),
            (copy, (keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head, table,
                    table_row, table_column, held, slots, count, before, window, most, skipped, requests, kv_heads,
                    tokens, items, key_tiles, value_tiles, full_keys, full_values, free_keys, free_values,
                    NT, DT, PT * EACH, BT, PAGE, STAGES)),
        ],
        [4, 4], [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
