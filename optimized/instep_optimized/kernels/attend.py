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
from .attend_parts import join_parts, read_parts
from .attend_steps import across, joined, nothing
from .runtime import INTERPRETED, ceil_div, launch, power_of_2, tile

SMALLEST_DOT, LOG2_E = 16, 1.4426950408889634
WINDOW = tile(64, 12)  # a request of at most so many rows is read in parts, and so is every tree
PART = tile(128, 32)  # positions of a part: fixed, so that a row's bits do not depend on how the work is divided
ROWS_JOINED, UNROLLED = tile(1, 128), tile(8, 1)  # per program, and per step of the joining kernel
LAZY = True
GROUP = tile(4, 2)  # parts that are joined before the groups are
MANY = tile(32, 4)  # tiles of heads and rows, from which on a program reads a group of parts
LISTED = 32  # requests, at least: fewer do not make another compiled kernel
RESIDENT = tile(8, 1)  # programs per multiprocessor that walk the list of parts; fewer run at a time
SCRATCH = 2**28  # bytes of parts that are not joined yet; more rows are read one after the other


class Shape(NamedTuple):
    """queries: rows (tokens times grouped heads) of a tile; positions: of a step."""

    queries: int
    positions: int
    warps: int
    stages: int
    registers: int | None = None


# By the bytes of an element; others are as the last.
CHUNK = {2: Shape(128, 32, 8, 3), 4: Shape(16, 32, 8, 2)}
PARTS = {2: Shape(32, 64, 4, 2), 4: Shape(16, 32, 8, 2)}
SMALL = Shape(16, 16, 4, 1)  # interpreted


def shape_of(shapes: dict[int, Shape], query: torch.Tensor) -> Shape:
    return SMALL if INTERPRETED else shapes.get(query.element_size(), shapes[4])


def attend(*, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    """`Attend` of the seam: row j of request b sees positions 0 .. before[b] + j of its mapped pages, or its ancestors.

    Scores and sums are fp32. The products of fp32 inputs are fp32 too (`ieee`). Probabilities are cast to the dtype of
    the values, relative to the largest score of the part (of all positions so far, in a prefill chunk).

    A row of a window or of a tree has bits of its own: they depend on its query, its position, and the keys and values
    up to there. So decode and verify agree, and a path of a tree is its chain. A row of a request with more than WINDOW
    rows in one launch differs from these in last bits; `invariant/attend.py` has them alike.
    """
    return read(query, pages, shape_of(CHUNK, query), shape_of(PARTS, query), PART, alone=False)


def read(query: torch.Tensor, pages: Pages, chunk: Shape, parts: Shape, part: int, *, alone: bool) -> torch.Tensor:
    """Attention with parts of `part` positions. alone: prefill chunks join them too, for the same bits."""
    if not pages.most:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)
    attended = torch.empty_like(query, memory_format=torch.contiguous_format)
    call = Call.of(query, pages, attended)
    if pages.most > WINDOW:
        call.whole(chunk, part if alone else 0)
    call.in_parts(parts, part)
    return attended


@cache
def multiprocessors(device: torch.device) -> int:
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


