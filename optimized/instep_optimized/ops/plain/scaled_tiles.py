"""Numbers that are stored in tiles with a scale each (`Blocked` of the contract): packed, opened, and in a pool.

Stochastic rounding takes counter-based random bits: Philox4x32-10 in torch integers, on any device. A pool without
scales is read and written as it is, in its own dtype. Leaves out: which pools have scales.
"""

import math

import torch
from torch.nn.functional import pad

from instep_reference.contract.declared_rounding import (
    CHANCE_BITS,
    INTEGER_SCALE_BITS,
    LARGEST_INTEGER,
    SCALE_BITS,
    STATE_ROWS,
)

from ...memory_addresses import Address, Chance

WORD, HALF = (1 << 32) - 1, (1 << 16) - 1


def uniforms(chance: Chance, tokens: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw [n, *shape] fp32 below 1, in logical order, for states [n] that contain these numbers of tokens."""
    element = torch.arange(math.prod(shape), device=tokens.device) + chance.first
    a, b, c, d = element, tokens[:, None] & WORD, torch.full_like(element, chance.layer), torch.zeros_like(element)
    low, high = chance.seed & WORD, chance.seed >> 32 & WORD
    for _ in range(10):
        (over, under), (above, below) = _product(a, 0xD2511F53), _product(c, 0xCD9E8D57)
        a, b, c, d = above ^ b ^ low, below, over ^ d ^ high, under
        low, high = low + 0x9E3779B9 & WORD, high + 0xBB67AE85 & WORD
    return ((a >> 32 - CHANCE_BITS) * 2.0**-CHANCE_BITS).view(-1, *shape)


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and the lower word of x times a factor. A single product would not fit into a signed number."""
    lower, upper = x * (factor & HALF), x * (factor >> 16)
    upper = upper + (lower >> 16)
    return upper >> 16, (upper & HALF) << 16 | lower & HALF


LEAST = torch.finfo(torch.float32).tiny  # the smallest scale: that of a tile of zeros
CUT, INTEGER_CUT = ((1 << 24 - bits) - 1 for bits in (SCALE_BITS, INTEGER_SCALE_BITS))  # the bits of a scale that are 0


def packed(
    x: torch.Tensor, dtype: torch.dtype, grid: tuple[int, ...], chance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack x [..., a, b] into `dtype`  ->  numbers, scales [..., *grid]: a tile's largest number by that of dtype.

    chance: like x, the random bits that decide how each number is rounded; None: to nearest
    """
    whole = not dtype.is_floating_point
    most, cut = (LARGEST_INTEGER, INTEGER_CUT) if whole else (torch.finfo(dtype).max, CUT)
    largest = _largest(_largest(x.float().abs(), -1, grid[-1]), -2, grid[-2])
    # Divided by a tensor: on a GPU torch multiplies by the reciprocal of a Python number, which rounds differently.
    scales = (largest / torch.full_like(largest, most)).clamp_min(LEAST)
    scales = ((scales.view(torch.int32) + cut) & ~cut).view(torch.float32)  # rounded up, so nothing overflows
    scaled = x.float() / _spread(scales, x)
    if whole:
        return scaled.round().clamp(-most, most).to(dtype), scales
    return _narrow(scaled, dtype, chance, 1 - 2.0 ** (1 - SCALE_BITS)), scales


def opened(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Unpack to fp32."""
    return values.float() * _spread(scales, values)


def as_stored(address: Address, x: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Round x as a store to this address and a load would, in x's own width. tokens: as in `put`."""
    if address.scales is None:
        return _narrow(x, address.pool.dtype, _chance(address, x, tokens)).to(x.dtype)
    return opened(*packed(x, address.pool.dtype, address.scales.shape[-2:], _chance(address, x, tokens))).to(x.dtype)


def get(address: Address, at: tuple[torch.Tensor | int, ...]) -> torch.Tensor:
    """Copy the units at these leading indices."""
    return address.pool[at] if address.scales is None else opened(address.pool[at], address.scales[at])


def put(
    address: Address, at: tuple[torch.Tensor | int, ...], x: torch.Tensor, tokens: torch.Tensor | None = None
) -> None:
    """Store x at these leading indices. tokens [n]: how many each contains, for stochastic rounding."""
    dtype, chance = address.pool.dtype, _chance(address, x, tokens)
    if address.scales is None:
        address.pool[at] = _narrow(x, dtype, chance)
    else:
        address.pool[at], address.scales[at] = packed(x, dtype, address.scales.shape[-2:], chance)


def _chance(address: Address, x: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor | None:
    if address.chance is None:
        return None
    assert tokens is not None, "stochastic rounding of a state needs the number of its tokens"
    return uniforms(address.chance, tokens, tuple(x.shape[1:]))


def _narrow(x: torch.Tensor, dtype: torch.dtype, chance: torch.Tensor | None, below: float = 1.0) -> torch.Tensor:
    """Round x to dtype: to nearest, or stochastically. below: up to which part of the largest number stochastically."""
    if chance is None:
        return x.to(dtype)
    info, size = torch.finfo(dtype), x.abs()
    exponent = torch.frexp(size.clamp_min(info.smallest_normal)).exponent - 1
    steps = torch.ldexp(size, -exponent) / info.eps  # multiples of the distance of its neighbours; powers of 2: exact
    steps = steps.floor() + (chance < steps - steps.floor())
    fallen = torch.ldexp(steps * info.eps, exponent)
    return torch.where(size < info.max * below, fallen, size).copysign(x).to(dtype)


def _largest(x: torch.Tensor, axis: int, scales: int) -> torch.Tensor:
    """Find the largest number of every tile along an axis."""
    if scales == x.shape[axis]:
        return x
    if scales > 1:
        missing = scales * STATE_ROWS - x.shape[axis]  # zeros are never the largest
        x = pad(x.movedim(axis, -1), (0, missing))
        return x.reshape(*x.shape[:-1], scales, STATE_ROWS).amax(-1).movedim(-1, axis)
    return x.amax(axis, keepdim=True)


def _spread(scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Spread one scale to every number of its tile; broadcasting does it along an axis with one scale."""
    for axis in (-2, -1):
        if scales.shape[axis] not in (1, like.shape[axis]):
            scales = scales.repeat_interleave(STATE_ROWS, axis).narrow(axis, 0, like.shape[axis])
    return scales
