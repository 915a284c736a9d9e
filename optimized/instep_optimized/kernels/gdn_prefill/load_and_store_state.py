"""Reading the state before a prefill program's rows and storing the state after them: device functions.

Leaves out: windows, which read and store rows of V (`token_by_token.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl

from ..device.pool_address import state_of
from ..device.scaled_tiles import ROWS, packed, scale_of, scales_at
from ..device.stochastic_rounding import fallen


@triton.jit
def state_before(states, unit, column, head, fresh, at_k, at_v, K, V, TILED: tl.constexpr):
    """Load the state  ->  [KT, VT] in fp32. A fresh request has zeros, and nothing of its memory is loaded."""
    known = at_v < tl.where(fresh == 0, V, 0)  # no column index is below 0
    source = state_of(states, unit, column, head) + at_k[:, None] * states.per_k + at_v[None, :] * states.per_v
    state = tl.load(source, mask=(at_k < K)[:, None] & known[None, :], other=0.0).to(tl.float32)
    if TILED:
        places = scales_at(states, unit, column, head, at_v, V)
        state = state * tl.load(places, mask=known, other=0.0)[None, :]
    tl.debug_barrier()  # the slot that is read here may be the slot that is stored later
    return state


@triton.jit
def store_state(
    state, states, has_store, request, head, at_k, at_v, K, V, rows, before, layer, seed_low, seed_high,
    TILED: tl.constexpr,
):  # fmt: skip
    """Store the state [KT, VT] after `rows` rows; a unit of -1 stores nothing. before, layer, seed: of `counters`"""
    unit, column = tl.load(states.units + request), tl.load(states.columns + request)
    kept = at_v < tl.where((has_store != 0) & (unit >= 0), V, 0)
    target = state_of(states, unit, column, head) + at_k[:, None] * states.per_k + at_v[None, :] * states.per_v
    stays = (at_k < K)[:, None] & kept[None, :]
    by = None
    if before is not None:
        element = (head.to(tl.int32) * K + at_k[:, None]) * V + at_v[None, :]
        by = (element, tl.load(before + request) + rows, layer, seed_low, seed_high)
    if TILED:
        scale = scale_of(tl.max(tl.abs(state), axis=0))  # [VT]
        places = scales_at(states, unit, column, head, at_v, V)
        tl.store(target, packed(state, tl.broadcast_to(scale[None, :], state.shape), by), mask=stays)
        tl.store(places, scale, mask=kept & (at_v % ROWS == 0))
    else:
        if by is not None:
            state = fallen(state, by, states.pool.dtype.element_ty)
        tl.store(target, state.to(states.pool.dtype.element_ty), mask=stays)
