"""Decisions: the argmax of each row of logits, and greedy acceptance of drafted chains.

Leaves out: sampling.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from instep_reference.contract.place import Place

from ..ops.base import Acceptance
from .runtime import ceil_div, launch, power_of_2, tile

COLUMNS = 4096  # of the vocabulary per step


def pick(*, logits: torch.Tensor, to: Place) -> torch.Tensor:
    """`Pick` of the seam: the lowest index on a tie."""
    assert logits.stride(1) == 1, "rows are contiguous"
    rows, width = logits.shape
    picked = logits.new_empty(rows, dtype=torch.int64)
    tall, wide = tile(1, 8), min(power_of_2(width), COLUMNS)
    launch(_pick, (ceil_div(rows, tall),), logits, logits.stride(0), picked, rows, width, RT=tall, CT=wide, warps=8)
    return picked


def accept(*, window: torch.Tensor, picks: torch.Tensor, count: torch.Tensor) -> Acceptance:
    """`Accept` of the seam: a draft is right while each one before it was, and it equals the pick one place before."""
    requests, width = window.shape
    correct, lens, last, bonus = (window.new_empty(requests) for _ in range(4))
    index = window.new_empty(requests, width)
    tall = tile(16, 16)
    launch(
        _accept, (ceil_div(requests, tall),), window, *window.stride(), picks, *picks.stride(), count,
        correct, lens, index, last, bonus, requests, width, RT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return Acceptance(correct, lens, index, last, bonus)


@triton.jit
def _pick(logits, logits_row, picked, rows, width, RT: tl.constexpr, CT: tl.constexpr):
    """Each lane keeps its first largest element; a NaN is never larger. Grid (row tiles)."""
    row, lane = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    best = tl.full((RT, CT), float("-inf"), tl.float32)
    where = tl.zeros((RT, CT), tl.int32) + lane[None, :]
    for start in range(0, width, CT):
        at = start + lane
        inside = (row < rows)[:, None] & (at < width)[None, :]
        value = tl.load(logits + row[:, None] * logits_row + at[None, :], mask=inside, other=float("-inf"))
        value = value.to(tl.float32)
        larger = value > best
        where = tl.where(larger, at[None, :], where)
        best = tl.where(larger, value, best)
    largest = tl.max(best, axis=1)
    lowest = tl.min(tl.where(best == largest[:, None], where, width), axis=1)
    tl.store(picked + row, lowest.to(tl.int64), mask=row < rows)


@triton.jit
def _accept(
    window, window_row, window_column, picks, picks_row, picks_column, count,
    correct, lens, index, last, bonus, requests, width,
    RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    request, t = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    live = request < requests
    nodes = tl.load(count + request, mask=live, other=0)
    drafted = live[:, None] & (t >= 1)[None, :] & (t[None, :] < nodes[:, None])
    draft = tl.load(window + request[:, None] * window_row + t[None, :] * window_column, mask=drafted, other=0)
    before = picks + request[:, None] * picks_row + (t - 1)[None, :] * picks_column
    right = drafted & (draft == tl.load(before, mask=drafted, other=0))
    wrong = tl.where(right | (t == 0)[None, :], CT, t[None, :])
    correct_drafts = tl.maximum(tl.minimum(tl.min(wrong, axis=1), nodes.to(tl.int32)) - 1, 0).to(tl.int64)
    busy = live & (nodes > 0)
    tl.store(correct + request, correct_drafts, mask=live)
    tl.store(lens + request, tl.where(busy, correct_drafts + 1, 0), mask=live)
    tl.store(last + request, correct_drafts, mask=live)
    said = tl.load(picks + request * picks_row + correct_drafts * picks_column, mask=busy, other=0)
    tl.store(bonus + request, said, mask=live)
    on_path = busy[:, None] & (t[None, :] <= correct_drafts[:, None])
    path = tl.where(on_path, t[None, :], -1).to(tl.int64)
    tl.store(index + request[:, None] * width + t[None, :], path, mask=live[:, None] & (t < width)[None, :])
