"""Attention of windows and trees in parts of a fixed number of positions, which are then joined in order.

Leaves out: the arithmetic of a part (`online_softmax.py`), and prefill chunks (`prefill_chunks.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl

from ..device.programmatic_dependent_launch import wait, wait_before_product
from ..rowwise.pointwise import opening
from .online_softmax import across, joined, nothing, of_head, rows_of_heads


@triton.jit(do_not_specialize=["most", "skipped", "few", "room", "requests", "tokens"])
def read_parts(
    query, keys, values, paged, sizes, means, sums, most, skipped, few, room, requests, tokens,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, GROUP: tl.constexpr, BT: tl.constexpr,
    PAGE: tl.constexpr, WIDEN: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Read parts of the positions of one request, for `tokens` rows and the heads of one KV head. Grid: any.

    The programs walk one list: for every request its units (parts, or groups of parts, which are then joined here),
    times its KV heads and row tiles. In a tree the units that reach into the window have tiles of one token. These
    tiles take
    the ancestors in order, as consecutive positions: node a_j of the path (a_0 is the root) as position before + j. So
    such a tile computes exactly what the same chain computes, and loads only what it sees.
    """
    rows_of, first_unit, shared, units, each_of = division(paged, most, skipped, few, requests, PT, GROUP, BT)
    tiles = tl.cdiv(rows_of, tokens)
    ends = tl.cumsum(sizes.kv_heads * (tiles * shared + rows_of * (units - shared)), axis=0)
    b, d = tl.arange(0, BT), tl.arange(0, DT)
    for item in range(tl.program_id(0), tl.max(ends, axis=0), tl.num_programs(0)):
        request = tl.sum((ends <= item).to(tl.int32), axis=0)
        chosen = b == request
        at = item - tl.max(tl.where(ends <= item, ends, 0), axis=0)
        base = tl.sum(tl.where(chosen, first_unit, 0), axis=0)
        common = tl.sum(tl.where(chosen, shared, 0), axis=0)
        rows = tl.minimum(tl.load(paged.rows + request).to(tl.int32) - skipped, most)
        slot, row = tl.load(paged.slots + request), tl.load(paged.begin + request)
        known = tl.load(paged.before + request).to(tl.int32)
        high = tl.cdiv(rows, tokens)
        alone = at >= common * high * sizes.kv_heads  # one token of a tree
        at -= tl.where(alone, common * high * sizes.kv_heads, 0)
        high, each = tl.where(alone, rows, high), tl.where(alone, 1, tokens)
        first, kv_head, unit = skipped + at % high * each, at // high % sizes.kv_heads, at // high // sizes.kv_heads
        unit += tl.where(alone, common, 0)

        m = tl.arange(0, MT)
        token, head = first + m // sizes.group, kv_head * sizes.group + m % sizes.group
        live = (m // sizes.group < each) & (token < tl.where(base + unit < room, skipped + rows, 0))
        inside = live[:, None] & (d < sizes.width)[None, :]  # [MT, DT]
        queries = rows_of_heads(query, row + token, head, inside, DT)
        last = known + token
        reach = tl.minimum(known + tl.minimum(first + each, skipped + rows), paged.held).to(tl.int32)
        line, key_at, value_at = paged.table + slot * paged.table_row, of_head(keys, kv_head), of_head(values, kv_head)
        pools = key_at, value_at, keys, values, paged, sizes, line, kv_head
        start = unit * PT * each_of
        path, full = 0, known + first + 1
        if paged.ancestors is not None:
            path = tl.load(paged.ancestors + (row + first) * paged.ancestors_step)
            seen = known
            for node in range(paged.nodes):
                seen += ((path >> node) & 1).to(tl.int32)
            path = tl.where(alone, path, 0)
            full = tl.where(path == 0, full, known)
            reach, last = tl.where(path == 0, reach, seen), tl.where(path == 0, last, seen - 1)
        best, total, mean = nothing(MT, DT)
        for place in range(start, tl.minimum(start + PT * each_of, reach), PT):
            more, sum_of_more, mean_of_more = across(
                queries, last, place, full, tl.minimum(place + PT, reach), known, path, pools,
                MT, NT, DT, PAGE, paged.ancestors is not None, WIDEN, True, ORDERED,
            )  # fmt: skip
            if each_of == 1:
                best, total, mean = more, sum_of_more, mean_of_more
            else:
                best, total, mean = joined(best, total, mean, more, sum_of_more, mean_of_more)
        spot = ((base + unit).to(tl.int64) * most + token - skipped) * (sizes.kv_heads * sizes.group) + head
        tl.store(means + (spot * sizes.width)[:, None] + d[None, :], mean, mask=inside)
        tl.store(sums + spot * 2, best, mask=live)
        tl.store(sums + spot * 2 + 1, total, mask=live)


@triton.jit
def division(paged, most, skipped, few, requests, PT: tl.constexpr, GROUP: tl.constexpr, BT: tl.constexpr):
    """Divide every request [BT] into units.

    -> its rows that are read in parts, the number of its first unit, how many units all rows of a tile read together,
    and how many units it has; and the parts in a unit. A unit is a part if all requests have at most `few` parts, else
    a group.
    """
    b = tl.arange(0, BT)
    there = b < requests
    rows, slot = tl.load(paged.rows + b, mask=there, other=0), tl.load(paged.slots + b, mask=there, other=-1)
    known = tl.load(paged.before + b, mask=there, other=0)
    here = tl.minimum(rows - skipped, most)  # rows of this launch
    reach = tl.minimum(known + skipped + here, paged.held)
    tree = rows < 0
    if paged.ancestors is not None:
        row = tl.load(paged.begin + b, mask=there, other=0)
        tree = tl.load(paged.ancestors + row * paged.ancestors_step, mask=there & (rows > 0), other=0) != 0
        of_tree = tl.minimum(known + paged.nodes, paged.held)  # a row's path may be longer than there are rows
        reach = tl.where(tree, of_tree, reach)
    rows = tl.where((slot < 0) | ((rows > paged.window) & ~tree) | (here < 0), 0, here).to(tl.int32)
    reach = tl.where(rows > 0, reach, 0).to(tl.int32)
    each = tl.where(tl.sum(tl.cdiv(reach, PT), axis=0) <= few, 1, GROUP)
    units = tl.cdiv(reach, PT * each)
    shared = tl.where(tree, tl.minimum(known.to(tl.int32) // (PT * each), units), units)
    return rows, tl.cumsum(units, axis=0) - units, shared, units, each


@triton.jit(do_not_specialize=["most", "skipped", "few", "room", "requests", "rows_of_all"])
def join_parts(
    attended, gate, means, sums, paged, most, skipped, few, room, requests, heads, width, rows_of_all,
    RT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, GROUP: tl.constexpr, BT: tl.constexpr,
    CT: tl.constexpr, ALONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join the parts of RT rows of heads of one request: the parts of a group in order, then the groups. Grid: any.

    A program has CT columns. ALONE: number of groups whose loads are in flight together, if their parts are stored
    alone.
    Everything that is read before `wait` was written before the parts were read. gate: opens each row, or None. Rows
    that belong to no request become 0, or 0 with the gate applied.
    """
    b = tl.arange(0, BT)
    rows_of, first_unit, _, units_of, each = division(paged, most, skipped, few, requests, PT, GROUP, BT)
    begins = tl.load(paged.begin + b, mask=b < requests, other=0)
    served = tl.load(paged.slots + b, mask=b < requests, other=-1) >= 0
    behind = begins + tl.where(served, tl.load(paged.rows + b, mask=b < requests, other=0), 0)
    known_of, blocks = tl.load(paged.before + b, mask=b < requests, other=0), tl.cdiv(most * heads, RT)
    for number in range(tl.program_id(0), blocks * requests * (DT // CT), tl.num_programs(0)):
        item, d = number // (DT // CT), number % (DT // CT) * CT + tl.arange(0, CT)
        mine, block = b == item // blocks, item % blocks
        rows, base = tl.sum(tl.where(mine, rows_of, 0), axis=0), tl.sum(tl.where(mine, first_unit, 0), axis=0)
        units, known = tl.sum(tl.where(mine, units_of, 0), axis=0), tl.sum(tl.where(mine, known_of, 0), axis=0)
        first = tl.sum(tl.where(mine, begins, 0), axis=0)
        r = block * RT + tl.arange(0, RT)
        token, head = r // heads, r % heads  # token: of this launch
        live = token < rows
        row, last = first + skipped + token, known + skipped + token
        if paged.ancestors is not None:
            path = tl.load(paged.ancestors + row * paged.ancestors_step, mask=live, other=0)
            seen = known - 1 + last * 0
            for node in range(paged.nodes):
                seen += (path >> node) & 1
            last = tl.where(path == 0, last, seen)
        reads = tl.where(live, tl.minimum(last // (PT * each) + 1, units), 0).to(tl.int32)  # [RT]: units of a row
        if EARLY:
            if gate is None:
                wait()
            else:
                wait_before_product()
        if block * RT < rows * heads:
            spot, between = (base.to(tl.int64) * most + token) * heads + head, most * heads
            stored = (means + (spot * width)[:, None] + d[None, :], sums + spot * 2, tl.minimum(reads, room - base),
                      tl.cast(between, tl.int64), width, d)  # fmt: skip
            inside = live[:, None] & (d < width)[None, :]
            if gate is not None:
                opened_by = opening(gate.at + (row * gate.per_row + head * gate.per_head)[:, None] + d[None, :], inside)
            best, total, mean = nothing(RT, CT)
            if each != 1:
                for start in range(0, units, GROUP):
                    loaded = loads(stored, start, GROUP, CT)
                    for step in tl.static_range(GROUP):
                        more, sum_of_more, mean_of_more = loaded[step]
                        best, total, mean = joined(best, total, mean, more, sum_of_more, mean_of_more)
            elif units > GROUP:
                for start in range(0, units, GROUP * ALONE):
                    best, total, mean = groups(best, total, mean, stored, start, RT, CT, GROUP, ALONE)
            else:
                best, total, mean = groups(best, total, mean, stored, 0, RT, CT, GROUP, 1)
            mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
            mean = tl.where((base + reads > room)[:, None], float("nan"), mean)  # shared pages: no room was left
            found = mean.to(attended.at.dtype.element_ty)
            if gate is not None:
                found = (found.to(tl.float32) / opened_by).to(attended.at.dtype.element_ty)
            goal = attended.at + (row * attended.per_row + head * attended.per_head)[:, None] + d[None, :]
            tl.store(goal, found, mask=inside)
    if EARLY:  # programs without rows wait, too: the next launch then waits for all that this launch waits for
        wait()
    if tl.sum(tl.where(begins >= 0, behind - begins, 0), axis=0) != rows_of_all:
        d = tl.arange(0, DT)
        for some_row in range(tl.program_id(0), rows_of_all, tl.num_programs(0)):
            if tl.max(((begins <= some_row) & (some_row < behind)).to(tl.int32), axis=0) == 0:
                far = tl.cast(some_row, tl.int64)
                for some_head in range(heads):
                    zero = tl.zeros((DT,), tl.float32)
                    if gate is not None:  # the gate may be NaN
                        zero /= opening(gate.at + far * gate.per_row + some_head * gate.per_head + d, d < width)
                    goal = attended.at + far * attended.per_row + some_head * attended.per_head + d
                    tl.store(goal, zero.to(attended.at.dtype.element_ty), mask=d < width)


@triton.jit
def groups(
    best, total, mean, stored, start,
    RT: tl.constexpr, DT: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Join COUNT further groups, from their parts, to what was joined so far."""
    loaded = loads(stored, start, GROUP * COUNT, DT)
    for group in tl.static_range(COUNT):
        best_of, total_of, mean_of = nothing(RT, DT)
        for step in tl.static_range(GROUP):
            more, sum_of_more, mean_of_more = loaded[group * GROUP + step]
            best_of, total_of, mean_of = joined(best_of, total_of, mean_of, more, sum_of_more, mean_of_more)
        best, total, mean = joined(best, total, mean, best_of, total_of, mean_of)
    return best, total, mean


@triton.jit
def loads(stored, start, COUNT: tl.constexpr, DT: tl.constexpr):
    """Load COUNT units: all are loaded before the first is used, so that the loads are in flight together."""
    means, sums, reads, between, width, d = stored
    loaded, inside = (), (d < width)[None, :]
    for step in tl.static_range(COUNT):
        there, beyond = start + step < reads, (start + step) * between
        best = tl.load(sums + beyond * 2, mask=there, other=float("-inf"))
        total = tl.load(sums + beyond * 2 + 1, mask=there, other=0.0)
        mean = tl.load(means + beyond * width, mask=there[:, None] & inside, other=0.0)
        loaded += ((best, total, mean),)  # type: ignore[assignment]
    return loaded
