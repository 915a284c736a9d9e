"""The gated delta rule for one token: the one device function that decode, verify and later re-runs share.

Leaves out: where states come from and go to (`window.py`), and chunks (`chunk.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step(state, q, k, v, decay, beta):
    """One token on a tile of V rows of one head's memory.

        S <- decay S;   u = beta (v - S k);   S <- S + u k^T;   o = S q        (S here is [V, K])

    Shapes:  state [VT, KT] fp32; q, k [KT]; v [VT]; decay, beta scalars; padding of K and V is zero.
             -> state, o [VT]
    Units:   decay = exp(log_decay) within [0, 1]; q already scaled.
    Mirrors: Gated DeltaNet (arXiv:2412.06464), the recurrent form, V first: rows of V never meet, so a program
             may own any number of them. Differs: the update is one fused multiply-add, said explicitly, and the
             decay is multiplied in before anything is read (carrying it aside would round differently).
    """
    state = state * decay
    recalled = tl.sum(state * k[None, :], axis=1)
    update = beta * (v - recalled)
    state = tl.fma(tl.broadcast_to(update[:, None], state.shape), tl.broadcast_to(k[None, :], state.shape), state)
    return state, tl.sum(state * q[None, :], axis=1)
