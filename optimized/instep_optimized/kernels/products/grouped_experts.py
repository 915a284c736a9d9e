"""Experts of 16-bit activations, rows grouped by expert: a block of rows reads the weights of its expert once.

A pair is a row and an expert that it chose; the shared expert is one more, and every row has it. Pairs are ordered by
expert, then by row, and cut into blocks of one expert. Nothing is read on the host, so grids have room for the maximum
number of blocks that these pairs can have. Leaves out: 32-bit activations, and op sets that multiply every row alone
(`moe.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...ops.op_protocols import ExpertWeights
from ..device.programmatic_dependent_launch import wait
from ..device.tile_dot_fp32 import dot
from ..rowwise.pointwise import squared, swiglu
from ..runtime import INTERPRETED, ceil_div, launch, power_of_2, tile

# On a GPU (LOG.md): rows of a block for few rows, for a prompt, and the number of rows from which on the latter is
# used.
FEW, MANY, MANY_FROM = 16, 64, 512
SCORE = {"ET": 16, "DT": 256, "warps": 2, "stages": 3}
UP = {"IT": 32, "DT": 128, "warps": 4, "stages": 4}
DOWN = {"DT": 64, "IT": 128, "warps": 4, "stages": 4}
UP_MANY = {"IT": 64, "DT": 64, "warps": 4, "stages": 3}
DOWN_MANY = {"DT": 128, "IT": 64, "warps": 4, "stages": 3}
MOST = 2048  # rows at a time: every pair has an fp32 answer in memory until its row is summed
PAIRS, OTHERS, COLUMNS = 8, 512, 1024
SMALLEST_DOT = 16


def router(weights: ExpertWeights, top_k: int, norm_topk: bool) -> dict[str, Any]:
    """Return the last arguments of the kernels that call `best`."""
    experts, groups = weights.router.shape[0], weights.groups
    return {"scale": weights.scale, "group_size": experts // groups, "NORM": norm_topk, "TOP": top_k,
            "GROUPS": groups, "BEST_GROUPS": weights.groups_per_token, "GT": power_of_2(groups)}  # fmt: skip


def grouped(
    x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, read: torch.Tensor | None = None
) -> torch.Tensor:
    """Implement `Moe`: x [N, D] of 16 bits, rows grouped by expert.

    read: rows that experts read, and whose width they have, if there is no shared expert; None: x
    Operands are used as stored, an expert's middle rows are rounded to x's dtype, sums are fp32, with one cast at the
    end.
    A row adds its experts in the order of choice, the shared expert last. With the same number of rows in a block a
    row's bits do not depend on other rows.
    """
    rows, width = x.shape
    if rows > MOST:
        reads = [None] * ceil_div(rows, MOST) if read is None else read.split(MOST)
        return torch.cat([grouped(some, weights, top_k, norm_topk, one)
                          for some, one in zip(x.split(MOST), reads, strict=True)])  # fmt: skip
    experts, inner = weights.router.shape[0], weights.down.shape[2]
    gate_up, down, opening = weights.shared_gate_up, weights.shared_down, weights.shared_gate
    shared = gate_up is not None and down is not None
    most, each = max(inner, down.shape[1] if down is not None else 0), top_k + shared
    tensors = (x, *(one for one in vars(weights).values() if isinstance(one, torch.Tensor)))
    assert all(one.stride(-1) == 1 for one in tensors), "rows are contiguous"
    pairs, tall = rows * each, FEW if rows < MANY_FROM else MANY
    # A block by the first of its pairs, or by the blocks before it if all were full, and its expert.
    compact = pairs <= ceil_div(pairs, tall) + experts + shared
    room = pairs if compact else ceil_div(pairs, tall) + experts + shared
    score = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    share = torch.empty(rows, each, dtype=torch.float32, device=x.device)
    chosen, order, blocks = (torch.empty(*shape, dtype=torch.int32, device=x.device)
                             for shape in ((rows, each), (pairs,), (3, room)))  # fmt: skip
    read = x if read is None else read
    assert read.stride(1) == 1 and (read.shape[1] == width or not shared), "a shared expert reads x"
    wide = read.shape[1]
    middle, answer = x.new_empty(pairs, most), torch.empty(pairs, wide, dtype=torch.float32, device=x.device)
    out = x.new_empty(rows, wide)
    launch(
        _moe_score, (ceil_div(experts, tile(SCORE["ET"], 64)), ceil_div(rows, tall)), x, x.stride(0), weights.router,
        weights.router.stride(0), score, rows, experts, width,
        RT=tall, **_tiles(SCORE, ET=experts, DT=width), WIDEN=INTERPRETED,
    )  # fmt: skip
    launch(
        _moe_choose, (rows,), score, x, x.stride(0), opening, weights.router_bias, chosen, share, blocks, room, experts,
        width, SHARED=shared, TT=power_of_2(each), ET=power_of_2(experts), DT=power_of_2(width),
        BT=power_of_2(ceil_div(room, max(rows, 1))), warps=1, **router(weights, top_k, norm_topk),
    )  # fmt: skip
    launch(_moe_sort, (ceil_div(pairs, tile(PAIRS, 64)),), chosen, order, blocks, room, pairs,
           COMPACT=compact, RT=tall, PT=tile(PAIRS, 64), QT=OTHERS)  # fmt: skip
    up, downwards = (UP, DOWN) if tall == FEW else (UP_MANY, DOWN_MANY)
    up, downwards = _tiles(up, IT=most, DT=wide), _tiles(downwards, DT=wide, IT=most)
    launch(
        _moe_up, (ceil_div(most, up["IT"]), room), read, read.stride(0), weights.gate_up, *weights.gate_up.stride()[:2],
        gate_up, gate_up.stride(0) if gate_up is not None else 0, blocks, room, order, middle, most, inner,
        down.shape[1] if down is not None else 0, experts, wide, EACH=each, GATED=weights.gated, LIMIT=weights.limit,
        SHARED_LIMIT=weights.shared_limit, RT=tall, WIDEN=INTERPRETED, **up,
    )  # fmt: skip
    launch(
        _moe_down, (ceil_div(wide, downwards["DT"]), room), middle, most, weights.down, *weights.down.stride()[:2],
        down, down.stride(0) if down is not None else 0, blocks, room, order, answer, inner,
        down.shape[1] if down is not None else 0, experts, wide, RT=tall, WIDEN=INTERPRETED, **downwards,
    )  # fmt: skip
    columns = min(power_of_2(wide), COLUMNS)
    launch(_moe_mix, (ceil_div(wide, columns), rows), answer, share, out, wide, EACH=each, DT=columns)
    return out


def _tiles(form: dict[str, int], **sizes: int) -> dict[str, int]:
    """Tile sizes: no tile is wider than what it tiles; interpreted, tiles are few and wide."""
    fits = {name: max(power_of_2(size), SMALLEST_DOT) for name, size in sizes.items()}
    return form | {name: min(tile(form[name], 256), most) for name, most in fits.items()}


@triton.jit(do_not_specialize=["rows"])
def _moe_score(
    x, x_row, router, router_row, score, rows, experts, width,
    RT: tl.constexpr, ET: tl.constexpr, DT: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the router's logits of RT rows and ET experts. Grid (tiles of E, tiles of N)."""
    if EARLY:
        wait()
    row, e = tl.program_id(1) * RT + tl.arange(0, RT), tl.program_id(0) * ET + tl.arange(0, ET)
    total = tl.zeros((RT, ET), tl.float32)
    for start in range(0, width, DT):
        d = start + tl.arange(0, DT)
        value = tl.load(x + row.to(tl.int64)[:, None] * x_row + d[None, :],
                        mask=(row < rows)[:, None] & (d < width)[None, :], other=0.0)  # fmt: skip
        weight = tl.load(router + (e * router_row)[:, None] + d[None, :],
                         mask=(e < experts)[:, None] & (d < width)[None, :], other=0.0)  # fmt: skip
        total = dot(value, tl.trans(weight), WIDEN, False, total)
    tl.store(score + row.to(tl.int64)[:, None] * experts + e[None, :], total,
             mask=(row < rows)[:, None] & (e < experts)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["room"])
