"""Run two engines on the same events in lock step: answers and memory must have equal bytes after every event.

Leaves out: why they must be equal (`same_events.py`), and runs that bring the same tokens through other events
(`position_record.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.engine import AnyEvent, Draft, Forward
from instep_reference.contract.event_facts import Phase
from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ...adapters import Subject
from ...player import Player
from ...run.compared_engine import Participant
from ...trace.event_scheduler import own_say
from ...verdict import Comparison, Skipped
from ...watch.event_context import EventContext
from ...watch.observers import OnHost
from ...watch.rows_by_request import row_spans
from ...watch.rows_subject_must_show import UPDATE
from .compare_bitwise import bitwise, different, parts, pools, unserved
from .position_record import Server, serving, state_of
from .request_timelines import RewrittenTrace


@dataclass
class Arm:
    """One of the two engines, with its name for messages and its events.

    watched  whether its places are observed and compared
    player   the player that serves the events; None: a new one
    """

    name: str
    engine: Subject
    trace: RewrittenTrace
    watched: bool = True
    player: Player | None = None

    def __post_init__(self) -> None:
        if self.player is None and self.watched:
            self.player = Participant(self.name, self.engine, asked=False)
        elif self.player is None:
            self.player = Player(self.name, self.engine, [OnHost()])
        self.server = Server(self.trace.header, self.player, self.engine)


@dataclass
class ABRun:
    """Compare two engines up to the first event at which they differ; later differences follow from it.

    pools  whether every byte of every pool must be equal as well
    """

    relation: str
    one: Arm
    other: Arm
    pools: bool = False

    def run(self) -> Iterator[Comparison | Skipped]:
        pairs = zip(self.one.trace.events, self.other.trace.events, strict=True)
        for index, (mine, theirs) in enumerate(pairs):
            results = list(self._event(self.one.trace.origins[index], mine, theirs))
            yield from results
            if any(isinstance(result, Comparison) and not result.agrees for result in results):
                return

    def _event(self, origin: int, mine: AnyEvent, theirs: AnyEvent) -> Iterator[Comparison | Skipped]:
        contexts = []
        for arm, event in ((self.one, mine), (self.other, theirs)):
            with serving(origin, event, arm.player) as failed:
                contexts.append(arm.server(event, origin))
            if failed:
                yield unserved(self.relation, failed[0], arm.name)
                return
        one, other = contexts
        yield from (Skipped("played", origin, said) for said in one.shown.said)
        yield from self._places(one, other)
        yield from self._answers(one, other)
        yield from self._states(one, other)
        if self.pools:
            yield from self._pools(one)

    def _places(self, one: EventContext, other: EventContext) -> Iterator[Comparison]:
        mine, theirs = one.subject.places, other.subject.places
        if self.one.watched and self.other.watched:
            for place in sorted(mine.keys() | theirs.keys(), key=Place.order):
                if place.component == UPDATE and not (place in mine and place in theirs):
                    continue  # only one of the two keeps updates
                left, right = mine.get(place), theirs.get(place)
                counts = different(left, right)
                request, rows = self._whose(one, place, left, right) if counts[1] else (None, "")
                yield self._comparison(one, place, counts, request, rows)

    def _whose(
        self, context: EventContext, place: Place, mine: torch.Tensor | None, theirs: torch.Tensor | None
    ) -> tuple[str | None, str]:
        """The first request whose rows differ, and the number of the row."""
        if mine is None or theirs is None or mine.shape != theirs.shape:
            return None, "the rows have different shapes"
        for span in row_spans(context, place.stage):
            begin, count = span.at(place)
            for row in range(begin, begin + count):
                if different(mine[row], theirs[row])[1]:
                    return span.request, f"row {row - begin} of {count} differs"
        return None, "rows that belong to no request differ"

    def _answers(self, one: EventContext, other: EventContext) -> Iterator[Comparison]:
        if not one.shown.has("draft" if isinstance(one.event, Draft) else "logits"):
            return  # the harness derived the answer
        mine, theirs = (own_say(context.event, context.subject.answer) for context in (one, other))
        if mine is not None or theirs is not None:
            stage = "chain.1" if isinstance(one.event, Draft) else "trunk"
            place = Place(stage, AFTER_LAYERS, "pick")
            yield self._comparison(one, place, different(mine, theirs), None, "the engines' own choices differ")

    def _states(self, one: EventContext, other: EventContext) -> Iterator[Comparison]:
        for name, standing in self.one.server.rules.table.live.items():
            if not (_touched(one, name) and one.shown.memory(name) and other.shown.memory(name)):
                continue
            mine, theirs = (state_of(arm.engine, name) for arm in (self.one, self.other))
            for place, left, right in parts(mine, theirs, one.shown.whole):
                if standing.phase is Phase.VERIFIED and place.component in BLOCKS:
                    continue  # undefined until the commit
                yield self._comparison(one, place, different(left, right), name, "the logical state differs")

    def _pools(self, one: EventContext) -> Iterator[Comparison]:
        for place, mine, theirs, says in pools(self.one.engine.regions(), self.other.engine.regions()):
            yield self._comparison(one, place, different(mine, theirs), None, says)

    def _comparison(
        self, context: EventContext, place: Place, counts: tuple[int, int], request: str | None, says: str
    ) -> Comparison:
        slot = None if request is None else context.expected.slots_after.get(request)
        between = f'{says} between "{self.one.name}" and "{self.other.name}"'
        return bitwise(self.relation, context.index, context.kind, place, counts, between, request, slot)


def _touched(context: EventContext, name: str) -> bool:
    """Whether the event names the request. Damage to other requests shows when they are named next."""
    event = context.event
    if isinstance(event, Forward):
        return any(row.request == name for row in event.rows)
    return name in getattr(event, "requests", (getattr(event, "request", None),))
