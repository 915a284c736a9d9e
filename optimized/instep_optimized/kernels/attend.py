"""Paged attention for prefill chunks, verify windows and decode: online softmax, grouped heads, positions in parts.

Leaves out: splitting the positions of a prefill chunk over several programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from instep_reference.contract.place import Place

from ..layout import Pages
from .dot import dot
from .runtime import INTERPRETED, ceil_div, launch, power_of_2, tile

SMALLEST_DOT = 16
WINDOW = tile(64, 12)  # a request of at most so many rows is read in parts, and so is every tree
PART = tile(256, 32)  # positions of a part: fixed, so that a row's bits do not depend on how the work is divided
ROWS_JOINED, UNROLLED = tile(1, 128), tile(8, 1)  # per program, and per step of the joining kernel
RESIDENT = 2  # programs per multiprocessor that walk the list of parts


class Shape(NamedTuple):
    """queries: rows (tokens times grouped heads) of a tile; positions: of a step."""

    queries: int
    positions: int
    warps: int
    stages: int


# By the bytes of an element; others are as the last.
CHUNK = {2: Shape(128, 64, 8, 2), 4: Shape(16, 32, 8, 2)}
PARTS = {2: Shape(32, 64, 4, 2), 4: Shape(16, 32, 8, 2)}
SMALL = Shape(16, 16, 4, 1)  # interpreted


def shape_of(shapes: dict[int, Shape], query: torch.Tensor) -> Shape:
    return SMALL if INTERPRETED else shapes.get(query.element_size(), shapes[4])


def attend(*, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    """`Attend` of the seam: row j of request b sees positions 0 .. before[b] + j of its mapped pages, or its ancestors.

    Scores and sums are fp32. The products of fp32 inputs are fp32 too (`ieee`). Probabilities are cast to the dtype of
    the values.
    """
    return read(query, pages, shape_of(CHUNK, query), shape_of(PARTS, query), PART, alone=False)


def read(query: torch.Tensor, pages: Pages, chunk: Shape, parts: Shape, part: int, *, alone: bool) -> torch.Tensor:
    """Attention with parts of `part` positions. alone: prefill chunks too join them, so that they have the same bits."""
    attended = torch.zeros_like(query, memory_format=torch.contiguous_format)
    call = Call.of(query, pages, attended)
    if pages.most > WINDOW:
        call.whole(chunk, part if alone else 0)
    call.in_parts(parts, part)
    return attended


@cache
def multiprocessors(device: torch.device) -> int:
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


class Call(NamedTuple):
    """What the kernels of one call are given alike."""

    query: torch.Tensor
    pages: Pages
    attended: torch.Tensor
    common: tuple[Any, ...]
    constants: dict[str, Any]

    @classmethod
    def of(cls, query: torch.Tensor, pages: Pages, attended: torch.Tensor) -> Call:
        assert query.stride(2) == pages.keys.stride(3) == pages.values.stride(3) == 1, "heads are contiguous"
        width, page_size = query.shape[2], pages.keys.shape[1]
        seen = (None,) * 3 if pages.ancestors is None else (pages.ancestors, pages.ancestors.stride(0), pages.nodes)
        common = (
            query, query.stride(0), query.stride(1),
            pages.keys, *pages.keys.stride()[:3], pages.values, *pages.values.stride()[:3],
            *_beside(pages.keys, pages.key_scales), *_beside(pages.values, pages.value_scales),
            pages.table, *pages.table.stride(), pages.table.shape[1] * page_size,
            pages.slots, pages.begin, pages.count, pages.before, *seen, WINDOW,
            query.shape[1] // pages.keys.shape[2], width, width**-0.5 * 1.4426950408889634,
        )  # fmt: skip
        wide = max(power_of_2(width), SMALLEST_DOT)
        constants = {"DT": wide, "PAGE": page_size, "WIDEN": INTERPRETED, "TILED": pages.key_scales is not None}
        return cls(query, pages, attended, common, constants)

    def height(self, shape: Shape) -> tuple[int, int]:
        """(rows, tokens) of a tile."""
        group = self.query.shape[1] // self.pages.keys.shape[2]
        rows = max(shape.queries, power_of_2(group))
        return rows, rows // group

    def whole(self, shape: Shape, part: int) -> None:
        """Requests of many rows: a program reads all positions of its rows."""
        rows, tokens = self.height(shape)
        launch(
            _whole, (self.pages.keys.shape[2], ceil_div(self.pages.most, tokens), self.pages.begin.numel()),
            *self.common, self.attended, self.attended.stride(0), self.attended.stride(1), tokens,
            MT=rows, NT=shape.positions, PT=part, ALONE=part > 0, ORDERED=part > 0 and INTERPRETED,
            **self.constants, warps=shape.warps, stages=shape.stages,
        )  # fmt: skip

    def in_parts(self, shape: Shape, part: int) -> None:
        """Requests of few rows, and trees: parts of their positions, then the parts joined in order."""
        pages, (heads, width) = self.pages, self.query.shape[1:]
        requests, kv_heads, most = pages.begin.numel(), pages.keys.shape[2], min(pages.most, WINDOW)
        if not requests or not most:
            return
        rows, tokens = self.height(shape)
        each = ceil_div(pages.table.shape[1] * pages.keys.shape[1], part)
        room = min(requests * each, ceil_div(pages.keys.shape[0] * pages.keys.shape[1], part) + requests)
        means = self.query.new_empty((room, most, heads, width), dtype=torch.float32)
        sums = self.query.new_empty((room, most, heads, 2), dtype=torch.float32)
        tiles = most if pages.ancestors is not None else ceil_div(most, tokens)
        programs = min(multiprocessors(self.query.device) * RESIDENT, requests * each * kv_heads * tiles)
        launch(
            _parts, (programs,), *self.common, means, sums, most, room, requests, kv_heads, tokens,
            MT=rows, NT=shape.positions, PT=part, BT=power_of_2(requests), ALONE=True, ORDERED=INTERPRETED,
            **self.constants, warps=shape.warps, stages=shape.stages,
        )  # fmt: skip
        launch(
            _join, (ceil_div(most * heads, ROWS_JOINED), requests), self.attended, *self.attended.stride()[:2],
            means, sums, most, room, requests, heads, width, pages.slots, pages.begin, pages.count, pages.before,
            *self.common[23:26], WINDOW, self.common[18],
            RT=ROWS_JOINED, DT=self.constants["DT"], PT=part, BT=power_of_2(requests), UNROLLED=UNROLLED, warps=2,
        )  # fmt: skip


def _beside(pool: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """The scales of a pool and their step from page to page; without scales the pool, which is not touched."""
    if scales is None:
        return pool, 0
    assert scales[0].is_contiguous(), "the scales of a page lie side by side"
    return scales, scales.stride(0)


@triton.jit
def _whole(
    query, query_row, query_head, keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head,
    key_scales, key_scales_page, value_scales, value_scales_page,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, nodes,
    window, group, width, scale, attended, attended_row, attended_head, tokens,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, PAGE: tl.constexpr, WIDEN: tl.constexpr,
    ALONE: tl.constexpr, ORDERED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """`tokens` rows of one request for the `group` query heads of one KV head. Grid (KV heads, row tiles, B).

    Tiles that see the most positions run first. Requests of at most `window` rows, and trees, are left to `_parts`.
    """
    request, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(0)
    rows, slot, row = tl.load(count + request), tl.load(slots + request), tl.load(begin + request)
    first = ((tl.num_programs(1) - 1 - tl.program_id(1)) * tokens).to(tl.int64)
    if (first >= rows) | (slot < 0) | (rows <= window):
        return
    if ancestors is not None:
        if tl.load(ancestors + row * ancestors_step) != 0:
            return
    m, d = tl.arange(0, MT), tl.arange(0, DT)
    token, head = first + m // group, kv_head * group + m % group
    inside = ((m // group < tokens) & (token < rows))[:, None] & (d < width)[None, :]  # [MT, DT]
    queries = tl.load(
        query + ((row + token) * query_row + head * query_head)[:, None] + d[None, :], mask=inside, other=0.0
    )
    known = tl.load(before + request).to(tl.int32)
    # last [MT]: the last position that each row sees; reach: one past the last position that any row of the tile sees
    last = known + token.to(tl.int32)
    reach = tl.minimum(known + tl.minimum(first + tokens, rows), held).to(tl.int32)
    line = table + slot * table_row
    keys += kv_head.to(tl.int64) * keys_head
    values += kv_head.to(tl.int64) * values_head
    full = known + first.to(tl.int32) + 1
    pools = (keys, keys_page, keys_entry, values, values_page, values_entry, key_scales, key_scales_page,
             value_scales, value_scales_page, table_column, held, width)  # fmt: skip
    if PT == 0:
        _, total, mean = across(
            queries, last, 0, full, reach, known, 0, 0, line, pools, kv_head, tl.num_programs(0), scale,
            MT, NT, DT, PAGE, False, WIDEN, ALONE, ORDERED, TILED,
        )  # fmt: skip
    else:
        best, total, mean = nothing(MT, DT)
        for start in range(0, reach, PT):
            more, sum_of_more, mean_of_more = across(
                queries, last, start, full, tl.minimum(start + PT, reach), known, 0, 0, line, pools, kv_head,
                tl.num_programs(0), scale, MT, NT, DT, PAGE, False, WIDEN, ALONE, ORDERED, TILED,
            )  # fmt: skip
            best, total, mean = joined(best, total, mean, more, sum_of_more, mean_of_more)
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        attended + ((row + token) * attended_row + head * attended_head)[:, None] + d[None, :],
        mean.to(attended.dtype.element_ty), mask=inside,
    )  # fmt: skip


@triton.jit
def _parts(
    query, query_row, query_head, keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head,
    key_scales, key_scales_page, value_scales, value_scales_page,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, nodes,
    window, group, width, scale, means, sums, most, room, requests, kv_heads, tokens,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr,
    WIDEN: tl.constexpr, ALONE: tl.constexpr, ORDERED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """A part of the positions of one request, for `tokens` rows and the heads of one KV head. Grid: any.

    The programs walk one list: of every request its parts, and of each part its KV heads and row tiles. In a tree the
    parts that reach into the window have tiles of one token. Such a tile takes its ancestors in their order, as if they
    stood one behind the other: node a_j of its path (a_0 the root) as position before + j. So it computes what that
    chain computes, and what it does not see is not loaded.
    """
    rows_of, first_part, shared, parts = division(
        slots, begin, count, before, ancestors, ancestors_step, nodes, window, held, requests, PT, BT
    )
    tiles = tl.cdiv(rows_of, tokens)
    ends = tl.cumsum(kv_heads * (tiles * shared + rows_of * (parts - shared)), axis=0)
    b = tl.arange(0, BT)
    for item in range(tl.program_id(0), tl.max(ends, axis=0), tl.num_programs(0)):
        request = tl.sum((ends <= item).to(tl.int32), axis=0)
        chosen = b == request
        at = item - tl.max(tl.where(ends <= item, ends, 0), axis=0)
        base = tl.sum(tl.where(chosen, first_part, 0), axis=0)
        common = tl.sum(tl.where(chosen, shared, 0), axis=0)
        rows = tl.load(count + request).to(tl.int32)
        slot, row = tl.load(slots + request), tl.load(begin + request)
        known = tl.load(before + request).to(tl.int32)
        high = tl.cdiv(rows, tokens)
        alone = at >= common * high * kv_heads  # one token of a tree
        at -= tl.where(alone, common * high * kv_heads, 0)
        high, each = tl.where(alone, rows, high), tl.where(alone, 1, tokens)
        first, kv_head, part = at % high * each, at // high % kv_heads, at // high // kv_heads
        part += tl.where(alone, common, 0)

        m, d = tl.arange(0, MT), tl.arange(0, DT)
        token, head = first + m // group, kv_head * group + m % group
        live = (m // group < each) & (token < tl.where(base + part < room, rows, 0))
        inside = live[:, None] & (d < width)[None, :]  # [MT, DT]
        queries = tl.load(
            query + ((row + token) * query_row + head * query_head)[:, None] + d[None, :], mask=inside, other=0.0
        )
        last = known + token
        reach = tl.minimum(known + tl.minimum(first + each, rows), held).to(tl.int32)
        line = table + slot * table_row
        start = part * PT
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
        best, total, mean = across(
            queries, last, start, full, tl.minimum(start + PT, reach), known, path, nodes, line, pools,
            kv_head, kv_heads, scale, MT, NT, DT, PAGE, ancestors is not None, WIDEN, ALONE, ORDERED, TILED,
        )  # fmt: skip
        spot = ((base + part).to(tl.int64) * most + token) * (kv_heads * group) + head
        tl.store(means + (spot * width)[:, None] + d[None, :], mean, mask=inside)
        tl.store(sums + spot * 2, best, mask=live)
        tl.store(sums + spot * 2 + 1, total, mask=live)


@triton.jit
def division(
    slots, begin, count, before, ancestors, ancestors_step, nodes, window, held, requests, PT: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Of every request [BT]: its rows that are read in parts, the number of its first part, how many parts all rows of
    a tile read together, and how many parts it has."""
    b = tl.arange(0, BT)
    there = b < requests
    rows, slot = tl.load(count + b, mask=there, other=0), tl.load(slots + b, mask=there, other=-1)
    known = tl.load(before + b, mask=there, other=0)
    reach = tl.minimum(known + rows, held)
    if ancestors is None:
        rows = tl.where((slot < 0) | (rows > window), 0, rows)
        parts = tl.where(rows > 0, tl.cdiv(reach, PT), 0).to(tl.int32)
        shared = parts
    else:
        row = tl.load(begin + b, mask=there, other=0)
        tree = tl.load(ancestors + row * ancestors_step, mask=there & (rows > 0), other=0) != 0
        rows = tl.where((slot < 0) | ((rows > window) & ~tree), 0, rows)
        reach = tl.where(tree, tl.minimum(known + nodes, held), reach)
        parts = tl.where(rows > 0, tl.cdiv(reach, PT), 0).to(tl.int32)
        shared = tl.where(tree, tl.minimum(known // PT, parts), parts).to(tl.int32)
    return rows.to(tl.int32), tl.cumsum(parts, axis=0) - parts, shared, parts


@triton.jit
def _join(
    attended, attended_row, attended_head, means, sums, most, room, requests, heads, width,
    slots, begin, count, before, ancestors, ancestors_step, nodes, window, held,
    RT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, BT: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """The parts of RT rows of heads of one request, in order. Grid (rows times heads, B)."""
    request = tl.program_id(1)
    b, d = tl.arange(0, BT), tl.arange(0, DT)
    rows_of, first_part, _, parts_of = division(
        slots, begin, count, before, ancestors, ancestors_step, nodes, window, held, requests, PT, BT
    )
    rows = tl.sum(tl.where(b == request, rows_of, 0), axis=0)
    base = tl.sum(tl.where(b == request, first_part, 0), axis=0)
    parts = tl.sum(tl.where(b == request, parts_of, 0), axis=0)
    r = tl.program_id(0) * RT + tl.arange(0, RT)
    token, head = r // heads, r % heads
    live = token < rows
    if tl.program_id(0) * RT >= rows * heads:
        return
    row, known = tl.load(begin + request) + token, tl.load(before + request)
    last = known + token
    if ancestors is not None:
        path = tl.load(ancestors + row * ancestors_step, mask=live, other=0)
        seen = known - 1 + token * 0
        for node in range(nodes):
            seen += (path >> node) & 1
        last = tl.where(path == 0, last, seen)
    mine = tl.minimum(last // PT + 1, parts)  # [RT]: how many parts a row reads
    best, total, mean = nothing(RT, DT)
    for start in range(0, parts, UNROLLED):
        for step in tl.static_range(UNROLLED):
            part = start + step
            spot = ((base + part).to(tl.int64) * most + token) * heads + head
            reads = live & (part < mine)
            inside = reads[:, None] & (d < width)[None, :]
            more = tl.load(sums + spot * 2, mask=reads, other=float("-inf"))
            sum_of_more = tl.load(sums + spot * 2 + 1, mask=reads, other=0.0)
            mean_of_more = tl.load(means + (spot * width)[:, None] + d[None, :], mask=inside, other=0.0)
            best, total, mean = joined(best, total, mean, more, sum_of_more, mean_of_more)
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        attended + (row * attended_row + head * attended_head)[:, None] + d[None, :],
        mean.to(attended.dtype.element_ty), mask=live[:, None] & (d < width)[None, :],
    )  # fmt: skip


@triton.jit
def nothing(MT: tl.constexpr, DT: tl.constexpr):
    """(best, total, mean) of no positions: the maximum, the sum of weights, the weighted sum of values."""
    return (
        tl.full((MT,), float("-inf"), tl.float32), tl.zeros((MT,), tl.float32), tl.zeros((MT, DT), tl.float32)
    )  # fmt: skip


@triton.jit
def joined(best, total, mean, more, sum_of_more, mean_of_more):
    """What was read so far, and a part behind it. A row that sees nothing of the part is not changed."""
    higher = tl.maximum(best, more)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    kept, new = tl.exp2(best - shift), tl.exp2(more - shift)
    sees = sum_of_more != 0.0  # also where it is NaN
    mean = tl.where(sees[:, None], mean * kept[:, None] + mean_of_more * new[:, None], mean)
    return tl.where(sees, higher, best), tl.where(sees, total * kept + sum_of_more * new, total), mean


@triton.jit
def across(
    queries, last, start, full, stop, known, path, nodes, line, pools, kv_head, kv_heads, scale,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PAGE: tl.constexpr, TREE: tl.constexpr, WIDEN: tl.constexpr,
    ALONE: tl.constexpr, ORDERED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Positions start .. stop - 1 from nothing -> (best, total, mean). Every row sees those before `full`."""
    full = tl.maximum(tl.minimum(full, stop) // NT * NT, start)
    best, total, mean = nothing(MT, DT)
    best, total, mean = over(
        best, total, mean, queries, last, start, full, known, path, nodes, line, pools, kv_head, kv_heads, scale,
        NT, DT, PAGE, False, False, WIDEN, False, ORDERED, TILED,
    )  # fmt: skip
    return over(
        best, total, mean, queries, last, full, stop, known, path, nodes, line, pools, kv_head, kv_heads, scale,
        NT, DT, PAGE, True, TREE, WIDEN, ALONE, ORDERED, TILED,
    )  # fmt: skip


@triton.jit
def over(
    best, total, mean, queries, last, start, stop, known, path, nodes, line, pools, kv_head, kv_heads, scale,
    NT: tl.constexpr, DT: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr,
    WIDEN: tl.constexpr, ALONE: tl.constexpr, ORDERED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Positions start .. stop - 1 in steps of NT, start a whole number of steps -> (best, total, mean) with them.

    WIDEN, ORDERED: see `dot`. CAUSAL: some row may see less than all of them; else their number is whole steps.
    ALONE: a row is not changed by a step that lies behind its last position. Such a step serves later rows of the tile,
    and its positions may hold anything.
    """
    (keys, keys_page, keys_entry, values, values_page, values_entry, key_scales, key_scales_page,
     value_scales, value_scales_page, table_column, held, width) = pools  # fmt: skip
    d = tl.arange(0, DT)
    page = page_of(line, table_column, start, stop, PAGE, NT)
    for step in range(start, stop, NT):  # positions are 32 bits wide: 64-bit division is slow
        at = step + tl.arange(0, NT)
        if TREE:
            place = stands(at, known, path, nodes)
            listed, entry = (at < stop) & (place < held), place % PAGE
            here = tl.load(line + place // PAGE * table_column, mask=listed, other=-1)
            listed = listed & (here >= 0)
        else:
            here, entry, listed = page, at % PAGE, at < tl.where(page >= 0, stop, 0)
            page = page_of(line, table_column, step + NT, stop, PAGE, NT)  # one step ahead: its latency is hidden
        inside = listed[:, None] & (d < width)[None, :]  # [NT, DT]
        at_keys, at_values = here * keys_page + entry * keys_entry, here * values_page + entry * values_entry
        key = tl.load(keys + at_keys[:, None] + d[None, :], mask=inside, other=0.0)
        if TILED:  # numbers of 8 bits are exact in every other dtype, so scores are multiplied instead of keys
            key = key.to(queries.dtype)
        score = dot(queries, tl.trans(key), WIDEN, ORDERED)  # [MT, NT]
        if TILED:
            beside = entry * kv_heads + kv_head
            score = score * tl.load(key_scales + here * key_scales_page + beside, mask=listed, other=0.0)[None, :]
        sees = listed[None, :]
        if CAUSAL:
            sees = sees & (at[None, :] <= last[:, None])
        score = tl.where(sees, score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1) * scale)
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: keep -inf - -inf out
        weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + scale, tl.zeros_like(score) - shift[:, None]))
        kept = tl.exp2(best - shift)  # [MT]: what was summed so far had the old maximum
        value = tl.load(values + at_values[:, None] + d[None, :], mask=inside, other=0.0)
        if TILED:  # the values are cast as the weights are: to the dtype of the queries
            each = tl.load(value_scales + here * value_scales_page + beside, mask=listed, other=0.0)
            value = (value.to(tl.float32) * each[:, None]).to(queries.dtype)
        # The sum of weights is taken before they are cast to the values' dtype.
        new_mean = dot(weight.to(value.dtype), value, WIDEN, ORDERED, mean * kept[:, None])
        new_total = total * kept + tl.sum(weight, axis=1)
        if ALONE:
            reached = step <= last
            mean = tl.where(reached[:, None], new_mean, mean)
            total, best = tl.where(reached, new_total, total), tl.where(reached, higher, best)
        else:
            mean, total, best = new_mean, new_total, higher
    return best, total, mean


@triton.jit
def page_of(line, table_column, start, stop, PAGE: tl.constexpr, NT: tl.constexpr):
    """The page of each position of a step: one number if a step lies within a page, else [NT]."""
    if PAGE % NT == 0:
        page = tl.load(line + start // PAGE * table_column, mask=start < stop, other=-1)
    else:
        at = start + tl.arange(0, NT)
        page = tl.load(line + at // PAGE * table_column, mask=at < stop, other=-1)
    return page


@triton.jit
def stands(at, known, path, nodes):
    """Where position known + j of a path stands: its node a_j at known + a_j. Positions before `known` stay."""
    place, order = at, known  # the position of the next node of the path
    for node in range(nodes):
        on = ((path >> node) & 1).to(tl.int32)
        place = tl.where((on != 0) & (at == order), known + node, place)
        order += on
    return place
