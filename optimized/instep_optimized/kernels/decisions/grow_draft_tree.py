"""A tree that the drafter grows: best tokens of a row, best candidates of a step, and the window of the best.

Each kernel selects in descending order, ties by lowest index, and excludes the entries that it has already taken.
Leaves out: the head's rows (`draft/eagle.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...ops.integer_op_protocols import Beams, GrownTree, TopkTokens
from ..runtime import ceil_div, launch, power_of_2, tile

COLUMNS = 4096  # tokens of the vocabulary per step


def topk_tokens(*, logits: torch.Tensor, topk: int) -> TopkTokens:
    """`MakeTopkTokens` of the seam."""
    assert logits.stride(1) == 1, "rows are contiguous"
    rows, vocab = logits.shape
    tokens = logits.new_empty(rows, topk, dtype=torch.int64)
    log_probs = logits.new_empty(rows, topk, dtype=torch.float32)
    tall, wide = tile(1, 8), min(power_of_2(vocab), COLUMNS)
    launch(
        _topk_tokens, (ceil_div(rows, tall),), logits, logits.stride(0), tokens, log_probs, rows, vocab, topk,
        RT=tall, CT=wide, warps=8,
    )  # fmt: skip
    return TopkTokens(tokens, log_probs)


def select_beams(
    *, tokens: torch.Tensor, log_probs: torch.Tensor, before: Beams | None, step: int, num_steps: int
) -> Beams:
    """`SelectBeams` of the seam: one program per request."""
    topk = tokens.shape[1]
    requests = len(tokens) if before is None else len(before.tokens)
    most = topk + (num_steps - 1) * topk**2
    candidates = [tokens.new_empty(requests, most), tokens.new_empty(requests, most),
                  log_probs.new_empty(requests, most)]  # fmt: skip
    beams = [tokens.new_empty(requests * topk) for _ in range(5)]
    known = (None,) * 5 if before is None else (*before[:3], before.beams, before.ancestors)
    assert all(one is None or one.is_contiguous() for one in known), "what an op gave is contiguous"
    first, many = (0, topk) if before is None else (topk + (step - 2) * topk**2, topk**2)
    launch(
        _select_beams, (requests,), tokens, tokens.stride(0), log_probs, log_probs.stride(0), *known, *candidates,
        *beams, most, topk, first, many, step, MT=power_of_2(most),
    )  # fmt: skip
    return Beams(*candidates, *beams)


def build_tree(*, tokens: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor, nodes: int) -> GrownTree:
    """`BuildTree` of the seam: one program per request."""
    assert tokens.is_contiguous() and parents.is_contiguous() and scores.is_contiguous(), "candidates are contiguous"
    requests, most = tokens.shape
    drafts, shape = tokens.new_empty(requests, nodes - 1), tokens.new_empty(requests, nodes)
    launch(
        _build_tree, (requests,), tokens, parents, scores, drafts, shape, most, nodes, min(nodes - 1, most),
        MT=power_of_2(most),
    )  # fmt: skip
    return GrownTree(drafts, shape)


@triton.jit
def _topk_tokens(
    logits, logits_row, tokens, log_probs, rows, vocab, topk, RT: tl.constexpr, CT: tl.constexpr
):  # fmt: skip
    """A NaN is never among the best. Grid (row tiles)."""
    row, lane = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    live = row < rows
    value_before, at_before = tl.full((RT,), float("inf"), tl.float32), tl.full((RT,), -1, tl.int32)
    peak, total = tl.full((RT,), 0.0, tl.float32), tl.full((RT,), 0.0, tl.float32)
    for rank in range(topk):
        best = tl.full((RT, CT), float("-inf"), tl.float32)
        where = tl.zeros((RT, CT), tl.int32) + lane[None, :]
        for start in range(0, vocab, CT):
            at = start + lane
            inside = live[:, None] & (at < vocab)[None, :]
            value = tl.load(logits + row[:, None] * logits_row + at[None, :], mask=inside, other=float("-inf"))
            value = value.to(tl.float32)
            same = (value == value_before[:, None]) & (at[None, :] > at_before[:, None])
            larger = ((value < value_before[:, None]) | same) & (value > best)
            where = tl.where(larger, at[None, :], where)
            best = tl.where(larger, value, best)
        value_before = tl.max(best, axis=1)
        at_before = tl.min(tl.where(best == value_before[:, None], where, vocab - 1), axis=1)
        if rank == 0:  # the sum of all powers, against the largest
            peak = tl.where(value_before == float("-inf"), 0.0, value_before)  # of no row: keep -inf - -inf out
            sums = tl.zeros((RT, CT), tl.float32)
            for start in range(0, vocab, CT):
                at = start + lane
                inside = live[:, None] & (at < vocab)[None, :]
                value = tl.load(logits + row[:, None] * logits_row + at[None, :], mask=inside, other=float("-inf"))
                sums += tl.exp(value.to(tl.float32) - peak[:, None])
            whole = tl.sum(sums, axis=1)
            total = tl.log(tl.where(whole > 0, whole, 1.0))
        tl.store(tokens + row * topk + rank, at_before.to(tl.int64), mask=live)
        tl.store(log_probs + row * topk + rank, value_before - peak - total, mask=live)


@triton.jit
def _select_beams(
    tokens, tokens_row, log_probs, log_probs_row, known_tokens, known_parents, known_scores, known_beams, known_seen,
    all_tokens, all_parents, all_scores, beams, following, depth, rows, seen, most, topk, first, many, step,
    MT: tl.constexpr,
):  # fmt: skip
    """Grid (requests). known_*: of the step before; the first step has none, and Triton leaves them out."""
    request, c = tl.program_id(0).to(tl.int64), tl.arange(0, MT)
    new = (c >= first) & (c < first + many)
    beam, rank = (c - first) // topk, (c - first) % topk
    if known_tokens is None:
        row = request + beam * 0
        parent = tl.full((MT,), -1, tl.int64)
        token, score = tl.zeros((MT,), tl.int64), tl.full((MT,), float("-inf"), all_scores.dtype.element_ty)
        said = tl.load(log_probs + row * log_probs_row + rank, mask=new, other=0.0)
    else:
        row = request * topk + beam
        at = request * most + c
        old = c < first
        parent = tl.load(known_parents + at, mask=old, other=-1)
        token = tl.load(known_tokens + at, mask=old, other=0)
        score = tl.load(known_scores + at, mask=old, other=float("-inf"))
        mine = tl.load(known_beams + request * topk + beam, mask=new, other=0)
        said = tl.load(log_probs + row * log_probs_row + rank, mask=new, other=0.0)
        said = tl.load(known_scores + request * most + mine, mask=new, other=0.0) + said
        parent = tl.where(new, mine, parent)
    token = tl.where(new, tl.load(tokens + row * tokens_row + rank, mask=new, other=0), token)
    score = tl.where(new, said, score)
    tl.store(all_tokens + request * most + c, token, mask=c < most)
    tl.store(all_parents + request * most + c, parent, mask=c < most)
    tl.store(all_scores + request * most + c, score, mask=c < most)
    left = new
    for place in range(topk):
        largest = tl.max(tl.where(left, score, float("-inf")), axis=0)
        number = tl.min(tl.where(left & (score == largest), c, first + many - 1), axis=0)  # of equal ones the lowest
        left = left & (c != number)
        out = request * topk + place
        tl.store(beams + out, number.to(tl.int64))
        tl.store(following + out, tl.sum(tl.where(c == number, token, 0), axis=0))
        tl.store(depth + out, out * 0 + step)
        own = (out * 0 + 1) << (1 + (step - 1) * topk + place)
        if known_tokens is None:
            tl.store(rows + out, request)
            tl.store(seen + out, own + 1)
        else:
            source = request * topk + (number - first) // topk
            tl.store(rows + out, source)
            tl.store(seen + out, tl.load(known_seen + source) + own)


@triton.jit
def _build_tree(tokens, parents, scores, drafts, shape, most, nodes, wanted, MT: tl.constexpr):
    """A node's parent is as many nodes in as there are chosen candidates up to it. Grid (requests)."""
    request, c = tl.program_id(0).to(tl.int64), tl.arange(0, MT)
    inside = c < most
    score = tl.load(scores + request * most + c, mask=inside, other=float("-inf"))
    token = tl.load(tokens + request * most + c, mask=inside, other=0)
    parent = tl.load(parents + request * most + c, mask=inside, other=-1)
    left = inside
    for _node in range(wanted):
        largest = tl.max(tl.where(left, score, float("-inf")), axis=0)
        number = tl.min(tl.where(left & (score == largest), c, most - 1), axis=0)
        left = left & (c != number)
    chosen = inside & ~left
    tl.store(shape + request * nodes, request * 0 - 1)
    last = -1
    for node in range(1, nodes):
        number = tl.min(tl.where(chosen & (c > last), c, MT), axis=0)
        up = tl.sum(tl.where(c == number, parent, 0), axis=0)
        place = tl.sum(tl.where(chosen & (c <= up), 1, 0), axis=0).to(tl.int64)
        tl.store(drafts + request * (nodes - 1) + node - 1, tl.sum(tl.where(c == number, token, 0), axis=0))
        tl.store(shape + request * nodes + node, tl.where(number < MT, place, -1))
        last = number
