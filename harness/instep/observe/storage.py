"""What storage does to numbers, as an engine declares it: a narrow dtype, or tiles with a scale each (`Blocked`).

Written beside the engine's own arithmetic and not from it: numbers are divided by the unit of their last place, never
cast. Leaves out: which components are stored how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import pad

from instep_reference.contract.rounding import SCALE_BITS, Blocked, Storage

ENTRY = {"key": "keys", "value": "values"}  # rows that attention reads out of the memory which takes them in


def eps(storage: Storage) -> float:
    """From 1 to the next number; in tiles, of the numbers that are stored."""
    return torch.finfo(storage.dtype if isinstance(storage, Blocked) else storage).eps


def narrower(stored: Storage, width: Storage) -> bool:
    return stored.is_floating_point and width.is_floating_point and eps(stored) > eps(width)


def rounded(x: torch.Tensor, storage: Storage) -> torch.Tensor:
    """x to nearest, in the width that it came in; what is read out of tiles is at least fp32."""
    if not isinstance(storage, Blocked):
        return x.to(storage).to(x.dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _in_tiles(wide, storage, lambda units: units.round())  # ties go to even numbers of units


def by_chance(x: torch.Tensor, storage: Blocked, generator: torch.Generator) -> torch.Tensor:
    """x rounded to one of its neighbours in its tile's scale, upwards at the odds of where it stands."""
    chance = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
    return _in_tiles(x, storage, lambda units: (units + chance).floor())


def before_rounding(found: torch.Tensor, truth: torch.Tensor, storage: Blocked | None = None) -> torch.Tensor:
    """The numbers next to the truth, in its width, that round to what was found: in its own dtype, or in tiles."""
    right = found.to(truth)
    off, larger = right - truth, torch.maximum(right.abs(), truth.abs())
    if storage is not None:
        scale = _spread(torch.maximum(*(_scales(x, storage) for x in (right, truth))), storage, truth)
        half = scale * _unit(larger / scale, storage.dtype) / 2
    else:
        half = _unit(larger, found.dtype) / 2
    return truth + off.sign() * (off.abs() - half).clamp_min(0)


def entries(component: str, x: torch.Tensor, rounds: Mapping[str, Storage]) -> torch.Tensor:
    """Keys and values as attention reads them again out of memory that is stored in tiles; anything else as it is."""
    storage = rounds.get(ENTRY.get(component, ""))
    return rounded(x, storage) if isinstance(storage, Blocked) else x


def _unit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of x to its neighbours in a dtype; below its normal numbers that is the same everywhere."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp_min(info.tiny))  # x is at least 2 ** (exponent - 1)
    return torch.ldexp(torch.full_like(x, info.eps / 2), exponent)


def _in_tiles(x: torch.Tensor, storage: Blocked, whole: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """whole: numbers of units -> whole numbers of units."""
    scale = _spread(_scales(x, storage), storage, x)
    scaled, most = x / scale, torch.finfo(storage.dtype).max
    unit = _unit(scaled, storage.dtype)
    return (whole(scaled / unit) * unit).clamp(-most, most) * scale


def _scales(x: torch.Tensor, storage: Blocked) -> torch.Tensor:
    """One per tile of the last two axes, as `Blocked` says; x's own width, numbers of fp32 with SCALE_BITS bits."""
    largest = x.abs()
    for axis, tile in zip((-2, -1), storage.tile, strict=True):
        size = x.shape[axis]
        of = tile or size
        padded = pad(largest.movedim(axis, -1), (0, -size % of))  # zeros are never the largest
        largest = padded.reshape(*padded.shape[:-1], -1, of).amax(-1).movedim(-1, axis)
    least = torch.finfo(torch.float32).tiny
    scale = (largest / torch.finfo(storage.dtype).max).float().clamp_min(least)
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**SCALE_BITS).ceil(), exponent - SCALE_BITS).to(x.dtype)


def _spread(scales: torch.Tensor, storage: Blocked, like: torch.Tensor) -> torch.Tensor:
    for axis, tile in zip((-2, -1), storage.tile, strict=True):
        size = like.shape[axis]
        scales = scales.repeat_interleave(tile or size, axis).narrow(axis, 0, size)
    return scales
