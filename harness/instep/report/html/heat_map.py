"""The heat map and the timeline of a page as compact arrays, by event.

The heat map has one cell per event and row; a row is a layer, a draft step, or the rest of a stage:

    rows    the bookkeeping, the embedding, each layer of the trunk, the rows after the layers, each stage of the draft
    line    all comparisons of one check in one cell: their count, and the one that used most of its allowance
    cells   [events x rows], as differences of successive cell numbers; each cell has the numbers of its lines

Equal lines are stored once: most comparisons are exact, and exact ones carry no numbers. The timeline follows from the
trace alone:

    stays   [request, slot, from, to]   from the event of its admission or resume; slot -1: preempted, -2: unknown
    marks   [event, request, what, number, of, tree]  number and of: prompt tokens read of all, nodes of a window,
            accepted drafts of those verified; tree: a number in `trees`, -1 for a chain
    trees   [parents, accepted nodes]   of a window that branches; no nodes before its commit

Events after the end of the replay are in the timeline, because the trace has them. Leaves out: words and colours.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import committed_paths, kind_of, named
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, draft_stage
from instep_reference.contract.recurrences import RECURRENCES, WITH_FIXED_MEMORY

from ...trace.event_rules import EventRules
from ...trace.file import Trace
from ...trace.request_table import RequestTable, Standing
from ...verdict import Comparison
from ...watch.event_context import branching
from ..divergence_message import NAMES, drafting
from ..outcome_data import EXACT

DETAILED = 200_000  # lines; with more, every cell keeps only the one that used most of its allowance
TABLE, HEAD, DRAFT = STAGE_LEVEL - 1, AFTER_LAYERS, 0  # levels of rows other than layers of the trunk


class Row(NamedTuple):
    """A row of the heat map. In stage "trunk", level is a layer or one of the above; a draft stage is one row."""

    stage: str
    level: int

    @classmethod
    def of(cls, place: Place) -> "Row":
        if place.stage != "trunk":
            return cls(place.stage, DRAFT)
        of_table = place.layer == STAGE_LEVEL and place.component in ("length", "root")
        return cls("trunk", TABLE if of_table else place.layer)

    def label(self, kinds: Sequence[str]) -> str:
        """The name of the row. kinds: those of the trunk's layers, as in the configuration."""
        if self.stage != "trunk":
            return drafting(self.stage).strip()
        named = {TABLE: "slots, pages, lengths", STAGE_LEVEL: "embedding", HEAD: "final rows, logits"}
        kind = kinds[self.level] if 0 <= self.level < len(kinds) else ""
        kind = kind.upper() if kind in RECURRENCES else kind
        return named.get(self.level) or f"layer {self.level} {kind}".strip()

    def order(self) -> tuple[int, ...]:
        return Place(self.stage, self.level, "length").order()[:3]


def rows_of(layers: int, compared: Iterable[Comparison], due: Iterable[Row]) -> list[Row]:
    """All rows of the model, of comparisons and of computations, in the order of the data flow."""
    trunk = [Row("trunk", level) for level in (TABLE, STAGE_LEVEL, *range(layers), HEAD)]
    return sorted({*trunk, *(Row.of(place) for place in {one.place for one in compared}), *due}, key=Row.order)


def data(compared: Sequence[Comparison], rows: Sequence[Row], requests: Mapping[str, int]) -> dict[str, Any]:
    """The cells as compact arrays. requests: name -> number."""
    row_of = _rows_of_places(compared, rows)
    grouped: dict[tuple[int, str], list[Comparison]] = {}
    for one in compared:
        grouped.setdefault((one.event * len(rows) + row_of[one.place], one.check), []).append(one)
    if len(grouped) > DETAILED:
        whole: dict[tuple[int, str], list[Comparison]] = {}
        for (at, _), ones in grouped.items():
            whole.setdefault((at, ""), []).extend(ones)
        grouped = whole
    table, lines, cells = _Names(), _Names(), dict[int, list[int]]()
    components = _Names()
    for (at, _), ones in grouped.items():
        cells.setdefault(at, []).append(lines.number(_line(ones, table, components, requests)))
    ordered = sorted(cells)
    return {
        "checks": list(table.numbers), "components": list(components.numbers), "lines": list(lines.numbers),
        "at": [at - before for at, before in zip(ordered, [0, *ordered], strict=False)],
        "of": [cells[at] for at in ordered],
    }


