"""Integer work of a round, on the device: places of rows, forced or own choices, and lengths that grow.

Leaves out: acceptance (`argmax_and_acceptance.py`) and everything that is not int64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...ops.integer_op_protocols import RowPlacement
from ..device.programmatic_dependent_launch import wait
from ..runtime import ceil_div, launch, power_of_2, tile

REQUESTS = 64  # requests that every row compares itself with in one step


def place_rows(
    *, slots: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, rows: int, length: torch.Tensor,
    table: torch.Tensor, page_size: int, shift: int, depth: torch.Tensor | None = None, lead: int = 0,
) -> RowPlacement:
    """`PlaceRows` of the seam: lane i of the grid computes the results of packed row i and those of request i."""
    assert all(x.is_contiguous() for x in (slots, begin, count)), "vectors are contiguous"
    requests = slots.numel()
    nodes = (None,) * 3 if depth is None else (depth, depth.stride(0), lead)
    positions, locations = (slots.new_empty(rows) for _ in range(2))
    before, kept, last = (slots.new_empty(requests) for _ in range(3))
    tall = tile(32, 128)
    launch(
        _place, (ceil_div(max(rows, requests), tall),), slots, begin, count, length, length.stride(0),
        table, *table.stride(), table.shape[1], page_size, shift, *nodes, positions, locations, before, kept, last,
        rows, requests, RT=tall, CT=min(power_of_2(requests), REQUESTS),
    )  # fmt: skip
    return RowPlacement(positions, locations, before, kept, last)


def choose(*, own: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """`Choose` of the seam, for one or two axes."""
    assert own.shape == forced.shape and own.dim() <= 2, "equal shapes of one or two axes"
    out = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    left, right, chosen = (x.unsqueeze(-1) if x.dim() == 1 else x for x in (own, forced, out))
    (rows, width), tall = left.shape, tile(16, 64)
    launch(
        _choose, (ceil_div(rows, tall), int(width > 0)), left, *left.stride(), right, *right.stride(), chosen,
        rows, width, RT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return out


def advance(*, length: torch.Tensor, slots: torch.Tensor, by: torch.Tensor) -> None:
    """`Advance` of the seam. Requests have different slots, so no two lanes add to the same length."""
    assert slots.is_contiguous() and by.is_contiguous(), "vectors are contiguous"
    requests, tall = slots.numel(), tile(32, 128)
    launch(_advance, (ceil_div(requests, tall),), length, length.stride(0), slots, by, requests, RT=tall)


def shift(*, tokens: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """`Shift` of the seam: lane i of the grid computes packed row i."""
    assert all(x.is_contiguous() for x in (tokens, begin, count, behind)), "vectors are contiguous"
    rows, requests, tall = tokens.numel(), begin.numel(), tile(32, 128)
    out = torch.empty_like(tokens)
    launch(
        _shift, (ceil_div(rows, tall),), tokens, begin, count, behind, out, rows, requests,
        RT=tall, CT=min(power_of_2(requests), REQUESTS),
    )  # fmt: skip
    return out


@triton.jit
def _place(
    slots, begin, count, length, length_step, table, table_row, table_column, width, page_size, shift,
    depth, depth_step, lead, positions, locations, before, kept, last, rows, requests,
    RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Place RT packed rows, and as many requests. depth: for nodes of trees; None compiles to no code. Grid (tiles)."""
    if EARLY:
        wait()
    lane = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    # All loads come before the stores: the compiler moves none before a store, which may write what it reads.
    # As request `lane`.
    asked = lane < requests
    slot = tl.load(slots + lane, mask=asked, other=-1)
    starts = tl.load(begin + lane, mask=asked, other=0)

    # As packed row `lane`: at most one request covers a row, so a maximum over all requests finds its slot, and a sum
    # over all requests finds its number among the request's rows.
    owner = tl.full((RT,), -1, tl.int64)  # [RT], the slot
    inside = tl.zeros((RT,), tl.int64)  # [RT], the number within the request
    for start in range(0, requests, CT):
        request = start + tl.arange(0, CT)
        there = request < requests
        theirs = tl.load(slots + request, mask=there, other=-1)
        first = tl.load(begin + request, mask=there, other=0)
        many = tl.load(count + request, mask=there, other=0)
        past = lane[:, None] - first[None, :]  # [RT, CT]
        covers = (past >= 0) & (past < many[None, :]) & (theirs >= 0)[None, :]
        owner = tl.maximum(owner, tl.max(tl.where(covers, theirs[None, :], -1), axis=1))
        inside = inside + tl.sum(tl.where(covers, past, 0), axis=1)
    busy, covered = slot >= 0, owner >= 0
    known = tl.load(length + slot * length_step, mask=busy, other=0)
    mine = tl.load(count + lane, mask=busy, other=0)
    reached = tl.load(length + owner * length_step, mask=covered, other=0)
    position = tl.where(covered, reached + shift + inside, 0)  # of the place, a node's own
    page = position // page_size
    mapped = covered & (position >= 0) & (page < width)
    number = tl.load(table + owner * table_row + page * table_column, mask=mapped, other=-1)
    spot = tl.where(number >= 0, number * page_size + position % page_size, -1)
    if depth is not None:  # siblings have one position: that of their depth
        position = tl.where(covered, reached - lead + tl.load(depth + lane * depth_step, mask=covered, other=0), 0)
    tl.store(positions + lane, position, mask=lane < rows)
    tl.store(locations + lane, spot, mask=lane < rows)
    ahead = shift if depth is None else -lead
    tl.store(before + lane, tl.where(busy, known + ahead, 0), mask=asked)
    tl.store(kept + lane, mine, mask=asked)
    tl.store(last + lane, tl.where(mine > 0, starts + mine - 1, -1), mask=asked)


