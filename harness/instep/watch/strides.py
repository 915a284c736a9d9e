"""Infer the unit stride that a misplaced write must have used.

Leaves out: detecting the misplaced write (`memory.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from instep_reference.contract.engine import Region


def changed_bytes(live: torch.Tensor, shadow: torch.Tensor, base: int) -> torch.Tensor:
    """The starts of the words that differ, in bytes from `base`.  live, shadow [units, blocks, n]"""
    at = (live != shadow).nonzero().cpu()
    steps = torch.tensor(live.stride()) * live.element_size()
    return (at * steps).sum(1) + (live.data_ptr() - base)


def taken_strides(region: Region, changed: torch.Tensor, free: Collection[int]) -> tuple[int, ...]:
    """The unit strides, in elements, with which all changes are inside units that may be written.

    The first word of every writable unit at another place must have changed: a coincidental change does not start at a
    unit.
    changed: in bytes from the first unit on
    """
    size, pitch, inner = region.units.element_size(), region.units.stride(0), region.units[0].numel()
    units = torch.tensor(sorted(unit for unit in free if unit < len(region.units)))
    found = []
    for stride in _candidates(region):
        begins, apart = units * stride * size, (units > 0)
        inside = ((changed[:, None] >= begins) & (changed[:, None] < begins + inner * size)).any(1)
        if stride != pitch and apart.any() and inside.all() and torch.isin(begins[apart], changed).all():
            found.append(stride)
    return tuple(sorted(found))


def _candidates(region: Region) -> Iterator[int]:
    """Strides of units without a gap between them, and of units with fewer positions."""
    yield from dict.fromkeys((region.units[0].numel(), *_narrower(region)))


def _narrower(region: Region) -> Iterator[int]:
    along = None if region.means is None else region.means.positions
    if along is not None and along.axis == 1:
        yield from (count * region.units.stride(1) for count in range(1, region.units.shape[1]))
