"""T0: every pool is large enough for the largest step count of the trace, and guarded pools have red zones.

A pool that is sized for the first step count overflows into its neighbour once a larger one is in force. A memory
budget that is computed with the first step count promises memory that the pools then take. So sizes are compared when
the run begins and whenever pools are rebuilt. Leaves out: the content of pools.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from instep_reference.contract.engine import Region
from instep_reference.contract.pool_meaning import Positions

from ..finding_problem import Problem
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.event_log import EventLog, Room
from ..watch.pool_addresses import stands
from .check_interface import TellsOnce, verb

ALIGNED = 16  # elements of a pitch and bytes of a base that kernels may assume (2-semantics, Invariance)


class Capacity(TellsOnce):
    """Units, columns, entries, page sizes, pitches, and the memory budget."""

    name = "capacity"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        super().__init__()
        self.known: tuple[object, ...] | None = None

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        room, budget = context.log.room, context.log.budget
        regions = [region for region in context.regions if region.units.numel()]
        if room is None or not regions:
            if self.known is None:
                yield from self.once(context, "this engine shows no memory")
            return
        shapes = tuple((region.name, region.layer, region.units.shape, region.units.stride()) for region in regions)
        windows = [window.shape[1] for state in context.subject.after.values() for window in state.conv.values()]
        if (shapes, bool(windows)) == self.known:
            return
        self.known = shapes, bool(windows)
        ranks = 1 if context.ranks is None else context.ranks.size  # each has some of the heads
        blocks = {(block.shape[0] // ranks, *block.shape[1:])
                  for state in context.subject.after.values() for block in state.state.values()}  # fmt: skip
        yield from judged(regions, context.log, context.index, context.kind, windows, blocks)
        if budget is None:
            yield Skipped(self.name, context.index, "this engine shows no memory budget")
        else:
            yield from budgeted(regions, budget, room, context.index, context.kind)
        if not context.log.guarded:
            yield Skipped(self.name, context.index, "pools are packed, so there are no red zones to check")


def judged(
    regions: Sequence[Region], log: EventLog, event: int, kind: str, windows: Sequence[int] = (),
    blocks: Collection[tuple[int, ...]] = (),
) -> Iterator[Comparison]:
    """Compare every pool, also after an event that made the subject raise.

    windows: values of W-1 that conv windows show. blocks: shapes of states.
    """
    assert log.room is not None
    for region in regions:
        if region.red:
            continue
        due = [*_needs(region, log.room, max(windows, default=0)), *_layout(region, log.room, blocks)]
        needs = [*due, *(_guards(region) if log.guarded else ())]
        short = [f"{region.name} has {has} {what}; {needed} {verb(needed, 'is', 'are')} needed{why}"
                 for what, has, needed, why in needs if has < needed]  # fmt: skip
        yield _compared(region, event, kind, len(needs), short)


def budgeted(
    regions: Sequence[Region], budget: Mapping[str, int], room: Room, event: int, kind: str
) -> Iterator[Comparison]:
    """Compare the bytes of each pool with those that the engine's memory budget has for it."""
    pools = dict[str, list[Region]]()
    for region in regions:
        if not region.red:
            pools.setdefault(region.name, []).append(region)
    for name, layers in pools.items():
        takes, found = sum(region.units.nbytes for region in layers), budget.get(name, 0)
        why = "" if found == takes else _of_first_count(layers[0], len(layers), found, room)
        said = f"the memory budget has {found} bytes for the pool {name}, which takes {takes}{why}"
        yield _compared(layers[0], event, kind, 1, [said] if found != takes else [])
    unknown = sorted(name for name, size in budget.items() if size and name not in pools)
    if unknown:
        said = f"the memory budget has bytes for {', '.join(unknown)}; the engine shows no such region"
        yield _compared(regions[0], event, kind, 1, [said])


def _compared(region: Region, event: int, kind: str, elements: int, said: Sequence[str]) -> Comparison:
    return Comparison(Capacity.name, Capacity.tier, event, kind, stands(region).place, elements, float(len(said)), 0.0,
                      problem=Problem.of("; ".join(said)))  # fmt: skip


def _of_first_count(region: Region, layers: int, found: int, room: Room) -> str:
    """Explain a budget of as many positions a unit as the first step count needs; "" if it is not that.

    Some pools have a few positions more than windows need, others a multiple of them.
    """
    along = None if region.means is None else region.means.positions
    if along is None or room.first == room.widest:
        return ""
    has = region.units.shape[along.axis]
    each, rest = divmod(found, layers * region.units.nbytes // has)
    less, scaled = along.windows * (room.widest - room.first), each * room.widest == has * room.first
    if rest or not (has - each == less or scaled):
        return ""
    return f": a budget for windows of {room.first} tokens, as the first step count has; the widest has {room.widest}"


Need = tuple[str, int, int, str]  # name, count that exists, count that is needed, reason


def _needs(region: Region, room: Room, window: int) -> Iterator[Need]:
    """The needs of a region. window: W-1, or 0 if no request has a conv window."""
    units, capacity = region.units, room.capacity
    if region.by == "slot":
        yield "units", units.shape[0], max(capacity.slots) + 1, ", one per slot that the trace assigns and slot 0"
    elif region.by == "page":
        yield "units", units.shape[0], max(capacity.pages) + 1, ", one per page that the trace assigns and page 0"
    elif region.by == "request":
        yield "request rows", units.shape[0], len(capacity.slots) + 1, ", one per slot and row 0"
    else:
        yield "rows", units.shape[0], len(capacity.slots), ", one per request of the widest batch"
    if region.means is not None and region.means.positions is not None:
        yield from _positions(region.means.positions, units, room, window)


def _layout(region: Region, room: Room, blocks: Collection[tuple[int, ...]]) -> Iterator[Need]:
    """States [.., HV, K, V] in their physical order. A shape counts only if a pool does not name its content."""
    units, means = region.units, region.means
    if means is not None and (means.component != "state" or means.keeps):
        return
    if room.layouts is None or tuple(units.shape[-3:]) not in blocks or min(units.shape[-2:]) == 1:
        return
    due, lies = room.layouts[region.by in ("row", "request")], "KV" if units.stride(-1) == 1 else "VK"
    yield f"blocks in the order {due}", units.shape[0] * (lies == due), units.shape[0], ", the declared layout"


def _positions(along: Positions, units: torch.Tensor, room: Room, window: int) -> Iterator[Need]:
    """The positions that a unit has and needs, by the meaning of a position."""
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
    """The needs of red zones: a pitch larger than the packed size, and aligned as kernels assume."""
    size, gap = region.units[0].numel(), 0 if region.gaps is None else region.gaps.shape[1]
    pitch = region.units.stride(0) if len(region.units) > 1 else size + gap  # the stride of a single unit is arbitrary
    yield "red-zone elements", gap, 1, " after each unit"
    yield "elements from unit to unit", pitch, size + gap, ""
    aligned = pitch % ALIGNED == 0 and region.units.data_ptr() % ALIGNED == 0
    yield "aligned pitches", int(aligned), 1, f": a multiple of {ALIGNED} elements, from a base of {ALIGNED} bytes"
