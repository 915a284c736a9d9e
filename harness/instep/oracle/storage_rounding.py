"""The effect of storage on numbers, as an engine declares it: a narrow dtype, or tiles with a scale each (`Blocked`).

It is written independently of the engine's arithmetic: numbers are divided by the unit of their last place, never cast.
Leaves out: which components are stored how.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from instep_reference.contract.declared_rounding import LARGEST_INTEGER, SCALE_BITS, Blocked, Storage, kept_in, read_as
from instep_reference.stochastic_rounding import uniforms

ENTRY = {"key": "keys", "value": "values"}  # rows that attention reads from the memory that stores them


def eps(storage: Storage) -> float:
    """The distance from 1 to the next number; for tiles, of the stored numbers."""
    dtype = storage.dtype if isinstance(storage, Blocked) else storage
    return torch.finfo(dtype).eps if dtype.is_floating_point else 1.0


def narrower(stored: Storage, width: Storage) -> bool:
    return stored.is_floating_point and width.is_floating_point and eps(stored) > eps(width)


class State(NamedTuple):
    """Identifies a state for stochastic rounding; the last two fields describe mistakes.

    tokens  number of tokens in it
    seed    a seed other than the declared one
    order   how its elements are counted: HEADS, restarted in every head; TURNED, K fastest; CUT, not at all: towards
            zero
    """

    layer: int
    tokens: int
    seed: int | None = None
    order: str = ""


HEADS, TURNED, CUT = "heads", "turned", "cut"


def rounded(x: torch.Tensor, storage: Storage, state: State | None = None) -> torch.Tensor:
    """Round x to nearest, or stochastically for this `state` if the storage has a seed; in the width that it came in.

    Values read from tiles have at least fp32.
    """
    if not isinstance(storage, Blocked):
        return x if x.dtype == storage else x.to(storage).to(x.dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if storage.seed is None or state is None:
        return _in_tiles(wide, storage, lambda units, scaled: units.round())  # ties go to even numbers of units
    chance, most = chances(x, storage, state), torch.finfo(storage.dtype).max
    top = most if storage.tile is None else most * (1 - 2.0 ** (1 - SCALE_BITS))

    def fallen(units: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
        size = units.abs()
        up = torch.where(scaled.abs() < top, chance < size - size.floor(), size > size.floor())
        return (size.floor() + up).copysign(units)

    return _in_tiles(wide, storage, fallen)


def chances(like: torch.Tensor, storage: Blocked, state: State) -> torch.Tensor:
    """The random numbers that round the elements of a state [..., HV, K, V], in its own width."""
    assert storage.seed is not None, "they fall to nearest"
    of = storage.seed if state.seed is None else state.seed, state.layer, state.tokens
    HV, K, V = like.shape[-3:]
    if state.order == CUT:
        return torch.ones_like(like)
    if state.order == HEADS:
        return uniforms(*of, 1, K, V).to(like).expand(HV, K, V)
    return (uniforms(*of, HV, V, K).mT if state.order == TURNED else uniforms(*of, HV, K, V)).to(like)


def by_chance(x: torch.Tensor, storage: Blocked, generator: torch.Generator) -> torch.Tensor:
    """x rounded to one of its neighbours in its tile's scale, upwards with the probability of its fraction."""
    chance = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
    return _in_tiles(x, storage, lambda units, scaled: (units + chance).floor())


def before_rounding(
    found: torch.Tensor, truth: torch.Tensor, storage: Blocked | None = None, state: State | None = None
) -> torch.Tensor:
    """The numbers closest to the truth, in its width, that round to the found ones: in its own dtype, or in tiles.

    state: which state it is. With random number u the values that round to m units are above m - 1 + u, and not above
    m + u: as for nearest, but shifted by u - 1/2.
    """
    right = found.to(truth)
    off, larger = right - truth, torch.maximum(right.abs(), truth.abs())
    if storage is not None:
        half = _unit(larger, storage.dtype) / 2
        if storage.tile is not None:
            scale = _spread(torch.maximum(*(_scales(x, storage) for x in (right, truth))), storage, truth)
            half = scale * _unit(larger / scale, storage.dtype) / 2
        if storage.seed is not None and state is not None:
            sign = torch.where(right == 0, truth, right).sign()
            off = off + sign * (2 * chances(truth, storage, state) - 1) * half
    else:
        half = _unit(larger, found.dtype) / 2
    return truth + off.sign() * (off.abs() - half).clamp_min(0)


