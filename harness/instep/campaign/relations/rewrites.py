"""Rewrite a whole trace in one respect: other slots, other rejected drafts, no speculation, longer pages.

Leaves out: a request's own timeline rewritten into other steps (`request_timelines.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as with_fields

from instep_reference.contract.engine import Admit, AnyEvent, Commit, Draft, Forward

from ...trace.event_rules import EventRules
from ...trace.file import Trace
from .request_timelines import RewrittenTrace, as_traced


def moved(trace: Trace) -> RewrittenTrace:
    """Reverse the order of slots and pages and shift both by one, so that none stays in place."""
    room = trace.header.capacity
    slots, pages = (tuple(unit + 1 for unit in reversed(units)) for units in (room.slots, room.pages))
    return _roomed(trace, slots=slots, pages=pages)


def in_one_page(trace: Trace) -> RewrittenTrace:
    """Give every request one page that holds it whole, so that page ownership depends on no reservation."""
    rules, longest = EventRules(trace.header), 0
    for event in trace.events:
        rules.apply(event)
        longest = max((longest, *(len(standing.prompt) + len(standing.said) for standing in rules.table.live.values())))
    widest = max((trace.header.num_steps, *trace.header.candidates)) + 1
    # Room for two more windows: one whose count is not known yet, and the next one.
    return _roomed(trace, pages=trace.header.capacity.slots, page_size=longest + 2 * widest)


def without_speculation(rewritten: RewrittenTrace) -> RewrittenTrace:
    """The same events for an engine that will never draft."""
    return replace(rewritten, header=with_fields(rewritten.header, num_steps=0, candidates=(0,), adaptive=None,
                                              controller=None))  # fmt: skip


def undrawn(trace: Trace) -> Trace:
    """Replace sampling by argmax with the same tokens: with other drafts, a draw would give other tokens."""
    return replace(trace, events=tuple(_undrawn(event) for event in trace.events))


def _undrawn(event: AnyEvent) -> AnyEvent:
    if isinstance(event, Admit):
        return with_fields(event, sampling=None)
    if isinstance(event, Forward):
        return with_fields(event, rows=tuple(with_fields(row, uniforms=()) for row in event.rows))
    return event


def with_other_drafts(trace: Trace) -> RewrittenTrace:
    """Replace every rejected draft by another token."""
    return replace(as_traced(trace), events=tuple(_altered(trace)))


def _roomed(trace: Trace, **room: Any) -> RewrittenTrace:
    header = with_fields(trace.header, capacity=with_fields(trace.header.capacity, **room))
    return replace(as_traced(trace), header=header)


def _altered(trace: Trace) -> Iterator[AnyEvent]:
    vocab, accepted = trace.header.checkpoint.vocab, _accepted(trace)
    for index, event in enumerate(trace.events):
        if isinstance(event, Draft) and event.picks is not None:
            kept = [accepted.get((index, name)) for name in event.requests]
            picks = tuple(
                one if nodes is None
                else tuple(token if node in nodes else (token + 1) % vocab for node, token in enumerate(one, 1))
                for one, nodes in zip(event.picks, kept, strict=True)
            )
            yield with_fields(event, picks=picks, own=False)
        else:
            yield event


def _accepted(trace: Trace) -> dict[tuple[int, str], tuple[int, ...]]:
    """Map (event of the draft, request) to the accepted drafts."""
    drafted: dict[str, int] = {}
    found = {}
    for index, event in enumerate(trace.events):
        if isinstance(event, Draft):
            drafted |= dict.fromkeys(event.requests, index)
        elif isinstance(event, Commit):
            for name, path in zip(event.requests, event.accepted or (), strict=True):
                found[drafted[name], name] = path.nodes
    return found
