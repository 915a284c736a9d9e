"""The product of two tiles, accumulated in fp32: the device function that every matrix product here uses.

Leaves out: loading the tiles, and the precise prefill of the delta rule, all in fp32 (`chunk16_fp32.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(x, y, WIDEN: tl.constexpr, ORDERED: tl.constexpr, more=None):
    """Multiply x [M, K] by y [K, N], and add `more` [M, N] if it is given; fp32 operands are not rounded.

    WIDEN    operands are first widened to fp32, which is exact. The interpreter needs it: it holds bf16 as whole
             numbers and would multiply these
    ORDERED  every element is a separate sum over K, in order. The interpreter's `tl.dot` calls the CPU's BLAS, which
             may sum two rows of one tile in different orders. A tensor core sums all rows alike
    """
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    if not ORDERED:
        product = tl.dot(x, y, more, input_precision="ieee")
    else:
        product = tl.sum(x[:, :, None] * y[None, :, :], axis=1)
        if more is not None:
            product += more
    return product
