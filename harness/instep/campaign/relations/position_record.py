"""Record a run by position: for every request, the rows of each named place at each of its tokens, and its states.

Two runs that bring the same tokens in different steps have equal records, so most relations compare records. Rows of
rejected drafts have no position and are not recorded. A row of the draft chain is recorded under the length that the
chain started from and the drafts before the row. Leaves out: comparing records (`compare_records.py`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from instep_reference.contract import engine as e
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.event_facts import kind_of, restores
from instep_reference.contract.place_names import STAGE_LEVEL, Place

from ...player import Player
from ...run.compared_engine import Participant
from ...run.lockstep import expect
from ...run.subject_errors import VERBS
from ...subject.engines.engine_from_verbs import DerivedEngine
from ...subject.guarded_calls import SubjectFailed, calling
from ...trace.event_rules import EventRules
from ...trace.header import Header
from ...trace.tree_shape import lines
from ...watch.batched_host_copies import on_host
from ...watch.event_context import EventContext, RowSpan
from ...watch.grown_tree import head_tree
from ...watch.memory_changes import UNWATCHED
from ...watch.rows_by_request import UPDATE, row_spans
from ...watch.visible_places import WHOLE, Shown
from .request_timelines import RewrittenTrace

Key = int | tuple[int, ...]  # a position; for a draft chain, the length it started from and the drafts so far


@dataclass(frozen=True)
class Block:
    """Rows of one place that one event computed for one request, with the key of each row."""

    event: int
    kind: str
    request: str
    place: Place
    keys: tuple[Key, ...]
    rows: torch.Tensor


@dataclass(frozen=True)
class Standing:
    """A request's logical state between rounds, after an event.

    rebuilt: the harness stepped over the tokens again, so the state is within rounding, but its bits may differ
    """

    event: int
    kind: str
    request: str
    state: e.RequestState
    rebuilt: bool = False


@dataclass(frozen=True)
class Stopped:
    """An event that the engine did not serve."""

    event: int
    kind: str
    place: Place
    why: str


@dataclass
class PositionRecord:
    """One run: `blocks` and `standings` in order of creation; `rows` and `states` index them by position and length."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    standings: list[Standing] = field(default_factory=list)
    rows: dict[tuple[str, Place, Key], torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[str, int], e.RequestState] = field(default_factory=dict)
    stopped: Stopped | None = None
    whole: bool = True  # whether the engine itself reports lengths and roots
    said: list[tuple[int, str]] = field(default_factory=list)  # event -> how its serving differed from the trace
    errors: dict[tuple[str, bool], dict[Key, float]] = field(default_factory=dict)  # cache of a yardstick

    def add(self, block: Block) -> None:
        self.blocks.append(block)
        for key, row in zip(block.keys, block.rows, strict=True):
            self.rows.setdefault((block.request, block.place, key), row)

    def stand(self, standing: Standing) -> None:
        self.standings.append(standing)
        self.states.setdefault((standing.request, standing.state.length), standing.state)


class PositionRecorder:
    """Serve events with one participant and record them by position."""

    def __init__(self, name: str, participant: Participant, trace: RewrittenTrace) -> None:
        self.record, self.participant, self.trace = PositionRecord(name), participant, trace
        self.server = Server(trace.header, participant, participant.engine)
        self.admitted = Counter[str]()
        self.flying: dict[str, list[Block]] = {}  # verified windows that are not yet committed

    def run(self) -> PositionRecord:
        """Serve up to the end, or up to the first event that the engine does not serve."""
        for index, event in enumerate(self.trace.events):
            origin = self.trace.origins[index]
            with serving(origin, event, self.participant) as failed:
                context = self.server(event, origin)
            if failed:
                self.record.stopped = failed[0]
                return self.record
            if isinstance(event, e.Admit):
                self.admitted[event.request] += 1
            self.record.whole = context.shown.whole
            self.record.said += [(origin, said) for said in context.shown.said]
            self._rows(context)
            self._states(context)
        return self.record

    def named(self, request: str) -> str:
        """The request's name in the record: a name that is admitted again is another request."""
        return request if self.admitted[request] <= 1 else f"{request}/{self.admitted[request]}"

    def _rows(self, context: EventContext) -> None:
        if isinstance(context.event, e.Forward):
            self.flying = {}  # windows left from the round before were aborted
        if isinstance(context.event, e.Commit):
            for span in row_spans(context, "extend"):
                for block in self.flying.pop(span.request, []):
                    self.record.add(_accepted(block, span.nodes))
        for made, span in self._blocks(context):
            if span.kind == "verify":
                self.flying.setdefault(span.request, []).append(made)
            else:
                self.record.add(made)

    def _blocks(self, context: EventContext) -> Iterator[tuple[Block, RowSpan]]:
        shown = context.shown
        for place, tensor in context.subject.places.items():
            for span in row_spans(context, place.stage) if shown.place(place) else ():
                if span.request in shown.gone or (place.component == UPDATE and span.kind != "verify"):
                    continue  # only verify rows keep an update
                begin, count = span.at(place)
                rows = tensor[begin : begin + count]
                if count and len(rows) == count:
                    keys, name = _keys(context, place.stage, span)[span.count - count :], self.named(span.request)
                    which = shown.rows(place, span.request)
                    yield Block(context.index, context.kind, name, place, keys[which], rows[which]), span

    def _states(self, context: EventContext) -> None:
        for name in filter(context.shown.memory, committed(context)):
            state = state_of(self.participant.engine, name)
            again = name in context.shown.rebuilt
            self.record.stand(Standing(context.index, context.kind, self.named(name), state, again))


