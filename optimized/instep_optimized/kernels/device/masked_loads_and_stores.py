"""Loads and stores of tiles that may reach out of bounds, as device functions.

Leaves out: which tiles fit exactly (their kernels pass WHOLE).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fetch(source, inside, WHOLE: tl.constexpr):
    """Load, with 0 outside of the bounds. WHOLE: the tile fits exactly, so no bound is checked."""
    if WHOLE:
        return tl.load(source)
    else:
        return tl.load(source, mask=inside, other=0.0)


@triton.jit
def put(target, what, inside, WHOLE: tl.constexpr):
    """Store, rounded to the dtype of the target."""
    if WHOLE:
        tl.store(target, what.to(target.dtype.element_ty))
    else:
        tl.store(target, what.to(target.dtype.element_ty), mask=inside)
