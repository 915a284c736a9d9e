"""Paged attention for prefill chunks, verify windows and decode: one kernel, online softmax, grouped heads.

Leaves out: splitting one request's positions over several programs (long contexts at a batch of one).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from instep_reference.contract.place import Place

from ..layout import Pages
from .dot import dot
from .runtime import INTERPRETED, ceil_div, launch, power_of_2, tile

SMALLEST_DOT = 16
QUERIES = {2: 128, 4: 32}  # query rows times grouped heads per program on a GPU, by bytes of an element
POSITIONS = {2: 64, 4: 32}  # positions per step
WARPS, STAGES = 8, 2


def attend(*, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    """`Attend` of the seam: row j of request b sees positions 0 .. before[b] + j of its mapped pages, or its ancestors.

    Scores and sums are fp32. The products of fp32 inputs are fp32 too (`ieee`). Probabilities are cast to the dtype of
    the values.
    """
    group, size = query.shape[1] // pages.keys.shape[2], query.element_size()
    most = tile(QUERIES.get(size, 32), 128)
    queries = max(SMALLEST_DOT, min(power_of_2((pages.most if pages.ancestors is None else 1) * group), most))
    return read(query, pages, queries, tile(POSITIONS.get(size, 32), 128), WARPS, STAGES, alone=False)


def read(
    query: torch.Tensor, pages: Pages, queries: int, positions: int, warps: int, stages: int, *, alone: bool
) -> torch.Tensor:
    """Attention in tiles of `queries` rows (tokens times grouped heads) and steps of `positions` positions, from 0.

    alone: the bits of a row do not depend on the other rows of its tile (`invariant/attend.py`).

    A tile of a tree has one token. It takes its ancestors in their order, as if they stood one behind the other: node
    a_j of its path (a_0 the root) as position before + j. So it computes what that chain computes, in the same steps,
    and what it does not see is not loaded. A row of a chain beside trees has a tile of its own too.
    """
    assert query.stride(2) == pages.keys.stride(3) == pages.values.stride(3) == 1, "heads are contiguous"
    heads, width = query.shape[1:]
    kv_heads, page_size = pages.keys.shape[2], pages.keys.shape[1]
    group = heads // kv_heads
    queries = max(queries, power_of_2(group))
    tokens = queries // group if pages.ancestors is None else 1
    seen = (None,) * 3 if pages.ancestors is None else (pages.ancestors, pages.ancestors.stride(0), pages.nodes)
    attended = torch.zeros_like(query, memory_format=torch.contiguous_format)
    launch(
        _attend, (ceil_div(pages.most, tokens), kv_heads, pages.begin.numel()),
        query, query.stride(0), query.stride(1), attended, attended.stride(0), attended.stride(1),
        pages.keys, *pages.keys.stride()[:3], pages.values, *pages.values.stride()[:3],
        *_beside(pages.keys, pages.key_scales), *_beside(pages.values, pages.value_scales),
        pages.table, *pages.table.stride(), pages.table.shape[1] * page_size,
        pages.slots, pages.begin, pages.count, pages.before, *seen, page_size, group, tokens, width, width**-0.5,
        MT=queries, NT=positions, DT=max(power_of_2(width), SMALLEST_DOT), WIDEN=INTERPRETED,
        ALONE=alone, ORDERED=alone and INTERPRETED, TILED=pages.key_scales is not None, warps=warps, stages=stages,
    )  # fmt: skip
    return attended


def _beside(pool: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """The scales of a pool and their step from page to page; without scales the pool, which is not touched."""
    if scales is None:
        return pool, 0
    assert scales[0].is_contiguous(), "the scales of a page lie side by side"
    return scales, scales.stride(0)


@triton.jit
def _attend(
    query, query_row, query_head, attended, attended_row, attended_head,
    keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head,
    key_scales, key_scales_page, value_scales, value_scales_page,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, nodes,
    page_size, group, tokens, width, scale,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, WIDEN: tl.constexpr,
    ALONE: tl.constexpr, ORDERED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """`tokens` rows of one request for the `group` query heads of one KV head. Grid (row tiles, KV heads, B).

    held: how many positions a line of the table has entries for; nothing behind them is read.
    WIDEN, ORDERED: see `dot`. ALONE: a row is not changed by a step that lies behind its last position. Such a step
    serves later rows of the tile, and its positions may hold anything.

    ancestors: bits per packed row, for trees, whose tiles have one token. Where it is None, Triton leaves it out.

    best, total, mean are the running maximum, sum of weights and weighted sum of values of the online softmax.
    """
    request, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, rows, slot = tl.program_id(0).to(tl.int64) * tokens, tl.load(count + request), tl.load(slots + request)
    if (first >= rows) | (slot < 0):
        return
    line = table + slot * table_row  # slot is 64 bits wide, and so is the product
    m, d = tl.arange(0, MT), tl.arange(0, DT)
    token, head = first + m // group, kv_head * group + m % group
    live = (m // group < tokens) & (token < rows)  # [MT]
    inside = live[:, None] & (d < width)[None, :]  # [MT, DT], rows of the tile: tokens times the heads of one group
    row = tl.load(begin + request) + token
    queries = tl.load(
        query + (row * query_row + head * query_head)[:, None] + d[None, :], mask=inside, other=0.0
    )
    known = tl.load(before + request)
    # last [MT]: the last position that each row sees; reach: one past the last position that any row of the tile sees
    if ancestors is None:
        last, reach = known + token, tl.minimum(known + tl.minimum(first + tokens, rows), held)
    else:
        path = tl.load(ancestors + (tl.load(begin + request) + first) * ancestors_step)
        seen = known
        for node in range(nodes):
            seen += (path >> node) & 1
        reach = tl.where(path == 0, known + first + 1, seen)  # without bits it is a chain's
        last = reach - 1 + token * 0

    best = tl.full((MT,), float("-inf"), tl.float32)
    total = tl.zeros((MT,), tl.float32)
    mean = tl.zeros((MT, DT), tl.float32)
    for start in range(0, reach.to(tl.int32), NT):  # positions are 32 bits wide: 64-bit division is slow
        at = start + tl.arange(0, NT)
        if ancestors is None:
            place, listed = at, at < reach
        else:
            place = stands(at, known.to(tl.int32), path, tl.where(start + NT > known, nodes, 0))
            listed = (at < reach) & (place < held)
        # One page lookup per position: a step of positions need not begin at a page, nor end at one.
        page = tl.load(line + place // page_size * table_column, mask=listed, other=-1)
        mapped, entry = page >= 0, place % page_size  # [NT]
        there = mapped[:, None] & (d < width)[None, :]
        key = tl.load(
            keys + (page * keys_page + entry * keys_entry + kv_head * keys_head)[:, None] + d[None, :],
            mask=there, other=0.0,
        )  # fmt: skip
        if TILED:  # numbers of 8 bits are exact in every other dtype, so scores are multiplied instead of keys
            key = key.to(queries.dtype)
        score = dot(queries, tl.trans(key), WIDEN, ORDERED) * scale  # [MT, NT]
        if TILED:
            beside = entry * tl.num_programs(1) + kv_head
            score = score * tl.load(key_scales + page * key_scales_page + beside, mask=mapped, other=0.0)[None, :]
        score = tl.where(mapped[None, :] & (at[None, :] <= last[:, None]), score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: keep -inf - -inf out
        weight = tl.exp(score - shift[:, None])
        kept = tl.exp(best - shift)  # [MT]: what was summed so far had the old maximum
        value = tl.load(
            values + (page * values_page + entry * values_entry + kv_head * values_head)[:, None] + d[None, :],
            mask=there, other=0.0,
        )  # fmt: skip
        if TILED:  # the values are cast as the weights are: to the dtype of the queries
            each = tl.load(value_scales + page * value_scales_page + beside, mask=mapped, other=0.0)
            value = (value.to(tl.float32) * each[:, None]).to(queries.dtype)
        # The sum of weights is taken before they are cast to the values' dtype.
        new_mean = mean * kept[:, None] + dot(weight.to(value.dtype), value, WIDEN, ORDERED)
        new_total = total * kept + tl.sum(weight, axis=1)
        if ALONE:
            reached = start <= last
            mean = tl.where(reached[:, None], new_mean, mean)
            total, best = tl.where(reached, new_total, total), tl.where(reached, higher, best)
        else:
            mean, total, best = new_mean, new_total, higher

    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        attended + (row * attended_row + head * attended_head)[:, None] + d[None, :],
        mean.to(attended.dtype.element_ty), mask=inside,
    )  # fmt: skip


@triton.jit
def stands(at, known, path, nodes):
    """Where position known + j of a path stands: its node a_j at known + a_j. Positions before `known` stay."""
    place, order = at, known  # the position of the next node of the path
    for node in range(nodes):
        on = ((path >> node) & 1).to(tl.int32)
        place = tl.where((on != 0) & (at == order), known + node, place)
        order += on
    return place
