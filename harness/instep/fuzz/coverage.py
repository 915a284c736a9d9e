"""How often conditions that trigger faults were met, over the events of all runs: one line per condition below.

If a condition was never met, the campaign cannot have found the faults that need it. Leaves out: code coverage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import Phase, kind_of

from ..trace.request_table import RequestTable


@dataclass
class Past:
    """What is remembered of the events before.

    accepted  drafts accepted last; owned: slots that had an owner; lost: slots that a preemption took
    behind    requests that decoded while there were no steps; switched: the step count changed
    """

    accepted: dict[str, int] = field(default_factory=dict)
    owned: set[int] = field(default_factory=set)
    lost: dict[str, int | None] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)
    switched: bool = False


@dataclass(frozen=True)
class Turn:
    """One event, and the request table before and after it."""

    before: RequestTable
    event: e.AnyEvent
    after: RequestTable
    past: Past


Condition = Callable[[Turn], bool]


class Coverage:
    """Counts events, pairs of events and conditions. `begin` starts a run, `note` counts one of its events."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        self._past, self._last = Past(), "start"

    def note(self, before: RequestTable, event: e.AnyEvent, after: RequestTable) -> None:
        turn, kind = Turn(before, event, after, self._past), kind_of(event)
        self.met.update(name for name, holds in CONDITIONS.items() if holds(turn))
        self.events[kind] += 1
        self.pairs[self._last, kind] += 1
        self._last = kind
        _remember(turn)

    def counts(self) -> dict[str, int]:
        """Condition -> how many events met it."""
        return {name: self.met[name] for name in CONDITIONS}


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
    """Rows of a batch that do not stand in the order of their slots."""
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


def _pages_out(turn: Turn) -> bool:
    return sum(len(standing.pages) for standing in turn.after.live.values()) == len(turn.after.capacity.pages)


def _caught_up(turn: Turn) -> bool:
    """Drafted by a request that decoded while there were no steps."""
    return isinstance(turn.event, e.Draft) and bool(turn.past.behind & {*turn.event.requests})


CONDITIONS: dict[str, Condition] = {
    "several requests in one forward": lambda t: isinstance(t.event, e.Forward) and len(t.event.rows) > 1,
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
    "every page taken": _pages_out,
    "slots in no order": lambda t: list(t.after.capacity.slots) != sorted(t.after.capacity.slots),
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
    if isinstance(event, e.Draft):
        past.behind.difference_update(event.requests)
    if isinstance(event, e.SetNumSteps):
        past.switched = past.switched or event.num_steps != turn.before.num_steps
    if isinstance(event, e.Preempt):
        past.lost[event.request] = turn.before.live[event.request].slot
    past.owned.update(standing.slot for standing in turn.before.live.values() if standing.slot is not None)
