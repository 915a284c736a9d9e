"""`read_parts` of `attend_parts.py` with explicit layouts: the same bits, and copies go on while parts are computed.

Leaves out: trees, and what else does not fit; the device functions (`attend_staged.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attend_staged import copied, holes, over_columns, places, seen, weighed, where
from .attend_steps import joined
from .layouts import along, barrier, gdc_wait, mbarrier, mma_v2

PIECE = gl.constexpr(64)  # numbers of a key that are multiplied at a time: fewer registers
joined = gluon.jit(joined.fn)


@gluon.jit
def _plus(x, y):
    return x + y


@gluon.jit
def _listed(work, UNIT: gl.constexpr, BT: gl.constexpr):
    """Of every request [BT]: pairs of tiles, whole units, its first unit, and where its items end in two lists.

    A unit is whole or broken. The list of the whole ones comes first: they take the same time.
    """
    slots, count, before, held, window, most, skipped, requests, kv_heads, tokens = work
    b = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [gl.num_warps()], [0]))
    there = b < requests
    rows, slot = gl.load(count + b, mask=there, other=0), gl.load(slots + b, mask=there, other=-1)
    here = gl.minimum(rows - skipped, most)
    reach = gl.minimum(gl.load(before + b, mask=there, other=0) + skipped + here, held)
    rows = gl.where((slot < 0) | (rows > window) | (here < 0), 0, here).to(gl.int32)
    reach = gl.where(rows > 0, reach, 0).to(gl.int32)
    pairs, units, whole = (rows + 2 * tokens - 1) // (2 * tokens), (reach + UNIT - 1) // UNIT, reach // UNIT
    first = gl.associative_scan(units, 0, _plus) - units
    whole_ends = gl.associative_scan(kv_heads * pairs * whole, 0, _plus)
    ends = gl.associative_scan(kv_heads * pairs * (units - whole), 0, _plus) + gl.max(whole_ends, axis=0)
    return b, pairs, whole, first, whole_ends, ends


@gluon.jit
def _chosen(item, lists, work, UNIT: gl.constexpr):
    """An item -> its request, KV head, first row, unit, the request's first unit; and the positions that it reads."""
    b, pairs, whole, first, whole_ends, ends = lists
    _, count, before, held, _, most, skipped, _, kv_heads, tokens = work
    all_whole = gl.max(whole_ends, axis=0)
    broken = item >= all_whole
    behind = gl.where(broken, ends, whole_ends)
    request = gl.sum((behind <= item).to(gl.int32), axis=0)
    begun = gl.maximum(gl.max(gl.where(behind <= item, behind, 0), axis=0), gl.where(broken, all_whole, 0))
    at, mine = item - begun, b == request
    its = gl.maximum(gl.sum(gl.where(mine, pairs, 0), axis=0), 1)
    unit = at // its // kv_heads + gl.where(broken, gl.sum(gl.where(mine, whole, 0), axis=0), 0)
    row = skipped + at % its * 2 * tokens
    rows, known = gl.load(count + request).to(gl.int32), gl.load(before + request).to(gl.int32)
    behind_last = gl.minimum(rows, skipped + most)
    reach = gl.minimum(known + gl.minimum(row + 2 * tokens, behind_last), held).to(gl.int32)
    start, base = unit * UNIT, gl.sum(gl.where(mine, first, 0), axis=0)
    return (request, at // its % kv_heads, row, behind_last, known, unit, base), start, gl.minimum(start + UNIT, reach)


@gluon.jit
def _copy(
    keys, values, table, table_row, table_column, work, items, tiles,
    NT: gl.constexpr, DT: gl.constexpr, UNIT: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    lists, done = _listed(work, UNIT, BT), 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        of, start, stop = _chosen(item, lists, work, UNIT)
        pages = (table + gl.load(work[0] + of[0]) * table_row, table_column)
        done = copied(done, start, stop, keys, values, of[1] * DT, pages, tiles, NT, DT, PAGE, STAGES, False)


@gluon.jit
def _read(
    given, work, items, query_tile, tiles,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, EACH: gl.constexpr, BT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """The first or the second tile of every pair."""
    query, query_row, query_head, table, table_row, table_column, begin, group, scale, means, sums, room = given
    key_tiles, value_tiles, full_keys, full_values, free_keys, free_values, _ = tiles
    W: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, TILE, 2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DT, DT // 8], [W, 1], [1, 0])
    most, skipped, kv_heads, tokens = work[5], work[6], work[8], work[9]
    position = gl.arange(0, NT, gl.SliceLayout(1, RIGHT))
    lists, done = _listed(work, PT * EACH, BT), 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        of, start, stop = _chosen(item, lists, work, PT * EACH)
        request, kv_head, first, behind_last, known, unit, base = of
        first += SIDE * tokens
        line, row, head = table + gl.load(work[0] + request) * table_row, gl.load(begin + request), kv_head * group
        m, d = along(0, MT, LOADED), along(1, DT, LOADED)
        inside = (m // group < tokens) & (first + m // group < behind_last) & (d >= 0)
        source = query + (row + first + m // group) * query_row + (head + m % group) * query_head + d
        loaded = gl.load(source, mask=inside, other=0.0)
        missing = holes(line, table_column, start, stop, PAGE)
        barrier()
        query_tile.store(loaded)
        barrier()
        m = gl.arange(0, MT, OF_ROW)
        last = known + first + m // group
        full = gl.where(missing != 0, 0, gl.minimum(known + first + 1, stop))  # all rows see the positions before it
        none, nothing = gl.full((MT,), float("-inf"), gl.float32, OF_ROW), gl.full((MT,), 0.0, gl.float32, OF_ROW)
        best, total, mean = none, nothing, gl.full((MT, DT), 0.0, gl.float32, TILE)
        for part in range(start, stop, PT):
            more, sum_of_more, mean_of_more = none, nothing, gl.full((MT, DT), 0.0, gl.float32, TILE)
            for step in range(part, gl.minimum(part + PT, stop), NT):
                place, turn = where(done, STAGES)
                score = gl.full((MT, NT), 0.0, gl.float32, TILE)
                mbarrier.wait(full_keys.index(place), turn)
                for piece in gl.static_range(DT // PIECE):
                    left = query_tile.slice(piece * PIECE, PIECE, dim=1).load(LEFT)
                    right = key_tiles.index(place).slice(piece * PIECE, PIECE, dim=1).permute((1, 0)).load(RIGHT)
                    score = mma_v2(left, right, score)
                mbarrier.arrive(free_keys.index(place), count=1)
                if step + NT > full:
                    score = seen(score, step, stop, last, (line, table_column), missing, NT, PAGE)
                weight, kept, higher, new = weighed(score, more, sum_of_more, scale)
                weights = gl.convert_layout(weight.to(value_tiles.dtype), LEFT)
                mbarrier.wait(full_values.index(place), turn)
                mean_of_all, value = mean_of_more * over_columns(kept, OF_ROW), value_tiles.index(place)
                if step + NT <= stop:
                    mean_of_all = mma_v2(weights, value.load(RIGHT), mean_of_all)
                else:  # behind the last position may be NaN
                    there = gl.expand_dims(position, 1) < stop - step
                    mean_of_all = mma_v2(weights, gl.where(there, value.load(RIGHT), 0.0).to(value.dtype), mean_of_all)
                mbarrier.arrive(free_values.index(place), count=1)
                if step + NT > full:  # a row is not changed by a step that lies behind its last position
                    reached = step <= last
                    higher, new = gl.where(reached, higher, more), gl.where(reached, new, sum_of_more)
                    mean_of_all = gl.where(gl.expand_dims(reached, 1), mean_of_all, mean_of_more)
                more, sum_of_more, mean_of_more = higher, new, mean_of_all
                done += 1
            if EACH == 1:
                best, total, mean = more, sum_of_more, mean_of_more
            else:
                best, total, mean = joined(best, total, mean, more, sum_of_more, mean_of_more)
        token = first + m // group
        live = (m // group < tokens) & (token < gl.where(base + unit < room, behind_last, 0))
        spot = ((base + unit).to(gl.int64) * most + token - skipped) * (kv_heads * group) + head + m % group
        d = along(1, DT, TILE)
        gl.store(means + gl.expand_dims(spot * DT, 1) + d, mean, mask=gl.expand_dims(live, 1) & (d >= 0))
        gl.store(sums + spot * 2, best, mask=live)
        gl.store(sums + spot * 2 + 1, total, mask=live)


@gluon.jit(do_not_specialize=["rows_of_all", "most", "skipped", "room", "requests", "tokens"])
def read_parts_staged(
    query, query_row, query_head, keys, values,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, nodes, window,
    group, width, scale, attended, attended_row, attended_head, rows_of_all, means, sums, most, skipped, room, requests,
    kv_heads, tokens,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, EACH: gl.constexpr, BT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Parts of the positions of one request, for two tiles of rows and the heads of one KV head. Grid: any."""
    if EARLY:  # the launch behind this one does not come early: its programs would crowd where these end first
        gdc_wait()
    W: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = query.dtype.element_ty
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    ALONG: gl.constexpr = gl.BlockedLayout([DT // 32 // W if DT >= 32 * W else 1], [32], [W], [0])
    work = (slots, count, before, held, window, most, skipped, requests, kv_heads, tokens)
    b = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [W], [0]))
    begins = gl.load(begin + b, mask=b < requests, other=0)
    served = gl.where(gl.load(slots + b, mask=b < requests, other=-1) < 0, 0, 1)
    behind = begins + served * gl.load(count + b, mask=b < requests, other=0)
    covered = gl.sum(gl.where(begins >= 0, behind - begins, 0), axis=0)
    for some_row in range(gl.program_id(0), gl.where(covered == rows_of_all, 0, rows_of_all), gl.num_programs(0)):
        if gl.max(((begins <= some_row) & (some_row < behind)).to(gl.int32), axis=0) == 0:  # of no request
            d = gl.arange(0, DT, ALONG)
            for some_head in range(kv_heads * group):
                into = attended + gl.cast(some_row, gl.int64) * attended_row + some_head * attended_head
                gl.store(into + d, gl.full((DT,), 0.0, attended.dtype.element_ty, ALONG))
    items = gl.max(_listed(work, PT * EACH, BT)[5], axis=0)
    if gl.program_id(0) >= items:
        return
    query_tiles = gl.allocate_shared_memory(DTYPE, [2, MT, DT], SHARED)
    tiles = places(DTYPE, NT, DT, STAGES)
    given = (query, query_row, query_head, table, table_row, table_column, begin, group, scale, means, sums, room)
    gl.warp_specialize(
        [
            (_read, (given, work, items, query_tiles.index(0), tiles, MT, NT, DT, PT, EACH, BT, PAGE, STAGES, 0)),
            (_read, (given, work, items, query_tiles.index(1), tiles, MT, NT, DT, PT, EACH, BT, PAGE, STAGES, 1)),
            (_copy, (keys, values, table, table_row, table_column, work, items, tiles, NT, DT, PT * EACH, BT, PAGE,
                     STAGES)),
        ],
        [4, 1], [REGISTERS, COPIER_REGISTERS],
    )  # fmt: skip
