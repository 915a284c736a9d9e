"""Bytes of the subject's pools before and after an event: which units changed that may not.

Leaves out: what may change (the strategy's table says it through `Inspectable.may_change`), and what a
change means (`checks/`). Digests say whether something changed; a shadow of the pools says how many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from instep_optimized.ops.around import memory_of
from instep_reference.contract.engine import Event, Inspectable, Region
from instep_reference.contract.errors import BadInput

from .digests import bits, digests, together, words

__all__ = ["UNWATCHED", "Changes", "Looked", "Trespass", "Watch", "bits"]

# Pools by slot whose units have a position of the window, or a ring's entry, on their first inner axis.
BY_POSITION = ("window", "picks", "final")
BY_POSITION_PREFIX = ("snapshot_", "ring_")


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
class Looked:
    """One region, or its red zones, around one event: a digest per unit and position.

    before, after  [units, positions] int64 on the host; one position where a unit has no such axis
    poison         the digest of a position that holds poison alone; None: the subject declares none, or a red zone
    """

    region: Region
    gap: bool
    before: torch.Tensor
    after: torch.Tensor
    poison: int | None = None

    def changed(self) -> torch.Tensor:
        """[units, positions] bool."""
        return self.before != self.after

    def spoiled(self, digests: torch.Tensor | None = None) -> torch.Tensor:
        """The same: which are no poison, afterwards or in other digests."""
        return torch.ne(self.after if digests is None else digests, self.poison or 0)


@dataclass(frozen=True)
class Changes:
    """What was looked at (bytes, units), what trespassed, and every digest."""

    units: int
    bytes: int
    trespasses: tuple[Trespass, ...]
    looked: tuple[Looked, ...] = field(default=(), compare=False)


UNWATCHED = Changes(0, 0, ())


class Watch:
    """Remembers what every byte was when it was last looked at, and says what an event changed that it may not.

    What changes between two events, when nobody may write at all, is the next event's.
    poison: what the subject fills fresh and freed units with, None: nothing, or nothing is known.
    """

    def __init__(self, subject: Inspectable, poison: float | None = None) -> None:
        self.subject, self.poison = subject, poison
        self.may: dict[str, set[int]] | None = None
        self.kept: list[_Kept] = []
        self.addresses: list[tuple[object, ...]] = []

    def before(self, event: Event) -> None:
        """Learn which units `event` may write. Call before the event runs."""
        self.may = self.subject.may_change(event)
        regions = self.subject.regions()
        addresses = [_address(region) for region in regions]
        if addresses != self.addresses:
            self.addresses = addresses
            self.kept = [kept for region in regions for kept in _keep(region, self.poison)]

    def forget(self) -> None:
        """Whoever wrote since the last event was allowed to: what stands there now is what it was."""
        self.addresses = []

    def after(self) -> Changes:
        """What differs from before; one transfer from the device, whatever the number of pools."""
        may, self.may = self.may, None
        if may is None or not self.kept:
            return UNWATCHED
        now = torch.cat([found.flatten() for found in together([kept.live for kept in self.kept])]).cpu()
        looked, trespasses, begin, units, size = [], list[Trespass](), 0, 0, 0
        for kept in self.kept:
            count = kept.digests.numel()
            seen = Looked(kept.region, kept.gap, kept.digests, now[begin : begin + count].view_as(kept.digests),
                          kept.poison)
            begin += count
            looked.append(seen)
            # A red zone belongs to nobody: not even a unit that may be written may write beside itself.
            free: Collection[int] = () if kept.gap else may.get(kept.region.name, ())
            guarded = len(kept.live) - sum(unit < len(kept.live) for unit in free)
            units, size = units + guarded, size + guarded * kept.live[0].numel() * kept.live.element_size()
            changed = seen.changed().any(1).nonzero()[:, 0].tolist()
            trespasses += [kept.trespass(unit) for unit in changed if unit not in free]
            kept.take(changed, seen.after)
        return Changes(units, size, tuple(trespasses), tuple(looked))


class _Kept:
    """A region (or its red zones): the live memory as whole numbers, what it last was, and the digests of that."""

    def __init__(self, region: Region, units: torch.Tensor, gap: bool, poison: float | None) -> None:
        self.region, self.gap = region, gap
        positions = 1 if gap else positions_of(region)
        self.live = words(units, positions)
        if memory_of(self.live) != memory_of(units):
            raise BadInput(f"region {region.name}", found="units with holes in them: they could only be copied",
                           expected="units that are one piece of memory each")  # fmt: skip
        self.shadow, self.digests = self.live.clone(), digests(self.live).cpu()
        self.poison = None if poison is None else _poisoned(units, positions, poison)

    def trespass(self, unit: int) -> Trespass:
        now, then = (lines[unit].contiguous().flatten().view(torch.uint8) for lines in (self.live, self.shadow))
        changed = int((now != then).sum())
        return Trespass(self.region.name, self.region.layer, self.region.by, unit, changed, self.gap)

    def take(self, changed: Sequence[int], now: torch.Tensor) -> None:
        """These units are from now on what they are now."""
        self.digests = now
        if changed:
            index = torch.tensor(changed, device=self.live.device)
            self.shadow[index] = self.live[index]


def _keep(region: Region, poison: float | None) -> Iterator[_Kept]:
    if region.units.numel():
        yield _Kept(region, region.units, False, poison if not region.name.endswith("_ends") else None)
    if region.gaps is not None and region.gaps.numel():
        yield _Kept(region, region.gaps, True, None)


def positions_of(region: Region) -> int:
    """How many positions, columns or entries a unit has, where its digests tell them apart; else 1."""
    name, shape = region.name, region.units.shape
    along = region.by == "page" or name in BY_POSITION or name.startswith(BY_POSITION_PREFIX)
    columns = name == "state" and len(shape) == len(("slot", "column", "HV", "K", "V"))
    return shape[1] if (along or columns) and len(shape) > 1 else 1


def pattern(poison: float, dtype: torch.dtype) -> float | int:
    """How a pool of this dtype is poisoned: with the number itself, or its fp64 bits where units hold labels."""
    return poison if dtype.is_floating_point else int(struct.unpack("<q", struct.pack("<d", poison))[0])


def _poisoned(units: torch.Tensor, positions: int, poison: float) -> int:
    one = units[:1].clone(memory_format=torch.preserve_format).fill_(pattern(poison, units.dtype))
    line = torch.empty_strided((1, *units.shape[1:]), units.stride(), dtype=units.dtype, device=units.device)
    return int(digests(words(line.copy_(one), positions))[0, 0])


def _address(region: Region) -> tuple[object, ...]:
    return region.name, region.layer, region.units.data_ptr(), region.units.shape, region.units.stride()
