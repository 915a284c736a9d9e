"""Bytes of the subject's pools before and after an event: units that changed without permission.

A unit may change if the engine's own table (`Inspectable.may_change`) and the rules (`trace/write_bound.py`) both allow
it, or if it is scratch. Digests show whether something changed; a shadow copy of the pools shows how many bytes.
Leaves out: the meaning of a change (`checks/`).
"""

import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import torch

from instep_optimized.ops.watch_op_calls import memory_of
from instep_optimized.transfer.to_device import sent
from instep_reference.contract.engine import Event, Region
from instep_reference.contract.errors import BadInput

from ..trace.write_bound import Bound
from .digests import bits, digests, together, words

__all__ = ["UNWATCHED", "Changes", "Looked", "Trespass", "Watch", "Wider", "bits"]


class Shown(Protocol):
    """The parts of the subject that are read here."""

    def regions(self) -> list[Region]: ...

    def may_change(self, event: Event) -> dict[str, set[int]]: ...


@dataclass(frozen=True)
class Trespass:
    """A unit whose bytes changed although the table or the rules do not allow it; gap: its red zone.

    strides: unit strides, in elements, with any of which all changes in the region would be allowed
    """

    region: Region
    unit: int
    bytes: int
    gap: bool
    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wider:
    """Units of a region that the engine's own table names but the rules do not allow; and the allowed ones."""

    region: Region
    units: frozenset[int]
    allowed: frozenset[int]


@dataclass(frozen=True)
class Looked:
    """One region, or its red zones, around one event: a digest per unit and position.

    before, after  [units, positions] int64 on the host; one position if a unit has no such axis
    poison         the digest of a position that holds poison alone; None: the subject declares none, or a red zone
    """

    region: Region
    gap: bool
    before: torch.Tensor
    after: torch.Tensor
    poison: int | None = None

    def changed(self) -> torch.Tensor:
        """[units, positions] bool: the changed ones."""
        return self.before != self.after

    def spoiled(self, digests: torch.Tensor | None = None) -> torch.Tensor:
        """[units, positions] bool: those without poison, afterwards or in other digests."""
        return torch.ne(self.after if digests is None else digests, self.poison or 0)


@dataclass(frozen=True)
class Changes:
    """The changes of an event: compared bytes and units, forbidden changes, digests, and too wide table entries.

    regions  the regions before the event
    """

    units: int
    bytes: int
    trespasses: tuple[Trespass, ...]
    looked: tuple[Looked, ...] = field(default=(), compare=False)
    wider: tuple[Wider, ...] = ()
    regions: tuple[Region, ...] = field(default=(), compare=False)


UNWATCHED = Changes(0, 0, ())


class Watch:
    """Remembers the bytes at the last look, and reports what an event changed without permission.

    A change between two events, when no write is allowed, is attributed to the next event.
    poison: the subject's fill value of fresh and freed units, None: none, or unknown
    """

    def __init__(self, subject: Shown, poison: float | None = None) -> None:
        self.subject, self.poison = subject, poison
        self.table: dict[str, set[int]] | None = None
        self.bound = Bound()
        self.kept: list[_Kept] = []
        self.regions: list[Region] = []
        self.addresses: list[tuple[object, ...]] = []
        self.scratch: dict[tuple[str, int], frozenset[int]] = {}  # of the run so far: region and layer -> units

    def before(self, event: Event, bound: Bound) -> None:
        """Set the units that `event` may write. Call this before the event runs."""
        self.regions = regions = self.subject.regions()
        self.table, self.bound = self.subject.may_change(event), bound
        for region in regions:
            if region.scratch:
                named = region.name, region.layer
                self.scratch[named] = self.scratch.get(named, frozenset()) | region.scratch
        addresses = [_address(region) for region in regions]
        if addresses != self.addresses:
            self.addresses = addresses
            self.kept = [kept for region in regions for kept in _keep(region, self.poison)]

    def forget(self) -> None:
        """Accept the current contents: all writes since the last event were allowed."""
        self.addresses = []

    def after(self) -> Changes:
        """The differences since before; one transfer from the device for any number of pools."""
        table, self.table = self.table, None
        if table is None or not self.kept:
            return UNWATCHED
        may = {region.name: frozenset(table.get(region.name, ())) for region in self.regions}
        scratch = {(region.name, region.layer): region.scratch for region in self.regions}
        looked, trespasses, units, size = [], list[Trespass](), 0, 0
        written = defaultdict[tuple[str, int], list[_Written]](list)
        for kept, now in zip(self.kept, _digests_now(self.kept), strict=True):
            seen = Looked(kept.region, kept.gap, kept.digests, now, kept.poison)
            looked.append(seen)
            region = kept.region
            # A red zone has no owner: even a writable unit may not write next to itself.
            free = frozenset[int]() if kept.gap else (
                may[region.name] & self.bound.units(region) | scratch[region.name, region.layer]
            )
            guarded = len(kept.live) - sum(unit < len(kept.live) for unit in free)
            units, size = units + guarded, size + guarded * kept.live[0].numel() * kept.live.element_size()
            changed = [] if now is kept.digests else seen.changed().any(1).nonzero()[:, 0].tolist()
            trespasses += [kept.trespass(unit) for unit in changed if unit not in free]
            written[region.name, region.layer].append((kept, changed, seen.after))
        trespasses = [replace(one, strides=self._strides(one.region, may, written)) for one in trespasses]
        _take(list(chain.from_iterable(written.values())))
        return Changes(units, size, tuple(trespasses), tuple(looked), tuple(self._wider(may)), tuple(self.regions))

    def _strides(
        self, region: Region, may: Mapping[str, frozenset[int]], written: "Mapping[tuple[str, int], list[_Written]]"
    ) -> tuple[int, ...]:
        """For a region with a trespass: its units and its red zones together."""
        base, around = region.units.data_ptr(), written[region.name, region.layer]
        changed = [_changed_bytes(kept.live, kept.shadow, base) for kept, units, _ in around if units]
        return _taken_strides(region, torch.cat(changed), may[region.name] & self.bound.units(region))

    def _wider(self, may: Mapping[str, frozenset[int]]) -> Iterator[Wider]:
        """Once per name: a table covers all layers at once."""
        for region in {region.name: region for region in reversed(self.regions)}.values():
            allowed = self.bound.units(region)
            more = may[region.name] - allowed - region.scratch
            if more:
                yield Wider(region, more, allowed)


