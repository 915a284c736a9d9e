"""Two engines on the same events, in step: whatever they say and hold must be the same bytes, event by event.

Leaves out: why it must be, and runs that bring the same tokens by other events (`story.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from instep_reference.contract.engine import AnyEvent, Draft, Forward, Inspectable, Region
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place import AFTER_LAYERS, Place

from ..adapters import Subject
from ..observe.memory import bits
from ..observe.moment import Moment
from ..observe.rows import ASKED, draft_stage, shares
from ..observe.updates import UPDATE
from ..rig.sides import on_host
from ..trace.book import Phase
from ..trace.drive import own_say
from ..verdict import Comparison, Skipped, Tier
from .compare import different, parts
from .retold import Told
from .story import Serve, Server, stopped

# Pools of memory by the component that stands in them; what belongs to no layer is told behind all of them.
COMPONENTS = {
    "state": "state", "conv": "conv", "keys": "keys", "values": "values", "draft_keys": "keys",
    "draft_values": "values",
}  # fmt: skip


@dataclass
class Arm:
    """One of the two: its name in a sentence, the engine, and what it is told.

    watched  whether its places are seen;  serve: how an event comes to it, None: as it is
    """

    name: str
    engine: Subject
    told: Told
    watched: bool = True
    serve: Serve | None = None

    def __post_init__(self) -> None:
        self.server = Server(self.told.header, self.serve or (lambda event: event.on(self.engine)))
        if self.watched:
            self.engine.watch(self.server.tape)


@dataclass
class Twins:
    """`run` stops at the first event at which the two part: what follows from it is no news.

    pools  whether every byte of every pool must be the same, too
    """

    relation: str
    one: Arm
    other: Arm
    pools: bool = False

    def run(self) -> Iterator[Comparison | Skipped]:
        pairs = zip(self.one.told.events, self.other.told.events, strict=True)
        for index, (mine, theirs) in enumerate(pairs):
            results = list(self._event(self.one.told.origins[index], mine, theirs))
            yield from results
            if any(isinstance(result, Comparison) and not result.agrees for result in results):
                return

    def _event(self, origin: int, mine: AnyEvent, theirs: AnyEvent) -> Iterator[Comparison | Skipped]:
        moments = []
        for arm, event in ((self.one, mine), (self.other, theirs)):
            try:
                moments.append(arm.server(event, origin))
            except Unsupported:
                raise
            except Exception as error:  # whatever it is: the engine may be anybody's
                stop = stopped(origin, event, error, arm.server.tape.last)
                yield Comparison(
                    self.relation, Tier.IDENTITY, origin, stop.kind, stop.place, elements=1, worst=1.0, allowed=0.0,
                    diagnosis=f"{arm.name}: {stop.why}; the event is legal",
                )
                return
        one, other = moments
        yield from self._places(one, other)
        yield from self._answers(one, other)
        yield from self._states(one)
        if self.pools:
            yield from self._pools(one)

    def _places(self, one: Moment, other: Moment) -> Iterator[Comparison]:
        mine, theirs = one.subject.places, other.subject.places
        if self.one.watched and self.other.watched:
            for place in sorted(mine.keys() | theirs.keys(), key=Place.order):
                if place.component == UPDATE and not (place in mine and place in theirs):
                    continue  # only one of them keeps it
                elements, wrong = different(mine.get(place), theirs.get(place))
                request, rows = (None, "") if not wrong else self._whose(one, place, mine.get(place), theirs.get(place))
                yield self._told(one, place, elements, wrong, request, rows)

    def _whose(
        self, moment: Moment, place: Place, mine: torch.Tensor | None, theirs: torch.Tensor | None
    ) -> tuple[str | None, str]:
        """The first request whose rows part, and which of its rows."""
        if mine is None or theirs is None or mine.shape != theirs.shape:
            return None, "has other rows"
        asked = place.component in ASKED and place.layer == AFTER_LAYERS
        for share in shares(moment, place.stage):
            begin, count = (share.asked_begin, share.asked) if asked else (share.begin, share.count)
            for row in range(begin, begin + count):
                if different(mine[row], theirs[row])[1]:
                    return share.request, f"row {row - begin} of {count} parts"
        return None, "parts in rows of nobody"

    def _answers(self, one: Moment, other: Moment) -> Iterator[Comparison]:
        mine, theirs = (own_say(moment.event, moment.subject.answer) for moment in (one, other))
        if mine is not None or theirs is not None:
            stage = "chain.1" if isinstance(one.event, Draft) else "trunk"
            elements, wrong = different(mine, theirs)
            yield self._told(one, Place(stage, AFTER_LAYERS, "pick"), elements, wrong, None, "its own choices part")

    def _states(self, one: Moment) -> Iterator[Comparison]:
        for name, standing in self.one.server.law.book.live.items():
            if not _touched(one, name):
                continue
            mine, theirs = (on_host(arm.engine.state(name)) for arm in (self.one, self.other))
            for place, left, right in parts(mine, theirs):
                if standing.phase is Phase.VERIFIED and place.component in ("conv", "state"):
                    continue  # nobody's until the commit
                elements, wrong = different(left, right)
                yield self._told(one, place, elements, wrong, name, "its logical state parts")

    def _pools(self, one: Moment) -> Iterator[Comparison]:
        for left, right in zip(*(_regions(arm.engine) for arm in (self.one, self.other)), strict=True):
            for mine, theirs, what in ((left.units, right.units, left.by), (left.gaps, right.gaps, "red zone")):
                if mine is None or theirs is None or not mine.numel():
                    continue
                wrong = 0 if torch.equal(bits(mine), bits(theirs)) else different(mine, theirs)[1]
                stage = draft_stage(left.layer) if left.name.startswith("draft_") else "trunk"
                component = COMPONENTS.get(left.name)
                place = Place(stage, left.layer if component else AFTER_LAYERS, component or "root")
                says = f"pool {left.name}, {what} {_unit(mine, theirs) if wrong else ''} parts"
                yield self._told(one, place, mine.numel(), wrong, None, says)

    def _told(
        self, moment: Moment, place: Place, elements: int, wrong: int, request: str | None, says: str
    ) -> Comparison:
        slot = None if request is None else moment.expected.slots_after.get(request)
        between = f'between "{self.one.name}" and "{self.other.name}"'
        return Comparison(
            self.relation, Tier.BITWISE, moment.index, moment.kind, place, elements=elements, worst=float(wrong),
            allowed=0.0, request=request, slot=slot, diagnosis=f"{says} {between}" if wrong else "",
        )


def _touched(moment: Moment, name: str) -> bool:
    """Whether the event named the request; what it does to others shows when they are named next."""
    event = moment.event
    if isinstance(event, Forward):
        return any(row.request == name for row in event.rows)
    return name in getattr(event, "requests", (getattr(event, "request", None),))


def _regions(engine: Inspectable) -> Sequence[Region]:
    return engine.regions()


def _unit(mine: torch.Tensor, theirs: torch.Tensor) -> int:
    return int((bits(mine) != bits(theirs)).flatten(1).any(1).nonzero()[0, 0])