def _moe_choose(
    score, x, x_row, opening, bias, chosen, share, blocks, room, experts, width, scale, group_size,
    NORM: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, BEST_GROUPS: tl.constexpr, GT: tl.constexpr,
    SHARED: tl.constexpr, TT: tl.constexpr, ET: tl.constexpr, DT: tl.constexpr, BT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one row by `best`. Grid (N).

    The shared expert follows them, with the share 1 if it has no gate. No block has rows yet.
    """
    if EARLY:
        wait()
    row, e, rank = tl.program_id(0).to(tl.int64), tl.arange(0, ET), tl.arange(0, TT)
    block = tl.program_id(0) * BT + tl.arange(0, BT)
    tl.store(blocks + block, 0, mask=block < room)
    logit = tl.load(score + row * experts + e, mask=e < experts, other=float("-inf"))
    which, part = best(
        logit, experts, rank, bias, scale, group_size, NORM, TOP, GROUPS, BEST_GROUPS, GT)
    each = TOP
    if SHARED:
        each = TOP + 1
        which, part = tl.where(rank == TOP, experts, which), tl.where(rank == TOP, 1.0, part)
    if opening is not None:
        d = tl.arange(0, DT)
        value = tl.load(x + row * x_row + d, mask=d < width, other=0.0).to(tl.float32)
        gate = tl.sum(value * tl.load(opening + d, mask=d < width, other=0.0).to(tl.float32), axis=0)
        part = tl.where(rank == TOP, 1.0 / (1.0 + tl.exp(-gate)), part)
    tl.store(chosen + row * each + rank, which, mask=rank < each)
    tl.store(share + row * each + rank, part, mask=rank < each)


@triton.jit
def best(
    logit, experts, rank, bias, scale, group_size,
    NORM: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, BEST_GROUPS: tl.constexpr, GT: tl.constexpr,
):  # fmt: skip
    """Choose the TOP best among the logits [ET] of one row (-inf: padding), in order; a tie goes to the lowest number.

    Without a bias an expert is as good as its share, a softmax over all experts. With one the share is a sigmoid, and
    an expert is as good as share + bias; only experts of the BEST_GROUPS best groups of `group_size` are chosen.
    ->  the expert of every rank [TT], and its share times `scale`; NORM: the shares are relative to the sum of the TOP
    """
    e = tl.arange(0, logit.shape[0])
    if bias is None:
        likely = tl.exp(logit - tl.max(logit, axis=0))
        likely = likely / tl.sum(likely, axis=0)
        left = tl.where(e < experts, likely, float("-inf"))  # -inf: padding, or chosen already
    else:
        likely = 1.0 / (1.0 + tl.exp(-logit))
        left = likely + tl.load(bias + e, mask=e < experts, other=0.0).to(tl.float32)
        left = tl.where(e < experts, left, float("-inf"))
        if BEST_GROUPS < GROUPS:
            left = tl.where(of_best_groups(left, group_size, GROUPS, BEST_GROUPS, GT), left, float("-inf"))
    total = 0.0
    which, part = rank * 0, tl.zeros(rank.shape, tl.float32)
    for i in tl.static_range(TOP):
        most = tl.max(left, axis=0)
        # In a row of NaN nothing equals the maximum; the bound keeps the number among the experts.
        expert = tl.minimum(tl.min(tl.where(left == most, e, logit.shape[0]), axis=0), experts - 1)
        if bias is not None:
            most = tl.sum(tl.where(e == expert, likely, 0.0), axis=0)
        which, part = tl.where(rank == i, expert, which), tl.where(rank == i, most, part)
        left = tl.where(e == expert, float("-inf"), left)
        total += most
    if NORM:
        part = part / total
    return which, part * scale


@triton.jit
def of_best_groups(goodness, size, GROUPS: tl.constexpr, BEST_GROUPS: tl.constexpr, GT: tl.constexpr):
    """Return which experts [ET] are in the BEST_GROUPS best groups. A group is as good as its two best experts."""
    e, g = tl.arange(0, goodness.shape[0]), tl.arange(0, GT)
    mine = (e // size)[None, :] == g[:, None]  # [GT, ET]
    table = tl.where(mine, goodness[None, :], float("-inf"))
    first = tl.max(table, axis=1)
    at = tl.min(tl.where(mine & (table == first[:, None]), e[None, :], goodness.shape[0]), axis=1)
    second = tl.max(tl.where(e[None, :] == at[:, None], float("-inf"), table), axis=1)
    pairs = tl.where(g < GROUPS, first + second, float("-inf"))
    taken = tl.zeros((GT,), tl.int32)
    for _ in tl.static_range(BEST_GROUPS):
        group = tl.min(tl.where(pairs == tl.max(pairs, axis=0), g, GROUPS - 1), axis=0)
        taken, pairs = tl.where(g == group, 1, taken), tl.where(g == group, float("-inf"), pairs)
    return tl.max(tl.where(mine & (taken != 0)[:, None], 1, 0), axis=0) != 0


@triton.jit(do_not_specialize=["room", "pairs"])
def _moe_sort(
    chosen, order, blocks, room, pairs,
    COMPACT: tl.constexpr, RT: tl.constexpr, PT: tl.constexpr, QT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sort PT pairs: count the pairs before each. Every RT pairs of one expert, from the first on, make a block.

    blocks [3, room]: rows (0: no block), the first of its pairs in `order`, its expert. Grid (tiles of pairs).
    """
    if EARLY:
        wait()
    p = tl.program_id(0) * PT + tl.arange(0, PT)
    mine = tl.load(chosen + p, mask=p < pairs, other=0)
    less, sooner, alike = tl.zeros((PT, QT), tl.int32), tl.zeros((PT, QT), tl.int32), tl.zeros((PT, QT), tl.int32)
    for start in range(0, pairs, QT):
        q = start + tl.arange(0, QT)
        other = tl.load(chosen + q, mask=q < pairs, other=2147483647)
        same = (other[None, :] == mine[:, None]).to(tl.int32)
        less += (other[None, :] < mine[:, None]).to(tl.int32)
        alike += same
        sooner += tl.where(q[None, :] < p[:, None], same, 0)
    sooner, alike = tl.sum(sooner, axis=1), tl.sum(alike, axis=1)
    at = tl.sum(less, axis=1) + sooner
    tl.store(order + at, p, mask=p < pairs)
    begins = (p < pairs) & (sooner % RT == 0)
    block = at if COMPACT else at // RT + mine
    tl.store(blocks + block, tl.minimum(alike - sooner, RT), mask=begins)
    tl.store(blocks + room + block, at, mask=begins)
    tl.store(blocks + 2 * room + block, mine, mask=begins)


@triton.jit(do_not_specialize=["room"])
def _moe_up(
    x, x_row, gate_up, expert_step, gate_up_row, shared, shared_row, blocks, room, order, middle, most, inner,
    shared_inner, experts, width,
    EACH: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, SHARED_LIMIT: tl.constexpr, RT: tl.constexpr,
    IT: tl.constexpr, DT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate) * up of one block, IT inner channels. Grid (tiles of I, blocks).

    GATED: as in `moe._up`
    LIMIT, SHARED_LIMIT: of a clamped SwiGLU, of routed experts and of the shared one; None: no clamp
    """
    block = blocks + tl.program_id(1)
    count, first, expert = tl.load(block), tl.load(block + room), tl.load(block + 2 * room)  # none waits for another
    if count == 0:
        return
    weight, step = gate_up + expert.to(tl.int64) * expert_step, gate_up_row
    if shared is not None:
        weight, step = tl.where(expert == experts, shared, weight), tl.where(expert == experts, shared_row, step)
        inner = tl.where(expert == experts, shared_inner, inner)
    m, i = tl.arange(0, RT), tl.program_id(0) * IT + tl.arange(0, IT)
    row = tl.load(order + first + m, mask=m < count, other=0) // EACH
    rows, columns = x + (row.to(tl.int64) * x_row)[:, None], weight + (i * step)[:, None]
    lower = columns + inner.to(tl.int64) * step  # the up half follows the gate half
    gate, up = tl.zeros((RT, IT), tl.float32), tl.zeros((RT, IT), tl.float32)
    for start in range(0, width, DT):
        d = start + tl.arange(0, DT)
        inside = (i < inner)[:, None] & (d < width)[None, :]
        value = tl.load(rows + d[None, :], mask=(m < count)[:, None] & (d < width)[None, :], other=0.0)
        gate = dot(value, tl.trans(tl.load(columns + d[None, :], mask=inside, other=0.0)), WIDEN, False, gate)
        if GATED:
            up = dot(value, tl.trans(tl.load(lower + d[None, :], mask=inside, other=0.0)), WIDEN, False, up)
    limit = LIMIT
    if LIMIT is not None or SHARED_LIMIT is not None:
        routed = float("inf") if LIMIT is None else LIMIT
        limit = tl.where(expert == experts, float("inf") if SHARED_LIMIT is None else SHARED_LIMIT, routed)
    tl.store(middle + ((first + m).to(tl.int64) * most)[:, None] + i[None, :],
             (swiglu(gate, up, limit) if GATED else squared(gate)).to(middle.dtype.element_ty),
             mask=(m < count)[:, None] & (i < inner)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["room"])
def _moe_down(
    middle, most, down, expert_step, down_row, shared, shared_row, blocks, room, order, answer, inner, shared_inner,
    experts, width, RT: tl.constexpr, DT: tl.constexpr, IT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the answers of one block's pairs, DT channels, in fp32. Grid (tiles of D, blocks)."""
    block = blocks + tl.program_id(1)
    count, first, expert = tl.load(block), tl.load(block + room), tl.load(block + 2 * room)  # none waits for another
    if count == 0:
        return
    weight, step = down + expert.to(tl.int64) * expert_step, down_row
    if shared is not None:
        weight, step = tl.where(expert == experts, shared, weight), tl.where(expert == experts, shared_row, step)
        inner = tl.where(expert == experts, shared_inner, inner)
    m, d = tl.arange(0, RT), tl.program_id(0) * DT + tl.arange(0, DT)
    rows, columns = middle + ((first + m).to(tl.int64) * most)[:, None], weight + (d * step)[:, None]
    total = tl.zeros((RT, DT), tl.float32)
    for start in range(0, inner, IT):
        i = start + tl.arange(0, IT)
        value = tl.load(rows + i[None, :], mask=(m < count)[:, None] & (i < inner)[None, :], other=0.0)
        weights = tl.load(columns + i[None, :], mask=(d < width)[:, None] & (i < inner)[None, :], other=0.0)
        total = dot(value, tl.trans(weights), WIDEN, False, total)
    pair = tl.load(order + first + m, mask=m < count, other=0)
    tl.store(answer + (pair.to(tl.int64) * width)[:, None] + d[None, :], total,
             mask=(m < count)[:, None] & (d < width)[None, :])  # fmt: skip


@triton.jit
def _moe_mix(answer, share, out, width, EACH: tl.constexpr, DT: tl.constexpr, EARLY: tl.constexpr):
    """Sum one row's answers by weight, in the order of choice, DT channels. Grid (tiles of D, N)."""
    if EARLY:
        wait()
    row, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * DT + tl.arange(0, DT)
    total = tl.zeros((DT,), tl.float32)
    for n in tl.static_range(EACH):
        pair = row * EACH + n
        total += tl.load(share + pair) * tl.load(answer + pair * width + d, mask=d < width, other=0.0)
    tl.store(out + row * width + d, total.to(out.dtype.element_ty), mask=d < width)
