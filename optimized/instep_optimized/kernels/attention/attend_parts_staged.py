"""`read_parts` of `attend_parts.py` with explicit layouts: the same bits, and copies go on while parts are computed.

Leaves out: trees, and what else does not fit; many requests (`attend_parts_apart.py`); the device functions
(`attend_staged.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.layouts import along, barrier, gdc_launch_dependents, gdc_wait, mbarrier, mma_v2, stage_and_phase
from .attend_staged import copied, holes, over_columns, places, seen, weighed
from .attend_steps import joined

PIECE = gl.constexpr(64)  # numbers of a key that are multiplied at a time: fewer registers
joined = gluon.jit(joined.fn)


@gluon.jit
def _plus(x, y):
    return x + y


@gluon.jit
def _units(positions, each, PT: gl.constexpr, GROUP: gl.constexpr):
    """Whole units in so many positions: parts, or groups of them."""
    return gl.where(each == 1, positions // PT, positions // (PT * GROUP))


@gluon.jit
def scored(query_tile, key_tile, TILE: gl.constexpr):
    """Products of all rows with the keys of a step, not yet scaled"""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, TILE, 2)
    score = gl.full((query_tile.shape[0], key_tile.shape[0]), 0.0, gl.float32, TILE)
    for piece in gl.static_range(key_tile.shape[1] // PIECE):
        left = query_tile.slice(piece * PIECE, PIECE, dim=1).load(LEFT)
        right = key_tile.slice(piece * PIECE, PIECE, dim=1).permute((1, 0)).load(RIGHT)
        score = mma_v2(left, right, score)
    return score


@gluon.jit
def summed(weights, value, mean, position, step, stop):
    """The values of a step, by their weights, added to `mean`. position: along the keys of a step"""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, mean.type.layout, 2)
    if step + value.shape[0] <= stop:
        mean = mma_v2(weights, value.load(RIGHT), mean)
    else:  # behind the last position may be NaN
        there = gl.expand_dims(position, 1) < stop - step
        mean = mma_v2(weights, gl.where(there, value.load(RIGHT), 0.0).to(value.dtype), mean)
    return mean


@gluon.jit
def listed(work, PT: gl.constexpr, GROUP: gl.constexpr, BT: gl.constexpr):
    """Of every request [BT]: what its items are made from, and where they end in two lists; parts in a unit.

    A unit is whole or broken. The list of the whole ones comes first: they take the same time.
    """
    slots, count, before, held, window, most, skipped, few, requests, kv_heads, tokens = work
    b = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [gl.num_warps()], [0]))
    there = b < requests
    rows, slot = gl.load(count + b, mask=there, other=0), gl.load(slots + b, mask=there, other=-1)
    known = gl.load(before + b, mask=there, other=0)
    here = gl.minimum(rows - skipped, most)
    reach = gl.minimum(known + skipped + here, held)
    rows = gl.where((slot < 0) | (rows > window) | (here < 0), 0, here).to(gl.int32)
    reach = gl.where(rows > 0, reach, 0).to(gl.int32)
    each = gl.where(gl.sum((reach + PT - 1) // PT, axis=0) <= few, 1, GROUP)
    pairs, whole = (rows + 2 * tokens - 1) // (2 * tokens), _units(reach, each, PT, GROUP)
    units = _units(reach + PT * each - 1, each, PT, GROUP)
    first = gl.associative_scan(units, 0, _plus) - units
    whole_ends = gl.associative_scan(kv_heads * pairs * whole, 0, _plus)
    ends = gl.associative_scan(kv_heads * pairs * (units - whole), 0, _plus) + gl.max(whole_ends, axis=0)
    return (b, rows, slot.to(gl.int32), known.to(gl.int32), pairs, whole, first, whole_ends, ends), each


@gluon.jit
def of_one(mine, numbers):
    """Of numbers of all requests that of one"""
    return gl.sum(gl.where(mine, numbers, 0), axis=0)


@gluon.jit
def chosen(item, lists, work, unit_size):
    """An item -> its request, slot, KV head, first row, unit, the request's first unit; the positions that it reads."""
    b, rows, slot, known, pairs, whole, first, whole_ends, ends = lists
    held, skipped, kv_heads, tokens = work[3], work[6], work[9], work[10]
    all_whole = gl.max(whole_ends, axis=0)
    broken = item >= all_whole
    behind = gl.where(broken, ends, whole_ends)
    request = gl.sum((behind <= item).to(gl.int32), axis=0)
    begun = gl.maximum(gl.max(gl.where(behind <= item, behind, 0), axis=0), gl.where(broken, all_whole, 0))
    at, mine = item - begun, b == request
    its = gl.maximum(of_one(mine, pairs), 1)
    unit = at // its // kv_heads + gl.where(broken, of_one(mine, whole), 0)
    row, behind_last, its_known = skipped + at % its * 2 * tokens, skipped + of_one(mine, rows), of_one(mine, known)
    reach = gl.minimum(its_known + gl.minimum(row + 2 * tokens, behind_last), held).to(gl.int32)
    start = unit * unit_size
    of = request, of_one(mine, slot), at // its % kv_heads, row, behind_last, its_known, unit, of_one(mine, first)
    return of, start, gl.minimum(start + unit_size, reach)


