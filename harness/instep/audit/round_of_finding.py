"""The round of a finding, from the recording: its batch rows, and what changed just before it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import committed_paths

from ..report.divergence_message import DIFFERS
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


@dataclass(frozen=True)
class BatchRow:
    """One row of the batch of a finding's event, as far as it was recorded.

    slot     the engine's number of the request's slot
    before   nodes of the request's window in the round before;  window: in this one, or tokens of a prompt
    accepted drafts, and the bonus
    wrong    what its memory or its rows are instead; empty: no finding
    """

    row: int
    request: str
    slot: int | None
    before: int | None
    window: int | None
    accepted: int | None
    wrong: str


def round_of(recorded: Recorded, findings: Sequence[Comparison]) -> dict[str, Any]:
    """The round of the first finding as data: all its rows, the event, and what changed just before it."""
    index, wrong = findings[0].event, dict[str, str]()
    named = [found for found in findings if found.event == index and found.request is not None]
    for found in sorted(named, key=lambda one: one.explained is None):  # what was identified goes first
        wrong.setdefault(found.request or "", found.diagnosis or DIFFERS)
    event, (size, places) = recorded.events[index], batch_of(recorded, index)
    rows = []
    for name, row in sorted(places.items(), key=lambda one: one[1]):
        placed = recorded.batch(index, name)
        windows = _windows(recorded.events[: index + 1], name)
        accepted = None
        if isinstance(event, e.Commit) and event.accepted is not None:
            accepted = len(committed_paths(event)[event.requests.index(name)].nodes) + 1
        rows.append(asdict(BatchRow(
            row, name, None if placed is None else placed.slots.get(name), windows[-2] if windows[1:] else None,
            windows[-1] if windows else None, accepted, wrong.get(name, ""),
        )))  # fmt: skip
    kind = "commit" if isinstance(event, e.Commit) else "forward"
    return {"event": index, "kind": kind, "changed": changed(recorded.events, index), "size": size, "rows": rows}


def _windows(events: Sequence[e.AnyEvent], name: str) -> list[int]:
    """The nodes of a request's window in each draft, and its tokens in each other forward."""
    found = list[int]()
    for event in events:
        if isinstance(event, e.Draft) and name in event.requests and event.picks:
            found.append(len(event.picks[event.requests.index(name)]) + 1)
        elif isinstance(event, e.Forward):
            found += [row.tokens or 1 for row in event.rows if row.request == name and row.kind != "verify"]
    return found


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
