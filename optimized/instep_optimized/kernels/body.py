"""The gated delta rule for one token: the one device function that decode, verify, re-runs and folds share.

Leaves out: where states come from and go to (`window.py`), and chunks (`chunk.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def absorb(state, k, v, log_decay, beta):
    """One token into a tile of V rows of one head's memory.

        S <- exp(log_decay) S;   u = beta (v - S k);   S <- S + u k^T        (S here is [V, K])

    Shapes:  state, k [VT, pieces, KI] fp32, K in pieces and k the same in every row; v [VT]; log_decay, beta scalars;
             padding of K and V is zero.  -> state
    Units:   log_decay in nats, at most 0.
    Mirrors: Gated DeltaNet (arXiv:2412.06464), the recurrent form, V first: rows of V never meet, so a program
             may own any number of them. Differs: the update is one fused multiply-add, said explicitly, and the
             decay is multiplied in before anything is read (carrying it aside would round differently).
    """
    state = state * tl.exp(log_decay)
    update = beta * (v - recall(state, k))
    return tl.fma(tl.broadcast_to(update[:, None, None], state.shape), k, state)


@triton.jit
def step(state, q, k, v, log_decay, beta):
    """`absorb`, then what the memory answers to q [VT, pieces, KI] (already scaled): o = S q.  -> state, o [VT]"""
    state = absorb(state, k, v, log_decay, beta)
    return state, recall(state, q)


@triton.jit
def recall(state, key):
    """S key: over the pieces first, which one thread holds, then across a piece.  -> [VT]"""
    return tl.sum(tl.sum(state * key, axis=1), axis=1)
