"""T1: inside a unit that may be written, only the positions that the event writes change their bytes.

All other positions keep their bytes or their poison: columns beyond a narrow window, ring entries of other windows, the
tail of a page, places of a slot table after a window. In rounds whose windows have own widths, places up to the step
count are scratch. The trace determines the positions; the engine declares with its
pools what a position is. Leaves out: units that may not be written at all (`unchanged_bytes.py`).
"""

from collections.abc import Iterable, Iterator, Mapping

from instep_reference.contract.engine import Commit, Draft, Region
from instep_reference.contract.event_facts import facts
from instep_reference.contract.pool_meaning import Positions

from ..finding_problem import Problem
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext, RowSpan
from ..watch.memory_changes import Looked
from ..watch.pool_addresses import stands, unit_word
from ..watch.rows_by_request import row_spans
from .check_interface import TellsOnce, compared

Writes = dict[int, set[int] | None]  # unit -> positions; None means any one position, which the engine chooses


class Tails(TellsOnce):
    """Compare every position of every unit that has positions."""

    name = "tails"
    tier = Tier.BITWISE

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        yield from self._undeclared(context)
        if not facts(context.event).batch:
            return
        for looked in context.changes.looked:
            along = None if looked.region.means is None else looked.region.means.positions
            if along is not None and looked.after.shape[1] > 1 and not looked.gap:
                yield self._judged(context, looked, along)

    def _undeclared(self, context: EventContext) -> Iterator[Skipped]:
        regions = context.changes.regions
        unknown = dict.fromkeys(region.name for region in regions if region.means is None)
        if not regions:
            yield from self.once(context, "this engine shows no memory")
        elif unknown:
            yield from self.once(context, f"{', '.join(unknown)}: the engine does not declare the content "
                                 "(`Region.means`), so every unit is compared as a whole")  # fmt: skip

    def _judged(self, context: EventContext, looked: Looked, along: Positions) -> Comparison:
        region, changed = looked.region, looked.changed()
        said, astray = [], list[int]()
        writes = _writes(context, region, along)
        for unit in changed.any(1).nonzero().flatten().tolist():
            positions = set(changed[unit].nonzero().flatten().tolist())
            allowed = writes.get(unit, set())
            strays = positions - allowed if allowed is not None else positions if len(positions) > 1 else set()
            if strays and unit not in region.scratch:
                astray.append(unit)
                some = "one position" if allowed is None else _spelled(allowed) if allowed else ""
                said.append(f"{region.name} {unit_word(region)} {unit} changed at {_spelled(strays)}; this event "
                            f"writes {f'only {some}' if some else 'nothing'} there")  # fmt: skip
        place, request, slot = stands(
            region, next(iter(astray), None), context.expected.slots_after, context.expected.request_rows_after
        )
        problem = Problem.of("; ".join(said), "forbidden_write")
        return compared(self, context, place, changed.numel(), len(said), problem, request=request, slot=slot,
                        blocks=len(changed), rank=region.rank,
                        units=tuple(astray))  # fmt: skip


def _writes(context: EventContext, region: Region, along: Positions) -> Writes:
    """The positions of a region that the event writes, by the meaning of a position."""
    count = region.units.shape[1]
    trunk = list(enumerate(row_spans(context, "trunk")))
    verified = [(number, span) for number, span in trunk if span.kind == "verify"]
    committed = list(enumerate(row_spans(context, "extend") if isinstance(context.event, Commit) else ()))
    match along.what:
        case "token":
            returned: Writes = {page: set(range(count)) for page in _returned(context)}
            draft, block = (region.means is not None and getattr(region.means, name) for name in ("draft", "block"))
            if block:
                return _paged(context, ("extend", "block"), count) | returned
            if not draft and committed:
                moves = [(span.request, _moved(span)) for _, span in committed]
                return _on_pages(context, moves, count) | returned
            return _paged(context, ("extend", *_chain(context)) if draft else ("trunk",), count) | returned
        case "choice":
            return _chosen(context)
        case "page":
            return _mapped(context)
        case "entry":
            return _by_unit(context, region, (
                *((number, span, [(span.start + row) % count for row in range(span.count)])
                  for number, span in verified),
                *((number, span, [position % count for position in _moved(span)]) for number, span in committed),
            ))
    # The slot table keeps picks and final rows of as many nodes as the step count has, also for a narrower window.
    widest = context.expected.num_steps + 1 if region.by == "slot" and along.what == "node" else 0
    nodes = _by_unit(context, region, ((number, span, range(max(span.count, widest))) for number, span in verified))
    if along.what != "column" or region.by == "row":
        return nodes
    # A decode and a chunk write the column that they read.
    units = _units(context, region)
    marked: Writes = {units[span.request]: None for _, span in trunk}
    return marked | nodes


