"""Rewrite a whole trace in one respect: other slots, other rejected drafts, no speculation, longer pages, caps.

Leaves out: a request's own timeline rewritten into other steps (`request_timelines.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from msgspec.structs import replace as with_fields

from instep_reference.contract.engine import Admit, AnyEvent, Commit, Draft, Forward
from instep_reference.contract.event_facts import committed_paths

from ...trace.event_rules import EventRules
from ...trace.file import Trace
from ...trace.tree_shape import depths
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


def with_full_caps(trace: Trace) -> RewrittenTrace:
    """Give every request of a commit a cap at the number of its drafts."""
    return _recommitted(trace, lambda event, windows: with_fields(
        event, accepted=committed_paths(event), caps=tuple(len(windows[name]) - 1 for name in event.requests)))


def without_caps(trace: Trace) -> RewrittenTrace:
    """Give every request the path that its cap leaves, and no cap."""
    return _recommitted(trace, lambda event, _: with_fields(event, accepted=committed_paths(event), caps=()))


def capped(trace: Trace) -> RewrittenTrace:
    """Give every commit the caps that it had, or caps after the accepted drafts. Paths that reach them go to a leaf."""
    return _recommitted(trace, _capped)


def _capped(event: Commit, windows: Mapping[str, Sequence[int]]) -> Commit:
    paths = []
    for name, path, cap in zip(event.requests, committed_paths(event), _caps(event), strict=True):
        parents, nodes = windows[name], [*path.nodes]
        while len(nodes) >= cap and (last := (nodes or [0])[-1]) in parents:
            nodes.append(parents.index(last))
        paths.append(with_fields(path, nodes=tuple(nodes)))
    return with_fields(event, accepted=tuple(paths), caps=_caps(event))


def cut_to_caps(trace: Trace) -> RewrittenTrace:
    """Cut every window after the drafts that its commit accepts or has as a cap; then no commit has caps."""
    events, drafted = [*trace.events], dict[str, int]()
    for index, event in enumerate(trace.events):
        if isinstance(event, Draft):
            drafted |= dict.fromkeys(event.requests, index)
        elif isinstance(event, Commit) and event.accepted is not None:
            paths = []
            for name, path, cap in zip(event.requests, committed_paths(event), _caps(event), strict=True):
                draft = cast(Draft, events[drafted[name]])
                place, picks = draft.requests.index(name), draft.picks or ()
                parents = draft.parents or tuple(tuple(range(len(one))) for one in picks)
                kept = [node for node, depth in enumerate(depths((-1, *parents[place]))) if depth <= cap]
                shape = tuple(kept.index(parents[place][node - 1]) for node in kept[1:])
                tokens = tuple(picks[place][node - 1] for node in kept[1:])
                events[drafted[name]] = with_fields(
                    draft, picks=(*picks[:place], tokens, *picks[place + 1 :]), own=False,
                    parents=(*parents[:place], shape, *parents[place + 1 :]))
                paths.append(with_fields(path, nodes=tuple(kept.index(node) for node in path.nodes)))
            events[index] = with_fields(event, accepted=tuple(paths), caps=())
    return replace(as_traced(trace), events=tuple(events))


def _caps(event: Commit) -> tuple[int, ...]:
    """The caps of a commit, or the numbers of drafts that it accepts."""
    return event.caps or tuple(len(path.nodes) for path in event.accepted or ())


def _recommitted(trace: Trace, change: Callable[[Commit, Mapping[str, Sequence[int]]], Commit]) -> RewrittenTrace:
    """Change every commit; `change` gets it with the parents of the nodes of each window."""
    rules, events = EventRules(trace.header), list[AnyEvent]()
    for event in trace.events:
        if isinstance(event, Commit) and event.accepted is not None:
            events.append(change(event, {name: rules.table.live[name].parents for name in event.requests}))
        else:
            events.append(event)
        rules.apply(event)
    return replace(as_traced(trace), events=tuple(events))


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
            for name, path in zip(event.requests, committed_paths(event), strict=True):
                found[drafted[name], name] = path.nodes
    return found