def not_judged(
    due: Mapping[int, Collection[Row]], rows: Sequence[Row], compared: Sequence[Comparison], events: int
) -> list[int]:
    """Cells in which a served event computes, but nothing was compared."""
    number = {row: index for index, row in enumerate(rows)}
    row_of = _rows_of_places(compared, rows)
    judged = {one.event * len(rows) + row_of[one.place] for one in compared}
    computed = {event * len(rows) + number[row] for event, there in due.items() if event < events for row in there}
    return sorted(computed - judged)


def _rows_of_places(compared: Iterable[Comparison], rows: Sequence[Row]) -> dict[Place, int]:
    number = {row: index for index, row in enumerate(rows)}
    return {place: number[Row.of(place)] for place in {one.place for one in compared}}


class _Names:
    """Numbers for values; equal values share one."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, name: Any) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def _line(
    ones: Sequence[Comparison], checks: _Names, components: _Names, requests: Mapping[str, int]
) -> tuple[object, ...]:
    """check, count, elements; then, unless all are exact: component, request, slot, worst, allowed, whether right."""
    worst = max(ones, key=lambda one: (not one.agrees, math.isnan(one.used), one.used))
    counts = (checks.number((worst.check, worst.tier.value)), len(ones), sum(one.elements for one in ones))
    if worst.agrees and (worst.tier in EXACT or not worst.allowed):
        return counts
    component = NAMES.get(worst.place.component, worst.place.component)
    return (
        *counts, components.number(component), requests.get(worst.request or "", -1),
        -1 if worst.slot is None else worst.slot, short(worst.worst), short(worst.allowed), int(worst.agrees),
    )


def short(number: float) -> float | str:
    """The number with four digits; as text if JSON has no number for it."""
    return float(f"{number:.4g}") if math.isfinite(number) else str(number)


NOBODY, UNKNOWN = -1, -2


@dataclass
class Lanes:
    """The data of the timeline. due: event -> the rows of the heat map in which it computes."""

    events: list[str] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    stays: list[list[int]] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    trees: list[list[Any]] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    due: dict[int, set[Row]] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        kinds = sorted(set(self.events))
        return {
            "kinds": kinds, "events": [kinds.index(kind) for kind in self.events], "requests": list(self.requests),
            "lanes": self._lanes(), "stays": self.stays, "marks": self.marks, "trees": self.trees, "steps": self.steps,
        }

    def _lanes(self) -> list[int]:
        """The lane of each request: the first one that is free for all its events."""
        ends: list[int] = []
        lanes = []
        for request in self.requests.values():
            mine = [stay for stay in self.stays if stay[0] == request]
            lane = next((lane for lane, end in enumerate(ends) if end < mine[0][2]), len(ends))
            ends[lane:lane + 1] = [mine[-1][3]]
            lanes.append(lane)
        return lanes


def lanes_of(trace: Trace, kinds: Sequence[str], *, overlap: bool = False) -> Lanes:
    """Follow the events of a trace by the event rules. kinds: those of the trunk's layers, as in the configuration."""
    found, rules = Lanes(steps=[[0, trace.header.num_steps]]), EventRules(trace.header, overlap=overlap)
    open_stays: dict[bool, dict[str, list[int]]] = {False: {}, True: {}}  # of the first engine, and of a receiver
    for index, event in enumerate(trace.events):
        at = rules.serving(event)
        table = at.table
        before = dict(table.live)
        at.apply(event, trace.where(index))
        found.events.append(kind_of(event))
        for name in (*table.live, *named(event)):
            found.requests.setdefault(name, len(found.requests))
        found.marks += [[index, *mark] for mark in _marks(event, before, table, found)]
        _stays(index, table, found, open_stays[at.receives])
        if isinstance(event, e.SetNumSteps):
            found.steps.append([index, event.num_steps])
        if due := _due(event, before, table, kinds, trace.header.heads):
            found.due[index] = due
    return found