def kept_states(x: torch.Tensor, rounds: Mapping[str, Storage], *, forward: bool) -> torch.Tensor:
    """States as a tracked prefix keeps them and shows them. forward: whether a forward made it, or a commit."""
    for storage in kept_in(rounds, forward=forward):
        x = rounded(x, storage).to(read_as(storage))
    return x


def numbers_and_scales(x: torch.Tensor, storage: Blocked) -> tuple[torch.Tensor, torch.Tensor]:
    """x in numbers of its scales before they are rounded to stored ones, and the scale of each."""
    scales = _spread(_scales(x, storage), storage, x)
    return x / scales, scales


def entries(component: str, x: torch.Tensor, rounds: Mapping[str, Storage]) -> torch.Tensor:
    """Keys and values as attention reads them from memory in tiles; anything else unchanged."""
    storage = rounds.get(ENTRY.get(component, ""))
    return rounded(x, storage) if isinstance(storage, Blocked) else x


def _unit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of x to its neighbours in a dtype; below its normal numbers that is constant."""
    if not dtype.is_floating_point:
        return torch.ones_like(x)
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp_min(info.tiny))  # x is at least 2 ** (exponent - 1)
    return torch.ldexp(torch.full_like(x, info.eps / 2), exponent)


def _in_tiles(
    x: torch.Tensor, storage: Blocked, whole: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """whole: (numbers of units, the numbers themselves) -> integer numbers of units."""
    most = _largest(storage)
    if storage.tile is None:
        wide = x.double()  # which has every unit of a 16-bit dtype, and the divisor
        unit = _unit(wide, storage.dtype)
        return torch.where(x.abs() < most, (whole(wide / unit, wide) * unit).to(x.dtype), x.to(storage.dtype).to(x))
    scale = _spread(_scales(x, storage), storage, x)
    scaled = x / scale
    unit = _unit(scaled, storage.dtype)
    # Whole numbers have one zero; adding 0 turns -0 into it.
    stored = (whole(scaled / unit, scaled) * unit).clamp(-most, most)
    return (stored if storage.dtype.is_floating_point else stored + 0.0) * scale


def _largest(storage: Blocked) -> float:
    return torch.finfo(storage.dtype).max if storage.dtype.is_floating_point else LARGEST_INTEGER


def _scales(x: torch.Tensor, storage: Blocked) -> torch.Tensor:
    """One scale per tile of the last two axes, as in `Blocked`; in x's own width, numbers of fp32 with `scale_bits`."""
    assert storage.tile is not None, "there are scales"
    largest = x.abs()
    for axis, tile in zip((-2, -1), storage.tile, strict=True):
        size = x.shape[axis]
        of = tile or size
        padded = pad(largest.movedim(axis, -1), (0, -size % of))  # zeros are never the largest
        largest = padded.reshape(*padded.shape[:-1], -1, of).amax(-1).movedim(-1, axis)
    least = torch.finfo(torch.float32).tiny
    scale = (largest / _largest(storage)).float().clamp_min(least)
    mantissa, exponent = torch.frexp(scale)
    bits = storage.scale_bits
    return torch.ldexp((mantissa * 2**bits).ceil(), exponent - bits).to(x.dtype)


def _spread(scales: torch.Tensor, storage: Blocked, like: torch.Tensor) -> torch.Tensor:
    assert storage.tile is not None, "there are scales"
    for axis, tile in zip((-2, -1), storage.tile, strict=True):
        size = like.shape[axis]
        scales = scales.repeat_interleave(tile or size, axis).narrow(axis, 0, size)
    return scales
