"""What an event will need and write, in units of the pools, said before it runs.

Leaves out: the running. Positions that an event asks pages for are worst cases; pages are never trimmed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from instep_reference.contract.engine import (
    Abort,
    Commit,
    Draft,
    Event,
    Finish,
    Forward,
    Load,
    Preempt,
    Resume,
    Row,
)

from .commit.base import Deed, Touch
from .memory import Memory
from .request import Request

Requests = Mapping[str, Request]
Wants = list[tuple[str, int]]


def width_of(row: Row, request: Request) -> int:
    """How many tokens a row carries."""
    if row.kind == "verify":
        return 1 + (0 if request.drafts is None else request.drafts.shape[0])
    return row.tokens if row.kind == "prefill" else 1


def tokens_of(rows: Sequence[Row], requests: Requests) -> int:
    """How many tokens a forward carries."""
    return sum(width_of(row, requests[row.request]) for row in rows)


def forward_wants(rows: Sequence[Row], requests: Requests) -> Wants:
    """(request, positions) that a forward needs pages for."""
    return [(row.request, requests[row.request].length + width_of(row, requests[row.request])) for row in rows]


def draft_wants(names: Sequence[str], requests: Requests, num_steps: int) -> Wants:
    return [(name, requests[name].length + num_steps) for name in names]


def touches(
    event: Event, live: Requests, saved: Mapping[str, int], preempted: Mapping[str, int], num_steps: int, memory: Memory
) -> list[Touch]:
    """What `event` does to whom. saved, preempted: the lengths of states that are kept aside, by name."""
    slots, pages = memory.slots, memory.pages

    def touch(deed: Deed, name: str, lists: Mapping[str, list[int]], count: int, row: int = -1) -> Touch:
        written = frozenset(pages.covering(lists[name], live[name].length, count))
        return Touch(deed, slots.of(name), row, written)

    match event:
        case Forward():
            lists = pages.grown(forward_wants(event.rows, live))
            return [
                touch(row.kind, row.request, lists, width_of(row, live[row.request]), number)
                for number, row in enumerate(event.rows)
            ]
        case Draft():
            lists = pages.grown(draft_wants(event.requests, live, num_steps))
            return [touch("draft", name, lists, max(0, num_steps - 1)) for name in event.requests]
        case Commit():
            lists = pages.owned()
            flights = {name: live[name].flight for name in event.requests}
            return [touch("commit", name, lists, flight.width) for name, flight in flights.items() if flight]
        case Finish() | Abort() | Preempt():
            owner = event.request
            if owner not in slots.owned():
                return []
            return [Touch("release", slots.of(owner), owned=frozenset(pages.of(owner)))]
        case Load() | Resume():
            kept = saved[event.name] if isinstance(event, Load) else preempted[event.request]
            slot = slots.of(event.request) if isinstance(event, Load) else slots.first()
            grown = pages.grown([(event.request, kept)])[event.request]
            return [Touch("restore", slot, written=frozenset(pages.covering(grown, 0, kept)))]
        case _:
            return []
