"""The product of two tiles, accumulated in fp32: the one device function behind every matrix product of these kernels.

Leaves out: where tiles come from, and the chunked delta rule, whose products are fp32 throughout (`chunk.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(x, y, WIDEN: tl.constexpr, ORDERED: tl.constexpr):
    """x [M, K] times y [K, N]; fp32 operands are not rounded.

    WIDEN    operands are widened to fp32, exactly: the interpreter multiplies the bit patterns of bf16
    ORDERED  every element is its own sum over K, first to last. The interpreter's `tl.dot` is a call of the CPU's
             BLAS, which owes nobody that two rows of a tile are summed alike; a tensor core's instruction does
    """
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.sum(x[:, :, None] * y[None, :, :], axis=1) if ORDERED else tl.dot(x, y, input_precision="ieee")
