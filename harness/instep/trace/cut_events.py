"""Smaller traces: remove requests, events, rows, prefixes, drafts or prompt tokens, and what is illegal without them.

A kind of cut lists the parts of a trace, and removes some of them. Afterwards `legal_part` drops every event, or every
row of one, that the event rules refuse: without a draft its verify and its commit, without a save its load. Leaves out:
which cuts are worth it (`instep.campaign.shrink`).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from instep_reference.contract.engine import Admit, AnyEvent, Commit, Draft, Forward, Path, Refused
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import kind_of, named, restricted, tracks

from .event_rules import EventRules
from .header import Header

Events = tuple[AnyEvent, ...]


@dataclass(frozen=True)
class Cut:
    """One kind of cut. parts: of a trace, in its order. without: the events without some parts, not yet legal."""

    parts: Callable[[Events], Sequence[Any]]
    without: Callable[[Header, Events, Collection[Any]], Events]


def legal_part(header: Header, events: Events, *, overlap: bool = False) -> Events:
    """Keep every event that is legal after the kept ones; one that is illegal for some requests, for the others."""
    rules, kept = EventRules(header, overlap=overlap), list[AnyEvent]()
    for event in events:
        for reading in _readings(rules, event):
            try:
                rules.apply(reading)
            except BadInput:
                continue
            kept.append(reading)
            break
    return tuple(kept)


def _readings(rules: EventRules, event: AnyEvent) -> Iterator[AnyEvent]:
    """The event, and then the event for those of its requests that may be in it."""
    yield event
    if isinstance(event, Draft | Forward | Commit):
        legal = rules.serving(event).legal()
        kinds = [row.kind for row in event.rows] if isinstance(event, Forward) else [kind_of(event)] * len(named(event))
        names = [name for name, kind in zip(named(event), kinds, strict=True) if name in legal.get(kind, ())]
        if 0 < len(names) < len(kinds):
            yield _restricted(event, names)


def _restricted(event: AnyEvent, names: Collection[str]) -> AnyEvent:
    smaller: AnyEvent = restricted(event, names)  # type: ignore[assignment]
    return smaller


# Requests, events and rows


def _requests(events: Events) -> Sequence[str]:
    return list(dict.fromkeys(event.request for event in events if isinstance(event, Admit)))


def without_requests(events: Events, gone: Collection[str]) -> Events:
    """The events without these requests. An event that names no other request goes, too."""
    kept = list[AnyEvent]()
    for event in events:
        mine = named(event.of if isinstance(event, Refused) else event)
        left = [name for name in mine if name not in gone]
        if left or not mine:
            kept.append(_restricted(event, left) if len(left) < len(mine) else event)
    return tuple(kept)


def _without_events(header: Header, events: Events, gone: Collection[int]) -> Events:
    return tuple(event for at, event in enumerate(events) if at not in gone)


class _Row(NamedTuple):
    event: int
    request: str


def _rows(events: Events) -> Sequence[_Row]:
    return [_Row(at, name) for at, event in enumerate(events) if len(named(event)) > 1 for name in named(event)]


def _without_rows(header: Header, events: Events, gone: Collection[_Row]) -> Events:
    kept = list[AnyEvent]()
    for at, event in enumerate(events):
        left = [name for name in named(event) if _Row(at, name) not in gone]
        if len(left) == len(named(event)):
            kept.append(event)
        elif left:
            kept.append(_restricted(event, left))
    return tuple(kept)


# Names of tracked prefixes


class _Prefix(NamedTuple):
    event: int
    name: str


def _prefixes(events: Events) -> Sequence[_Prefix]:
    return [_Prefix(at, name) for at, event in enumerate(events) for name in tracks(event)]


def _without_prefixes(header: Header, events: Events, gone: Collection[_Prefix]) -> Events:
    kept = list[AnyEvent]()
    for at, event in enumerate(events):
        def left(names: tuple[str, ...], at: int = at) -> tuple[str, ...]:
            names = tuple("" if _Prefix(at, name) in gone else name for name in names)
            return names if any(names) else ()

        if isinstance(event, Commit):
            event = replace(event, track=left(event.track))
        elif isinstance(event, Forward):
            event = replace(event, rows=tuple(
                replace(row, track="".join(left((row.track,))), inner=left(row.inner)) for row in event.rows))
        kept.append(event)
    return tuple(kept)


# Drafts


class _Node(NamedTuple):
    """A draft: node 0 is the root of its window."""

    event: int
    request: str
    node: int


def _nodes(events: Events) -> Sequence[_Node]:
    return [_Node(at, name, node) for at, event in enumerate(events) if isinstance(event, Draft)
            for name, picks in zip(event.requests, event.picks or (), strict=False)
            for node in range(1, 1 + len(picks))]  # fmt: skip


def _without_nodes(header: Header, events: Events, gone: Collection[_Node]) -> Events:
    """The events without these drafts and those that continue them, in windows, uniforms, paths and caps."""
    kept, numbers = list[AnyEvent](), dict[str, dict[int, int]]()  # request -> node before the cut -> node after it
    for at, event in enumerate(events):
        match event:
            case Draft() if event.picks is not None:
                kept.append(_draft_without(event, at, gone, numbers))
            case Forward():
                kept.append(replace(event, rows=tuple(
                    replace(row, uniforms=_of_nodes(row.uniforms, numbers[row.request]))
                    if row.kind == "verify" and row.request in numbers else row for row in event.rows)))  # fmt: skip
            case Commit():
                kept.append(_commit_without(event, numbers))
            case _:
                kept.append(event)
    return tuple(kept)


def _draft_without(event: Draft, at: int, gone: Collection[_Node], numbers: dict[str, dict[int, int]]) -> Draft:
    assert event.picks is not None
    shapes = event.parents or tuple(tuple(range(len(picks))) for picks in event.picks)
    left = list[tuple[tuple[int, ...], tuple[int, ...]]]()
    for name, picks, parents in zip(event.requests, event.picks, shapes, strict=True):
        number, tokens, above = {0: 0}, list[int](), list[int]()
        for node, (token, parent) in enumerate(zip(picks, parents, strict=True), start=1):
            if parent in number and _Node(at, name, node) not in gone:
                number[node] = len(number)
                tokens.append(token)
                above.append(number[parent])
        numbers[name] = number
        left.append((tuple(tokens), tuple(above)))
    if all(len(tokens) == len(picks) for (tokens, _), picks in zip(left, event.picks, strict=True)):
        return event
    return replace(event, picks=tuple(tokens for tokens, _ in left), parents=tuple(above for _, above in left),
                   own=False)  # fmt: skip


def _of_nodes(uniforms: tuple[float, ...], number: dict[int, int]) -> tuple[float, ...]:
    return tuple(uniforms[node] for node in number if node < len(uniforms) - 1) + uniforms[-1:]


def _commit_without(event: Commit, numbers: dict[str, dict[int, int]]) -> Commit:
    paths, caps = list[Path](), list[int]()
    for name, path in zip(event.requests, event.accepted or (), strict=False):
        number, nodes = numbers.get(name), list[int]()
        for node in path.nodes:
            if number is not None and node not in number:
                break
            nodes.append(node if number is None else number[node])
        paths.append(Path(tuple(nodes), path.bonus))
    for name, cap in zip(event.requests, event.caps, strict=False):
        caps.append(min(cap, len(numbers[name]) - 1) if name in numbers else cap)
    return replace(event, accepted=None if event.accepted is None else tuple(paths), caps=tuple(caps))


# Tokens of prompts


class _Token(NamedTuple):
    request: str
    position: int


def _tokens(events: Events) -> Sequence[_Token]:
    return [_Token(event.request, at) for event in events if isinstance(event, Admit)
            for at in range(len(event.prompt))]  # fmt: skip


def _without_tokens(header: Header, events: Events, gone: Collection[_Token]) -> Events:
    """The events without these tokens, in prompts and in the chunks that take them in.

    If nothing is left of the last chunk, the chunk before it chooses the root.
    """
    rules, kept, chunks = EventRules(header), list[AnyEvent](), dict[str, tuple[int, int]]()
    for event in events:
        left = event
        if isinstance(event, Admit):
            prompt = tuple(token for at, token in enumerate(event.prompt) if _Token(event.request, at) not in gone)
            left = replace(event, prompt=prompt)
        elif isinstance(event, Forward):
            rows = []
            for row in event.rows:
                start = rules.serving(event).table.live[row.request].length
                count = sum(_Token(row.request, start + at) not in gone for at in range(row.tokens))
                if row.kind != "prefill" or count == row.tokens:
                    rows.append(row)
                elif count:
                    rows.append(replace(row, tokens=count, inner=()))
                elif row.request in chunks:
                    _give_root(kept, rows, chunks[row.request], row)
                if row.kind == "prefill" and count:
                    chunks[row.request] = len(kept), len(rows) - 1
            left = replace(event, rows=tuple(rows))
        rules.apply(event)
        if not isinstance(left, Forward) or left.rows:
            kept.append(left)
    return tuple(kept)


def _give_root(kept: list[AnyEvent], rows: list[Any], chunk: tuple[int, int], last: Any) -> None:
    """Let an earlier chunk choose what the last one chose. chunk: its event among the kept ones, and its row there."""
    event = kept[chunk[0]]
    assert isinstance(event, Forward)
    changed = list(event.rows)
    changed[chunk[1]] = replace(changed[chunk[1]], root=last.root, uniforms=last.uniforms)
    kept[chunk[0]] = replace(event, rows=tuple(changed))


def _without_shared_tokens(header: Header, events: Events, gone: Collection[_Token]) -> Events:
    """The same, also in every prompt that is equal up to such a token: a copy may be shared by these requests."""
    prompts: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for event in events:
        if isinstance(event, Admit):
            prompts[event.request].add(event.prompt)
    begins = {prompt[: at + 1] for name, at in gone for prompt in prompts[name]}
    return _without_tokens(header, events, {
        _Token(name, at) for name, several in prompts.items() for prompt in several for at in range(len(prompt))
        if prompt[: at + 1] in begins
    })  # fmt: skip


CUTS: dict[str, Cut] = {
    "requests": Cut(_requests, lambda header, events, gone: without_requests(events, gone)),
    "events": Cut(lambda events: range(len(events)), _without_events),
    "rows": Cut(_rows, _without_rows),
    "prefixes": Cut(_prefixes, _without_prefixes),
    "drafts": Cut(_nodes, _without_nodes),
    "shared tokens": Cut(_tokens, _without_shared_tokens),
    "tokens": Cut(_tokens, _without_tokens),
}