def _stays(index: int, table: RequestTable, found: Lanes, open_stays: dict[str, list[int]]) -> None:
    """End and begin stays where the table has another slot, and extend the others to this event."""
    for name, standing in table.live.items():
        slot = NOBODY if standing.slot is None else standing.slot
        stay = open_stays.get(name)
        if stay is None or stay[1] != slot:
            stay = open_stays[name] = [found.requests[name], slot, index, index]
            found.stays.append(stay)
        stay[3] = index
    for name in open_stays.keys() - table.live.keys():
        open_stays.pop(name)[3] = index


def _marks(event: e.Event, before: dict[str, Standing], table: RequestTable, found: Lanes) -> Iterator[list[Any]]:
    """request, what, number, of, tree"""
    def window(name: str, nodes: tuple[int, ...] = (), where: dict[str, Standing] = before) -> int:
        parents = branching(where[name].parents)
        if parents is not None:
            found.trees.append([parents, nodes])
        return NOBODY if parents is None else len(found.trees) - 1

    number = found.requests.__getitem__
    if isinstance(event, e.Forward):
        for row in event.rows:
            standing, read = before[row.request], row.kind == "prefill"
            tokens = row.tokens if read else len(standing.window) if row.kind == "verify" else 1
            tree = window(row.request) if row.kind == "verify" else NOBODY
            yield [number(row.request), row.kind, tokens, len(standing.prompt) if read else tokens, tree]
    elif isinstance(event, e.Draft):
        for name in event.requests:
            drafts = len(table.live[name].window) - 1
            yield [number(name), "draft", drafts, drafts, window(name, where=table.live)]
    elif isinstance(event, e.Commit):
        for place, name in enumerate(event.requests):
            nodes = e_paths[place].nodes if (e_paths := committed_paths(event)) else ()
            yield [number(name), "commit", len(nodes), len(before[name].window) - 1, window(name, nodes)]
    elif isinstance(event, e.Admit):
        yield [number(event.request), "admit", len(event.prompt), len(event.prompt), NOBODY]
    else:
        for name in named(event) or ("",):  # "": an event without a request, as idle
            yield [found.requests.get(name, NOBODY), kind_of(event), 0, 0, NOBODY]


def _due(
    event: e.Event, before: dict[str, Standing], table: RequestTable, kinds: Sequence[str], heads: int
) -> set[Row]:
    """The rows in which an event computes numbers, according to the trace. heads: number of MTP layers that draft."""
    due: set[Row] = set()
    if isinstance(event, e.Forward):
        due |= {Row("trunk", layer) for layer in (STAGE_LEVEL, *range(len(kinds)))}
        chooses = any(row.kind != "prefill" or row.tokens == before[row.request].unread for row in event.rows)
        due |= {Row("trunk", HEAD)} if chooses else set()
    if isinstance(event, e.Commit):  # it moves the states to the accepted position
        due |= {Row("trunk", layer) for layer, kind in enumerate(kinds) if kind in WITH_FIXED_MEMORY}
    extends = isinstance(event, e.Commit) or any(row.kind != "verify" for row in getattr(event, "rows", ()))
    if extends and heads:
        due.add(Row(draft_stage(0), 0))
    block = table.capacity.block
    if extends and block:
        due.add(Row(draft_stage(0), 0))
    if isinstance(event, e.Draft) and block:
        due.add(Row("block", 0))
    if isinstance(event, e.Draft) and heads == 1:  # with several, each has proposed its draft in its extend
        nodes = {node for name in event.requests for node in table.live[name].parents if node > 0}
        grown = table.capacity.topk is not None  # then the head runs once per step, not once per node
        due |= {Row(f"chain.{step}", 0) for step in (range(1, table.num_steps) if grown else nodes)}
    return due