@triton.jit
def _choose(
    own, own_row, own_column, forced, forced_row, forced_column, out, rows, width,
    RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait()
    row = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    at = tl.arange(0, CT)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    ours = tl.load(own + row[:, None] * own_row + at[None, :] * own_column, mask=inside, other=0)
    theirs = tl.load(forced + row[:, None] * forced_row + at[None, :] * forced_column, mask=inside, other=-1)
    tl.store(out + row[:, None] * width + at[None, :], tl.where(theirs >= 0, theirs, ours), mask=inside)


@triton.jit
def _advance(length, length_step, slots, by, requests, RT: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        wait()
    request = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    slot = tl.load(slots + request, mask=request < requests, other=-1)
    at = length + slot * length_step
    grown = tl.load(at, mask=slot >= 0, other=0) + tl.load(by + request, mask=slot >= 0, other=0)
    tl.store(at, grown, mask=slot >= 0)


@triton.jit
def _shift(tokens, begin, count, behind, out, rows, requests, RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr):
    """RT packed rows, each found in at most one request. Grid (tiles)."""
    if EARLY:
        wait()
    lane = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    inner = tl.zeros((RT,), tl.int64)  # 1: the next row belongs to the same request; 0: it does not
    ended = tl.zeros((RT,), tl.int64)  # for the last row of a request: the token that follows it
    for start in range(0, requests, CT):
        request = start + tl.arange(0, CT)
        there = request < requests
        first = tl.load(begin + request, mask=there, other=0)
        many = tl.load(count + request, mask=there, other=0)
        token = tl.load(behind + request, mask=there, other=0)
        past = lane[:, None] - first[None, :]
        further = (past >= 0) & (past < many[None, :] - 1)
        last = (past >= 0) & (past == many[None, :] - 1)
        inner = inner + tl.sum(further.to(tl.int64), axis=1)
        ended = ended + tl.sum(tl.where(last, token[None, :], 0), axis=1)
    after = tl.load(tokens + lane + 1, mask=(inner > 0) & (lane + 1 < rows), other=0)
    tl.store(out + lane, tl.where(inner > 0, after, ended), mask=lane < rows)
