"""Stochastic rounding, as device functions: Philox4x32-10 by counters, and the number that a number rounds to.

Leaves out: which numbers are stored, and their scales (`token_by_token.py`, `load_and_store_state.py`,
`scaled_tiles.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from instep_reference.contract.declared_rounding import CHANCE_BITS, SCALE_BITS

from ...memory_addresses import Address, Part

BITS = tl.constexpr(CHANCE_BITS)
# Magnitude from which a number is rounded to nearest, and the exponent of the smallest normal number, in fp32 bits.
E4M3_FROM, E4M3_LEAST = tl.constexpr(448 * (1 - 2.0 ** (1 - SCALE_BITS))), tl.constexpr(127 - 6 << 23)
FP16_FROM, FP16_LEAST = tl.constexpr(65504.0), tl.constexpr(127 - 14 << 23)
BF16_FROM = tl.constexpr(0x7F7F0000)


def counters(part: Part, *stored: Address | None) -> tuple[Any, ...]:
    """Counters for stochastic rounding: (tokens before the rows [B], layer, the seed's two words), or four times None.

    The upper word of the layer is the number of a rank's first element in the state of the whole model.

    With None, Triton compiles no stochastic rounding: the kernel has the code that it has without it.
    """
    chance = next((one.chance for one in (part.read, *stored) if one is not None and one.chance is not None), None)
    if chance is None:
        return 4 * (None,)
    assert part.before is not None, "whoever stores states by chance knows how many tokens are in them"
    return part.before, chance.layer + (chance.first << 32), _word(chance.seed), _word(chance.seed >> 32)


def _word(number: int) -> int:
    """Return the lower 32 bits as a signed number: one type of argument, whatever the seed is."""
    return (number & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


@triton.jit
def fallen(x, by, dtype: tl.constexpr):
    """Round x in fp32 stochastically to numbers of dtype, returned in fp32; the largest ones stay as they are.

    by: (indices of the elements in [HV, K, V], tokens in the state, layer, the seed's lower word, its upper word).
    For a tile [.., .., pieces, ..] the indices may be those of the first piece, and a sixth number is the step from one
    piece to the next.
    """
    if len(by) == 5:
        chance = drawn(by[0], by[1], by[2], by[3], by[4])
    else:  # one piece after another: the words of all pieces would not fit in registers at once
        chance = tl.zeros(x.shape, tl.uint32)
        pieces = tl.arange(0, x.shape[2])[None, None, :, None]
        for piece in range(x.shape[2]):
            chance = tl.where(pieces == piece, drawn(by[0] + piece * by[5], by[1], by[2], by[3], by[4]), chance)
    if dtype == tl.bfloat16:
        return _to_bf16(x, chance)
    elif dtype == tl.float16:
        return _by_steps(x, chance, 10, FP16_LEAST, FP16_FROM)
    else:
        tl.static_assert(dtype == tl.float8e4nv, "what falls by chance has 16 bits at most")
        return _by_steps(x, chance, 3, E4M3_LEAST, E4M3_FROM)


@triton.jit
def drawn(element, tokens, layer, low, high):
    """Draw the bits, below 2 ** BITS, that decide how an element is rounded."""
    a, b, c = element.to(tl.uint32), tokens.to(tl.uint32), layer.to(tl.uint32)
    a += (layer.to(tl.int64) >> 32).to(tl.uint32)
    d = c * 0
    low, high = low.to(tl.uint32), high.to(tl.uint32)
    for _ in tl.static_range(10):
        one, other = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57  # both words by one instruction
        a, b = (other >> 32).to(tl.uint32) ^ b ^ low, other.to(tl.uint32)
        c, d = (one >> 32).to(tl.uint32) ^ d ^ high, one.to(tl.uint32)
        low, high = low + 0x9E3779B9, high + 0xBB67AE85
    return a >> (32 - BITS)


@triton.jit
def _to_bf16(x, chance):
    """Round to bf16, which is fp32 with the lower 16 bits 0, also for its smallest numbers."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    up = chance < ((size & 0xFFFF) << (BITS - 16)).to(tl.uint32)
    fell = (bits & -0x10000) + tl.where(up, 0x10000, 0)
    return tl.where(size < BF16_FROM, fell, bits).to(tl.float32, bitcast=True)


@triton.jit
def _by_steps(x, chance, MANTISSA: tl.constexpr, LEAST: tl.constexpr, FROM: tl.constexpr):
    """MANTISSA: stored bits of dtype; LEAST: the exponent of its smallest normal number, in fp32 bits."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum(bits & 0x7F800000, LEAST)
    # The spacing of the neighbours, and 1 / spacing: powers of 2, so everything that follows is exact.
    unit = (exponent - (MANTISSA << 23)).to(tl.float32, bitcast=True)
    steps = tl.abs(x) * ((0x7F000000 - exponent) + (MANTISSA << 23)).to(tl.float32, bitcast=True)
    whole = tl.floor(steps)
    up = chance.to(tl.float32) < (steps - whole) * 2.0**BITS
    size = ((whole + tl.where(up, 1.0, 0.0)) * unit).to(tl.int32, bitcast=True)
    return tl.where(tl.abs(x) < FROM, (size | (bits & -0x80000000)).to(tl.float32, bitcast=True), x)
