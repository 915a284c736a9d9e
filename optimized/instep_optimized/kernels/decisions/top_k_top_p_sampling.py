"""Drawn choices: thresholds of top-k and top-p are found bit by bit, without sorting; then one token per row.

Leaves out: the argmax alone, and acceptance (`argmax_and_acceptance.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from instep_reference.contract.place_names import Place
from instep_reference.contract.sampling import UNIFORM

from ..runtime import ceil_div, launch, power_of_2, tile

COLUMNS = 4096  # tokens of the vocabulary per step


def draw(
    *, logits: torch.Tensor, window: torch.Tensor, parents: torch.Tensor | None, begin: torch.Tensor,
    count: torch.Tensor, sampling: torch.Tensor, uniforms: torch.Tensor, final: torch.Tensor, to: Place,
) -> torch.Tensor:
    """`Draw` of the seam, in fp32."""
    assert logits.stride(1) == 1 and window.stride(1) == 1 and sampling.is_contiguous(), "rows are contiguous"
    assert begin.is_contiguous() and count.is_contiguous() and uniforms.stride(1) == 1, "so are requests"
    (requests, nodes), vocab = window.shape, logits.shape[1]
    picked = begin.new_zeros(len(logits))
    tall, wide, tree = tile(1, 8), min(power_of_2(vocab), COLUMNS), window if parents is None else parents
    assert tree.stride(1) == 1, "parents are contiguous"
    launch(
        _draw, (ceil_div(requests, tall), nodes), logits, logits.stride(0), window, window.stride(0), tree,
        tree.stride(0), begin, count, sampling, uniforms, uniforms.stride(0), final, final.stride(0), picked,
        requests, nodes, vocab, RT=tall, CT=wide, TT=power_of_2(nodes), TREE=parents is not None, UNIT=UNIFORM, warps=8,
    )  # fmt: skip
    return picked


@triton.jit
def _values(row, on, at, vocab):
    """[RT, CT] logits: -0.0 equals 0.0, and a NaN is never larger."""
    inside = on[:, None] & (at < vocab)
    value = tl.load(row[:, None] + at, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    return tl.where(value == 0, 0.0, value)


@triton.jit
def _keys(value):
    """Whole numbers in the order of the values, and 1 below 2**31 at most: room for one more."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _kept(value, at, least, until):
    """Return which tokens are kept, in order of falling value, then rising id, up to `until`, whose key is `least`."""
    key = _keys(value)
    return (key > least[:, None]) | ((key == least[:, None]) & (at <= until[:, None]))


@triton.jit
def _weights(value, best, heat):
    return tl.exp((value - best[:, None]) / heat[:, None])


@triton.jit
def _largest(row, on, vocab, RT: tl.constexpr, CT: tl.constexpr):
    """Return the largest logit of each row, 0 for rows that are off, and its lowest id."""
    best, where = tl.full((RT,), float("-inf"), tl.float32), tl.full((RT,), 0, tl.int32)
    for start in range(0, vocab, CT):
        at = (start + tl.arange(0, CT))[None, :]
        value = _values(row, on, at, vocab)
        top = tl.max(value, axis=1)
        first = tl.min(tl.where(value == top[:, None], at, vocab), axis=1)
        where = tl.where(top > best, first, where)
        best = tl.maximum(best, top)
    return tl.where(on, best, 0.0), where


@triton.jit
def _tally(
    row, on, vocab, best, heat, least, until, bound, WEIGHED: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr
):
    """Count the kept tokens whose key is at least `bound`, or sum their weights."""
    total = tl.zeros((RT,), tl.float32)
    for start in range(0, vocab, CT):
        at = (start + tl.arange(0, CT))[None, :]
        value = _values(row, on, at, vocab)
        mine = _kept(value, at, least, until) & (_keys(value) >= bound[:, None]) & (at < vocab) & on[:, None]
        each = mine.to(tl.float32)
        if WEIGHED:
            each = tl.where(mine, _weights(value, best, heat), 0.0)
        total += tl.sum(each, axis=1)
    return total


