"""T0: every pool is as large as the largest candidate of the trace needs it, and guarded pools have their red zones.

Leaves out: what stands in a pool. A pool that was sized for the step count at the start serves until a wider one comes
into force; then it writes into its neighbour. So this is asked when the run begins, and when pools are made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from instep_optimized.layout import OWN
from instep_reference.contract.engine import Region

from ..observe.moment import Moment
from ..observe.noted import Noted, Room
from ..observe.pools import standing
from ..verdict import Comparison, Skipped, Tier

ALIGNED = 16  # elements of a pitch, bytes of a base: what kernels may rely on (2-semantics, Invariance)
ENDS = "_ends"  # of a pool: red zones and nothing else
OWN_POOLS = tuple(f"ring_{name}" for name in OWN)  # of a ring: these have room for one window


class Capacity:
    """Units, columns, entries, page sizes, pitches."""

    name = "capacity"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        self.known: tuple[object, ...] | None = None

    def __call__(self, moment: Moment) -> Iterator[Comparison | Skipped]:
        room, regions = moment.noted.room, [region for region in moment.regions() if region.units.numel()]
        if room is None or not regions:
            return
        shapes = tuple((region.name, region.layer, region.units.shape, region.units.stride()) for region in regions)
        windows = [window.shape[1] for state in moment.subject.after.values() for window in state.conv.values()]
        if (shapes, bool(windows)) == self.known:
            return
        self.known = shapes, bool(windows)
        yield from judged(regions, moment.noted, moment.index, moment.kind, windows)
        if not moment.noted.guarded:
            yield Skipped(self.name, moment.index, "pools are packed: there are no red zones to look for")


def judged(
    regions: Sequence[Region], noted: Noted, event: int, kind: str, windows: Sequence[int] = ()
) -> Iterator[Comparison]:
    """Every pool by itself; also of an event that the subject did not survive. windows: W-1, if something tells it."""
    assert noted.room is not None
    for region in regions:
        if region.name.endswith(ENDS):
            continue
        needs = [*_needs(region, noted.room, max(windows, default=0)), *(_guards(region) if noted.guarded else ())]
        short = [f"{region.name} has {has} {what}; {needed} are needed{why}" for what, has, needed, why in needs
                 if has < needed]  # fmt: skip
        yield Comparison(
            Capacity.name, Capacity.tier, event, kind, standing(region.name, region.layer), elements=len(needs),
            worst=float(len(short)), allowed=0.0, diagnosis="; ".join(short),
        )  # fmt: skip


Need = tuple[str, int, int, str]  # what, how many there are, how many are needed, why


def _needs(region: Region, room: Room, window: int) -> Iterator[Need]:
    """window: W-1, where some request's conv window tells it."""
    units, capacity, widest = region.units, room.capacity, room.widest
    why = f" for the widest window, of {widest} tokens"
    if region.by == "slot":
        yield "units", units.shape[0], max(capacity.slots) + 1, ", one per slot that is handed out and slot 0"
    elif region.by == "page":
        yield "units", units.shape[0], max(capacity.pages) + 1, ", one per page that is handed out and page 0"
        yield "positions a page", units.shape[1], capacity.page_size, ""
    else:
        yield "rows", units.shape[0], len(capacity.slots), ", one per request of the widest batch"
    if region.name.startswith("snapshot_"):
        yield "columns", units.shape[1], widest, why
    if region.name in ("window", "picks", "final"):
        yield "places", units.shape[1], widest, why
    if region.name == "state" and units.dim() == len(("slot", "column", "HV", "K", "V")):
        yield "columns", units.shape[1], widest, why
    if region.name == "conv" and window and units.shape[2] > window:
        yield "inputs a line", units.shape[2], window + widest - 1, why
    if region.name == "table":
        yield "pages a request", units.shape[1], len(capacity.pages), ""
    if region.name.startswith("ring_"):
        windows = 1 if region.name in OWN_POOLS else 2
        yield "entries", units.shape[1], windows * widest, f" for {windows} of the widest windows"


def _guards(region: Region) -> Iterator[Need]:
    """A pitch that is not the packed size, and on which kernels may rely."""
    pitch, size = region.units.stride(0), region.units[0].numel()
    gap = 0 if region.gaps is None else region.gaps.shape[1]
    yield "elements of red zone", gap, 1, " behind each unit"
    yield "elements from unit to unit", pitch, size + gap, ""
    aligned = pitch % ALIGNED == 0 and region.units.data_ptr() % ALIGNED == 0
    yield "aligned pitches", int(aligned), 1, f": a multiple of {ALIGNED} elements, from a base of {ALIGNED} bytes"