class Call(NamedTuple):
    """What the kernels of one call are given alike. placed: what says how positions are divided; held: those that a
    line of the table has entries for."""

    query: torch.Tensor
    pages: Pages
    attended: torch.Tensor
    placed: tuple[Any, ...]
    common: tuple[Any, ...]
    constants: dict[str, Any]

    @classmethod
    def of(cls, query: torch.Tensor, pages: Pages, attended: torch.Tensor) -> Call:
        assert query.stride(2) == pages.keys.stride(3) == pages.values.stride(3) == 1, "heads are contiguous"
        width, page_size = query.shape[2], pages.keys.shape[1]
        seen = (None,) * 3 if pages.ancestors is None else (pages.ancestors, pages.ancestors.stride(0), pages.nodes)
        held = pages.table.shape[1] * page_size
        placed = held, pages.slots, pages.begin, pages.count, pages.before, *seen, WINDOW
        common = (
            query, query.stride(0), query.stride(1),
            pages.keys, *pages.keys.stride()[:3], pages.values, *pages.values.stride()[:3],
            *_beside(pages.keys, pages.key_scales), *_beside(pages.values, pages.value_scales),
            pages.table, *pages.table.stride(), *placed,
            query.shape[1] // pages.keys.shape[2], width, width**-0.5 * LOG2_E,
        )  # fmt: skip
        wide = max(power_of_2(width), SMALLEST_DOT)
        constants = {"DT": wide, "PAGE": page_size, "WIDEN": INTERPRETED, "TILED": pages.key_scales is not None}
        return cls(query, pages, attended, placed, common, constants)

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
            MT=rows, NT=shape.positions, PT=part, GROUP=GROUP, ALONE=part > 0, LAZY=LAZY and part == 0,
            ORDERED=part > 0 and INTERPRETED,
            warps=shape.warps, stages=shape.stages, registers=shape.registers, **self.constants,
        )  # fmt: skip

    def in_parts(self, shape: Shape, part: int) -> None:
        """Requests of few rows, and trees: parts of their positions, then the parts joined in order."""
        pages, (heads, width) = self.pages, self.query.shape[1:]
        requests, kv_heads, most = pages.begin.numel(), pages.keys.shape[2], min(pages.most, max(WINDOW, pages.nodes))
        rows, tokens = self.height(shape)
        each = GROUP if requests * kv_heads * ceil_div(most, tokens) >= MANY else 1
        unit = part * each
        most_units = ceil_div(pages.table.shape[1] * pages.keys.shape[1], unit)
        # No page is of two requests: so they have no more whole units than the pool, and a broken one each.
        room = min(requests * most_units, ceil_div(pages.keys.shape[0] * pages.keys.shape[1], unit) + requests)
        fit = SCRATCH // max(room * heads * (width + 2) * 4, 1)
        at_once = min(most, max(fit // tokens, 1) * tokens)
        means = self.query.new_empty((room, at_once, heads, width), dtype=torch.float32)
        sums = self.query.new_empty((room, at_once, heads, 2), dtype=torch.float32)
        tiles = ceil_div(at_once, tokens if pages.ancestors is None else 1)
        listed = max(power_of_2(requests), LISTED)
        items = requests * most_units * kv_heads * tiles
        programs = max(min(multiprocessors(self.query.device) * RESIDENT, items), 1)
        for skipped in range(0, most, at_once):
            launch(
                read_parts, (programs,), *self.common, self.attended, *self.attended.stride()[:2], self.query.shape[0],
                means, sums, at_once, skipped, room, requests, kv_heads, tokens,
                MT=rows, NT=shape.positions, PT=part, EACH=each, BT=listed, ALONE=True, ORDERED=INTERPRETED,
                warps=shape.warps, stages=shape.stages, registers=shape.registers, **self.constants,
            )  # fmt: skip
            launch(
                join_parts, (ceil_div(at_once * heads, ROWS_JOINED), requests),
                self.attended, *self.attended.stride()[:2], means, sums, *self.placed,
                at_once, skipped, room, requests, heads, width,
                RT=ROWS_JOINED, DT=self.constants["DT"], PT=unit, BT=listed, GROUP=GROUP // each,
                UNROLLED=max(UNROLLED * each // GROUP, 1), warps=2,
            )  # fmt: skip


def _beside(pool: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """The scales of a pool and their step from page to page; without scales the pool, which is not touched."""
    if scales is None:
        return pool, 0
    assert scales[0].is_contiguous(), "the scales of a page lie side by side"
    return scales, scales.stride(0)


@triton.jit
def _whole(
    query, query_row, query_head,
    keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head,
    key_scales, key_scales_page, value_scales, value_scales_page,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, nodes, window,
    group, width, scale, attended, attended_row, attended_head, tokens,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    WIDEN: tl.constexpr, ALONE: tl.constexpr, LAZY: tl.constexpr, ORDERED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """`tokens` rows of one request for the `group` query heads of one KV head. Grid (KV heads, row tiles, B).

    Tiles that see the most positions run first. `attend_parts.py` reads requests of at most `window` rows, and trees.
    """
    request, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(0)
    rows, slot, row = tl.load(count + request), tl.load(slots + request), tl.load(begin + request)
    first = ((tl.num_programs(1) - 1 - tl.program_id(1)) * tokens).to(tl.int64)
    if (first >= rows) | (slot < 0) | (rows <= window):
        return
    if ancestors is not None and tl.load(ancestors + row * ancestors_step) != 0:
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
            MT, NT, DT, PAGE, False, WIDEN, ALONE, LAZY, ORDERED, TILED,
        )  # fmt: skip
    else:
        best, total, mean = nothing(MT, DT)
        for group in range(0, reach, PT * GROUP):
            best_of, total_of, mean_of = nothing(MT, DT)
            for start in range(group, tl.minimum(group + PT * GROUP, reach), PT):
                more, sum_of_more, mean_of_more = across(
                    queries, last, start, full, tl.minimum(start + PT, reach), known, 0, 0, line, pools, kv_head,
                    tl.num_programs(0), scale, MT, NT, DT, PAGE, False, WIDEN, ALONE, LAZY, ORDERED, TILED,
                )  # fmt: skip
                best_of, total_of, mean_of = joined(best_of, total_of, mean_of, more, sum_of_more, mean_of_more)
            best, total, mean = joined(best, total, mean, best_of, total_of, mean_of)
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        attended + ((row + token) * attended_row + head * attended_head)[:, None] + d[None, :],
        mean.to(attended.dtype.element_ty), mask=inside,
    )  # fmt: skip
