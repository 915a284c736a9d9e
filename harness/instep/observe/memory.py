"""Bytes of the subject's pools before and after an event: which units changed that may not.

Leaves out: what may change (the strategy's table says it through `Inspectable.may_change`), and what a
change means (`checks/bytes.py`). Values are compared as integers, so -0 and the payload of a NaN count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from instep_reference.contract.engine import Event, Inspectable, Region

# Integers of the same width: a view that works whatever the strides of the pool are.
INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Trespass:
    """A unit whose bytes changed although the table does not allow it; gap: its red zone."""

    region: str
    layer: int
    by: str
    unit: int
    bytes: int
    gap: bool


@dataclass(frozen=True)
class Changes:
    """What was looked at (bytes, units) and what trespassed."""

    units: int
    bytes: int
    trespasses: tuple[Trespass, ...]


UNWATCHED = Changes(0, 0, ())


class Watch:
    """Keeps the bytes that an event may not touch, and says afterwards which of them it touched."""

    def __init__(self, subject: Inspectable) -> None:
        self.subject = subject
        self.kept: list[_Kept] = []

    def before(self, event: Event) -> None:
        """Copy every unit that `event` may not write, and every red zone. Call before the event runs."""
        may = self.subject.may_change(event)
        self.kept = [kept for region in self.subject.regions() for kept in _keep(region, may.get(region.name, set()))]

    def after(self) -> Changes:
        """Compare with the copies; one transfer from the device, whatever the number of pools."""
        if not self.kept:
            return UNWATCHED
        touched = torch.cat([kept.touched() for kept in self.kept]).tolist()
        trespasses: list[Trespass] = []
        begin = 0
        for kept in self.kept:
            flags = touched[begin : begin + len(kept.units)]
            begin += len(kept.units)
            trespasses += [kept.trespass(row) for row, flag in enumerate(flags) if flag]
        units = sum(len(kept.units) for kept in self.kept)
        size = sum(kept.copy.numel() * kept.copy.element_size() for kept in self.kept)
        self.kept = []
        return Changes(units, size, tuple(trespasses))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: equality is then equality of bytes."""
    return tensor.view(INTEGER_OF_WIDTH[tensor.element_size()])


@dataclass(frozen=True)
class _Kept:
    """A region (or its red zones): the live view, the units that may not change, and their bytes before."""

    region: Region
    live: torch.Tensor
    units: Sequence[int]
    index: torch.Tensor | None  # None: all units
    copy: torch.Tensor
    gap: bool

    def touched(self) -> torch.Tensor:
        """[units] bool, on the device."""
        return (self._now() != self.copy).flatten(1).any(1)

    def trespass(self, row: int) -> Trespass:
        now = self._now()[row].contiguous().flatten().view(torch.uint8)
        then = self.copy[row].contiguous().flatten().view(torch.uint8)
        changed = int((now != then).sum())
        return Trespass(self.region.name, self.region.layer, self.region.by, self.units[row], changed, self.gap)

    def _now(self) -> torch.Tensor:
        return self.live if self.index is None else self.live[self.index]


def _keep(region: Region, may: set[int]) -> list[_Kept]:
    kept = []
    for tensor, gap in ((region.units, False), (region.gaps, True)):
        if tensor is None or tensor.numel() == 0:
            continue
        live = bits(tensor)
        # A red zone belongs to nobody: not even a unit that may be written may write beside itself.
        units = [unit for unit in range(live.shape[0]) if gap or unit not in may]
        if not units:
            continue
        whole = len(units) == live.shape[0]
        index = None if whole else torch.tensor(units, device=live.device)
        copy = live.clone() if index is None else live[index]
        kept.append(_Kept(region, live, units, index, copy, gap))
    return kept
