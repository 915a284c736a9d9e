"""How often conditions that trigger faults were met, over the events of all runs: one line per condition below.

If a condition was never met, the campaign cannot have found the faults that need it. Leaves out: code coverage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import ROW_FACTS, Phase, facts, kind_of, named, tracks

from ...trace.request_table import RequestTable
from . import drafter_coverage
from .coverage_turn import Condition, Past, Turn
from .prefix_coverage import PREFIXES
from .tree_coverage import TREES


class Coverage:
    """Counts events, pairs of events and conditions. `begin` starts a run, `note` counts one of its events."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()
        self._trees = self._prefixes = False  # whether any run had windows that may be trees; tracked prefixes
        self._drafters: dict[str, Condition] = {}  # of the drafters of the runs
        self.begin()

    def begin(self, *, overlap: bool = False, heads: int = 1) -> None:
        self._past, self._last, self._overlap, self._heads = Past(), "start", overlap, heads
        self._drafters |= drafter_coverage.of(heads)

    def note(self, before: RequestTable, event: e.AnyEvent, after: RequestTable) -> None:
        turn, kind = Turn(before, event, after, self._past, self._overlap, self._heads), kind_of(event)
        conditions = {**CONDITIONS, **TREES, **PREFIXES, **drafter_coverage.of(self._heads)}
        self._trees = self._trees or after.capacity.trees
        self._prefixes = self._prefixes or after.capacity.track_interval is not None
        self.met.update(name for name, holds in conditions.items() if holds(turn))
        self.events[kind] += 1
        self.pairs[self._last, kind] += 1
        self._last = kind
        _remember(turn)

    def counts(self) -> dict[str, int]:
        """Condition -> how many events met it."""
        further = (*(TREES if self._trees else ()), *(PREFIXES if self._prefixes else ()), *self._drafters)
        return {name: self.met[name] for name in (*CONDITIONS, *further)}


def _rows(turn: Turn, *kinds: str) -> list[e.Row]:
    rows = turn.event.rows if isinstance(turn.event, e.Forward) else ()
    return [row for row in rows if row.kind in kinds]


def _chunk(count: int) -> Condition:
    return lambda turn: any(row.tokens == count for row in _rows(turn, "prefill"))


def _window_long(turn: Turn) -> bool:
    """A last chunk as long as a verify window would be."""
    return any(row.tokens == turn.before.num_steps + 1 and row.root is not None for row in _rows(turn, "prefill"))


def _accepted(turn: Turn) -> list[tuple[int, int]]:
    """Drafts accepted and drafts offered, per request of a commit."""
    if not isinstance(turn.event, e.Commit) or turn.event.accepted is None:
        return []
    return [
        (len(path.nodes), len(turn.before.live[name].window) - 1)
        for name, path in zip(turn.event.requests, turn.event.accepted, strict=True)
    ]


def _ragged(turn: Turn) -> bool:
    return len({count for count, _ in _accepted(turn)}) > 1


def _none(turn: Turn) -> bool:
    return bool(found := _accepted(turn)) and all(count == 0 for count, _ in found)


def _all(turn: Turn) -> bool:
    return bool(found := _accepted(turn)) and all(count == offered > 0 for count, offered in found)


def _out_of_order(turn: Turn) -> bool:
    """Rows of a batch that are not in the order of their slots."""
    slots = [turn.before.live[row.request].slot or 0 for row in _rows(turn, "prefill", "verify", "decode")]
    return slots != sorted(slots)


def _steps(holds: Callable[[int, int], bool]) -> Condition:
    def condition(turn: Turn) -> bool:
        return isinstance(turn.event, e.SetNumSteps) and holds(turn.before.num_steps, turn.event.num_steps)

    return condition


def _aborted(*phases: Phase) -> Condition:
    def condition(turn: Turn) -> bool:
        return isinstance(turn.event, e.Abort) and turn.before.live[turn.event.request].phase in phases

    return condition


def _elsewhere(turn: Turn) -> bool:
    """Resumed in another slot than the one that was lost."""
    if not isinstance(turn.event, e.Resume):
        return False
    name = turn.event.request
    return turn.after.live[name].slot != turn.past.lost.get(name)


def _reused(turn: Turn) -> bool:
    return isinstance(turn.event, e.Admit) and turn.after.live[turn.event.request].slot in turn.past.owned


def _pages_out(table: RequestTable) -> bool:
    return sum(len(standing.pages) for standing in table.live.values()) == len(table.capacity.pages)


def _caught_up(turn: Turn) -> bool:
    """Drafted by a request that decoded while there were no steps."""
    return isinstance(turn.event, e.Draft) and bool(turn.past.behind & {*turn.event.requests})


def _every_share(turn: Turn) -> bool:
    """All, none and some of the drafts, in one batch."""
    return {(count > 0) + (count == offered) for count, offered in _accepted(turn) if offered} == {0, 1, 2}