@triton.jit
def _cut(
    row, on, vocab, best, heat, least, until, wanted, WEIGHED: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr
):
    """Keep the shortest prefix whose number, or weight, is at least `wanted` -> key and id of its last token.

    A bitwise search finds the largest key at which the tally still reaches `wanted`. A tally never grows with the key,
    because rounding keeps the order of sums. Among tokens with this key, only as many are kept as needed.
    """
    low, high = tl.full((RT,), -(1 << 31), tl.int64), tl.full((RT,), (1 << 31) - 1, tl.int64)
    for _ in range(32):
        middle = low + (high - low + 1) // 2
        enough = _tally(row, on, vocab, best, heat, least, until, middle, WEIGHED, RT, CT) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    above = _tally(row, on, vocab, best, heat, least, until, low + 1, WEIGHED, RT, CT)
    seen, last = tl.zeros((RT,), tl.float32), tl.full((RT,), -1, tl.int32)
    for start in range(0, vocab, CT):
        at = (start + tl.arange(0, CT))[None, :]
        value = _values(row, on, at, vocab)
        equal = _kept(value, at, least, until) & (_keys(value) == low[:, None]) & (at < vocab) & on[:, None]
        each = equal.to(tl.float32)
        if WEIGHED:
            each = tl.where(equal, _weights(value, best, heat), 0.0)
        # Keep a token while the tokens before it do not reach `wanted`.
        before = above[:, None] + (seen[:, None] + tl.cumsum(each, axis=1) - each)
        last = tl.maximum(last, tl.max(tl.where(equal & (before < wanted[:, None]), at, -1), axis=1))
        seen += tl.sum(each, axis=1)
    return low, last


@triton.jit
def _of_a_child(at, tokens, tree, on, node, count, nodes, TREE: tl.constexpr):
    """[RT, CT]: whether a token is the token of a child of the node."""
    found = (at < 0) & on[:, None]
    first, end = node + 1, tl.minimum(node + 2, nodes)
    if TREE:
        end = nodes
    for other in range(first, end):
        child = on & (other < count)
        if TREE:
            child = child & (tl.load(tree + other, mask=child, other=-1) == node)
        token = tl.load(tokens + other, mask=child, other=-1)
        found = found | (at == token[:, None])
    return found