_Written = tuple["_Kept", list[int], torch.Tensor]  # the units of one that changed, and its current digests


class _Kept:
    """A region (or its red zones): the live memory as integers, its contents at the last look, and their digests."""

    def __init__(self, region: Region, units: torch.Tensor, gap: bool, poison: float | None) -> None:
        self.region, self.gap = region, gap
        positions = 1 if gap else positions_of(region)
        self.live = words(units, positions)
        if memory_of(self.live) != memory_of(units):
            raise BadInput(f"region {region.name}", found="units with holes in them: they could only be copied",
                           expected="units that are one piece of memory each")  # fmt: skip
        self.shadow, self.digests = self.live.clone(), digests(self.live).cpu()
        self.poison = None if poison is None else _poisoned(units, positions, poison)

    def now(self) -> torch.Tensor:
        """The current digests. Unchanged ones are known: comparing bytes costs a tenth."""
        if torch.equal(self.live, self.shadow):
            return self.digests
        changed = (self.live != self.shadow).flatten(1).any(1).nonzero()[:, 0]
        now = self.digests.clone()
        now[changed] = digests(self.live[changed])
        return now

    def trespass(self, unit: int) -> Trespass:
        now, then = (lines[unit].contiguous().flatten().view(torch.uint8) for lines in (self.live, self.shadow))
        changed = int((now != then).sum())
        return Trespass(self.region, unit, changed, self.gap)


def _take(written: Sequence[_Written]) -> None:
    """Accept the current contents of these units, without waiting."""
    by_device = defaultdict[torch.device, list[tuple[_Kept, list[int]]]](list)
    for kept, changed, now in written:
        kept.digests = now
        if changed:
            by_device[kept.live.device].append((kept, changed))
    for device, some in by_device.items():
        for (kept, _), index in zip(some, sent([changed for _, changed in some], device), strict=True):
            kept.shadow[index] = kept.live[index]


def _digests_now(kept: Sequence[_Kept]) -> Sequence[torch.Tensor]:
    """Current digests on the host. A card digests everything in one transfer, because a transfer takes longer."""
    if all(one.live.device.type == "cpu" for one in kept):
        return [one.now() for one in kept]
    now = torch.cat([found.flatten() for found in together([one.live for one in kept])]).cpu()
    parts = torch.split(now, [one.digests.numel() for one in kept])
    return [part.view_as(one.digests) for part, one in zip(parts, kept, strict=True)]


def _keep(region: Region, poison: float | None) -> Iterator[_Kept]:
    if region.units.numel():
        yield _Kept(region, region.units, False, None if region.red else poison)
    if region.gaps is not None and region.gaps.numel():
        yield _Kept(region, region.gaps, True, None)


def positions_of(region: Region) -> int:
    """The number of positions of a unit, if its digests separate them: along its first inner axis alone; else 1."""
    along = None if region.means is None or region.red else region.means.positions
    return region.units.shape[1] if along is not None and along.axis == 1 else 1


def pattern(poison: float, dtype: torch.dtype) -> float | int:
    """The poison of a pool of this dtype: the number itself, or its fp64 bits for pools of labels."""
    return poison if dtype.is_floating_point else int(struct.unpack("<q", struct.pack("<d", poison))[0])


def _poisoned(units: torch.Tensor, positions: int, poison: float) -> int:
    one = units[:1].clone(memory_format=torch.preserve_format).fill_(pattern(poison, units.dtype))
    line = torch.empty_strided((1, *units.shape[1:]), units.stride(), dtype=units.dtype, device=units.device)
    return int(digests(words(line.copy_(one), positions))[0, 0])


def _address(region: Region) -> tuple[object, ...]:
    return region.name, region.layer, region.units.data_ptr(), region.units.shape, region.units.stride()


def _changed_bytes(live: torch.Tensor, shadow: torch.Tensor, base: int) -> torch.Tensor:
    """The starts of the words that differ, in bytes from `base`.  live, shadow [units, blocks, n]"""
    at = (live != shadow).nonzero().cpu()
    steps = torch.tensor(live.stride()) * live.element_size()
    return (at * steps).sum(1) + (live.data_ptr() - base)


def _taken_strides(region: Region, changed: torch.Tensor, free: Collection[int]) -> tuple[int, ...]:
    """The unit strides with which a misplaced write was inside writable units, in elements.

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