def _other_tokens(turn: Turn) -> bool:
    """Requests of one batch that accepted other tokens at the same node."""
    if not isinstance(turn.event, e.Commit) or turn.event.accepted is None:
        return False
    taken = [
        tuple(turn.before.live[name].window[node] for node in path.nodes[:1])
        for name, path in zip(turn.event.requests, turn.event.accepted, strict=True)
    ]
    return len({tokens for tokens in taken if tokens}) > 1


def _away(least: int) -> Condition:
    """In a batch again, after others were committed without it and while its accepted drafts were pending."""
    return lambda turn: any(turn.past.missed.get(name, 0) >= least for name in _batch(turn))


def _batch(turn: Turn) -> tuple[str, ...]:
    return named(turn.event) if isinstance(turn.event, e.Forward | e.Draft) else ()


def _below_pending(turn: Turn) -> bool:
    """A step count below what some request accepted last, and has not run on from."""
    return isinstance(turn.event, e.SetNumSteps) and any(
        count > turn.event.num_steps for name, count in turn.past.accepted.items() if name in turn.before.live
    )


def _of(kind: type[e.Event], *phases: Phase) -> Condition:
    """An event of one request that is in one of the phases."""

    def condition(turn: Turn) -> bool:
        event: Any = turn.event
        return isinstance(turn.event, kind) and turn.before.live[event.request].phase in phases

    return condition


def _loaded(holds: Callable[[Turn, e.Load], bool]) -> Condition:
    return lambda turn: isinstance(turn.event, e.Load) and holds(turn, turn.event)


def _ends(turn: Turn) -> list[int]:
    """The offsets into a page at which prompt chunks end that are not the last."""
    return [
        (turn.before.live[row.request].length + row.tokens) % turn.before.capacity.page_size
        for row in _rows(turn, "prefill") if row.tokens < turn.before.live[row.request].unread
    ]


def _begins_a_page(turn: Turn) -> bool:
    rows, size = _rows(turn, "verify"), turn.before.capacity.page_size
    return any(turn.before.live[row.request].length % size == 0 for row in rows)


def _past_position(least: int) -> Condition:
    return lambda turn: any(turn.before.live[name].length >= least for name in _batch(turn))


def _sizes(holds: Callable[[int, int, int], bool]) -> Condition:
    """The accepted counts of this commit and the two before it."""
    return lambda turn: isinstance(turn.event, e.Commit) and holds(*turn.past.batch, len(turn.event.requests))


def _refused(holds: Callable[[Turn, e.AnyEvent], bool]) -> Condition:
    return lambda turn: isinstance(turn.event, e.Refused) and holds(turn, turn.event.of)


def _no_page(turn: Turn, event: e.AnyEvent) -> bool:
    """A forward of rows that are all legal but for the room."""
    if not isinstance(event, e.Forward) or any(row.request not in turn.before.live for row in event.rows):
        return False
    width = {row.request: len(turn.before.live[row.request].window) or row.tokens for row in event.rows}
    return turn.before.pages_missing(turn.before.positions(width)) > 0


def _in_part(turn: Turn, event: e.AnyEvent) -> bool:
    """Several requests, of which the first may be named."""
    names, phases = named(event), facts(event).phases
    if isinstance(event, e.Forward):
        phases = ROW_FACTS[event.rows[0].kind].phases
    standing = turn.before.live.get(names[0]) if len(names) > 1 else None
    return standing is not None and standing.phase in phases


