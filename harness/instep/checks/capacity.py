"""T0: every pool is as large as the largest candidate of the trace needs it, and guarded pools have their red zones.

Leaves out: what stands in a pool. A pool that was sized for the step count at the start serves until a wider one comes
into force; then it writes into its neighbour. So this is asked when the run begins, and when pools are made anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from instep_reference.contract.engine import Region
from instep_reference.contract.meaning import Positions

from ..observe.context import EventContext
from ..observe.event_log import EventLog, Room
from ..observe.pools import stands
from ..problem import Problem
from ..verdict import Comparison, Skipped, Tier

ALIGNED = 16  # elements of a pitch, bytes of a base: what kernels may rely on (2-semantics, Invariance)


class Capacity:
    """Units, columns, entries, page sizes, pitches."""

    name = "capacity"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        self.known: tuple[object, ...] | None = None

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        room, regions = context.log.room, [region for region in context.regions() if region.units.numel()]
        if room is None or not regions:
            if self.known is None:
                yield Skipped(self.name, context.index, "this engine shows no memory")
            self.known = ()
            return
        shapes = tuple((region.name, region.layer, region.units.shape, region.units.stride()) for region in regions)
        windows = [window.shape[1] for state in context.subject.after.values() for window in state.conv.values()]
        if (shapes, bool(windows)) == self.known:
            return
        self.known = shapes, bool(windows)
        blocks = {tuple(block.shape) for state in context.subject.after.values() for block in state.state.values()}
        yield from judged(regions, context.log, context.index, context.kind, windows, blocks)
        if not context.log.guarded:
            yield Skipped(self.name, context.index, "pools are packed: there are no red zones to look for")


def judged(
    regions: Sequence[Region], log: EventLog, event: int, kind: str, windows: Sequence[int] = (),
    blocks: Collection[tuple[int, ...]] = (),
) -> Iterator[Comparison]:
    """Every pool by itself; also of an event that the subject did not survive. windows: W-1, if something tells it;
    blocks: shapes of states, likewise."""
    assert log.room is not None
    for region in regions:
        if region.red:
            continue
        due = [*_needs(region, log.room, max(windows, default=0)), *_layout(region, log.room, blocks)]
        needs = [*due, *(_guards(region) if log.guarded else ())]
        short = [f"{region.name} has {has} {what}; {needed} are needed{why}" for what, has, needed, why in needs
                 if has < needed]  # fmt: skip
        yield Comparison(
            Capacity.name, Capacity.tier, event, kind, stands(region).place, elements=len(needs),
            worst=float(len(short)), allowed=0.0, problem=Problem.of("; ".join(short)),
        )  # fmt: skip


Need = tuple[str, int, int, str]  # what, how many there are, how many are needed, why


def _needs(region: Region, room: Room, window: int) -> Iterator[Need]:
    """window: W-1, where some request's conv window tells it."""
    units, capacity = region.units, room.capacity
    if region.by == "slot":
        yield "units", units.shape[0], max(capacity.slots) + 1, ", one per slot that is handed out and slot 0"
    elif region.by == "page":
        yield "units", units.shape[0], max(capacity.pages) + 1, ", one per page that is handed out and page 0"
    else:
        yield "rows", units.shape[0], len(capacity.slots), ", one per request of the widest batch"
    if region.means is not None and region.means.positions is not None:
        yield from _positions(region.means.positions, units, room, window)


def _layout(region: Region, room: Room, blocks: Collection[tuple[int, ...]]) -> Iterator[Need]:
    """States [.., HV, K, V] in their physical order."""
    units = region.units
    if room.layouts is None or tuple(units.shape[-3:]) not in blocks or min(units.shape[-2:]) == 1:
        return
    due, lies = room.layouts[region.by == "row"], "KV" if units.stride(-1) == 1 else "VK"
    yield f"blocks that lie as {due}", units.shape[0] * (lies == due), units.shape[0], ", the declared layout"


def _positions(along: Positions, units: torch.Tensor, room: Room, window: int) -> Iterator[Need]:
    """How many positions a unit has, and how many it needs, by what a position is."""
    has, widest = units.shape[along.axis], room.widest
    why = f" for the widest window, of {widest} tokens"
    match along.what:
        case "token":
            yield "positions a page", has, room.capacity.page_size, ""
        case "page":
            yield "pages a request", has, room.capacity.request_pages, ""
        case "entry":
            yield "entries", has, along.windows * widest, f" for {along.windows} of the widest windows"
        case "input" if window:
            yield "inputs a line", has, window + widest - 1, why
        case "column":
            yield "columns", has, widest, why
        case "node" | "choice":
            yield "places", has, widest, why


def _guards(region: Region) -> Iterator[Need]:
    """A pitch that is not the packed size, and on which kernels may rely."""
    size, gap = region.units[0].numel(), 0 if region.gaps is None else region.gaps.shape[1]
    pitch = region.units.stride(0) if len(region.units) > 1 else size + gap  # torch gives a single unit any stride
    yield "elements of red zone", gap, 1, " behind each unit"
    yield "elements from unit to unit", pitch, size + gap, ""
    aligned = pitch % ALIGNED == 0 and region.units.data_ptr() % ALIGNED == 0
    yield "aligned pitches", int(aligned), 1, f": a multiple of {ALIGNED} elements, from a base of {ALIGNED} bytes"
