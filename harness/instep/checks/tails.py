"""T1: within a unit that may be written, only the positions that the event names change their bytes.

Leaves out: units that may not be written at all (`bytes.py`). Columns beyond a narrow window, entries of a ring that
are not this window's, the tail of a page, the places of a board behind a window: what nobody names keeps its bytes, or
its poison. Positions come from the trace; the pools are the optimized engine's, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from instep_reference.contract.engine import Commit, Draft, Forward, Region

from ..observe.memory import Looked
from ..observe.moment import Moment
from ..observe.pools import standing
from ..observe.rows import Share, shares
from ..verdict import Comparison, Skipped, Tier

Writes = dict[int, set[int] | None]  # unit -> positions; None: one of them, and the engine knows which


class Tails:
    """Every position of every unit that has positions."""

    name = "tails"
    tier = Tier.BITWISE

    def __call__(self, moment: Moment) -> Iterator[Comparison | Skipped]:
        if not (moment.noted.ops and isinstance(moment.event, Draft | Forward | Commit)):
            return
        for looked in moment.changes.looked:
            if looked.after.shape[1] > 1 and not looked.gap:
                yield self._judged(moment, looked)

    def _judged(self, moment: Moment, looked: Looked) -> Comparison:
        region, changed = looked.region, looked.changed()
        said, first = [], None
        writes = _writes(moment, region)
        for unit in changed.any(1).nonzero()[:, 0].tolist():
            positions = set(changed[unit].nonzero()[:, 0].tolist())
            allowed = writes.get(unit, set())
            strays = positions - allowed if allowed is not None else positions if len(positions) > 1 else set()
            if strays:
                first = unit if first is None else first
                right = "one position" if allowed is None else _spelled(allowed) if allowed else "nothing"
                said.append(f"{region.name} {region.by} {unit} changed at {_spelled(strays)}, where this event does "
                            f"not write (there it writes {right})")  # fmt: skip
        owners = {slot: name for name, slot in moment.expected.slots_after.items()} if region.by == "slot" else {}
        return Comparison(
            self.name, self.tier, moment.index, moment.kind, standing(region.name, region.layer),
            elements=changed.numel(), blocks=len(changed), worst=float(len(said)), allowed=0.0,
            request=None if first is None else owners.get(first), slot=first if region.by == "slot" else None,
            diagnosis="; ".join(said),
        )  # fmt: skip


def _writes(moment: Moment, region: Region) -> Writes:
    """The positions of a region that the event writes."""
    name, positions = region.name, region.units.shape[1]
    if region.by == "page":
        stages = ("extend", *_chain(moment)) if name.startswith("draft") else ("trunk",)
        return _paged(moment, stages, positions)
    trunk = [(number, share) for number, share in enumerate(shares(moment, "trunk"))]
    verified = [(number, share) for number, share in trunk if share.kind == "verify"]
    if region.by == "row":
        return {number: set(range(share.count)) for number, share in verified}
    if name in ("picks", "final"):
        return _by_slot(moment, ((share, range(share.count)) for _, share in verified))
    if name.startswith("ring_"):
        return _by_slot(moment, (
            (share, ((share.start + row) % positions for row in range(share.count))) for _, share in verified
        ))
    if name == "window":
        return _window(moment)
    # States by column: a decode and a chunk write where they read.
    marked: Writes = {moment.expected.slots_after[share.request]: None for _, share in trunk}
    return marked | _by_slot(moment, ((share, range(share.count)) for _, share in verified))


def _window(moment: Moment) -> Writes:
    """Roots in place 0, drafts behind them."""
    if isinstance(moment.event, Draft):
        drafts = range(1, moment.expected.num_steps + 1)
        return {moment.expected.slots_after[name]: set(drafts) for name in moment.event.requests}
    rooted = [share for share in shares(moment, "extend") if share.asked]
    return _by_slot(moment, ((share, (0,)) for share in rooted))


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


def _by_slot(moment: Moment, parts: Iterable[tuple[Share, Iterable[int]]]) -> Writes:
    slots = moment.expected.slots_after
    return {slots[share.request]: set(positions) for share, positions in parts if share.request in slots}


def _spelled(found: set[int]) -> str:
    """position 3; positions 3 to 5; positions 1, 4"""
    positions = sorted(found)
    if len(positions) == 1:
        return f"position {positions[0]}"
    if positions == list(range(positions[0], positions[-1] + 1)):
        return f"positions {positions[0]} to {positions[-1]}"
    return f"positions {', '.join(map(str, positions))}"