CONDITIONS: dict[str, Condition] = {
    "several requests in one forward": lambda t: isinstance(t.event, e.Forward) and len(t.event.rows) > 1,
    "a window that is drawn": lambda t: any(row.uniforms for row in _rows(t, "verify")),
    "drawn beside greedy": lambda t: {bool(row.uniforms) for row in _rows(t, "verify", "decode")} == {True, False},
    "a sampled request resumed": lambda t: isinstance(t.event, e.Resume) and t.after.live[t.event.request].draws,
    "prefill beside verify": lambda t: bool(_rows(t, "prefill")) and bool(_rows(t, "verify")),
    "decode beside verify": lambda t: bool(_rows(t, "decode")) and bool(_rows(t, "verify")),
    "batch order is not slot order": _out_of_order,
    "a chunk of 1": _chunk(1),
    "a chunk of 2": _chunk(2),
    "a chunk of 3": _chunk(3),
    "a chunk of 63, 64 or 65": lambda t: any(_chunk(count)(t) for count in (63, 64, 65)),
    "a last chunk as long as a window": _window_long,
    "accepted: ragged": _ragged,
    "accepted: none": _none,
    "accepted: all": _all,
    "a plain step after several accepted": lambda t: any(t.past.accepted.get(r.request) for r in _rows(t, "decode")),
    "steps up": _steps(lambda old, new: 0 < old < new),
    "steps down": _steps(lambda old, new: old > new > 0),
    "steps to 0": _steps(lambda old, new: old > new == 0),
    "steps back from 0": _steps(lambda old, new: old == 0 < new),
    "a verify after a switch": lambda t: t.past.switched and bool(_rows(t, "verify")),
    "drafts after plain steps at 0": _caught_up,
    "preempted": lambda t: isinstance(t.event, e.Preempt),
    "resumed in another slot": _elsewhere,
    "saved": lambda t: isinstance(t.event, e.Save),
    "loaded": lambda t: isinstance(t.event, e.Load),
    "aborted in its prompt": _aborted(Phase.WAITING, Phase.PREFILLING),
    "aborted after a draft": _aborted(Phase.DRAFTED),
    "aborted after a verify": _aborted(Phase.VERIFIED),
    "finished": lambda t: isinstance(t.event, e.Finish),
    "idle": lambda t: isinstance(t.event, e.Idle),
    "a slot used again": _reused,
    "every slot taken": lambda t: t.after.free_slot() is None,
    "every page taken": lambda t: _pages_out(t.after),
    "slots in no order": lambda t: list(t.after.capacity.slots) != sorted(t.after.capacity.slots),
    "all, none and some accepted in one batch": _every_share,
    "other tokens accepted in one batch": _other_tokens,
    "absent from a round, tokens pending": _away(1),
    "absent from several rounds, tokens pending": _away(2),
    "steps below what is pending": _below_pending,
    "a smaller batch": _sizes(lambda older, last, now: now < last),
    "a smaller batch, then a larger": _sizes(lambda older, last, now: last < min(older, now)),
    "saved in its prompt": _of(e.Save, Phase.PREFILLING),
    "saved behind a root": _of(e.Save, Phase.READY),
    "loaded twice": _loaded(lambda t, event: t.past.loads[event.name] > 0),
    "loaded into another slot": _loaded(lambda t, load: t.past.kept[load.name][0] != t.before.live[load.request].slot),
    "loaded under another step count": _loaded(lambda t, event: t.past.kept[event.name][1] != t.before.num_steps),
    "preempted before its prompt": _of(e.Preempt, Phase.WAITING),
    "preempted in its prompt": _of(e.Preempt, Phase.PREFILLING),
    "preempted behind a root": _of(e.Preempt, Phase.READY),
    "preempted when no page is free": lambda t: isinstance(t.event, e.Preempt) and _pages_out(t.before),
    "aborted before its prompt": _aborted(Phase.WAITING),
    "aborted between rounds": _aborted(Phase.READY),
    "aborted while preempted": _aborted(Phase.PREEMPTED),
    "finished while rounds overlap": lambda t: isinstance(t.event, e.Finish) and t.overlap,
    "a chunk that ends in a page": lambda t: any(_ends(t)),
    "a chunk that ends with a page": lambda t: 0 in _ends(t),
    "a window that begins a page": _begins_a_page,
    "a position past 512": _past_position(512),
    "a position past 4,096": _past_position(4096),
    "refused: a name, a phase or a number": lambda t: isinstance(t.event, e.Refused),
    "refused: after a request that may be named": _refused(_in_part),
    "refused: no slot is free": _refused(lambda t, event: isinstance(event, e.Admit) and t.before.free_slot() is None),
    "refused: no page is free": _refused(_no_page),
    "pages in no order": lambda t: list(t.after.capacity.pages) != sorted(t.after.capacity.pages),
}


def _remember(turn: Turn) -> None:
    past, event = turn.past, turn.event
    if isinstance(event, e.Commit):
        past.accepted.update(zip(event.requests, (count for count, _ in _accepted(turn)), strict=True))
    for row in _rows(turn, "decode"):
        past.accepted.pop(row.request, None)
        if turn.before.num_steps == 0:
            past.behind.add(row.request)
    for name in _batch(turn):
        past.missed.pop(name, None)
    if isinstance(event, e.Commit):
        past.batch = (past.batch[1], len(event.requests))
        for name, count in past.accepted.items():
            if count and name in turn.after.live and name not in event.requests:
                past.missed[name] = past.missed.get(name, 0) + 1
    for name, under in tracks(event).items():
        if under in turn.after.saved:
            past.kept[under] = turn.before.live[name].slot, turn.before.num_steps
            past.accepted_in |= {under} if isinstance(event, e.Commit) else set()
    if isinstance(event, e.Save):
        past.kept[event.name] = turn.before.live[event.request].slot, turn.before.num_steps
    if isinstance(event, e.Fetch):
        past.fetched.add(event.name)
    if isinstance(event, e.Evict):
        past.evicted.add(event.name)
        past.accepted_in.discard(event.name)
        past.fetched.discard(event.name)
    if isinstance(event, e.Load):
        past.loads[event.name] += 1
        past.hits |= {event.request} if turn.after.saved[event.name].prefix else set()
    for name in named(event) if facts(event).ends else ():
        past.hits.discard(name)
        past.accepted.pop(name, None)
        past.missed.pop(name, None)
    if isinstance(event, e.Draft):
        past.behind.difference_update(event.requests)
    if isinstance(event, e.SetNumSteps):
        past.switched = past.switched or event.num_steps != turn.before.num_steps
    if isinstance(event, e.Preempt):
        past.lost[event.request] = turn.before.live[event.request].slot
    past.owned.update(standing.slot for standing in turn.before.live.values() if standing.slot is not None)