@gluon.jit
def copy(
    keys, values, table, table_row, table_column, work, tiles,
    NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, GROUP: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of all items of this program."""
    if EARLY:
        gdc_wait()
    lists, each = listed(work, PT, GROUP, BT)
    done = 0
    for item in range(gl.program_id(0), gl.max(lists[8], axis=0), gl.num_programs(0)):
        of, start, stop = chosen(item, lists, work, PT * each)
        pages = (table + of[1].to(gl.int64) * table_row, table_column)
        done = copied(done, start, stop, keys, values, of[2] * DT, pages, tiles, NT, DT, PAGE, STAGES, False)
    if EARLY:  # so late that the programs of the launch behind do not crowd where these end first
        gdc_launch_dependents()


@gluon.jit
def _read(
    given, work, query_tile, tiles,
    MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, GROUP: gl.constexpr, BT: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, SIDE: gl.constexpr,
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
    if EARLY:
        gdc_wait()
    most, skipped, kv_heads, tokens = work[5], work[6], work[9], work[10]
    position = gl.arange(0, NT, gl.SliceLayout(1, RIGHT))
    lists, each = listed(work, PT, GROUP, BT)
    done = 0
    for item in range(gl.program_id(0), gl.max(lists[8], axis=0), gl.num_programs(0)):
        of, start, stop = chosen(item, lists, work, PT * each)
        request, slot, kv_head, first, behind_last, known, unit, base = of
        first += SIDE * tokens
        line, row = table + slot.to(gl.int64) * table_row, gl.load(begin + request)
        head = kv_head * group
        m, d = along(0, MT, LOADED), along(1, DT, LOADED)
        token = first + m // group
        inside = (m // group < tokens) & (token < behind_last) & (d >= 0)
        source = query + (row + token) * query_row + (head + m % group) * query_head + d
        loaded = gl.load(source, mask=inside, other=0.0)
        missing = holes(line, table_column, start, stop, PAGE)
        barrier()
        query_tile.store(loaded)
        barrier()
        m = gl.arange(0, MT, OF_ROW)
        token = first + m // group
        last = known + token
        full = gl.where(missing != 0, 0, gl.minimum(known + first + 1, stop))  # all rows see the positions before it
        none, nothing = gl.full((MT,), float("-inf"), gl.float32, OF_ROW), gl.full((MT,), 0.0, gl.float32, OF_ROW)
        best, total, mean = none, nothing, gl.full((MT, DT), 0.0, gl.float32, TILE)
        for part in range(start, stop, PT):
            more, sum_of_more, mean_of_more = none, nothing, gl.full((MT, DT), 0.0, gl.float32, TILE)
            for step in range(part, gl.minimum(part + PT, stop), NT):
                place, phase = stage_and_phase(done, STAGES)
                mbarrier.wait(full_keys.index(place), phase)
                score = scored(query_tile, key_tiles.index(place), TILE)
                mbarrier.arrive(free_keys.index(place), count=1)
                if step + NT > full:
                    score = seen(score, step, stop, last, (line, table_column), missing, NT, PAGE)
                weight, kept, higher, new = weighed(score, more, sum_of_more, scale)
                weights = gl.convert_layout(weight.to(value_tiles.dtype), LEFT)
                mbarrier.wait(full_values.index(place), phase)
                mean_of_all, value = mean_of_more * over_columns(kept, OF_ROW), value_tiles.index(place)
                mean_of_all = summed(weights, value, mean_of_all, position, step, stop)
                mbarrier.arrive(free_values.index(place), count=1)
                if step + NT > full:  # a row is not changed by a step that lies behind its last position
                    reached = step <= last
                    higher, new = gl.where(reached, higher, more), gl.where(reached, new, sum_of_more)
                    mean_of_all = gl.where(gl.expand_dims(reached, 1), mean_of_all, mean_of_more)
                more, sum_of_more, mean_of_more = higher, new, mean_of_all
                done += 1
            best, total, mean = joined(best, total, mean, more, sum_of_more, mean_of_more)
        live = (m // group < tokens) & (token < gl.where(base + unit < room, behind_last, 0))
        spot = ((base + unit).to(gl.int64) * most + token - skipped) * (kv_heads * group) + head + m % group
        d = along(1, DT, TILE)
        gl.store(means + gl.expand_dims(spot * DT, 1) + d, mean, mask=gl.expand_dims(live, 1) & (d >= 0))
        gl.store(sums + spot * 2, best, mask=live)
        gl.store(sums + spot * 2 + 1, total, mask=live)


@gluon.jit(do_not_specialize=["most", "skipped", "few", "room", "requests"])
def read_parts_staged(
    query, query_row, query_head, keys, values,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, nodes, window,
    group: gl.constexpr, width, scale, means, sums, most, skipped, few, room, requests, kv_heads: gl.constexpr,
    tokens: gl.constexpr, MT: gl.constexpr, NT: gl.constexpr, DT: gl.constexpr, PT: gl.constexpr, GROUP: gl.constexpr,
    BT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Parts of the positions of one request, for two tiles of rows and the heads of one KV head. Grid: any."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    work = (slots, count, before, held, window, most, skipped, few, requests, kv_heads, tokens)
    given = (query, query_row, query_head, table, table_row, table_column, begin, group, scale, means, sums, room)
    query_tiles = gl.allocate_shared_memory(DTYPE, [2, MT, DT], SHARED)
    tiles = places(DTYPE, NT, DT, STAGES, 2, 2)
    gl.warp_specialize(
        [
            (_read, (given, work, query_tiles.index(0), tiles, MT, NT, DT, PT, GROUP, BT, PAGE, STAGES, EARLY, 0)),
            (_read, (given, work, query_tiles.index(1), tiles, MT, NT, DT, PT, GROUP, BT, PAGE, STAGES, EARLY, 1)),
            (copy, (keys, values, table, table_row, table_column, work, tiles, NT, DT, PT, GROUP, BT, PAGE, STAGES,
                    EARLY)),
        ],
        [4, 1], [REGISTERS, COPIER_REGISTERS],
    )  # fmt: skip