@triton.jit
def _draw(
    logits, logits_row, window, window_row, parents, parents_row, begin, count, sampling, uniforms, uniforms_row,
    final, final_step, picked, requests, nodes, vocab,
    RT: tl.constexpr, CT: tl.constexpr, TT: tl.constexpr, TREE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Draw for RT requests at one node. Grid (request tiles, nodes)."""
    request, node = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.program_id(1)
    live = request < requests
    have = tl.load(count + request, mask=live, other=0)
    on = live & (node < have)
    at_row = tl.load(begin + request, mask=on, other=0) + node
    row, tokens, tree = logits + at_row * logits_row, window + request * window_row, parents + request * parents_row
    asked = tl.load(sampling + request * 3, mask=on, other=0.0)
    few = tl.load(sampling + request * 3 + 1, mask=on, other=0.0)
    mass = tl.load(sampling + request * 3 + 2, mask=on, other=1.0)
    drawn = on & (asked > 0)
    heat = tl.where(drawn, asked, 1.0)
    best, chosen = _largest(row, on, vocab, RT, CT)

    # Apply top-k, then top-p. At first everything is kept, down to the smallest key and the last id.
    least, until = tl.full((RT,), -(1 << 31), tl.int64), tl.full((RT,), 0, tl.int32) + vocab
    if tl.max(tl.where(drawn, few, 0.0), axis=0) > 0:
        wanted = tl.where((few > 0) & (few < vocab), few, vocab * 1.0)
        least, until = _cut(row, drawn, vocab, best, heat, least, until, wanted, False, RT, CT)
    if tl.min(tl.where(drawn, mass, 1.0), axis=0) < 1:
        whole = _tally(row, drawn, vocab, best, heat, least, until, least, True, RT, CT)
        key, end = _cut(row, drawn, vocab, best, heat, least, until, mass * whole, True, RT, CT)
        least, until = tl.where(mass < 1, key, least), tl.where(mass < 1, end, until)

    # The children, cumulated in window order; a token that two of them share counts once.
    place = tl.arange(0, TT)[None, :]
    child = drawn[:, None] & (place > node) & (place < have[:, None])
    if TREE:
        child = child & (tl.load(tree[:, None] + place, mask=child, other=-1) == node)
    else:
        child = child & (place == node + 1)
    token = tl.load(tokens[:, None] + place, mask=child, other=-1)
    # Not `value`, as in the loops below: a variable that lives across a loop keeps its shape in it.
    of_child = tl.load(row[:, None] + token, mask=child, other=float("-inf")).to(tl.float32)
    of_child = tl.where(of_child == of_child, tl.where(of_child == 0, 0.0, of_child), float("-inf"))
    counts = child & _kept(of_child, token, least, until)
    if TREE:
        earlier = tl.arange(0, TT)[None, :, None] < tl.arange(0, TT)[None, None, :]
        twice = earlier & child[:, :, None] & (token[:, :, None] == token[:, None, :])
        counts = counts & (tl.max(twice.to(tl.int32), axis=1) == 0)
    each = tl.where(counts, _weights(of_child, best, heat), 0.0)
    sums = tl.cumsum(each, axis=1)
    held = tl.max(sums, axis=1)

    # The weight outside the children. The total is the sum of both, so no gap is left if the children hold all of it.
    rest = tl.zeros((RT,), tl.float32)
    for start in range(0, vocab, CT):
        at = (start + tl.arange(0, CT))[None, :]
        value = _values(row, drawn, at, vocab)
        gone = _of_a_child(at, tokens, tree, drawn, node, have, nodes, TREE)
        mine = _kept(value, at, least, until) & (at < vocab) & drawn[:, None] & ~gone
        rest += tl.sum(tl.where(mine, _weights(value, best, heat), 0.0), axis=1)
    uniform = tl.load(uniforms + request * uniforms_row + node, mask=drawn, other=0).to(tl.float32) * UNIT
    limit = uniform * (held + rest)
    taken = tl.min(tl.where(child & (limit[:, None] < sums), place, TT), axis=1)
    accepted = tl.max(tl.where(child & (place == taken[:, None]), token, -1), axis=1)

    # If no child was drawn, the final uniform draws from the rest, in order of ids.
    bound = tl.load(final + request * final_step, mask=drawn, other=0).to(tl.float32) * UNIT * rest
    behind, last = tl.full((RT,), 0, tl.int32) + vocab, tl.full((RT,), -1, tl.int32)
    along = tl.zeros((RT,), tl.float32)
    for start in range(0, vocab, CT):
        at = (start + tl.arange(0, CT))[None, :]
        value = _values(row, drawn, at, vocab)
        gone = _of_a_child(at, tokens, tree, drawn, node, have, nodes, TREE)
        mine = _kept(value, at, least, until) & (at < vocab) & drawn[:, None] & ~gone
        weight = tl.where(mine, _weights(value, best, heat), 0.0)
        passed = (weight > 0) & (along[:, None] + tl.cumsum(weight, axis=1) > bound[:, None])
        behind = tl.minimum(behind, tl.min(tl.where(passed, at, vocab), axis=1))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, at, -1), axis=1))
        along += tl.sum(weight, axis=1)
    # Sums in another order may end just under the bound: then the last token with weight is taken.
    left = tl.where(behind < vocab, behind, last)
    said = tl.where(taken < TT, accepted, left.to(tl.int64))
    tl.store(picked + at_row, tl.where(drawn, said, chosen.to(tl.int64)), mask=on)
