"""Decisions: the argmax of each row of logits, and acceptance of drafted chains and trees.

Leaves out: choices that are drawn (`top_k_top_p_sampling.py`), and the kernel for trees
(`tree_shapes_and_acceptance.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from instep_reference.contract.place_names import Place

from ...ops.integer_op_protocols import Acceptance
from ..device.programmatic_dependent_launch import wait
from ..runtime import ceil_div, launch, power_of_2, tile
from .tree_shapes_and_acceptance import accept_tree

COLUMNS, JOINED = 2048, 4096  # per program on a GPU: tokens of the vocabulary; blocks of them


def pick(*, logits: torch.Tensor, to: Place) -> torch.Tensor:
    """`Pick` of the seam: the lowest index on a tie.

    Every program looks at some columns of one row; then the best of all blocks are joined in the same way. A maximum
    does not depend on the order, so neither do the bits.
    """
    assert logits.stride(1) == 1, "rows are contiguous"
    return joined(logits, None)


def joined(values: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Return the column of the largest value of each row, or its token: tokens rise along a row."""
    rows = len(values)
    while True:
        width = values.shape[1]
        tall, wide = tile(1, 8), min(power_of_2(width), tile(COLUMNS if tokens is None else JOINED, 1 << 14))
        blocks = ceil_div(width, wide)
        best = values.new_empty(rows, blocks, dtype=torch.float32)
        picked = values.new_empty(rows, blocks, dtype=torch.int64)
        launch(
            _pick, (ceil_div(rows, tall), blocks), values, values.stride(0), tokens, best, picked, rows, width,
            RT=tall, CT=wide, warps=32 if wide > COLUMNS else 8 if wide > 1024 else 4,
        )  # fmt: skip
        if blocks <= 1:
            return picked.view(rows)
        values, tokens = best, picked


def accept(
    *, window: torch.Tensor, picks: torch.Tensor, count: torch.Tensor, forced_last: torch.Tensor,
    forced_bonus: torch.Tensor, parents: torch.Tensor | None = None, caps: torch.Tensor | None = None,
) -> Acceptance:
    """`Accept` of the seam: a draft is right if it, and each one before it, equals the pick one node before."""
    assert count.is_contiguous(), "the windows' lengths are contiguous"
    requests, width = window.shape
    correct, lens, last, bonus, own, own_bonus = (window.new_empty(requests) for _ in range(6))
    index, tokens = (window.new_empty(requests, width) for _ in range(2))
    tall = tile(16, 16)
    kernel, shape = (_accept, ()) if parents is None else (accept_tree, (parents, *parents.stride()))
    launch(
        kernel, (ceil_div(requests, tall),), window, *window.stride(), picks, *picks.stride(), count,
        forced_last, forced_last.stride(0), forced_bonus, forced_bonus.stride(0),
        correct, lens, index, last, bonus, own, own_bonus, tokens, requests, width, *shape,
        caps, 0 if caps is None else caps.stride(0), RT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return Acceptance(correct, lens, index, last, bonus, own, own_bonus, tokens)


@triton.jit
def _pick(
    values, values_row, tokens, best, picked, rows, width,
    RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Find the largest of CT columns of RT rows; a NaN is never larger than anything. Grid (row tiles, column tiles).

    tokens [rows, width]: the token of each column; None: the column itself. Tokens rise along a row.
    """
    if EARLY:
        wait()
    row, block = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.program_id(1)
    at = block * CT + tl.arange(0, CT)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    value = tl.load(values + row[:, None] * values_row + at[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    largest = tl.max(value, axis=1)
    # The lowest column with the largest value wins. In a row with only NaN that is the first column.
    lowest = tl.min(tl.where(inside & (value == largest[:, None]), at[None, :], width), axis=1)
    token = lowest.to(tl.int64)
    if tokens is not None:
        token = tl.load(tokens + row * width + lowest, mask=(row < rows) & (lowest < width), other=0)
    spot = row * tl.num_programs(1) + block
    tl.store(best + spot, largest, mask=row < rows)
    tl.store(picked + spot, token, mask=row < rows)


@triton.jit
def _accept(
    window, window_row, window_column, picks, picks_row, picks_column, count,
    forced_last, correct_step, forced_bonus, bonus_step,
    correct, lens, index, last, bonus, own, own_bonus, tokens, requests, width, caps, caps_step,
    RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Accept for RT requests. Grid (request tiles)."""
    if EARLY:
        wait()
    request, t = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    live = request < requests
    nodes = tl.load(count + request, mask=live, other=0)
    busy = live & (nodes > 0)
    drafts = window + request[:, None] * window_row
    said = picks + request * picks_row
    # Own acceptance: the first node whose draft is wrong, minus 1. The root (t = 0) is never wrong.
    drafted = live[:, None] & (t >= 1)[None, :] & (t[None, :] < nodes[:, None])
    draft = tl.load(drafts + t[None, :] * window_column, mask=drafted, other=0)
    before = tl.load(said[:, None] + (t - 1)[None, :] * picks_column, mask=drafted, other=0)
    wrong = tl.where((drafted & (draft == before)) | (t == 0)[None, :], CT, t[None, :])
    most = tl.maximum(nodes - 1, 0)
    if caps is not None:
        cap = tl.load(caps + request * caps_step, mask=live, other=-1)
        most = tl.where(cap >= 0, tl.minimum(cap, most), most)
    ours = tl.minimum(tl.maximum(tl.min(wrong, axis=1).to(tl.int64) - 1, 0), most)
    tl.store(own + request, ours, mask=live)
    tl.store(own_bonus + request, tl.load(said + ours * picks_column, mask=busy, other=0), mask=live)
    # In force: the forced count where it is not -1, but never more than the window has drafts.
    forced = tl.load(forced_last + request * correct_step, mask=live, other=-1)
    in_force = tl.where(forced >= 0, tl.minimum(forced, most), ours)
    tl.store(correct + request, in_force, mask=live)
    tl.store(last + request, in_force, mask=live)
    tl.store(lens + request, tl.where(busy, in_force + 1, 0), mask=live)
    named = tl.load(forced_bonus + request * bonus_step, mask=live, other=-1)
    reached = tl.load(said + in_force * picks_column, mask=busy, other=0)
    root = tl.where(busy, tl.where(named >= 0, named, reached), 0)
    tl.store(bonus + request, root, mask=live)
    # The path is nodes 0 .. in_force. Node t is followed by draft t + 1; the last node by the bonus.
    on_path = busy[:, None] & (t[None, :] <= in_force[:, None])
    accepted = busy[:, None] & (t[None, :] < in_force[:, None])
    inside = live[:, None] & (t < width)[None, :]
    at = request[:, None] * width + t[None, :]
    tl.store(index + at, tl.where(on_path, t[None, :], -1).to(tl.int64), mask=inside)
    taken = tl.load(drafts + (t + 1)[None, :] * window_column, mask=accepted, other=0)
    tl.store(tokens + at, tl.where(on_path & (t[None, :] == in_force[:, None]), root[:, None], taken), mask=inside)
