"""Integer work of windows that are trees: derived shapes, greedy acceptance, and paths that move.

Leaves out: chains (`argmax_and_acceptance.py`), and moving the entries of a path (`copy_units.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...ops.integer_op_protocols import PathPlan, TreePlan
from ..runtime import ceil_div, launch, power_of_2, tile


def plan_tree(*, parents: torch.Tensor, slots: torch.Tensor, count: torch.Tensor) -> TreePlan:
    """`PlanTree` of the seam."""
    assert slots.is_contiguous() and count.is_contiguous(), "vectors are contiguous"
    (requests, width), tall = parents.shape, tile(8, 16)
    told = TreePlan(*(parents.new_empty(requests, width) for _ in TreePlan._fields))
    launch(
        _plan_tree, (ceil_div(requests, tall),), parents, *parents.stride(), slots, count, *told, requests, width,
        RT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return told


def plan_path(
    *, accept_index: torch.Tensor, slots: torch.Tensor, before: torch.Tensor, size: int,
    table: torch.Tensor | None = None,
) -> PathPlan:
    """Implement `PlanPath`: each accepted node by itself."""
    assert slots.is_contiguous() and before.is_contiguous(), "vectors are contiguous"
    (requests, width), tall = accept_index.shape, tile(8, 16)
    source, target = (accept_index.new_empty(requests, width) for _ in range(2))
    lines = (None,) * 4 if table is None else (table, *table.stride(), table.shape[1])
    launch(
        _plan_path, (ceil_div(requests, tall), int(width > 0)), accept_index, *accept_index.stride(), slots, before,
        size, *lines, source, target, requests, width, RT=tall, CT=power_of_2(width),
    )  # fmt: skip
    return PathPlan(source, target)


@triton.jit
def _plan_tree(
    parents, parents_row, parents_column, slots, count, ancestors, depth, inner, before, requests, width,
    RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Plan RT requests, node by node: a parent comes before its children. Grid (request tiles)."""
    request, t = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    live = request < requests
    slot = tl.load(slots + request, mask=live, other=-1)
    nodes = tl.where(slot >= 0, tl.load(count + request, mask=live, other=0), 0)  # [RT]
    there = t[None, :] < nodes[:, None]  # [RT, CT]
    shape = parents + request[:, None] * parents_row + t[None, :] * parents_column
    inside = live[:, None] & (t < width)[None, :]
    parent = tl.load(shape, mask=inside & there & (t > 0)[None, :], other=-1)  # [RT, CT]
    path, deep, has = tl.zeros_like(parent), tl.zeros_like(parent), tl.zeros_like(parent)  # [RT, CT]
    bit = tl.full((RT,), 1, tl.int64)
    for node in range(width):
        mine = t[None, :] == node
        above = tl.max(tl.where(mine, parent, -1), axis=1)  # [RT], -1: none
        up = t[None, :] == above[:, None]
        path = tl.where(mine & there, (tl.sum(tl.where(up, path, 0), axis=1) + bit)[:, None], path)
        below = tl.sum(tl.where(up, deep, 0), axis=1) + (above >= 0).to(tl.int64)
        deep = tl.where(mine, below[:, None], deep)
        has = tl.where(up, 1, has)
        bit = bit + bit
    at = request[:, None] * width + t[None, :]
    tl.store(ancestors + at, path, mask=inside)
    tl.store(depth + at, deep, mask=inside)
    tl.store(inner + at, tl.where(has > 0, slot[:, None], -1), mask=inside)
    tl.store(before + at, parent, mask=inside)


