"""The gated delta rule over a prefill chunk on tensor cores: 64 tokens at a time, operands in bf16, sums in fp32.

Leaves out: the precise form (`chunk16_fp32.py`), which 32-bit activations take, and the token-by-token form
(`token_by_token.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...memory_addresses import Part
from ...ops.op_protocols import GdnInputs
from ..device.pool_address import PackedRows, Spans, States, given, row_of
from ..device.scaled_tiles import ROWS
from ..device.stochastic_rounding import counters
from ..device.tile_dot_fp32 import dot
from ..device.zero_uncovered_rows import clear_rest
from ..runtime import INTERPRETED, ceil_div, launch, power_of_2
from .load_and_store_state import state_before, store_state

TOKENS = 64  # per block
LOG2E = tl.constexpr(math.log2(math.e))
HALVINGS = tl.constexpr(6)  # of a block, until one token is left
LEAST = tl.constexpr(-126.0)  # log2 of the smallest normal number of fp32
FAR = tl.constexpr(100.0)  # distance of exponents up to which one product has all pairs of a block
SOLVED = tl.constexpr(16)  # tokens of a triangular block that is inverted by substitution
VALUES = 32  # columns of V per program that carries the state
# The width doubles from this many programs on, one per multiprocessor of an H100. It is a constant, so that tiles
# follow from the model's shape alone.
WIDE_FROM = 132
SMALLEST_DOT = 16
PREPARE = {"warps": 4, "registers": 168}  # three programs at a time instead of two
CARRY = {"warps": 4, "stages": 3}
SLICE = 32  # channels at a time
PREPARE_CHANNELS = {"warps": 2}  # four programs at a time (LOG.md)
CARRY_CHANNELS = {"warps": 4, "stages": 2}  # a third tile of keys a block


def blocks(inputs: GdnInputs, part: Part, core: torch.Tensor, look: int = 0) -> None:
    """Run one part's rows through their states, block by block; write `core` [N, HV, V] and the memory.

    With D_ij, A and S as in `chunk16_fp32.py`, T = (I + A)^-1, P = tril(q k^T) D, and a block of C tokens:

        U  = T beta (v - D_i0 (k S))      what every token adds
        o  = D_i0 (q S) + P U
        S <- D_C0 S + k^T (D_Cj U)

    The first kernel, `_prepare`, computes T and P of all blocks at once, and q and k in bf16. The second, `_carry`,
    takes the blocks in order. Every product has bf16 operands and adds in fp32; S itself, gates, decays and residuals
    are fp32. T is inverted in fp32 in blocks of 16, which products then join. This is what
    `Product("bf16", block=64, residual=True, narrow=True)` declares.
    If each key channel has its own decay, `_prepare_channels` is the first kernel; keys and queries come decayed.
    look: number of rows of `core` to check; those that no request covers become zero
    Mirrors: Gated DeltaNet (arXiv:2412.06464), chunked form with the UT transform. Differs: the inverse is applied to
    the residual instead of to keys and values separately, which saves a rounding and memory traffic.
    """
    assert part.per_row is None, "a prefill chunk keeps no state per position"
    requests, heads, values, keys = part.begin.numel(), core.shape[1], core.shape[2], inputs.k.shape[2]
    group, wide, most = heads // inputs.k.shape[1], _wide(keys), ceil_div(part.most, TOKENS)
    scratch = _scratch(core, requests)
    x, of_requests, left16 = PackedRows.of(inputs, core), Spans.of(part), None
    if x.channels is not None:
        q16, k16, left16, solved, mixed, gates = prepared_channels(x, of_requests, inputs, part, core)
        group = 1  # keys and queries are decayed, so each value head has its own
    else:
        q16, k16 = (scratch(heads // group, TOKENS, wide) for _ in range(2))
        solved, mixed = (scratch(heads, TOKENS, TOKENS) for _ in range(2))
        lower = scratch(heads, TOKENS, SOLVED.value, dtype=torch.float32)  # rows of A within their triangular block
        gates = scratch(heads, 3, TOKENS, dtype=torch.float32)  # decay since the block's start, until its end; beta
        launch(
            _prepare, (heads, most, requests), x, q16, k16, solved, mixed, gates, lower, of_requests, keys, group,
            C=TOKENS, KT=wide, WIDEN=INTERPRETED, **PREPARE,
        )  # fmt: skip
    # By the model's shape alone: the other requests of a batch change no tile.
    columns = 2 * VALUES if heads * ceil_div(values, VALUES) > WIDE_FROM else VALUES
    tall = max(SMALLEST_DOT, min(power_of_2(values), columns))
    assert part.read.scales is None or tall % ROWS.value == 0, "a program has whole tiles"
    launch(
        _carry, (ceil_div(values, tall), heads, requests if most else 0),
        x, q16, k16, left16, solved, mixed, gates, look, of_requests,
        States.of(part.read, part.read), States.of(part.store, part.read), given(part.store),
        *counters(part, part.store), values, keys, group,
        TILED=part.read.scales is not None, C=TOKENS, KT=wide, VT=tall, WIDEN=INTERPRETED,
        **(CARRY if left16 is None else CARRY_CHANNELS),
    )  # fmt: skip


def _wide(keys: int) -> int:
    return max(power_of_2(keys), SMALLEST_DOT)


def _scratch(core: torch.Tensor, requests: int) -> Callable[..., torch.Tensor]:
    """Make memory [blocks, *shape] for all blocks of a call."""
    room = core.shape[0] // TOKENS + requests  # blocks of all requests: each has at most one that is not full

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return core.new_empty(room, *shape, dtype=dtype)

    return made


def prepared_channels(
    x: PackedRows, of_requests: Spans, inputs: GdnInputs, part: Part, core: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Run `_prepare_channels`. Each block [blocks, HV, ..] has the following, in bf16 but for `gates` in fp32:

    q16, k16, left16  [C, KT], decayed since the block's start, and keys until its end
    solved, mixed     T and P, [C, C]
    gates             [C + KT]: beta, and the decay of the block by channel
    """
    requests, heads, keys = part.begin.numel(), core.shape[1], inputs.k.shape[2]
    wide, scratch = _wide(keys), _scratch(core, requests)
    q16, k16, left16 = (scratch(heads, TOKENS, wide) for _ in range(3))
    solved, mixed = (scratch(heads, TOKENS, TOKENS) for _ in range(2))
    gates = scratch(heads, TOKENS + wide, dtype=torch.float32)
    lower = scratch(heads, TOKENS, SOLVED.value, dtype=torch.float32)  # rows of A within their triangular block
    launch(
        _prepare_channels, (heads, ceil_div(part.most, TOKENS), requests),
        x, q16, k16, left16, solved, mixed, gates, lower, of_requests, keys, heads // inputs.k.shape[1],
        C=TOKENS, KT=wide, KS=min(wide, SLICE), WIDEN=INTERPRETED, **PREPARE_CHANNELS,
    )  # fmt: skip
    return q16, k16, left16, solved, mixed, gates


