"""The timeline of a page as compact arrays, which follow from the trace alone.

    stays   [request, slot, from, to]   from the event of its admission or resume; slot -1: preempted, -2: unknown
    marks   [event, request, what, number, of, tree]  number and of: prompt tokens read of all, nodes of a window,
            accepted drafts of those verified; tree: a number in `trees`, -1 for a chain
    trees   [parents, accepted nodes]   of a window that branches; no nodes before its commit

Events after the end of the replay are in it, because the trace has them. Leaves out: words and colours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import committed_paths, kind_of, named
from instep_reference.contract.place_names import STAGE_LEVEL, draft_stage
from instep_reference.contract.recurrences import WITH_FIXED_MEMORY

from ...trace.event_rules import EventRules
from ...trace.file import Trace
from ...trace.request_table import RequestTable, Standing
from ...watch.event_context import branching
from .heat_map import HEAD, Row

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
