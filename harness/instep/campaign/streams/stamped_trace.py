"""A trace in stamps: the same events, with every token replaced by the stamp of its request and position.

A draft that its commit accepts gets the stamp of the token that it becomes; every other draft is stamped as rejected,
at the position of its depth. A request that loads the saved state of another request has the other's prompt, and so the
other's stamps. Leaves out: which of two rejected siblings a row is; their stamps are equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from instep_reference.contract import engine as e
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import committed_paths, facts, named, restores

from ...trace.event_rules import EventRules
from ...trace.file import Trace
from ...trace.header import Model
from ...trace.tree_shape import depths
from .stamp_model import USUAL, config, stream_checkpoint
from .token_stamps import MOST_POSITIONS, Stamp


@dataclass(frozen=True)
class Held:
    """A request by the trace: all known tokens, of which the first `length` are committed, and its window, if any."""

    tokens: tuple[int, ...]
    length: int
    window: tuple[int, ...]


@dataclass(frozen=True)
class Labelled:
    """The trace in stamps. names: request number -> name; held: for every event, what each live request then holds."""

    trace: Trace
    config: ModelConfig
    names: tuple[str, ...]
    held: tuple[Mapping[str, Held], ...]


def relabelled(trace: Trace, recurrence: str = USUAL) -> Labelled:
    """The trace in stamps, for the model of `stamp_model.py` with as many requests, and this recurrence."""
    trace.header.must_have_one_engine(f"{trace.path.name} line 1")
    events, names = trace.events, tuple(event.request for event in trace.events if isinstance(event, e.Admit))
    made = config(len(names), mtp_layers=min(trace.header.heads, 1), recurrence=recurrence)
    digest = stream_checkpoint(made).digest
    model = Model("in memory", digest, digest, made.vocab, made.mtp_layers)
    header = replace(trace.header, checkpoint=model, stop=None)
    rules, said, held = EventRules(header), list[e.AnyEvent](), list[Mapping[str, Held]]()
    writer = _Writer(events, _prompts(events))
    for index, event in enumerate(events):
        said.append(writer.stamped(index, event, rules))
        rules.apply(said[-1], trace.where(index))
        live = rules.table.live
        held.append({name: Held((*one.prompt, *one.said), one.length, one.window) for name, one in live.items()})
    return Labelled(Trace(trace.path, header, tuple(said), {}, ""), made, names, tuple(held))


def _prompts(events: Sequence[e.AnyEvent]) -> dict[int, int]:
    """Request number, in the order of admission -> the number of the request whose prompt it has."""
    owner, number, live, saved = dict[int, int](), -1, dict[str, int](), dict[str, int]()
    for event in events:
        if isinstance(event, e.Admit):
            number += 1
            live[event.request] = owner[number] = number
        request, name = (getattr(event, field, "") for field in ("request", "name"))
        match facts(event).copy:
            case "keep" if name:
                saved[name] = owner[live[request]]
            case "drop":
                saved.pop(name, None)
            case "restore" if name in saved:  # else it is a prefix
                owner[live[request]] = saved[name]
    return owner


@dataclass
class _Writer:
    """Goes through the events once. `numbers`: live request -> its number."""

    events: Sequence[e.AnyEvent]
    prompts: Mapping[int, int]

    def __post_init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.texts: list[tuple[int, ...]] = []  # the stamped prompts, in order of admission

    def stamped(self, index: int, event: e.AnyEvent, rules: EventRules) -> e.AnyEvent:
        match event:
            case e.Admit():
                number = self.numbers[event.request] = len(self.texts)
                owner, prefix = self.prompts[number], self._prefix(index, event.request, rules)
                own = (*prefix, *(_token(number, at) for at in range(len(prefix), len(event.prompt))))
                self.texts.append(own if owner == number else self.texts[owner])
                return replace(event, prompt=self.texts[number])
            case e.Draft():
                return self._draft(index, event, rules)
            case e.Forward():
                rows = (replace(row, root=self._root(row, rules)) for row in event.rows)
                return replace(event, rows=tuple(rows))
            case e.Commit():
                return self._commit(event, rules)
        return event

    def _prefix(self, index: int, name: str, rules: EventRules) -> tuple[int, ...]:
        """The stamps of the prefix that a request is given next; none, where it is given none."""
        for event in self.events[index + 1 :]:
            if restores(event) == name and (kept := rules.table.saved.get(getattr(event, "name", ""))):
                return kept.prompt if kept.prefix else ()
            if name in named(event):
                break
        return ()

    def _draft(self, index: int, event: e.Draft, rules: EventRules) -> e.Draft:
        picks, given = [], event.picks or ()
        shapes = event.parents or [range(len(drafts)) for drafts in given]
        for name, drafts, parents in zip(event.requests, given, shapes, strict=True):
            begin, accepted = rules.table.live[name].length, self._accepted(index, name)
            depth = depths((-1, *parents))[1:]
            picks.append(tuple(
                _token(self.numbers[name], begin + depth[n], n + 1 not in accepted) for n in range(len(drafts))))
        return replace(event, picks=tuple(picks), own=False)  # no drafter proposes stamps

    def _accepted(self, index: int, name: str) -> tuple[int, ...]:
        """The nodes of this event's drafts that the request's next commit accepts."""
        for event in self.events[index + 1 :]:
            if isinstance(event, e.Abort) and event.request == name:
                return ()
            if isinstance(event, e.Commit) and name in event.requests and event.accepted is not None:
                return committed_paths(event)[event.requests.index(name)].nodes
        return ()

    def _root(self, row: e.Row, rules: EventRules) -> int | None:
        if row.root is None:
            return None
        return _token(self.numbers[row.request], rules.table.live[row.request].length + row.tokens)

    def _commit(self, event: e.Commit, rules: EventRules) -> e.Commit:
        paths = []
        cut = committed_paths(event)
        for name, path, kept in zip(event.requests, event.accepted or (), cut, strict=True):
            at = rules.table.live[name].length + 1 + len(kept.nodes)
            paths.append(replace(path, bonus=_token(self.numbers[name], at)))
        return replace(event, accepted=tuple(paths))


def _token(request: int, position: int, rejected: bool = False) -> int:
    if position >= MOST_POSITIONS:
        raise BadInput("trace", found=f"position {position}", expected=f"under {MOST_POSITIONS} for exact streams")
    return Stamp(request, position, rejected).token