def state_of(engine: Any, name: str) -> e.RequestState:
    """Read a request's logical state and copy it to the host. An exception of the engine becomes its finding."""
    with calling("state"):
        found: e.RequestState = on_host(engine.state(name))
        return found


class Server:
    """Serve events with one player, and check each against the trace rules."""

    def __init__(self, header: Header, player: Player, engine: object) -> None:
        self.rules, self.player, self.engine = EventRules(header), player, engine
        heads = {layer: torch.empty(0) for layer in range(header.heads)}
        # Row spans need only the number of MTP layers of a state.
        self.unasked = e.RequestState(0, None, None, None, {}, {}, {}, {}, heads, heads)

    def __call__(self, event: e.AnyEvent, origin: int) -> EventContext:
        """Serve the event as number `origin` of the trace."""
        table = self.rules.table
        before = table.as_it_stands()
        self.rules.apply(event, f"event {origin}")
        side = replace(self.player.serve(event), after=dict.fromkeys(table.live, self.unasked))
        shown: Shown = self.engine.shown() if isinstance(self.engine, DerivedEngine) else WHOLE
        return EventContext(origin, event, expect(before, table), side, side, None, UNWATCHED, {}, {}, shown=shown)


@contextmanager
def serving(origin: int, event: e.Event, player: Player | None = None) -> Iterator[list[Stopped]]:
    """A block in which the engine serves event `origin`. If it raises, the event is in the yielded list.

    player: a participant has the last place that was observed, which is how far the engine got
    """
    failed = list[Stopped]()
    try:
        yield failed
    except Unsupported:
        raise
    except Exception as error:  # an external engine may raise anything
        last = player.activations.last if isinstance(player, Participant) else None
        failed.append(Stopped(origin, kind_of(event), last or Place("trunk", STAGE_LEVEL, "embedding"), raised(error)))


def raised(error: BaseException) -> str:
    """The exception in one line, with the callback that raised it."""
    if isinstance(error, SubjectFailed):
        return f"{error.question} " * (error.question in VERBS) + raised(error.error)
    said = str(error).splitlines()[0] if str(error) else "no message"
    return f"raised {type(error).__name__} ({said})"


def committed(context: EventContext) -> Sequence[str]:
    """The requests whose committed state this event wrote."""
    match context.event:
        case e.Forward(rows=rows):
            return [row.request for row in rows if row.kind != "verify"]
        case e.Commit(requests=names):
            return names
    return [name] if (name := restores(context.event)) and context.expected.lengths_after[name] else []


def _keys(context: EventContext, stage: str, span: RowSpan) -> tuple[Key, ...]:
    """The key of each row: a position; for draft rows the start length, and the drafts before or the block's width."""
    if not isinstance(context.event, e.Draft):
        return tuple(range(span.start, span.start + span.count))
    if stage == "block":  # every row of a block depends on its width
        return tuple((span.start, span.count, row) for row in range(span.count))
    step = int(stage.partition(".")[2])
    picks = (context.event.picks or ())[context.event.requests.index(span.request)]
    tree = head_tree(context, span.request, picks)
    if tree is None:
        return ((span.start, step, *span.nodes),)
    _, *drafts = lines(tree.parents)[(*span.nodes, step)[0]]
    return ((span.start, *(tree.tokens[node - 1] for node in drafts)),)


def _accepted(block: Block, nodes: tuple[int, ...]) -> Block:
    """The rows of the nodes on the accepted path, each with the position of its depth in the tree."""
    start = block.keys[0]
    assert isinstance(start, int), "window rows have positions as keys"
    keys = tuple(range(start, start + len(nodes)))
    return replace(block, keys=keys, rows=block.rows[list(nodes)])
