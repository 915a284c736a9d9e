"""Zeros in the rows of a result that no request covers, written by the kernel that writes the others: no fill before.

A kernel has `beyond` more programs along the axis of requests, and gives each of them one block of rows. They run at
the same time as the others, and no row is written twice. In short windows nearly every row is covered, so there the
programs of each request check their share of all rows (`covering`); the programs of prompts first count how many rows
of their share are covered (`covered`). A kernel whose programs are few, or all busy, first counts the rows that are
left (`uncovered`); then each request's programs clear their share (`clear_rest`).

Leaves out: a launch with several parts. No part knows what the others cover, so its op fills the whole result before.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...memory_addresses import Part
from ..runtime import ceil_div, tile

ROWS = tile(16, 64)  # rows per program: large enough for few programs, small enough that none runs long
REQUESTS = tl.constexpr(16)  # requests that every row is compared with in one step
LANES = tl.constexpr(32)  # requests that one row is compared with in a step (`covering`)


def result(parts: tuple[Part, ...], x: torch.Tensor, *shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Allocate a result of packed rows  ->  it, and how many of its rows `clear` must check (0: already filled)."""
    if len(parts) == 1 and len(parts[0].begin):
        return x.new_empty(shape, dtype=dtype), shape[0]
    return x.new_zeros(shape, dtype=dtype), 0


def beyond(rows: int, blocks: int) -> int:
    """Number of extra programs along the axis of requests, if there are `blocks` along the first axis of the grid."""
    return ceil_div(ceil_div(rows, ROWS), max(blocks, 1))


@triton.jit
def rows_of(past, QT: tl.constexpr):
    """Rows of program number `past` after the requests' programs; programs of the grid's first axis share them."""
    return (past * tl.num_programs(0) + tl.program_id(0)) * QT + tl.arange(0, QT)


@triton.jit
def covering(row, lane, units, begin, count, requests):
    """Count the requests with a unit that cover a row; lane: the numbers 0 to some power of 2."""
    found = 0
    for start in range(0, requests, lane.shape[0]):
        request = start + lane
        busy = tl.load(units + request, mask=request < requests, other=-1) >= 0
        past = row - tl.load(begin + request, mask=busy, other=0)
        mine = busy & (past >= 0) & (past < tl.load(count + request, mask=busy, other=0))
        found += tl.sum(mine.to(tl.int32), axis=0)
    return found


@triton.jit
def covered(first, behind, lane, units, begin, count, requests):
    """Count the rows first to behind - 1 that a request with a unit covers. lane: as above"""
    found = 0
    for start in range(0, requests, lane.shape[0]):
        request = start + lane
        busy = tl.load(units + request, mask=request < requests, other=-1) >= 0
        begins = tl.load(begin + request, mask=busy, other=0)
        ends = tl.minimum(begins + tl.load(count + request, mask=busy, other=0), behind)
        found += tl.sum(tl.maximum(ends - tl.maximum(begins, first), 0).to(tl.int32), axis=0)
    return found


@triton.jit
def uncovered(lane, units, count, requests, rows):
    """Count the rows, out of `rows`, that no request with a unit covers; no two requests share a row. lane: as above"""
    for start in range(0, requests, lane.shape[0]):
        request = start + lane
        busy = tl.load(units + request, mask=request < requests, other=-1) >= 0
        rows -= tl.sum(tl.load(count + request, mask=busy, other=0).to(tl.int32), axis=0)
    return rows


@triton.jit
def clear_rest(out, head, at, inside, spans, rows, QT: tl.constexpr):
    """Apply `clear` to all rows of a head: the programs of each request (the grid's last axis) take a share."""
    requests, of_head = tl.num_programs(2), out.at + head * out.per_head
    if uncovered(tl.arange(0, REQUESTS), spans.units, spans.rows, requests, rows) > 0:
        for first in range(tl.program_id(2) * QT, rows, requests * QT):
            row = first + tl.arange(0, QT)
            clear(of_head, out.per_row, at, inside, row, spans.units, spans.begin, spans.rows, requests, rows)


@triton.jit
def clear(out, out_row, at, inside, row, units, begin, count, requests, rows):
    """Set elements `at` [CT] to zero in those of the rows `row` [QT] that no request with a unit covers.

    inside [CT]: which of these elements exist
    """
    covered = row * 0
    for start in range(0, requests, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        busy = tl.load(units + request, mask=request < requests, other=-1) >= 0
        past = row[:, None] - tl.load(begin + request, mask=busy, other=0)[None, :]
        mine = (past >= 0) & (past < tl.load(count + request, mask=busy, other=0)[None, :])
        covered = tl.maximum(covered, tl.max(mine.to(tl.int32), axis=1))
    goal = out + (row.to(tl.int64) * out_row)[:, None] + at[None, :]
    free = (row < rows) & (covered == 0)
    zeros = tl.zeros((row.shape[0], at.shape[0]), out.dtype.element_ty)
    tl.store(goal, zeros, mask=free[:, None] & inside[None, :])
