"""The gated delta rule over a prefill chunk on tensor cores: 64 tokens at a time, operands in bf16, sums in fp32.

Leaves out: the precise form (`chunk.py`), which 32-bit activations take, and the token-by-token form (`window.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import Part
from ..ops.base import GdnInputs
from .address import flat, given
from .dot import dot
from .runtime import INTERPRETED, ceil_div, launch, power_of_2
from .tiles import ROWS, beside, packed, scale_of, scales_at

TOKENS = 64  # per block
VALUES = 64  # rows of V per program that carries the state: the height of one tensor-core instruction
SMALLEST_DOT = 16
SOLVE, MERGE, LATE, ORDER = 1, "bf16", 0, 0
PREPARE = {"warps": 4, "stages": 1}
CARRY = {"warps": 4, "stages": 2}


def blocks(inputs: GdnInputs, part: Part, core: torch.Tensor) -> None:
    """Run one part's rows through their states; write `core` [N, HV, V] and the memory."""
    assert part.per_row is None, "a prefill chunk keeps no state per position"
    requests, heads, values, keys = part.begin.numel(), core.shape[1], core.shape[2], inputs.k.shape[2]
    key_heads, wide = inputs.k.shape[1], max(power_of_2(keys), SMALLEST_DOT)
    most = ceil_div(part.most, TOKENS)
    room = core.shape[0] // TOKENS + requests  # blocks of all requests together: each has at most one that is not full

    def scratch(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(room, *shape, dtype=dtype, device=core.device)

    q16, k16 = (scratch(key_heads, TOKENS, wide) for _ in range(2))
    solved, mixed = (scratch(heads, TOKENS, TOKENS) for _ in range(2))
    gates = scratch(heads, 3, TOKENS, dtype=torch.float32)
    diagonal = scratch(heads, TOKENS, 16, dtype=torch.float32) if SOLVE == 1 else gates
    rows = tuple(y for x in inputs for y in (x, x.stride(0), x.stride(1)))
    assert all(x.stride(2) == 1 for x in (*inputs[:3], core)), "rows have a contiguous last axis"
    spans = (part.begin, part.count, part.read.units)
    launch(
        _prepare, (heads, most, requests), *rows[:6], *rows[9:], q16, k16, solved, mixed, gates, diagonal, *spans,
        keys, heads // key_heads,
        C=TOKENS, KT=wide, WIDEN=INTERPRETED, SOLVE=SOLVE, MERGE=MERGE, LATE=LATE, **PREPARE,
    )  # fmt: skip
    tall = max(SMALLEST_DOT, min(power_of_2(values), VALUES))
    assert part.read.scales is None or tall % ROWS.value == 0 or tall >= values, "a program has whole tiles"
    launch(
        _carry, (ceil_div(values, tall), heads, requests if most else 0), *rows[6:9], q16, k16, solved, mixed, gates,
        core, core.stride(0), core.stride(1), *spans, part.fresh, *flat(part.read, 3, part.read),
        *flat(part.store, 3, part.read), given(part.store),
        *beside(part.read, part.read), *beside(part.store, part.read), values, keys, heads // key_heads,
        TILED=part.read.scales is not None, C=TOKENS, KT=wide, VT=tall, WIDEN=INTERPRETED, ORDER=ORDER, **CARRY,
    )  # fmt: skip


@triton.jit
def _blocks_before(count, request, C: tl.constexpr):
    """How many blocks the requests before this one have: where its own begin in the scratch."""
    at, before = tl.arange(0, 32), tl.zeros((1,), tl.int64)
    for first in range(0, request, 32):
        counts = tl.load(count + first + at, mask=first + at < request, other=0)
        before += tl.sum(tl.cdiv(counts, C), axis=0)
    return tl.sum(before, axis=0)


@triton.jit
def _solve0(upper, C: tl.constexpr):
    """masked sums."""
    n: tl.constexpr = C // 16
    b, i = tl.arange(0, n), tl.arange(0, 16)
    same = b[:, None, None, None] == b[None, None, :, None]
    four = tl.sum(tl.where(same, tl.reshape(upper, (n, 16, n, 16)), 0.0), axis=2)  # [n, 16 (j), 16 (i)]
    found = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None] + tl.zeros_like(four)
    for step in range(1, 16):
        ahead = tl.sum(tl.where((i == step)[None, None, :], four, 0.0), axis=2)  # [n, 16 (m)]
        new = tl.sum(found * ahead[:, None, :], axis=2)  # [n, 16 (j)]
        found = tl.where((i == step)[None, None, :], found - new[:, :, None], found)
    return tl.reshape(tl.where(same, found[:, :, None, :], 0.0), (C, C))


