"""The gated delta rule for one token, as device functions that decode, verify, re-runs and folds share.

Leaves out: where states come from and go to (`window.py`), and chunks (`chunk.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step(state, q, k, v, decay, beta):
    """Put one token into a tile of V rows of one head's state, and read the state with q (already scaled).

        S <- decay S;   u = beta (v - S k);   S <- S + u k^T;   o = S q        (S here is [V, K])

    Shapes:  state, q, k [VT, pieces, KI] fp32, K in pieces, q and k the same in every row; v [VT]; decay, beta scalars;
             padding of K and V is zero.  -> state, o [VT], u [VT]
    Units:   decay within 0 and 1, the exponential of a log decay in nats.
    Mirrors: Gated DeltaNet (arXiv:2412.06464), the recurrent form, with V as the first axis. No sum runs over V, so a
             program may own any number of its rows. Differs: the update is one explicit fused multiply-add; the
             decay is multiplied in before the state is read (a decay that is kept apart would round differently).
    """
    state = forget(state, decay)
    update = beta * (v - recall(state, k))
    state = add(state, k, update)
    return state, recall(state, q), update


@triton.jit
def again(state, k, decay, update):
    """A token whose update u [VT] is known: the multiply and multiply-add of `step` on the same bits.  -> state"""
    return add(forget(state, decay), k, update)


@triton.jit
def forget(state, decay):
    """decay S"""
    return state * decay


@triton.jit
def add(state, k, update):
    """S + u k^T, one rounding per element"""
    return tl.fma(tl.broadcast_to(update[:, None, None], state.shape), k, state)


@triton.jit
def recall(state, key):
    """S key: the sum over the pieces first (they lie in one thread), then over the numbers of a piece.  -> [VT]"""
    return tl.sum(tl.sum(state * key, axis=1), axis=1)
