"""Attention over a run of positions: steps of online softmax over pages, and how two runs are joined. Device functions.

Also the arguments that all kernels of attention share, next to rows and pools: `Paged` and `Sizes`.
Leaves out: which program reads which positions (`prefill_chunks.py`, `split_kv.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device.tile_dot_fp32 import dot


class Paged(NamedTuple):
    """`Pages` without the pools, for a kernel.

    held: positions for which a line of the table has entries;  rows: of each request
    window: maximum number of rows that are read in parts
    """

    table: torch.Tensor
    table_row: int
    table_column: int
    held: int
    slots: torch.Tensor
    begin: torch.Tensor
    rows: torch.Tensor
    before: torch.Tensor
    ancestors: torch.Tensor | None
    ancestors_step: int | None
    nodes: int | None
    window: int


class Sizes(NamedTuple):
    """Query heads of a KV head, numbers of a head, the factor of scores, KV heads."""

    group: int
    width: int
    scale: float
    kv_heads: int


@triton.jit
def nothing(MT: tl.constexpr, DT: tl.constexpr):
    """(best, total, mean) of no positions: the maximum, the sum of weights, the weighted sum of values."""
    return (
        tl.full((MT,), float("-inf"), tl.float32), tl.zeros((MT,), tl.float32), tl.zeros((MT, DT), tl.float32)
    )  # fmt: skip


@triton.jit
def joined(best, total, mean, more, sum_of_more, mean_of_more):
    """Join a further part to what was read so far. A row that sees nothing of the part does not change."""
    higher = tl.maximum(best, more)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    kept, new = tl.exp2(best - shift), tl.exp2(more - shift)
    sees = sum_of_more != 0.0  # also where it is NaN
    mean = tl.where(sees[:, None], mean * kept[:, None] + mean_of_more * new[:, None], mean)
    return tl.where(sees, higher, best), tl.where(sees, total * kept + sum_of_more * new, total), mean


@triton.jit
def of_head(pool, kv_head):
    """Return the address of a KV head in a pool."""
    return pool.at + kv_head.to(tl.int64) * pool.per_head


@triton.jit
def rows_of_heads(rows, row, head, inside, DT: tl.constexpr):
    """Load the numbers of a head of some rows  ->  [MT, DT]; 0 where `inside` is false"""
    d = tl.arange(0, DT)
    return tl.load(rows.at + (row * rows.per_row + head * rows.per_head)[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit
def across(
    queries, last, start, full, stop, known, path, pools,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PAGE: tl.constexpr, TREE: tl.constexpr, WIDEN: tl.constexpr,
    ALONE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Read positions start .. stop - 1 from nothing -> (best, total, mean). Every row sees those before `full`."""
    full = tl.maximum(tl.minimum(full, stop) // NT * NT, start)
    best, total, mean = nothing(MT, DT)
    best, total, mean = over(
        best, total, mean, queries, last, start, full, known, path, pools,
        NT, DT, PAGE, False, False, WIDEN, False, ORDERED,
    )  # fmt: skip
    return over(
        best, total, mean, queries, last, full, stop, known, path, pools,
        NT, DT, PAGE, True, TREE, WIDEN, ALONE, ORDERED,
    )  # fmt: skip


@triton.jit
def over(
    best, total, mean, queries, last, start, stop, known, path, pools,
    NT: tl.constexpr, DT: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr,
    WIDEN: tl.constexpr, ALONE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Read positions start .. stop - 1 in steps of NT -> (best, total, mean) with them. `start` is a multiple of NT.

    WIDEN, ORDERED: see `dot`. CAUSAL: some row may not see all positions; else stop - start is a multiple of NT.
    ALONE: a step after a row's last position does not change the row. Such a step serves later rows of the tile, and
    its positions may hold anything.
    """
    key_at, value_at, keys, values, paged, sizes, line, kv_head = pools
    ONE_PAGE: tl.constexpr = PAGE % NT == 0 and not CAUSAL  # no row sees a step whose page is missing
    d = tl.arange(0, DT)
    page = page_of(line, paged.table_column, start, stop, PAGE, NT)
    for step in range(start, stop, NT):  # positions are 32 bits wide: 64-bit division is slow
        at = step + tl.arange(0, NT)
        if TREE:
            place = stands(at, known, path, paged.nodes)
            listed, entry = (at < stop) & (place < paged.held), place % PAGE
            here = tl.load(line + place // PAGE * paged.table_column, mask=listed, other=-1)
            listed = listed & (here >= 0)
        else:
            here, entry, listed = page, at % PAGE, at < tl.where(page >= 0, stop, 0)
            page = page_of(line, paged.table_column, step + NT, stop, PAGE, NT)  # one step ahead: its latency is hidden
        inside = listed[:, None] & (d < sizes.width)[None, :]  # [NT, DT]
        at_keys = here * keys.per_page + entry * keys.per_entry
        at_values = here * values.per_page + entry * values.per_entry
        key = tl.load(key_at + at_keys[:, None] + d[None, :], mask=inside, other=0.0)
        if keys.scales is not None:  # numbers of 8 bits are exact in every other dtype, so scores are scaled, not keys
            key = key.to(queries.dtype)
        score = dot(queries, tl.trans(key), WIDEN, ORDERED)  # [MT, NT]
        if keys.scales is not None:
            beside = entry * sizes.kv_heads + kv_head
            score = score * tl.load(keys.scales + here * keys.scales_per_page + beside, mask=listed, other=0.0)[None, :]
        if ONE_PAGE:  # then [MT] is masked instead of [MT, NT]
            higher = tl.where(here >= 0, tl.maximum(best, tl.max(score, axis=1) * sizes.scale), best)
        else:
            sees = listed[None, :]
            if CAUSAL:
                sees = sees & (at[None, :] <= last[:, None])
            score = tl.where(sees, score, float("-inf"))
            higher = tl.maximum(best, tl.max(score, axis=1) * sizes.scale)
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: keep -inf - -inf out
        kept = tl.exp2(best - shift)  # [MT]: what was summed so far had the old maximum
        if ONE_PAGE:
            shift = tl.where(here >= 0, shift, float("inf"))
        weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + sizes.scale, tl.zeros_like(score) - shift[:, None]))
        value = tl.load(value_at + at_values[:, None] + d[None, :], mask=inside, other=0.0)
        if values.scales is not None:  # the values are cast as the weights are: to the dtype of the queries
            each = tl.load(values.scales + here * values.scales_per_page + beside, mask=listed, other=0.0)
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
    """Load the page of each position of a step: one number if the step is within a page, else [NT]."""
    if PAGE % NT == 0:
        page = tl.load(line + start // PAGE * table_column, mask=start < stop, other=-1)
    else:
        at = start + tl.arange(0, NT)
        page = tl.load(line + at // PAGE * table_column, mask=at < stop, other=-1)
    return page


@triton.jit
def stands(at, known, path, nodes):
    """Return the physical place of position known + j of a path: known + a_j for its node a_j; earlier ones stay."""
    place, order = at, known  # order: the position of the next node of the path
    for node in range(nodes):
        on = ((path >> node) & 1).to(tl.int32)
        place = tl.where((on != 0) & (at == order), known + node, place)
        order += on
    return place
