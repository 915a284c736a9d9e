"""The gated delta rule over a prefill chunk: 16 tokens at a time as matrix products, states carried in between.

Leaves out: the token-by-token form (`token_by_token.py`), and the faster form for 16-bit activations (`chunk64.py`).
Products are fp32 (`ieee`), operands and accumulation.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...memory_addresses import Part
from ...ops.op_protocols import GdnInputs
from ..device.pool_address import PackedRows, Spans, States, given, row_of
from ..device.scaled_tiles import ROWS
from ..device.stochastic_rounding import counters
from ..device.zero_uncovered_rows import clear_rest
from ..runtime import ceil_div, launch, power_of_2, tile
from .load_and_store_state import state_before, store_state

TOKENS = 16  # per block: more tokens make the triangular solve longer, fewer make more steps that carry the state
VALUE_COLUMNS = 16  # columns of V per program of the second kernel on a GPU
SMALLEST_DOT = 16
PRECISION = "ieee"  # of every product
WARPS = {"solve": 2, "carry": 4}


def chunk(inputs: GdnInputs, part: Part, core: torch.Tensor, look: int = 0) -> None:
    """Run one part's rows through their states, block by block; write `core` [N, HV, V] and the memory.

        D_ij = exp(g_{j+1} + ... + g_i)                      decay from token j to token i >= j, never above 1
        A_ij = beta_i D_ij (k_i . k_j), j < i                what an earlier write already put under a key
        U    = (I + A)^-1 beta (v - D_i0 k S)                all updates of the block at once
        o    = D_i0 q S + (tril(q k^T) D) U
        S   <- D_C0 S + sum_j D_Cj k_j u_j^T

    (D_i0 includes the decay of the block's first token.) The first kernel, `_solve`, computes (I + A)^-1 and tril(q
    k^T) D
    of all blocks at once. The second, `_carry`, carries the state from block to block.
    If each key channel has its own decay, D_ij is a diagonal [K, K] between k_i and k_j, or q_i and k_j; its terms are
    sums of their own log decays, too, and so are those that scale keys and queries in `_carry`.
    look: number of rows of `core` to check; those that no request covers become zero
    Mirrors: Gated DeltaNet (arXiv:2412.06464), chunked form with the UT transform. Differs: each decay D_ij is the sum
    of its own terms instead of a difference of running sums, so it loses no digits after a strong decay and never
    passes 1; the inverse is applied to the residual instead of to keys and values separately.
    """
    assert part.per_row is None, "a prefill chunk keeps no state per position"
    requests, heads, values, keys = part.begin.numel(), core.shape[1], core.shape[2], inputs.k.shape[2]
    group, wide = heads // inputs.k.shape[1], max(power_of_2(keys), SMALLEST_DOT)
    # Scratch between the kernels: per row and head one line of (I + A)^-1 and one of tril(q k^T) D.
    solved, mixed = (inputs.k.new_empty(core.shape[0], heads, TOKENS) for _ in range(2))
    x, of_requests = PackedRows.of(inputs, core), Spans.of(part)
    blocks = ceil_div(part.most, TOKENS)
    launch(
        _solve, (blocks, heads, requests), x, solved, mixed, of_requests, solved.stride(0), keys, group,
        TOKENS=TOKENS, KT=wide, PRECISION=PRECISION, warps=WARPS["solve"],
    )  # fmt: skip
    columns = max(SMALLEST_DOT, min(power_of_2(values), tile(VALUE_COLUMNS, 64)))
    assert part.read.scales is None or columns % ROWS.value == 0 or columns >= values, "a program has whole tiles"
    launch(
        _carry, (ceil_div(values, columns), heads, requests if blocks else 0), x, solved, mixed, look, of_requests,
        States.of(part.read, part.read), States.of(part.store, part.read), given(part.store),
        *counters(part, part.store), solved.stride(0), values, keys, group, TILED=part.read.scales is not None,
        TOKENS=TOKENS, KT=wide, VT=columns, PRECISION=PRECISION, warps=WARPS["carry"],
    )  # fmt: skip


@triton.jit
def _solve(
    x, solved, mixed, spans, work_row, K, group, TOKENS: tl.constexpr, KT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute (I + A)^-1 and tril(q k^T) D of one block of C = TOKENS tokens. Grid (blocks, HV, B).

    Tiles of token pairs are held transposed, as [j, i]: the decays from token j on are then a running sum along axis 1.
    """
    request, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    rows = tl.minimum(tl.load(spans.rows + request) - first, TOKENS)
    if (tl.load(spans.units + request) < 0) | (rows <= 0):
        return
    i, at_k = tl.arange(0, TOKENS), tl.arange(0, KT)  # [C], [KT]
    row, live = tl.load(spans.begin + request) + first + i, i < rows  # [C], [C]
    inside = live[:, None] & (at_k < K)[None, :]  # [C, KT]
    key_head = head // group
    queries = tl.load(row_of(x.q, row[:, None], key_head) + at_k[None, :], mask=inside, other=0.0)  # [C, KT]
    keys = tl.load(row_of(x.k, row[:, None], key_head) + at_k[None, :], mask=inside, other=0.0)  # [C, KT]
    if x.channels is None:
        forget = tl.load(row_of(x.log_decay, row, head), mask=live, other=0.0)  # [C]
    else:
        forget = tl.load(row_of(x.log_decay, row[:, None], head) + at_k[None, :], mask=inside, other=0.0)  # [C, KT]
    write = tl.load(row_of(x.beta, row, head), mask=live, other=0.0)  # [C]

    later, not_earlier = i[None, :] > i[:, None], i[None, :] >= i[:, None]  # [C, C]
    # D_ij is exp of the summed log decays of the tokens j+1 .. i. Each is at most 0, so no decay is above 1.
    if x.channels is None:
        decay = tl.exp(tl.cumsum(tl.where(later, forget[None, :], 0.0), axis=1))  # [C, C]
        overlap = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * decay * write[None, :]  # [C, C]
    else:
        overlap, seen = tl.zeros((TOKENS, TOKENS), tl.float32), tl.zeros((TOKENS, TOKENS), tl.float32)
        for j in range(rows):
            key = tl.sum(tl.where((i == j)[:, None], keys, 0.0), axis=0)  # [KT]
            decayed = key[None, :] * tl.exp(tl.cumsum(tl.where((i > j)[:, None], forget, 0.0), axis=0))  # [C, KT]
            overlap = tl.where((i == j)[:, None], tl.sum(keys * decayed, axis=1)[None, :], overlap)
            seen = tl.where((i == j)[:, None], tl.sum(queries * decayed, axis=1)[None, :], seen)
        overlap = overlap * write[None, :]
    overlap = tl.where(later, overlap, 0.0)  # [C, C]
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)  # [C, C] as [i, j]
    for n in range(1, rows):  # forward substitution: row n of the inverse from the rows above it
        ahead = tl.sum(tl.where(i[None, :] == n, overlap, 0.0), axis=1)  # [C]
        found = tl.sum(ahead[:, None] * inverse, axis=0)  # [C]
        inverse = tl.where(i[:, None] == n, inverse - found[None, :], inverse)  # [C, C]

    if x.channels is None:
        seen = tl.where(not_earlier, tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * decay, 0.0)  # [C, C]
    else:
        seen = tl.where(not_earlier, seen, 0.0)
    at = head * TOKENS + i
    # Both are stored as [i, j], one line per row i: `seen` is turned back here.
    tl.store(solved + row[:, None] * work_row + at[None, :], inverse, mask=live[:, None])
    tl.store(mixed + row[None, :] * work_row + at[:, None], seen, mask=live[None, :])


