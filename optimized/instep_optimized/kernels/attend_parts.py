"""Attention of windows and trees in parts of a fixed number of positions, which are then joined in order.

Leaves out: the arithmetic of a part (`attend_steps.py`), and prefill chunks (`attend_chunk.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl

from .attend_steps import across, joined, nothing
from .early import wait


@triton.jit(do_not_specialize=["rows_of_all", "most", "skipped", "room", "requests", "tokens"])
def read_parts(
    query, query_row, query_head,
    keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head,
    key_scales, key_scales_page, value_scales, value_scales_page,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, nodes, window,
    group, width, scale, attended, attended_row, attended_head, rows_of_all, means, sums, most, skipped, room, requests,
    kv_heads, tokens,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, EACH: tl.constexpr, BT: tl.constexpr,
    PAGE: tl.constexpr, WIDEN: tl.constexpr, ORDERED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Parts of the positions of one request, for `tokens` rows and the heads of one KV head. Grid: any.

    The programs walk one list: of every request its parts (or groups of EACH parts, which are then joined here), and of
    each its KV heads and row tiles. In a tree the parts that reach into the window have tiles of one token. Such a tile
    takes its ancestors in their order, as if they stood one behind the other: node a_j of its path (a_0 the root) as
    position before + j. So it computes what that chain computes, and what it does not see is not loaded.
    """
    rows_of, first_part, shared, parts = division(
        held, slots, begin, count, before, ancestors, ancestors_step, nodes, window, most, skipped, requests, PT * EACH,
        BT,
    )  # fmt: skip
    tiles = tl.cdiv(rows_of, tokens)
    ends = tl.cumsum(kv_heads * (tiles * shared + rows_of * (parts - shared)), axis=0)
    b, d = tl.arange(0, BT), tl.arange(0, DT)
    begins = tl.load(begin + b, mask=b < requests, other=0)
    served = tl.where(tl.load(slots + b, mask=b < requests, other=-1) < 0, 0, 1)
    behind = begins + served * tl.load(count + b, mask=b < requests, other=0)
    for some_row in range(tl.program_id(0), rows_of_all, tl.num_programs(0)):
        if tl.max(((begins <= some_row) & (some_row < behind)).to(tl.int32), axis=0) == 0:  # of no request
            for some_head in range(kv_heads * group):
                into = attended + tl.cast(some_row, tl.int64) * attended_row + some_head * attended_head + d
                tl.store(into, tl.zeros((DT,), attended.dtype.element_ty), mask=d < width)
    for item in range(tl.program_id(0), tl.max(ends, axis=0), tl.num_programs(0)):
        request = tl.sum((ends <= item).to(tl.int32), axis=0)
        chosen = b == request
        at = item - tl.max(tl.where(ends <= item, ends, 0), axis=0)
        base = tl.sum(tl.where(chosen, first_part, 0), axis=0)
        common = tl.sum(tl.where(chosen, shared, 0), axis=0)
        rows = tl.minimum(tl.load(count + request).to(tl.int32) - skipped, most)
        slot, row = tl.load(slots + request), tl.load(begin + request)
        known = tl.load(before + request).to(tl.int32)
        high = tl.cdiv(rows, tokens)
        alone = at >= common * high * kv_heads  # one token of a tree
        at -= tl.where(alone, common * high * kv_heads, 0)
        high, each = tl.where(alone, rows, high), tl.where(alone, 1, tokens)
        first, kv_head, part = skipped + at % high * each, at // high % kv_heads, at // high // kv_heads
        part += tl.where(alone, common, 0)

        m = tl.arange(0, MT)
        token, head = first + m // group, kv_head * group + m % group
        live = (m // group < each) & (token < tl.where(base + part < room, skipped + rows, 0))
        inside = live[:, None] & (d < width)[None, :]  # [MT, DT]
        queries = tl.load(
            query + ((row + token) * query_row + head * query_head)[:, None] + d[None, :], mask=inside, other=0.0
        )
        last = known + token
        reach = tl.minimum(known + tl.minimum(first + each, skipped + rows), held).to(tl.int32)
        line = table + slot * table_row
        start = part * (PT * EACH)
        pools = (keys + kv_head.to(tl.int64) * keys_head, keys_page, keys_entry,
                 values + kv_head.to(tl.int64) * values_head, values_page, values_entry, key_scales, key_scales_page,
                 value_scales, value_scales_page, table_column, held, width)  # fmt: skip
        path, full = 0, known + first + 1
        if ancestors is not None:
            path = tl.load(ancestors + (row + first) * ancestors_step)
            seen = known
            for node in range(nodes):
                seen += ((path >> node) & 1).to(tl.int32)
            path = tl.where(alone, path, 0)
            full = tl.where(path == 0, full, known)
            reach, last = tl.where(path == 0, reach, seen), tl.where(path == 0, last, seen - 1)
        if EACH == 1:
            best, total, mean = across(
                queries, last, start, full, tl.minimum(start + PT, reach), known, path, nodes, line, pools,
                kv_head, kv_heads, scale, MT, NT, DT, PAGE, ancestors is not None, WIDEN, True, ORDERED, TILED,
            )  # fmt: skip
        else:
            best, total, mean = nothing(MT, DT)
            for place in range(start, tl.minimum(start + PT * EACH, reach), PT):
                more, sum_of_more, mean_of_more = across(
                    queries, last, place, full, tl.minimum(place + PT, reach), known, path, nodes, line, pools,
                    kv_head, kv_heads, scale,
                    MT, NT, DT, PAGE, ancestors is not None, WIDEN, True, ORDERED, TILED,
                )  # fmt: skip
                best, total, mean = joined(best, total, mean, more, sum_of_more, mean_of_more)
        spot = ((base + part).to(tl.int64) * most + token - skipped) * (kv_heads * group) + head
        tl.store(means + (spot * width)[:, None] + d[None, :], mean, mask=inside)
        tl.store(sums + spot * 2, best, mask=live)
        tl.store(sums + spot * 2 + 1, total, mask=live)


@triton.jit
def division(
    held, slots, begin, count, before, ancestors, ancestors_step, nodes, window, most, skipped, requests,
    PT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Of every request [BT]: its rows that are read in parts, the number of its first part, how many parts all rows of
    a tile read together, and how many parts it has."""
    b = tl.arange(0, BT)
    there = b < requests
    rows, slot = tl.load(count + b, mask=there, other=0), tl.load(slots + b, mask=there, other=-1)
    known = tl.load(before + b, mask=there, other=0)
    here, ends = tl.minimum(rows - skipped, most), known + rows  # rows of this launch; where the whole window ends
    reach = tl.minimum(known + skipped + here, held)
    if ancestors is None:
        rows = tl.where((slot < 0) | (rows > window) | (here < 0), 0, here)
        parts = tl.where(rows > 0, tl.cdiv(reach, PT), 0).to(tl.int32)
        shared = parts
    else:
        row = tl.load(begin + b, mask=there, other=0)
        tree = tl.load(ancestors + row * ancestors_step, mask=there & (rows > 0), other=0) != 0
        rows = tl.where((slot < 0) | ((rows > window) & ~tree) | (here < 0), 0, here)
        reach = tl.where(tree, tl.minimum(ends, held), reach)
        parts = tl.where(rows > 0, tl.cdiv(reach, PT), 0).to(tl.int32)
        shared = tl.where(tree, tl.minimum(known // PT, parts), parts).to(tl.int32)
    return rows.to(tl.int32), tl.cumsum(parts, axis=0) - parts, shared, parts


@triton.jit(do_not_specialize=["most", "skipped", "room", "requests"])
def join_parts(
    attended, attended_row, attended_head, means, sums,
    held, slots, begin, count, before, ancestors, ancestors_step, nodes, window, most, skipped, room, requests,
    heads, width,
    RT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr,
    UNROLLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of RT rows of heads of one request: those of a group in order, then the groups. Grid (such rows, B)."""
    if EARLY:
        wait()
    request = tl.program_id(1)
    b, d = tl.arange(0, BT), tl.arange(0, DT)
    first, known = tl.load(begin + request), tl.load(before + request)
    rows_of, first_part, _, parts_of = division(
        held, slots, begin, count, before, ancestors, ancestors_step, nodes, window, most, skipped, requests, PT, BT
    )
    rows = tl.sum(tl.where(b == request, rows_of, 0), axis=0)
    base = tl.sum(tl.where(b == request, first_part, 0), axis=0)
    parts = tl.sum(tl.where(b == request, parts_of, 0), axis=0)
    r = tl.program_id(0) * RT + tl.arange(0, RT)
    token, head = r // heads, r % heads  # token: of this launch
    live = token < rows
    if tl.program_id(0) * RT >= rows * heads:
        return
    row, last = first + skipped + token, known + skipped + token
    if ancestors is not None:
        path = tl.load(ancestors + row * ancestors_step, mask=live, other=0)
        seen = known - 1 + last * 0
        for node in range(nodes):
            seen += (path >> node) & 1
        last = tl.where(path == 0, last, seen)
    reads = tl.where(live, tl.minimum(last // PT + 1, parts), 0).to(tl.int32)  # [RT]: how many parts a row reads
    best, total, mean = nothing(RT, DT)
    for start in range(0, parts, GROUP * UNROLLED):
        loaded = ()  # all before the first is used, so that they are under way together
        for step in tl.static_range(GROUP * UNROLLED):
            part = start + step
            spot = ((base + part).to(tl.int64) * most + token) * heads + head
            there = part < tl.minimum(reads, room - base)
            more = tl.load(sums + spot * 2, mask=there, other=float("-inf"))
            sum_of_more = tl.load(sums + spot * 2 + 1, mask=there, other=0.0)
            mean_of_more = tl.load(
                means + (spot * width)[:, None] + d[None, :], mask=there[:, None] & (d < width)[None, :], other=0.0
            )
            loaded += ((more, sum_of_more, mean_of_more),)  # type: ignore[assignment]
        for group in tl.static_range(UNROLLED):
            best_of, total_of, mean_of = nothing(RT, DT)
            for step in tl.static_range(GROUP):
                more, sum_of_more, mean_of_more = loaded[group * GROUP + step]
                best_of, total_of, mean_of = joined(best_of, total_of, mean_of, more, sum_of_more, mean_of_more)
            best, total, mean = joined(best, total, mean, best_of, total_of, mean_of)
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    mean = tl.where((base + reads > room)[:, None], float("nan"), mean)  # requests share pages: there was no room
    tl.store(
        attended + (row * attended_row + head * attended_head)[:, None] + d[None, :],
        mean.to(attended.dtype.element_ty), mask=live[:, None] & (d < width)[None, :],
    )  # fmt: skip
