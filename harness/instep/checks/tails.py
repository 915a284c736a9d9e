"""T1: within a unit that may be written, only the positions that the event names change their bytes.

Leaves out: units that may not be written at all (`bytes.py`). Columns beyond a narrow window, entries of a ring that
are not this window's, the tail of a page, the places of a slot table behind a window: what nobody names keeps its
bytes, or its poison. Positions come from the trace; what a position is, the engine declares with its pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from instep_reference.contract.engine import Commit, Draft, Forward, Region
from instep_reference.contract.meaning import Positions

from ..observe.memory import Looked
from ..observe.moment import Moment
from ..observe.pools import stands
from ..observe.rows import Share, shares
from ..verdict import Comparison, Skipped, Tier

Writes = dict[int, set[int] | None]  # unit -> positions; None: one of them, and the engine knows which


class Tails:
    """Every position of every unit that has positions."""

    name = "tails"
    tier = Tier.BITWISE

    def __init__(self) -> None:
        self.said = False

    def __call__(self, moment: Moment) -> Iterator[Comparison | Skipped]:
        if not self.said:
            yield from self._undeclared(moment)
        self.said = True
        if not isinstance(moment.event, Draft | Forward | Commit):
            return
        for looked in moment.changes.looked:
            along = None if looked.region.means is None else looked.region.means.positions
            if along is not None and looked.after.shape[1] > 1 and not looked.gap:
                yield self._judged(moment, looked, along)

    def _undeclared(self, moment: Moment) -> Iterator[Skipped]:
        regions = moment.changes.regions
        unknown = dict.fromkeys(region.name for region in regions if region.means is None)
        if not regions:
            yield Skipped(self.name, moment.index, "this engine shows no memory")
        elif unknown:
            yield Skipped(self.name, moment.index, f"{', '.join(unknown)}: the engine does not declare what stands in "
                          "there (`Region.means`); every unit is looked at as a whole")  # fmt: skip

    def _judged(self, moment: Moment, looked: Looked, along: Positions) -> Comparison:
        region, changed = looked.region, looked.changed()
        said, first = [], None
        writes = _writes(moment, region, along)
        for unit in changed.any(1).nonzero()[:, 0].tolist():
            positions = set(changed[unit].nonzero()[:, 0].tolist())
            allowed = writes.get(unit, set())
            strays = positions - allowed if allowed is not None else positions if len(positions) > 1 else set()
            if strays and unit not in region.scratch:
                first = unit if first is None else first
                right = "one position" if allowed is None else _spelled(allowed) if allowed else "nothing"
                said.append(f"{region.name} {region.by} {unit} changed at {_spelled(strays)}, where this event does "
                            f"not write (there it writes {right})")  # fmt: skip
        place, request, slot = stands(region, first, moment.expected.slots_after)
        return Comparison(
            self.name, self.tier, moment.index, moment.kind, place, elements=changed.numel(), blocks=len(changed),
            worst=float(len(said)), allowed=0.0, request=request, slot=slot, diagnosis="; ".join(said),
        )


def _writes(moment: Moment, region: Region, along: Positions) -> Writes:
    """The positions of a region that the event writes, by what a position is."""
    count = region.units.shape[1]
    trunk = list(enumerate(shares(moment, "trunk")))
    verified = [(number, share) for number, share in trunk if share.kind == "verify"]
    match along.what:
        case "token":
            draft = region.means is not None and region.means.draft
            return _paged(moment, ("extend", *_chain(moment)) if draft else ("trunk",), count)
        case "choice":
            return _chosen(moment)
        case "page":
            return _mapped(moment)
        case "entry":
            return _by_unit(moment, region, (
                (number, share, [(share.start + row) % count for row in range(share.count)])
                for number, share in verified
            ))
    nodes = _by_unit(moment, region, ((number, share, range(share.count)) for number, share in verified))
    if along.what != "column" or region.by == "row":
        return nodes
    # A decode and a chunk write the column that they read.
    marked: Writes = {moment.expected.slots_after[share.request]: None for _, share in trunk}
    return marked | nodes


def _chosen(moment: Moment) -> Writes:
    """Roots in position 0, drafts behind them."""
    slots = moment.expected.slots_after
    if isinstance(moment.event, Draft):
        return {slots[name]: set(range(1, moment.expected.num_steps + 1)) for name in moment.event.requests}
    return {slots[share.request]: {0} for share in shares(moment, "extend") if share.asked}


def _mapped(moment: Moment) -> Writes:
    """Pages that a request has now and had not before."""
    before, slots = moment.expected.pages_before, moment.expected.slots_after
    return {
        slots[name]: set(range(len(before.get(name, ())), len(pages)))
        for name, pages in moment.expected.pages_after.items()
    }


def _chain(moment: Moment) -> list[str]:
    return [f"chain.{step}" for step in range(1, moment.expected.num_steps)]


def _paged(moment: Moment, stages: Iterable[str], size: int) -> Writes:
    """Rows of these stages stand at consecutive positions of their requests' pages."""
    found: dict[int, set[int]] = {}
    for stage in stages:
        name, _, step = stage.partition(".")
        shift = int(step) - 1 if name == "chain" else 0
        for share in shares(moment, stage):
            pages = moment.expected.pages_after.get(share.request, ())
            for at in range(share.start + shift, share.start + shift + share.count):
                if at // size < len(pages):
                    found.setdefault(pages[at // size], set()).add(at % size)
    return {**found}


def _by_unit(moment: Moment, region: Region, parts: Iterable[tuple[int, Share, Iterable[int]]]) -> Writes:
    """Batch rows with their positions, as rows or as the slots of their requests."""
    slots = moment.expected.slots_after
    return {
        number if region.by == "row" else slots[share.request]: set(positions)
        for number, share, positions in parts if region.by == "row" or share.request in slots
    }


def _spelled(found: set[int]) -> str:
    """position 3; positions 3 to 5; positions 1, 4"""
    positions = sorted(found)
    if len(positions) == 1:
        return f"position {positions[0]}"
    if positions == list(range(positions[0], positions[-1] + 1)):
        return f"positions {positions[0]} to {positions[-1]}"
    return f"positions {', '.join(map(str, positions))}"