@triton.jit
def _solve1(upper, diagonal, C: tl.constexpr):
    """rows of A from memory."""
    n: tl.constexpr = C // 16
    c, i = tl.arange(0, C), tl.arange(0, 16)
    # A[c, m] at c * 16 + m, of the diagonal blocks: transposed of upper
    j = tl.arange(0, C)
    inside = (j[:, None] // 16) == (j[None, :] // 16)
    tl.store(diagonal + j[None, :] * 16 + j[:, None] % 16, upper, mask=inside)
    tl.debug_barrier()
    found = tl.where((c % 16)[:, None] == i[None, :], 1.0, 0.0)  # [C (j), 16 (n)]
    for step in range(1, 16):
        ahead = tl.load(diagonal + ((c // 16) * 16 + step)[:, None] * 16 + i[None, :])  # [C, 16 (m)]
        new = tl.sum(found * ahead, axis=1)
        found = tl.where((i == step)[None, :], found - new[:, None], found)
    b = tl.arange(0, n)
    spread = tl.where((c // 16)[:, None, None] == b[None, :, None], found[:, None, :], 0.0)
    return tl.reshape(spread, (C, C))


@triton.jit
def _solve2(upper, MERGE: tl.constexpr, C: tl.constexpr):
    """products of 16 x 16."""
    n: tl.constexpr = C // 16
    b, i = tl.arange(0, n), tl.arange(0, 16)
    same = b[:, None, None, None] == b[None, None, :, None]
    four = tl.sum(tl.where(same, tl.reshape(upper, (n, 16, n, 16)), 0.0), axis=2)  # [n, 16 (j), 16 (i)]
    found = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None] - tl.where(
        (i[:, None] // 2 == i[None, :] // 2)[None], four, 0.0)
    for level in tl.static_range(1, 4):
        between = (i[:, None] // 2**level != i[None, :] // 2**level) & (
            i[:, None] // 2 ** (level + 1) == i[None, :] // 2 ** (level + 1))
        lower = tl.where(between[None], four, 0.0)
        found -= tl.dot(tl.dot(found, lower, input_precision=MERGE), found, input_precision=MERGE)
    return tl.reshape(tl.where(same, found[:, :, None, :], 0.0), (C, C))


@triton.jit
def _solve3(upper, MERGE: tl.constexpr, WIDEN: tl.constexpr, C: tl.constexpr):
    """products of C x C throughout."""
    i = tl.arange(0, C)
    found = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where((i[:, None] ^ i[None, :]) == 1, upper, 0.0)
    for level in tl.static_range(1, 4):
        found = _merge(found, upper, 2**level, MERGE, WIDEN, C)
    return found


@triton.jit
def _merge(found, upper, SIZE: tl.constexpr, MERGE: tl.constexpr, WIDEN: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, C)
    lower = tl.where((i[:, None] ^ i[None, :]) // SIZE == 1, upper, 0.0)
    if MERGE == "bf16":
        narrow = found.to(tl.bfloat16)
        return found - dot(dot(narrow, lower.to(tl.bfloat16), WIDEN, False).to(tl.bfloat16), narrow, WIDEN, False)
    else:
        return found - tl.dot(tl.dot(found, lower, input_precision=MERGE), found, input_precision=MERGE)


@triton.jit
def _prepare(
    q, q_row, q_head, k, k_row, k_head, log_decay, log_decay_row, log_decay_head, beta, beta_row, beta_head,
    q16, k16, solved, mixed, gates, diagonal, begin, count, units, K, group,
    C: tl.constexpr, KT: tl.constexpr, WIDEN: tl.constexpr, SOLVE: tl.constexpr, MERGE: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """What needs no state, of one block and one key head, for every value head of it. Grid (blocks, H, B)."""
    request, head = tl.program_id(2), tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * C
    rows = tl.minimum(tl.load(count + request) - first, C).to(tl.int32)
    if (tl.load(units + request) < 0) | (rows <= 0):
        return
    block = _blocks_before(count, request, C) + tl.program_id(1)
    i, at_k = tl.arange(0, C), tl.arange(0, KT)
    start, live = tl.load(begin + request) + first, i < rows
    inside = live[:, None] & (at_k < K)[None, :]
    key_head, at = head // group, block * tl.num_programs(0) + head
    q, k = q + start * q_row + key_head * q_head, k + start * k_row + key_head * k_head
    queries = tl.load(q + i[:, None] * q_row + at_k[None, :], mask=inside, other=0.0).to(tl.bfloat16)
    keys = tl.load(k + i[:, None] * k_row + at_k[None, :], mask=inside, other=0.0).to(tl.bfloat16)
    keys = tl.where(rows > 0, keys, 0.0)
    if (LATE < 2) & (head % group == 0):
        place = (at // group) * C * KT + i[:, None] * KT + tl.max_contiguous(at_k, 4)[None, :]
        tl.store(q16 + place, queries)
        tl.store(k16 + place, keys)
    gate = log_decay + start * log_decay_row + head * log_decay_head + i * log_decay_row
    forget = tl.load(gate, mask=live, other=0.0).to(tl.float64)
    write = tl.load(beta + start * beta_row + head * beta_head + i * beta_row, mask=live, other=0.0)
    total = tl.cumsum(forget, axis=0)
    tl.store(gates + at * 3 * C + i, tl.exp(total.to(tl.float32)))
    tl.store(gates + at * 3 * C + C + i, tl.exp((tl.sum(forget, axis=0) - total).to(tl.float32)))
    tl.store(gates + at * 3 * C + 2 * C + i, write)
    later, not_earlier = i[None, :] > i[:, None], i[None, :] >= i[:, None]
    decay = tl.exp(tl.minimum((total[None, :] - total[:, None]).to(tl.float32), 0.0))  # [j, i]
    tile = at * C * C + i[None, :] * C + i[:, None]  # stored as [i, j]
    seen = dot(keys, tl.trans(queries), WIDEN, False)  # [C (j), C (i)]
    weights = tl.where(not_earlier, seen * decay, 0.0).to(tl.bfloat16)
    if LATE < 1:
        tl.store(mixed + tile, weights)
    overlap = dot(keys, tl.trans(keys), WIDEN, False)  # [C (j), C (i)]
    upper = tl.where(later, overlap * decay * write[None, :], 0.0)
    if SOLVE == 0:
        found = _solve0(upper, C)
    elif SOLVE == 1:
        found = _solve1(upper, diagonal + at * C * 16, C)
    elif SOLVE == 2:
        found = _solve2(upper, "tf32x3" if MERGE == "bf16" else "ieee", C)
    else:
        found = _solve3(upper, MERGE, WIDEN, C)
    found = _merge(found, upper, 16, MERGE, WIDEN, C)
    found = _merge(found, upper, 32, MERGE, WIDEN, C)
    tl.store(solved + tile, found.to(tl.bfloat16))
    if LATE >= 1:
        tl.store(mixed + tile, weights)
    if (LATE == 2) & (head % group == 0):
        place = (at // group) * C * KT + i[:, None] * KT + tl.max_contiguous(at_k, 4)[None, :]
        tl.store(q16 + place, tl.load(q + i[:, None] * q_row + at_k[None, :], mask=inside, other=0.0).to(tl.bfloat16))
        tl.store(k16 + place, tl.load(k + i[:, None] * k_row + at_k[None, :], mask=inside, other=0.0).to(tl.bfloat16))


@triton.jit(do_not_specialize=["has_store"])
def _carry(
    v, v_row, v_head, q16, k16, solved, mixed, gates, core, core_row, core_head, begin, count, units, fresh,
    read, read_units, read_columns, read_unit, read_column, read_h, read_k, read_v,
    store, store_units, store_columns, store_unit, store_column, store_h, store_k, store_v, has_store,
    read_scales, read_scales_unit, read_scales_column, store_scales, store_scales_unit, store_scales_column,
    V, K, group,
    C: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, WIDEN: tl.constexpr, TILED: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """One request, one value head, VT columns of V, all blocks in order. Grid (V tiles, HV, B)."""
    request, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    unit, rows = tl.load(units + request), tl.load(count + request).to(tl.int32)
    if (unit < 0) | (rows <= 0):
        return  # core is zero there already
    i, at_k, at_v = tl.arange(0, C), tl.arange(0, KT), tl.program_id(0) * VT + tl.arange(0, VT)
    in_k, in_v = at_k < K, at_v < V
    heads = tl.num_programs(1)
    known = at_v < tl.where(tl.load(fresh + request) == 0, V, 0)  # nothing of a fresh request's memory is loaded
    place = tl.load(read_columns + request)
    source = read + unit * read_unit + place * read_column + head * read_h
    source = source + at_k[:, None] * read_k + at_v[None, :] * read_v
    state = tl.load(source, mask=in_k[:, None] & known[None, :], other=0.0).to(tl.float32)  # [KT, VT]
    if TILED:
        scales = scales_at(read_scales, read_scales_unit, read_scales_column, unit, place, head, at_v, V)
        state = state * tl.load(scales, mask=known, other=0.0)[None, :]
    tl.debug_barrier()  # the slot that is read here may be the slot that is stored below

    block, start = _blocks_before(count, request, C), tl.load(begin + request)
    v, v_tile = v + start * v_row + head * v_head, i[:, None] * v_row + at_v[None, :]
    core, core_tile = core + start * core_row + head * core_head, i[:, None] * core_row + at_v[None, :]
    wide, square = i[:, None] * KT + at_k[None, :], i[:, None] * C + i[None, :]
    k16, q16 = k16 + (block * (heads // group) + head // group) * C * KT, q16 + (block * (heads // group) + head // group) * C * KT
    solved, mixed, gates = solved + (block * heads + head) * C * C, mixed + (block * heads + head) * C * C, gates + (block * heads + head) * 3 * C
    for first in range(0, rows, C):
        some = (first + i < rows)[:, None] & in_v[None, :]
        keys, inverse = tl.load(k16 + wide), tl.load(solved + square)
        since, until, write = tl.load(gates + i), tl.load(gates + C + i), tl.load(gates + 2 * C + i)
        whole = tl.load(gates + C - 1)
        values = tl.load(v + v_tile, mask=some, other=0.0)  # [C, VT]
        queries, weights = tl.load(q16 + wide), tl.load(mixed + square)

        narrow = state.to(tl.bfloat16)
        residual = (values - dot(keys, narrow, WIDEN, False) * since[:, None]) * write[:, None]
        if ORDER == 1:
            out = dot(queries, narrow, WIDEN, False) * since[:, None]
        update = dot(inverse, residual.to(tl.bfloat16), WIDEN, False)  # [C, VT]
        if ORDER == 3:
            out = dot(queries, narrow, WIDEN, False) * since[:, None]
        state = state * whole + dot(tl.trans(keys), (update * until[:, None]).to(tl.bfloat16), WIDEN, False)
        if ORDER == 0:
            out = dot(queries, narrow, WIDEN, False) * since[:, None]
        if ORDER != 2:
            out += dot(weights, update.to(tl.bfloat16), WIDEN, False)
            tl.store(core + core_tile, out.to(core.dtype.element_ty), mask=some)
        v += C * v_row
        core += C * core_row
        k16, q16 = k16 + (heads // group) * C * KT, q16 + (heads // group) * C * KT
        solved, mixed, gates = solved + heads * C * C, mixed + heads * C * C, gates + heads * 3 * C

    goal, place = tl.load(store_units + request), tl.load(store_columns + request)
    kept = at_v < tl.where((has_store != 0) & (goal >= 0), V, 0)
    target = store + goal * store_unit + place * store_column + head * store_h
    target = target + at_k[:, None] * store_k + at_v[None, :] * store_v
    stays = in_k[:, None] & kept[None, :]
    if TILED:
        scale = scale_of(tl.max(tl.abs(state), axis=0))
        scales = scales_at(store_scales, store_scales_unit, store_scales_column, goal, place, head, at_v, V)
        tl.store(target, packed(state, tl.broadcast_to(scale[None, :], state.shape)), mask=stays)
        tl.store(scales, scale, mask=kept & (at_v % ROWS == 0))
    else:
        tl.store(target, state.to(store.dtype.element_ty), mask=stays)