@triton.jit
def accept_tree(
    window, window_row, window_column, picks, picks_row, picks_column, count,
    forced_last, last_step, forced_bonus, bonus_step,
    correct, lens, index, last, bonus, own, own_bonus, tokens, requests, width,
    parents, parents_row, parents_column, caps, caps_step,
    RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Accept for RT requests: from the root down to the last right node, and back up from the last node in force.

    The arguments are those of `pick._accept`, then the shapes. Grid (request tiles).
    """
    request, t = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    live = request < requests
    nodes = tl.load(count + request, mask=live, other=0)
    busy = live & (nodes > 0)
    drafts, said, shape = window + request * window_row, picks + request * picks_row, parents + request * parents_row
    drafted = live[:, None] & (t >= 1)[None, :] & (t[None, :] < nodes[:, None])  # [RT, CT]
    draft = tl.load(drafts[:, None] + t[None, :] * window_column, mask=drafted, other=0)
    parent = tl.load(shape[:, None] + t[None, :] * parents_column, mask=drafted, other=-1)
    if caps is not None:
        cap = tl.load(caps + request * caps_step, mask=live, other=-1)
        most = tl.where(cap >= 0, cap, width)  # [RT], drafts of a path
    ours = tl.zeros((RT,), tl.int64)  # the walk's node; it stays where no child fits
    for _step in range(1, width):
        told = tl.load(said + ours * picks_column, mask=busy, other=0)
        fits = drafted & (parent == ours[:, None]) & (draft == told[:, None])
        child = tl.min(tl.where(fits, t[None, :], CT), axis=1).to(tl.int64)  # the lowest if several fit
        if caps is not None:
            child = tl.where(_step <= most, child, CT)
        ours = tl.where(child < CT, child, ours)
    # In force: the forced node if it is not -1, but none after the window's end.
    forced = tl.load(forced_last + request * last_step, mask=live, other=-1)
    final = tl.where(forced >= 0, tl.minimum(forced, tl.maximum(nodes - 1, 0)), ours)  # [RT]
    deep = depth_of(final, shape, parents_column, busy, width)
    if caps is not None:
        for _step in range(1, width):
            above = busy & (deep > most)
            final = tl.where(above, tl.load(shape + final * parents_column, mask=above, other=0), final)
            deep = tl.where(above, deep - 1, deep)
    tl.store(correct + request, deep, mask=live)
    tl.store(lens + request, tl.where(busy, deep + 1, 0), mask=live)
    tl.store(last + request, tl.where(busy, final, 0), mask=live)
    tl.store(own + request, depth_of(ours, shape, parents_column, busy, width), mask=live)
    tl.store(own_bonus + request, tl.load(said + ours * picks_column, mask=busy, other=0), mask=live)
    named = tl.load(forced_bonus + request * bonus_step, mask=live, other=-1)
    reached = tl.load(said + final * picks_column, mask=busy, other=0)
    root = tl.where(busy, tl.where(named >= 0, named, reached), 0)
    tl.store(bonus + request, root, mask=live)

    # Back up: the last node is followed by the bonus, every node above it by the one that was just passed.
    node, place, following = final, tl.where(busy, deep, -1), root  # [RT] each
    path, behind = tl.full((RT, CT), -1, tl.int64), tl.zeros((RT, CT), tl.int64)
    for _step in range(width):
        here = t[None, :] == place[:, None]
        path, behind = tl.where(here, node[:, None], path), tl.where(here, following[:, None], behind)
        on = place > 0
        following = tl.load(drafts + node * window_column, mask=on, other=0)
        node, place = tl.load(shape + node * parents_column, mask=on, other=0), place - 1
    at, inside = request[:, None] * width + t[None, :], live[:, None] & (t < width)[None, :]
    tl.store(index + at, path, mask=inside)
    tl.store(tokens + at, behind, mask=inside)


@triton.jit
def depth_of(node, shape, parents_column, busy, width):
    """Count the nodes above `node` [RT]; 0 for an idle request."""
    deep = node * 0
    for _step in range(1, width):
        on = busy & (node > 0)
        deep += on.to(tl.int64)
        node = tl.load(shape + node * parents_column, mask=on, other=0)
    return deep


@triton.jit
def _plan_path(
    accept_index, index_row, index_column, slots, before, size, table, table_row, table_column, table_width,
    source, target, requests, width,
    RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Plan RT requests. Grid (request tiles)."""
    request, t = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    inside = (request < requests)[:, None] & (t < width)[None, :]  # [RT, CT]
    slot = tl.load(slots + request, mask=request < requests, other=-1)[:, None]  # [RT, 1]
    start = tl.load(before + request, mask=request < requests, other=0)[:, None]
    node = tl.load(accept_index + request[:, None] * index_row + t[None, :] * index_column, mask=inside, other=-1)
    moves = inside & (slot >= 0) & (node > t[None, :])  # a node that is already in its token's place does not move
    at = request[:, None] * width + t[None, :]
    here = location(start + node, slot, moves, size, table, table_row, table_column, table_width)
    there = location(start + t[None, :], slot, moves, size, table, table_row, table_column, table_width)
    tl.store(source + at, here, mask=inside)
    tl.store(target + at, there, mask=inside)


@triton.jit
def location(position, slot, wanted, size, table, table_row, table_column, table_width):
    """Return unit * size + entry of positions, on the table's pages or in the slot's ring; -1: unwanted, or no page."""
    if table is None:
        return tl.where(wanted, slot * size + position % size, -1)
    else:
        page = position // size
        listed = wanted & (position >= 0) & (page < table_width)
        number = tl.load(table + slot * table_row + page * table_column, mask=listed, other=-1)
        return tl.where(number >= 0, number * size + position % size, -1)
