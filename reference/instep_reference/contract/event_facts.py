"""One description per type of event: when it is legal, what it may write, which copy it moves, how it is shown.

The event rules, the write bound, fuzz, the checks, policies and the texts of a trace read it. Leaves out: facts that
depend on more than a phase, such as token counts, room, choices (`instep.trace.event_rules`). An engine does not read
the table: what it writes is its own statement, which the table bounds.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from msgspec.structs import replace

from . import engine as e


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
    copy      what it does with a copy of a logical state: keep or restore that of its request, move it to the host
              or back, or drop it. A copy has the event's `name`. Without one it is that of a preempted request
    batch     whether it runs a batch: a row for each request that it names, or the rows of the last forward
    answer    the type of its answer
    when      the part of a round in which a policy may request it: at first, after that, or after the admissions
    shown     its text, if it needs no rule: {tokens} and {phase} are those of its request before it, {now} and {slot}
              the length and slot after it
    covers    the name of the condition that every event of this type meets in the coverage of drawn runs
    """

    phases: tuple[Phase, ...] = ()
    after: Phase | None = None
    not_while: tuple[Phase, ...] = ()
    ends: bool = False
    pages: Literal["", "round", "copy", "all"] = ""
    copy: Literal["", "keep", "restore", "to host", "back", "drop"] = ""
    batch: Literal["", "own", "last"] = ""
    answer: type | None = None
    when: Literal["", "first", "then", "late"] = ""
    shown: str = ""
    covers: str = ""


LEAVES = "{request} with {tokens}, {phase}"
FLYING = (Phase.VERIFIED,)  # between a verify and its commit no other part of a round runs
FACTS: Mapping[type[e.Event], EventFacts] = {
    e.Admit: EventFacts(after=Phase.WAITING),
    e.Draft: EventFacts(
        (Phase.READY, Phase.DRAFTED), Phase.DRAFTED, FLYING, pages="round", batch="own", answer=e.Drafted),
    e.Forward: EventFacts(not_while=FLYING, pages="round", batch="own", answer=e.Forwarded),  # phases: of its rows
    e.Commit: EventFacts((Phase.VERIFIED,), Phase.READY, pages="round", batch="last", answer=e.Committed),
    e.Load: EventFacts((Phase.WAITING,), pages="copy", copy="restore", when="late",
                     shown='{request} from "{name}", now {now}', covers="loaded"),
    e.Resume: EventFacts((Phase.PREEMPTED,), pages="copy", copy="restore", when="then",
                       shown="{request} into slot {slot}"),
    e.Save: EventFacts((Phase.PREFILLING, Phase.READY), copy="keep", when="first",
                     shown='{request} under "{name}", after {tokens}', covers="saved"),
    e.Preempt: EventFacts(BETWEEN_ROUNDS, Phase.PREEMPTED, pages="all", copy="keep", when="first", shown=LEAVES,
                        covers="preempted"),
    e.SetNumSteps: EventFacts(not_while=(Phase.DRAFTED, Phase.VERIFIED)),
    e.Finish: EventFacts((Phase.READY,), ends=True, pages="all", shown=LEAVES, covers="finished"),
    e.Abort: EventFacts(ANYWHERE, ends=True, pages="all", when="first", shown=LEAVES),
    e.Idle: EventFacts(not_while=FLYING, when="first", covers="idle"),
    # A kept entry belongs to no request.
    e.Offload: EventFacts(copy="to host", when="first", shown='"{name}" goes to the host'),
    e.Fetch: EventFacts(copy="back", when="late", shown='"{name}" comes back to the device'),
    e.Evict: EventFacts(copy="drop", when="first", shown='"{name}" is kept no longer'),
    e.Refused: EventFacts(when="first"),
}  # fmt: skip
ROW_FACTS: Mapping[str, EventFacts] = {  # of a forward, by the kind of row
    "prefill": EventFacts((Phase.WAITING, Phase.PREFILLING), not_while=FLYING),
    "verify": EventFacts((Phase.DRAFTED,), Phase.VERIFIED, FLYING),
    "decode": EventFacts((Phase.READY,), Phase.READY, FLYING),
}


def facts(event: e.Event) -> EventFacts:
    return FACTS[type(event)]


def restores(event: e.Event) -> str:
    """Return the request whose memory comes back from a copy; empty if none does."""
    return getattr(event, "request", "") if facts(event).copy == "restore" else ""


def moves(event: e.Event) -> str:
    """Return the name of the copy that goes to the host or comes back; empty if none does."""
    return getattr(event, "name", "") if facts(event).copy in ("to host", "back") else ""


def kind_of(event: e.Event | type[e.Event]) -> str:
    """Name the type of an event as a trace spells it."""
    return str(event.__struct_config__.tag)


def named(event: e.Event) -> tuple[str, ...]:
    """List the requests that it names, in batch order."""
    rows: tuple[str, ...] = tuple(row.request for row in getattr(event, "rows", ()))
    several: tuple[str, ...] = getattr(event, "requests", rows)
    return (event.request,) if hasattr(event, "request") else several


def restricted(event: e.Event, names: Container[str]) -> e.Event:
    """Return the same draft, forward or commit for some of its requests; any other event as it is."""
    match event:
        case e.Forward():
            return replace(event, rows=tuple(row for row in event.rows if row.request in names))
        case e.Draft() | e.Commit():
            mine = [number for number, name in enumerate(event.requests) if name in names]
            lists = {field: getattr(event, field) for field in event.__struct_fields__}
            return replace(event, **{field: tuple(each[n] for n in mine) if isinstance(each, tuple) and each else each
                                     for field, each in lists.items()})  # fmt: skip
    return event


def tracks(event: e.Event) -> dict[str, str]:
    """Return the names under which the event tracks prefixes, if it reaches them -> the requests of the prefixes."""
    names: list[tuple[str, ...]] = [(*row.inner, row.track) for row in getattr(event, "rows", ())]
    names = [(under,) for under in getattr(event, "track", ())] or names
    return {under: request for request, mine in zip(named(event), names, strict=False) for under in mine if under}


def tracked(event: e.Event, answer: object) -> dict[str, int]:
    """Return the names of the prefixes that the event has tracked, according to its answer -> their tokens."""
    inner: Mapping[str, int] = getattr(answer, "inner", {})
    ends: Mapping[str, int] = getattr(answer, "tracked", {})
    within = {under for row in getattr(event, "rows", ()) for under in row.inner}
    return {under: inner[under] if under in within else ends[request] for under, request in tracks(event).items()
            if (under in inner if under in within else request in ends)}  # fmt: skip


def inner_multiples(start: int, end: int, every: int) -> range:
    """List the multiples of an interval inside the tokens `start` to `end`, without both ends."""
    return range(start // every * every + every, end, every)


def committed_paths(event: e.Commit) -> tuple[e.Path, ...]:
    """List the accepted paths up to their caps, in batch order; empty if the engine accepts by itself."""
    caps = event.caps or (None,) * len(event.requests)
    return tuple(e.Path(path.nodes[:cap], path.bonus) for path, cap in zip(event.accepted or (), caps, strict=False))
