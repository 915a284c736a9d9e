"""The round of a finding, from the recording: its batch rows, and what changed just before it.

Leaves out: slots, which the writer records with the states (`write.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from instep_reference.contract import engine as e

from ..verdict import Comparison
from .recording import Recorded


def remark(recorded: Recorded, findings: Sequence[Comparison]) -> str:
    """The circumstances of the first finding, with the rows of all requests that are wrong at its event.

    first commit after steps 3 -> 1 (event 26); batch rows 1 and 2 of 6, counted from 0
    """
    index = findings[0].event
    said = [changed(recorded.events, index)]
    size, places = batch_of(recorded, index)
    wrong = {found.request for found in findings if found.event == index}
    rows = sorted(row for name, row in places.items() if name in wrong)
    if rows:
        said.append(f"batch row{'s' * (len(rows) > 1)} {_joined(map(str, rows))} of {size}, counted from 0")
    return "; ".join(filter(None, said))


def batch_of(recorded: Recorded, index: int) -> tuple[int, Mapping[str, int]]:
    """The number of rows of an event's batch, and the row of each request: the engine's, or in the recorded order."""
    event = recorded.events[index]
    names = [row.request for row in event.rows] if isinstance(event, e.Forward) else getattr(event, "requests", ())
    placed = recorded.batch(index, names[0]) if names else None
    if placed is not None and set(names) <= placed.rows.keys():
        return placed.batch, {name: placed.rows[name] for name in names}
    return len(names), {name: row for row, name in enumerate(names)}


def changed(events: Sequence[e.AnyEvent], index: int) -> str:
    """Describe the changes since the round before that of event `index`; empty if there are none.

    A round ends with a commit, or with a forward that has decode rows. Step counts are those of the windows.
    """
    ended = [number for number, event in enumerate(events[:index]) if _ends_round(event)]
    since = ended[-1] + 1 if ended else 0
    found = [f"request {name} {how} (event {number})" for number, name, how in _came_and_went(events, since, index)]
    before = _steps(events, ended[-2] + 1 if len(ended) > 1 else 0, since) if ended else None
    now = _steps(events, since, index + 1)
    if before is not None and now is not None and before[0] != now[0]:
        found.insert(0, f"steps {before[0]} -> {now[0]} (event {now[1]})")
    kind = "commit" if isinstance(events[index], e.Commit) else "forward"
    return f"first {kind} after {_joined(found)}" if ended and found else ""


def _ends_round(event: e.AnyEvent) -> bool:
    return isinstance(event, e.Commit) or (
        isinstance(event, e.Forward) and any(row.kind == "decode" for row in event.rows))


def _steps(events: Sequence[e.AnyEvent], begin: int, end: int) -> tuple[int, int] | None:
    """The step count of the round between two events, and the event that shows it first; None: there is no round."""
    for number in range(begin, end):
        event = events[number]
        if isinstance(event, e.Draft) and event.picks:
            steps = max(map(len, event.picks))
            told = number - 1 if number and events[number - 1] == e.SetNumSteps(steps) else number
            return steps, told
        if isinstance(event, e.Forward) and any(row.kind == "decode" for row in event.rows):
            return 0, number
    return None


def _came_and_went(events: Sequence[e.AnyEvent], begin: int, end: int) -> Iterable[tuple[int, str, str]]:
    """Requests that ended or joined the batch between two events."""
    gone = dict[str, int]()
    for number in range(begin, end):
        event = events[number]
        if isinstance(event, e.Finish | e.Abort):
            gone[event.request] = number
        elif isinstance(event, e.Admit) and event.request in gone:
            yield gone.pop(event.request), event.request, "was preempted and admitted again"
        elif isinstance(event, e.Forward):
            for row in event.rows:
                if row.kind == "prefill" and row.root is not None:
                    yield number, row.request, "joined"
    yield from ((number, name, "ended") for name, number in gone.items())


def _joined(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