@triton.jit(do_not_specialize=["has_store", "look", "layer", "seed_low", "seed_high"])
def _carry(
    x, solved, mixed, look, spans, read, store, has_store, before, layer, seed_low, seed_high, work_row, V, K, group,
    TOKENS: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr, PRECISION: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Carry one request, one value head, VT columns of V through blocks of C = TOKENS. Grid (V tiles, HV, B)."""
    request, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    unit, rows = tl.load(spans.units + request), tl.load(spans.rows + request)
    i, at_k, at_v = tl.arange(0, TOKENS), tl.arange(0, KT), tl.program_id(0) * VT + tl.arange(0, VT)
    clear_rest(x.core, head, at_v, at_v < V, spans, look, TOKENS)
    if (unit < 0) | (rows <= 0):
        return
    in_k, in_v = at_k < K, at_v < V  # [KT], [VT]
    column, fresh = tl.load(read.columns + request), tl.load(spans.fresh + request)
    state = state_before(read, unit, column, head, fresh, at_k, at_v, K, V, TILED)  # [KT, VT]
    key_head, start = head // group, tl.load(spans.begin + request)
    for first in range(0, rows, TOKENS):
        row, live = start + first + i, first + i < rows
        some_k, some_v, some = live[:, None] & in_k[None, :], live[:, None] & in_v[None, :], live[:, None]
        keys = tl.load(row_of(x.k, row[:, None], key_head) + at_k[None, :], mask=some_k, other=0.0)  # [C, KT]
        values = tl.load(row_of(x.v, row[:, None], head) + at_v[None, :], mask=some_v, other=0.0)  # [C, VT]
        write = tl.load(row_of(x.beta, row, head), mask=live, other=0.0)  # [C]
        if x.channels is None:
            gate = row_of(x.log_decay, row, head)
            forget = tl.load(gate, mask=live, other=0.0)  # [C]
            following = tl.load(gate + x.log_decay.per_row, mask=(first + i + 1 < rows) & (i + 1 < TOKENS), other=0.0)
        else:  # a row is [KT], here and in the decays below
            gate = row_of(x.log_decay, row[:, None], head) + at_k[None, :]
            forget = tl.load(gate, mask=some_k, other=0.0)
            goes_on = ((first + i + 1 < rows) & (i + 1 < TOKENS))[:, None] & in_k[None, :]
            following = tl.load(gate + x.log_decay.per_row, mask=goes_on, other=0.0)
        since = tl.exp(tl.cumsum(forget, axis=0))  # [C], from the block's start through token i
        until = tl.exp(tl.cumsum(following, axis=0, reverse=True))  # [C], from after token i to the block's end
        work = row[:, None] * work_row + head * TOKENS + i[None, :]  # [C, C]

        # Recall each key from the state before the block; the solved residual is the update of each token.
        if x.channels is None:
            recalled = since[:, None] * tl.dot(keys, state, input_precision=PRECISION)  # [C, VT]
        else:
            recalled = tl.dot(since * keys, state, input_precision=PRECISION)
        inverse = tl.load(solved + work, mask=some, other=0.0)  # [C, C]
        update = tl.dot(inverse, write[:, None] * (values - recalled), input_precision=PRECISION)  # [C, VT]
        queries = tl.load(row_of(x.q, row[:, None], key_head) + at_k[None, :], mask=some_k, other=0.0)
        # A query reads the state before the block, and the updates of the block up to its own token.
        if x.channels is None:
            out = since[:, None] * tl.dot(queries, state, input_precision=PRECISION)  # [C, VT]
        else:
            out = tl.dot(since * queries, state, input_precision=PRECISION)
        out += tl.dot(tl.load(mixed + work, mask=some, other=0.0), update, input_precision=PRECISION)  # [C, VT]
        target = row_of(x.core, row[:, None], head) + at_v[None, :]
        tl.store(target, out.to(target.dtype.element_ty), mask=some_v)
        # Each update still decays from its own token to the block's end.
        if x.channels is None:
            added = tl.dot(tl.trans(keys * until[:, None]), update, input_precision=PRECISION)  # [KT, VT]
            state = tl.exp(tl.sum(forget, axis=0)) * state + added  # [KT, VT]
        else:
            added = tl.dot(tl.trans(keys * until), update, input_precision=PRECISION)
            state = tl.exp(tl.sum(forget, axis=0))[:, None] * state + added

    store_state(
        state, store, has_store, request, head, at_k, at_v, K, V, rows, before, layer, seed_low, seed_high, TILED
    )
