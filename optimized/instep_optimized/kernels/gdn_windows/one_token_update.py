"""The gated delta rule, and an outer product, for one token: device functions of decode, verify, re-runs and folds.

Leaves out: loading and storing states (`token_by_token.py`), and chunks (`chunk16_fp32.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime import INTERPRETED

FUSED = tl.constexpr(not INTERPRETED)  # the interpreter would call a custom function once per number


@triton.jit
def step(state, q, k, kq, v, decay, beta, DELTA: tl.constexpr = True):
    """Put one token into a tile of V rows of one head's state, and read the state with q (already scaled).

        u = beta (v - decay S k);   o = decay S q + u (k . q);   S <- decay S + u k^T        (S here is [V, K])

    Without DELTA a token recalls nothing: u = beta v.

    Shapes:  state [VL, VR, pieces, KI] fp32, V in two axes and K in two; q, k [VL or 1, 1, pieces, KI], the same in
             every row; v [VL, VR]; kq, the k . q of `overlap`, decay and beta scalars; padding of K and V is zero.
             -> state, o [VL, VR], u [VL, VR]
    Units:   decay within 0 and 1, the exponential of a log decay in nats. It is a scalar, or [1 or VL, 1, pieces, KI]
             if each key channel has its own: then S is multiplied by it before both sums. That is as much arithmetic,
             because the next state needs the same product, and `again` rounds it in the same way.
    Mirrors: Gated DeltaNet (arXiv:2412.06464), the recurrent form, with V as the first axis. No sum runs over V, so a
             program may own any number of its rows. Differs: o is not read from the new S. As
             (decay S + u k^T) q = decay S q + u (k . q), both sums over K read the same S, so neither waits for the
             other. The decay multiplies a sum once, not each of its terms.
    Error of o: |.| is the magnitude of every number, e = 2^-24, and n the number of roundings on the longest path
    through
             a sum over K; decays are omitted (each is one more rounding in both forms). To first order in e:
             read from the new S:   n e |S + u k^T| |q|  of the sum,   e |S + u k^T| |q|  as each new number is rounded
             here:                  n e (|S| |q| + |u| |k| |q|)  of both sums,   e |o|  of the one multiply-add
             Both are at most (n + 1) e (|S| |q| + |u| |k| |q|). The error of u enters both times (k . q).
             If u removes most of S (beta near 1, v small, keys alike) the first is below the second. Measured in
             fp32 over eight regimes of decays, keys and betas, the error of a head is 0.95 to 1.45 times that of the
             other form in the median, and 3 times at the worst, 3e-6 of it: within the allowance of the other form.
    """
    if len(decay.shape) > 0:
        state, decay = forget(state, decay), None
    out, update = answer(state, q, k, kq, v, decay, beta, DELTA)
    return again(state, k, decay, update), out, update


@triton.jit
def answer(state, q, k, kq, v, decay, beta, DELTA: tl.constexpr = True):
    """Compute the read-out of a token, and its update of the state, as in `step`.  -> o [VL, VR], u [VL, VR]

    decay: None if the state has decayed already
    """
    if not DELTA:
        update, read = beta * v, recall(state, q)
        return tl.fma(update, kq, read if decay is None else decay * read), update
    known, read = recall(state, k), recall(state, q)
    if decay is None:
        update = beta * (v - known)
        return tl.fma(update, kq, read), update
    else:
        update = beta * tl.fma(known, -decay, v)
        return tl.fma(update, kq, decay * read), update


@triton.jit
def again(state, k, decay, update):
    """Replay a token whose update u [VL, VR] is known: one multiply and one multiply-add per number.  -> state

    decay: as in `step`, or None if the state has decayed already
    """
    return add(state if decay is None else forget(state, decay), k, update)


@triton.jit
def forget(state, decay):
    """Return decay S."""
    return state * decay


@triton.jit
def add(state, k, update):
    """Return S + u k^T, with one rounding per element."""
    every = tl.expand_dims(tl.expand_dims(update, 2), 2)  # in the order in which `recall` removed the axes
    return tl.fma(tl.broadcast_to(every, state.shape), tl.broadcast_to(k, state.shape), state)


@triton.jit
def recall(state, key):
    """Return S key  ->  [VL, VR].

    The sum runs over the pieces first (they are in one thread, and their products are not rounded separately), then
    over the numbers of a piece.
    """
    if FUSED and state.shape[2] > 1:  # a single piece has nothing to combine, and would not be multiplied either
        total, _ = tl.reduce((state, tl.broadcast_to(key, state.shape)), 2, _product)
    else:
        total = tl.sum(state * key, axis=2)
    return tl.sum(total, axis=2)


@triton.jit
def overlap(k, q):
    """Return k . q of [.., pieces, KI], with the sum over KI first.  -> [..]"""
    return tl.sum(tl.sum(k * q, axis=len(k.shape) - 1), axis=len(k.shape) - 2)


@triton.jit
def _product(a, b, c, d):
    """Combine a sum so far, as a times b, and the next pair  ->  a sum, as itself times 1"""
    return tl.fma(c, d, a * b), tl.cast(1.0, tl.float32)
