"""Fixed facts about every type of event: the requests that it names, when it is legal, and what it may write of them.

One line per type. Leaves out: facts that depend on more than a phase, such as token counts, room, choices
(`instep.trace.event_rules`). An engine does not read the table: what it writes is its own statement, which the table
bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from .engine import (
    Abort,
    Admit,
    Commit,
    Committed,
    Draft,
    Drafted,
    Event,
    Evict,
    Fetch,
    Finish,
    Forward,
    Forwarded,
    Idle,
    Load,
    Offload,
    Preempt,
    Refused,
    Resume,
    Save,
    SetNumSteps,
)


class Phase(Enum):
    """Phase of a request. waiting: nothing ran yet; prefilling: in its prompt; ready: its root is known."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    READY = "ready"
    DRAFTED = "drafted"
    VERIFIED = "verified"
    PREEMPTED = "preempted"


ANYWHERE = tuple(Phase)
BETWEEN_ROUNDS = (Phase.WAITING, Phase.PREFILLING, Phase.READY)


@dataclass(frozen=True)
class EventFacts:
    """One type of event.

    phases    phases that are legal for every request that it names; none: it names no request, or no live one
    after     the phase in which it leaves them; None: unchanged, or it depends on the event
    not_while phases that no request at all may be in
    ends      whether the requests that it names are over
    pages     which of their pages it may write: those of a round (from the committed length on), those of a copy that
              is brought back (up to its length), or all, which are given back with the slot
    batch     whether it runs a batch: a row for each request that it names, or the rows of the last forward
    answer    the type of its answer
    """

    phases: tuple[Phase, ...] = ()
    after: Phase | None = None
    not_while: tuple[Phase, ...] = ()
    ends: bool = False
    pages: Literal["", "round", "copy", "all"] = ""
    batch: Literal["", "own", "last"] = ""
    answer: type | None = None


FLYING = (Phase.VERIFIED,)  # between a verify and its commit no other part of a round runs
FACTS: Mapping[type[Event], EventFacts] = {
    Admit: EventFacts(after=Phase.WAITING),
    Draft: EventFacts((Phase.READY, Phase.DRAFTED), Phase.DRAFTED, FLYING, pages="round", batch="own", answer=Drafted),
    Forward: EventFacts(not_while=FLYING, pages="round", batch="own", answer=Forwarded),  # phases: of its rows
    Commit: EventFacts((Phase.VERIFIED,), Phase.READY, pages="round", batch="last", answer=Committed),
    SetNumSteps: EventFacts(not_while=(Phase.DRAFTED, Phase.VERIFIED)),
    Save: EventFacts((Phase.PREFILLING, Phase.READY)),
    Load: EventFacts((Phase.WAITING,), pages="copy"),
    Offload: EventFacts(),  # a kept entry belongs to no request
    Fetch: EventFacts(),
    Evict: EventFacts(),
    Preempt: EventFacts(BETWEEN_ROUNDS, Phase.PREEMPTED, pages="all"),
    Resume: EventFacts((Phase.PREEMPTED,), pages="copy"),
    Finish: EventFacts((Phase.READY,), ends=True, pages="all"),
    Abort: EventFacts(ANYWHERE, ends=True, pages="all"),
    Idle: EventFacts(not_while=FLYING),
    Refused: EventFacts(),
}
ROW_FACTS: Mapping[str, EventFacts] = {  # of a forward, by the kind of row
    "prefill": EventFacts((Phase.WAITING, Phase.PREFILLING), not_while=FLYING),
    "verify": EventFacts((Phase.DRAFTED,), Phase.VERIFIED, FLYING),
    "decode": EventFacts((Phase.READY,), Phase.READY, FLYING),
}


def facts(event: Event) -> EventFacts:
    return FACTS[type(event)]


def kind_of(event: Event | type[Event]) -> str:
    """Name the type of an event as a trace spells it."""
    return str(event.__struct_config__.tag)


def named(event: Event) -> tuple[str, ...]:
    """List the requests that it names, in batch order."""
    rows: tuple[str, ...] = tuple(row.request for row in getattr(event, "rows", ()))
    several: tuple[str, ...] = getattr(event, "requests", rows)
    return (event.request,) if hasattr(event, "request") else several


def tracks(event: Event) -> dict[str, str]:
    """Return request -> the name under which the event tracks a prefix of it, if it reaches one."""
    rows: tuple[str, ...] = tuple(row.track for row in getattr(event, "rows", ()))
    names: tuple[str, ...] = getattr(event, "track", rows)
    return {request: under for request, under in zip(named(event), names, strict=False) if under}