@triton.jit
def _blocks_before(count, units, request, C: tl.constexpr):
    """Count the blocks of the served requests before this one: the offset of its blocks in the scratch."""
    at, before = tl.arange(0, 32), tl.zeros((1,), tl.int64)
    for first in range(0, request, 32):
        served = tl.load(units + first + at, mask=first + at < request, other=-1) >= 0
        counts = tl.load(count + first + at, mask=served, other=0)
        before += tl.sum(tl.cdiv(counts, C), axis=0)
    return tl.sum(before, axis=0)


@triton.jit
def _prepare(
    x, q16, k16, solved, mixed, gates, lower, spans, K, group,
    C: tl.constexpr, KT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the part of one block that needs no state. Grid (HV, blocks, B).

    Rows after a request's last are zeros. Tiles of token pairs are held transposed, as [j, i], and stored as [i, j].
    """
    request, head = tl.program_id(2), tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * C
    rows = tl.minimum(tl.load(spans.rows + request) - first, C).to(tl.int32)
    if (tl.load(spans.units + request) < 0) | (rows <= 0):
        return
    i, at_k = tl.arange(0, C), tl.arange(0, KT)
    start, live, key_head = tl.load(spans.begin + request) + first, i < rows, head // group
    at = (_blocks_before(spans.rows, spans.units, request, C) + tl.program_id(1)) * tl.num_programs(0) + head
    inside = live[:, None] & (at_k < K)[None, :]
    q, k = row_of(x.q, start, key_head), row_of(x.k, start, key_head)
    queries = tl.load(q + i[:, None] * x.q.per_row + at_k[None, :], mask=inside, other=0.0).to(tl.bfloat16)  # [C, KT]
    keys = tl.load(k + i[:, None] * x.k.per_row + at_k[None, :], mask=inside, other=0.0).to(tl.bfloat16)  # [C, KT]
    keys = tl.where(rows > 0, keys, 0.0)  # changes nothing, but without it the compiler stages fp32 in shared memory
    if head % group == 0:
        place = (at // group) * C * KT + i[:, None] * KT + tl.max_contiguous(at_k, 4)[None, :]  # as they were loaded
        tl.store(q16 + place, queries)
        tl.store(k16 + place, keys)
    # Running sums in fp64 lose no digit of their differences that fp32 has: a difference of two of them is the sum of
    # the log decays between two tokens. As two fp32 numbers, one below the other, they keep nearly all of it. Neither
    # rises from a token to the next while the first stays, so no difference is above 0 and no decay above 1.
    forget = tl.load(row_of(x.log_decay, start + i, head), mask=live, other=0.0)  # [C]
    forget = forget.to(tl.float64) * LOG2E
    total = tl.cumsum(forget, axis=0)  # [C]
    until = tl.sum(forget, axis=0) - total
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    write = tl.load(row_of(x.beta, start + i, head), mask=live, other=0.0)  # [C]
    tl.store(gates + at * 3 * C + i, tl.exp2(high))
    tl.store(gates + at * 3 * C + C + i, tl.exp2(tl.minimum(until.to(tl.float32), 0.0)))
    tl.store(gates + at * 3 * C + 2 * C + i, write)
    over = high[None, :] - high[:, None] + (low[None, :] - low[:, None])  # [C, C]
    decay = tl.exp2(tl.where(i[None, :] >= i[:, None], over, float("-inf")))  # [C, C]

    tile = at * C * C + i[None, :] * C + i[:, None]
    seen = dot(keys, tl.trans(queries), WIDEN, False) * decay  # [C, C]
    tl.store(mixed + tile, seen.to(tl.bfloat16))
    overlap = dot(keys, tl.trans(keys), WIDEN, False) * decay * write[None, :]  # [C, C]
    overlap = tl.where(i[None, :] > i[:, None], overlap, 0.0)
    inverse = _inverse(overlap, i, lower + at * C * SOLVED, C, WIDEN)
    tl.store(solved + tile, inverse.to(tl.bfloat16))


@triton.jit
def _prepare_channels(
    x, q16, k16, left16, solved, mixed, gates, lower, spans, K, group,
    C: tl.constexpr, KT: tl.constexpr, KS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Do `_prepare` with a decay per key channel, and decay keys and queries for `_carry`. Grid (HV, blocks, B).

        A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)         G_i: the sum of log decays through token i
             = beta_i sum_c (k_ic exp(G_ic - M_c)) (k_jc exp(M_c - G_jc))       for any M

    So A is a product of two matrices. If every G of some KS channels is within FAR of that of the middle token, M
    is that one for all pairs. Then an operand is at most 2^FAR of its key and has its digits in bf16, whose
    exponents are those of fp32; keys below 2^(LEAST + FAR) = 2^-26 may be lost. Pairs with j > i may overflow; they
    are not taken.

    Otherwise an exponent might be large and positive. For j < i, let M be G_m of a token m with j <= m <= i: as G
    never rises, both exponents are at most 0. No operand is above its key or query, so no bound of the gate is
    needed. A factor that underflows belongs to a product that is smaller still. Halving finds m: a block of 2 h
    tokens has h^2 pairs with j in its first half and i in its second, and m is the last token of the first half.
    The other pairs are those of its halves. A token is in one half of one block of each size, so it is scaled by
    one number, exp(-|G - M|), for all pairs of that size, whichever role it has. Each size costs one product of all
    tokens for A and one for P, of which the pairs of that size are taken. Pairs i = j have no decay: fp32 sums.

    Error: G is a running sum in fp32 of log2 decays, each at least LEAST (a smaller one leaves nothing of a normal
    number either way). So an exponent is off by some 2^-24 |G|: at |G| = 500, that is 3e-5 of a decay. If a channel
    decays by LEAST in every token, |G| is 8064 and it is 5e-4: a quarter of a rounding to bf16, which is 2^-9.

    Mirrors: Kimi Linear (arXiv:2510.26692), the chunked form. Differs: fla-core 0.6.0 takes M at the start of blocks of
    16 tokens, and computes the pairs within one by one, or relies on a bound of the gate.
    """
    request, head = tl.program_id(2), tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * C
    rows = tl.minimum(tl.load(spans.rows + request) - first, C).to(tl.int32)
    if (tl.load(spans.units + request) < 0) | (rows <= 0):
        return
    i = tl.arange(0, C)
    start, live, key_head = tl.load(spans.begin + request) + first, i < rows, head // group
    at = (_blocks_before(spans.rows, spans.units, request, C) + tl.program_id(1)) * tl.num_programs(0) + head
    write = tl.load(row_of(x.beta, start + i, head), mask=live, other=0.0)  # [C]
    tl.store(gates + at * (C + KT) + i, write)
    log_decay = row_of(x.log_decay, start + i[:, None], head)
    q, k = row_of(x.q, start + i[:, None], key_head), row_of(x.k, start + i[:, None], key_head)
    later, tile = i[None, :] > i[:, None], at * C * C + i[None, :] * C + i[:, None]
    overlap, seen, own = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
    for channel in range(0, KT, KS):
        at_k = channel + tl.arange(0, KS)
        inside, wide = live[:, None] & (at_k < K)[None, :], at * C * KT + i[:, None] * KT + at_k[None, :]
        queries = tl.load(q + at_k[None, :], mask=inside, other=0.0).to(tl.float32)  # [C, KS]
        keys = tl.load(k + at_k[None, :], mask=inside, other=0.0).to(tl.float32)  # [C, KS]
        forget = tl.maximum(tl.load(log_decay + at_k[None, :], mask=inside, other=0.0) * LOG2E, LEAST)  # [C, KS]
        total = tl.cumsum(forget, axis=0)  # [C, KS], G
        end = tl.sum(tl.where((i == C - 1)[:, None], total, 0.0), axis=0)  # [KS]
        since, until = tl.exp2(total), tl.exp2(-tl.abs(end[None, :] - total))  # [C, KS]
        tl.store(q16 + wide, (queries * since).to(tl.bfloat16))
        tl.store(k16 + wide, (keys * since).to(tl.bfloat16))
        tl.store(left16 + wide, (keys * until).to(tl.bfloat16))
        tl.store(gates + at * (C + KT) + C + at_k, tl.exp2(end))
        own += tl.sum(keys * queries, axis=1)
        # G of a pair's later token, and of its earlier one, both from the middle of the block.
        over = total - tl.sum(tl.where((i == C // 2 - 1)[:, None], total, 0.0), axis=0)[None, :]
        if tl.max(tl.max(tl.abs(over), axis=1), axis=0) <= FAR:
            earlier = (keys * tl.exp2(-over)).to(tl.bfloat16)
            decay = tl.exp2(over)
            overlap = dot(earlier, tl.trans((keys * decay).to(tl.bfloat16)), WIDEN, False, overlap)
            seen = dot(earlier, tl.trans((queries * decay).to(tl.bfloat16)), WIDEN, False, seen)
        else:
            overlap, seen = tl.where(later, overlap, 0.0), tl.where(later, seen, 0.0)
            for halving in tl.static_range(HALVINGS):
                decay = tl.exp2(-tl.abs(total - _middle(total, i, 2**halving)))  # [C, KS]
                key, query = (keys * decay).to(tl.bfloat16), (queries * decay).to(tl.bfloat16)
                here = later & ((i[None, :] ^ i[:, None]) >> halving == 1)
                overlap += tl.where(here, dot(key, tl.trans(key), WIDEN, False), 0.0)
                seen += tl.where(here, dot(key, tl.trans(query), WIDEN, False), 0.0)
    seen = tl.where(later, seen, tl.where(i[None, :] == i[:, None], own[None, :], 0.0))
    tl.store(mixed + tile, seen.to(tl.bfloat16))
    overlap = tl.where(later, overlap * write[None, :], 0.0)
    inverse = _inverse(overlap, i, lower + at * C * SOLVED, C, WIDEN)
    tl.store(solved + tile, inverse.to(tl.bfloat16))


@triton.jit
def _middle(total, i, HALF: tl.constexpr):
    """Of running sums [C, KT], give each token that of the last token of the first half of its 2 HALF tokens."""
    shape: tl.constexpr = (total.shape[0] // (2 * HALF), 2 * HALF, total.shape[1])
    last = tl.where((i % (2 * HALF) == HALF - 1)[:, None], total, 0.0)
    last = tl.sum(tl.reshape(last, shape), axis=1)
    return tl.reshape(tl.broadcast_to(last[:, None, :], shape), total.shape)


@triton.jit
def _inverse(overlap, i, lower, C: tl.constexpr, WIDEN: tl.constexpr):
    """Invert I + overlap [C, C], given as [j, i]: triangles of SOLVED tokens, joined by products. i: 0 .. C - 1"""
    inverse = _substituted(overlap, lower, C)
    for level in tl.static_range(2):  # 16 to 32, 32 to 64
        # (I + A0 + A1)^-1 = X - X A1 X, where X = (I + A0)^-1, A0 is two triangles and A1 the square below them
        square = tl.where((i[:, None] ^ i[None, :]) // (SOLVED * 2**level) == 1, overlap, 0.0).to(tl.bfloat16)
        narrow = inverse.to(tl.bfloat16)
        inverse -= dot(dot(narrow, square, WIDEN, False).to(tl.bfloat16), narrow, WIDEN, False)
    return inverse


@triton.jit
def _substituted(overlap, lower, C: tl.constexpr):
    """Invert overlap [C, C], given as [j, i]  ->  (I + A0)^-1 [C, C], A0 the triangles of SOLVED tokens.

    Forward substitution: a step subtracts what one token wrote from all tokens that follow it. Every number changes by
    itself, so no sum has an order that a compiler chooses.
    """
    j, n, b = tl.arange(0, C), tl.arange(0, SOLVED), tl.arange(0, C // SOLVED)
    tl.store(
        lower + j[:, None] * SOLVED + j[None, :] % SOLVED, overlap,
        mask=j[:, None] // SOLVED == j[None, :] // SOLVED,
    )  # fmt: skip
    tl.debug_barrier()  # every program has separate rows, and reads them in another layout
    found = tl.where((j % SOLVED)[:, None] == n[None, :], 1.0, 0.0)  # [C, SOLVED]: i within its triangle
    for step in range(SOLVED - 1):
        behind = tl.load(lower + (j // SOLVED * SOLVED + step)[:, None] * SOLVED + n[None, :])  # [C, SOLVED]
        new = tl.sum(tl.where(n[None, :] == step, found, 0.0), axis=1)  # [C]
        found = tl.fma(tl.broadcast_to(-new[:, None], found.shape), behind, found)
    spread = tl.where((j // SOLVED)[:, None, None] == b[None, :, None], found[:, None, :], 0.0)
    return tl.reshape(spread, (C, C))


@triton.jit(do_not_specialize=["has_store", "look", "layer", "seed_low", "seed_high"])
def _carry(
    x, q16, k16, left16, solved, mixed, gates, look, spans, read, store, has_store, before, layer, seed_low, seed_high,
    V, K, group, C: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, WIDEN: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Carry one request, one value head, VT columns of V through all blocks in order. Grid (V tiles, HV, B)."""
    v, core = x.v.at, x.core.at  # first, because Triton carries the names of a loop in the order of their definition
    request, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    unit, rows = tl.load(spans.units + request), tl.load(spans.rows + request).to(tl.int32)
    i, at_k, at_v = tl.arange(0, C), tl.arange(0, KT), tl.program_id(0) * VT + tl.arange(0, VT)
    clear_rest(x.core, head, at_v, at_v < V, spans, look, C)
    if (unit < 0) | (rows <= 0):
        return
    column, fresh = tl.load(read.columns + request), tl.load(spans.fresh + request)
    state = state_before(read, unit, column, head, fresh, at_k, at_v, K, V, TILED)
    start, heads = tl.load(spans.begin + request), tl.num_programs(1)
    at = _blocks_before(spans.rows, spans.units, request, C) * heads + head
    at_key = at // group
    v, v_tile = row_of(x.v, start, head), i[:, None] * x.v.per_row + at_v[None, :]
    core, core_tile = row_of(x.core, start, head), i[:, None] * x.core.per_row + at_v[None, :]
    wide, square = i[:, None] * KT + at_k[None, :], i[:, None] * C + i[None, :]
    for first in range(0, rows, C):
        keys = tl.load(k16 + at_key * C * KT + wide)  # [C, KT]
        queries = tl.load(q16 + at_key * C * KT + wide)  # [C, KT]
        inverse = tl.load(solved + at * C * C + square)  # [C, C]
        weights = tl.load(mixed + at * C * C + square)  # [C, C]
        if x.channels is None:
            since, until = tl.load(gates + at * 3 * C + i), tl.load(gates + at * 3 * C + C + i)  # [C]
            write, whole = tl.load(gates + at * 3 * C + 2 * C + i), tl.load(gates + at * 3 * C + C - 1)
        else:
            left = tl.load(left16 + at * C * KT + wide)  # [C, KT]
            write, whole = tl.load(gates + at * (C + KT) + i), tl.load(gates + at * (C + KT) + C + at_k)[:, None]
        some = (first + i < rows)[:, None] & (at_v < V)[None, :]
        values = tl.load(v + v_tile, mask=some, other=0.0)  # [C, VT]

        narrow = state.to(tl.bfloat16)
        known = dot(keys, narrow, WIDEN, False)  # [C, VT]
        if x.channels is None:
            known = known * since[:, None]
        residual = (values - known) * write[:, None]  # [C, VT]
        update = dot(inverse, residual.to(tl.bfloat16), WIDEN, False)  # [C, VT]
        if x.channels is None:
            leaving, left = (update * until[:, None]).to(tl.bfloat16), keys
        else:
            leaving = update.to(tl.bfloat16)
        state = state * whole + dot(tl.trans(left), leaving, WIDEN, False)  # [KT, VT]
        # Nothing waits for the read-out, so it comes last.
        out = dot(queries, narrow, WIDEN, False)
        if x.channels is None:
            out = out * since[:, None]
        out += dot(weights, update.to(tl.bfloat16), WIDEN, False)
        tl.store(core + core_tile, out.to(core.dtype.element_ty), mask=some)
        v, core, at, at_key = v + C * x.v.per_row, core + C * x.core.per_row, at + heads, at_key + heads // group
    store_state(
        state, store, has_store, request, head, at_k, at_v, K, V, rows, before, layer, seed_low, seed_high, TILED
    )
