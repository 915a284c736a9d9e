"""One event of a drawn run, with the request table around it and facts about earlier events.

Leaves out: the conditions that are counted (`coverage.py`).
"""

from collections import Counter
from dataclasses import dataclass, field

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import committed_paths, facts, named, tracks

from ...trace.request_table import RequestTable, Standing


@dataclass
class Past:
    """Facts about earlier events.

    accepted  number of drafts accepted last; owned: slots that had an owner; lost: slots that a preemption took
    again     slots that had two owners or more; paged, paged_again: the same for pages
    behind    requests that decoded while the step count was 0; switched: the step count changed
    missed    number of other requests' commits since a request was last in a batch, while its accepted drafts may still
              be pending; batch: requests of the last two commits
    kept      saved states by name -> slot and step count of the save; loads: how often each was loaded
    hits      live requests that have loaded a prefix; accepted_in: prefixes that end with accepted tokens
    inside    prefixes that were tracked inside a chunk
    fetched   prefixes that were reloaded from the host; evicted: names that were evicted
    sent      names under which something was given to another engine
    """

    accepted: dict[str, int] = field(default_factory=dict)
    owned: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    paged: set[int] = field(default_factory=set)
    paged_again: set[int] = field(default_factory=set)
    lost: dict[str, int | None] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)
    switched: bool = False
    missed: dict[str, int] = field(default_factory=dict)
    batch: tuple[int, int] = (0, 0)
    kept: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    loads: Counter[str] = field(default_factory=Counter)
    hits: set[str] = field(default_factory=set)
    accepted_in: set[str] = field(default_factory=set)
    inside: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)
    evicted: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Turn:
    """One event, and the request table before and after it."""

    before: RequestTable
    event: e.AnyEvent
    after: RequestTable
    past: Past
    overlap: bool = False  # whether rounds overlap
    heads: int = 1  # how many MTP layers are in use
    buckets: tuple[int, ...] = ()  # packed rows for which forwards with prompts are captured in graphs


def rows_of(turn: Turn, *kinds: str) -> list[e.Row]:
    """List the rows of a forward of these kinds."""
    rows = turn.event.rows if isinstance(turn.event, e.Forward) else ()
    return [row for row in rows if row.kind in kinds]


def branches(standing: Standing) -> bool:
    """Return whether the window of a request is a tree and no chain."""
    return standing.parents != tuple(range(-1, len(standing.parents) - 1))


def paths_of(turn: Turn) -> list[tuple[Standing, tuple[int, ...]]]:
    """For a commit: each request before it, and the nodes of its window that were accepted."""
    if not isinstance(turn.event, e.Commit) or turn.event.accepted is None:
        return []
    paths = zip(turn.event.requests, committed_paths(turn.event), strict=True)
    return [(turn.before.live[name], path.nodes) for name, path in paths]


def accepted_of(turn: Turn) -> list[tuple[int, int]]:
    """Drafts accepted and drafts offered, per request of a commit."""
    return [(len(nodes), len(standing.window) - 1) for standing, nodes in paths_of(turn)]


def batch_of(turn: Turn) -> tuple[str, ...]:
    """Return the requests of a forward or a draft."""
    return named(turn.event) if isinstance(turn.event, e.Forward | e.Draft) else ()


def at_prefix_end(turn: Turn, name: str, count: int) -> bool:
    """Return whether a prefix of this length ends where its request does."""
    return turn.after.live[name].length == count


def remember(turn: Turn) -> None:
    """Add the facts of an event for later ones."""
    past, event = turn.past, turn.event
    if isinstance(event, e.Commit):
        past.accepted.update(zip(event.requests, (count for count, _ in accepted_of(turn)), strict=True))
    for row in rows_of(turn, "decode"):
        past.accepted.pop(row.request, None)
        if turn.before.num_steps == 0:
            past.behind.add(row.request)
    for name in batch_of(turn):
        past.missed.pop(name, None)
    if isinstance(event, e.Commit):
        past.batch = (past.batch[1], len(event.requests))
        for name, count in past.accepted.items():
            if count and name in turn.after.live and name not in event.requests:
                past.missed[name] = past.missed.get(name, 0) + 1
    for under, name in tracks(event).items():
        if under in turn.after.saved:
            past.kept[under] = turn.before.live[name].slot, turn.before.num_steps
            past.accepted_in |= {under} if isinstance(event, e.Commit) else set()
            inside = isinstance(event, e.Forward) and not at_prefix_end(turn, name, turn.after.saved[under].length)
            past.inside |= {under} if inside else set()
    copy, name, request = facts(event).copy, getattr(event, "name", ""), getattr(event, "request", "")
    if copy == "keep" and name:
        past.kept[name] = turn.before.live[request].slot, turn.before.num_steps
    elif copy == "keep":
        past.lost[request] = turn.before.live[request].slot
    elif copy == "to host":
        past.sent.add(name)
    elif copy == "back":
        past.fetched.add(name)
    elif copy == "drop":
        past.evicted.add(name)
        past.accepted_in.discard(name)
        past.inside.discard(name)
        past.fetched.discard(name)
    elif copy == "restore" and name:
        past.loads[name] += 1
        past.sent |= {request} if name in past.fetched else set()
        past.hits |= {request} if turn.after.saved[name].prefix else set()
    for name in named(event) if facts(event).ends else ():
        past.hits.discard(name)
        past.accepted.pop(name, None)
        past.missed.pop(name, None)
    if isinstance(event, e.Draft):
        past.behind.difference_update(event.requests)
    if isinstance(event, e.SetNumSteps):
        past.switched = past.switched or event.num_steps != turn.before.num_steps
    both = [({standing.slot for standing in table.live.values() if standing.slot is not None},
             {page for standing in table.live.values() for page in standing.pages})
            for table in (turn.before, turn.after)]  # fmt: skip
    (slots, pages), (later_slots, later_pages) = both
    past.again |= (later_slots - slots) & past.owned
    past.paged_again |= (later_pages - pages) & past.paged
    past.owned |= slots
    past.paged |= pages