def _chosen(context: EventContext) -> Writes:
    """Positions of choices: roots in position 0, drafts after it."""
    slots = context.expected.slots_after
    if isinstance(context.event, Draft):
        widest = 0 if context.event.parents is None else context.expected.num_steps + 1
        return {slots[name]: set(range(1, max(len(context.expected.windows[name]), widest)))
                for name in context.event.requests}  # fmt: skip
    return {slots[span.request]: {0} for span in row_spans(context, "extend") if span.logit_rows}


def _mapped(context: EventContext) -> Writes:
    """Positions of pages that a request gained or gave back at this event."""
    before, slots = context.expected.pages_before, context.expected.slots_after
    counts = {name: (len(before.get(name, ())), len(pages)) for name, pages in context.expected.pages_after.items()}
    return {slots[name]: set(range(min(both), max(both))) for name, both in counts.items()}


def _returned(context: EventContext) -> set[int]:
    """The pages that a commit gives back. An engine may poison them."""
    before, after = context.expected.pages_before, context.expected.pages_after
    names = context.event.requests if isinstance(context.event, Commit) else ()
    return {page for name in names if name in after for page in before[name][len(after[name]) :]}


def _chain(context: EventContext) -> list[str]:
    """The stages of a draft: at most one per node after the root."""
    if context.expected.topk is not None:
        return [f"chain.{step}" for step in range(1, context.expected.num_steps)]
    nodes = max(map(len, context.expected.windows.values()), default=0)
    return [f"chain.{step}" for step in range(1, nodes)]


def _paged(context: EventContext, stages: Iterable[str], size: int) -> Writes:
    """Positions on pages of the rows of these stages, which are consecutive; every node has its own."""
    rows: list[tuple[str, Iterable[int]]] = []
    for stage in stages:
        name, _, step = stage.partition(".")
        shift = int(step) - 1 if name == "chain" else 0
        for span in row_spans(context, stage):
            at = span.start + (span.nodes[0] - 1 if name == "chain" and span.nodes else shift)
            rows.append((span.request, range(at, at + span.count)))
    return _on_pages(context, rows, size)


def _moved(span: RowSpan) -> list[int]:
    """Positions to which a commit moves a node; a chain has none."""
    return [span.start + order for order, node in enumerate(span.nodes) if node != order]


def _on_pages(context: EventContext, rows: Iterable[tuple[str, Iterable[int]]], size: int) -> Writes:
    """Positions of requests as positions on their pages."""
    found: dict[int, set[int]] = {}
    for request, positions in rows:
        pages = context.expected.pages_in_use(request)
        for at in positions:
            if at // size < len(pages):
                found.setdefault(pages[at // size], set()).add(at % size)
    return {**found}


def _by_unit(context: EventContext, region: Region, parts: Iterable[tuple[int, RowSpan, Iterable[int]]]) -> Writes:
    """Positions by batch row, or by the slot or the request row of the row's request."""
    units = _units(context, region)
    return {
        number if region.by == "row" else units[span.request]: set(positions)
        for number, span, positions in parts if region.by == "row" or span.request in units
    }


def _units(context: EventContext, region: Region) -> Mapping[str, int]:
    """The unit of every request: its request row or its slot."""
    expected = context.expected
    return expected.request_rows_after if region.by == "request" else expected.slots_after


def _spelled(found: set[int]) -> str:
    """position 3; positions 3 to 5; positions 1, 4"""
    positions = sorted(found)
    if len(positions) == 1:
        return f"position {positions[0]}"
    if positions == list(range(positions[0], positions[-1] + 1)):
        return f"positions {positions[0]} to {positions[-1]}"
    return f"positions {', '.join(map(str, positions))}"
