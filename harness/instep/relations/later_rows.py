"""Path parity: row i of a verify does not hang on the rows behind it, bit by bit, with any op set.

Leaves out: rows behind the last accepted one, which nobody keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from instep_reference.contract.engine import AnyEvent, Commit, Draft

from ..trace.file import Trace
from ..verdict import Tier
from .arms import alike, no_trees
from .base import Case, Relation, Results
from .retold import Told, as_traced


def hold(case: Case) -> Results:
    others = case.told("other rejected drafts", lambda: with_other_drafts(case.trace))
    yield from alike("later_rows", case, case.traced(), others, exact=True)


def with_other_drafts(trace: Trace) -> Told:
    """The same events, with other tokens wherever a draft was rejected."""
    told = as_traced(trace)
    return replace(told, events=tuple(_altered(trace)))


def _altered(trace: Trace) -> Iterator[AnyEvent]:
    vocab, lands = trace.header.checkpoint.vocab, _accepted(trace)
    for index, event in enumerate(trace.events):
        if isinstance(event, Draft) and event.picks is not None:
            kept = [lands.get((index, name)) for name in event.requests]
            picks = tuple(
                one if count is None else (*one[:count], *((token + 1) % vocab for token in one[count:]))
                for one, count in zip(event.picks, kept, strict=True)
            )
            yield msgspec.structs.replace(event, picks=picks)
        else:
            yield event


def _accepted(trace: Trace) -> dict[tuple[int, str], int]:
    """(event of the draft, request) -> how many of its drafts were accepted."""
    drafted: dict[str, int] = {}
    found = {}
    for index, event in enumerate(trace.events):
        if isinstance(event, Draft):
            drafted |= dict.fromkeys(event.requests, index)
        elif isinstance(event, Commit):
            for name, path in zip(event.requests, event.accepted or (), strict=True):
                found[drafted[name], name] = len(path.nodes)
    return found


def lacks(case: Case) -> str | None:
    if reason := no_trees(case):
        return reason
    told = with_other_drafts(case.trace).events
    return "no draft of this trace was rejected" if told == case.trace.events else None


RELATION = Relation(
    "later_rows", "row i of a verify is the same whatever tokens stand behind it", (Tier.BITWISE,), hold, lacks
)
