"""An engine that is read late must answer and leave the same bytes as one that is read after every event.

Answers, accepted counts and copies to the host are lazy: the host waits for them, or computes them, when it reads them.
A replay reads all of them after every event. So nothing is unread when the next event is served, and a reading may
repair what the engine got wrong. This relation compares two kinds of runs of the same events. One reads everything
after every event. The other reads nothing before a reading point: it keeps the answers, and calls neither `state` nor
`next_num_steps` nor `regions`. No observer is on an engine here, and the trace makes all choices.

There is a run for the last event and for each drawn reading point, and one that reads at all of them. After a
difference the runs are repeated with other reading points, to find the first event after which a late reading differs.
Leaves out: graphs, unless the setting has them; a comparison of rounds that overlap with rounds that wait
(`overlapped.py`).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from instep_reference.contract import engine as e
from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.event_facts import Phase, kind_of
from instep_reference.contract.place_names import Place

from ...adapters import Subject
from ...player import Observer, Player, Side
from ...subject.guarded_calls import calling, checked_num_steps, materialized
from ...trace.event_rules import EventRules
from ...trace.request_table import RequestTable
from ...verdict import Comparison, Skipped, Tier
from ...watch.batched_host_copies import with_others
from .case import Case, Relation, Results
from .compare_records import WANTED, answer_parts, as_text, bitwise, different, parts, pools, unserved
from .position_record import serving
from .request_timelines import RewrittenTrace, as_traced

NAME = "read_late"
AT_ONCE, LATE = "read at once", "read late"
POINTS, SEED = 4, 0  # reading points that are drawn before the last event, and the seed that draws them
FEWEST = 4  # events of the stretch from which one point is drawn: a shorter trace has fewer points
BY_CALLBACKS = ("the answers and step counts of an engine driven through callbacks are the harness's own: it reads the "
                "results of a callback at once, so only memory is read late")  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """Host copies of everything that was read after one event.

    answers   event -> its answers; two if a draft was served again with the recorded drafts
    prefixes  name -> the tracked prefix
    """

    answers: Mapping[int, Sequence[e.Answer | None]]
    wanted_num_steps: int
    states: Mapping[str, e.RequestState]
    prefixes: Mapping[str, e.RequestState]
    pools: Sequence[e.Region]


Compared = list[Comparison | Skipped]


class Served(Observer):
    """Notes the events that the engine gets, and its answers."""

    def __init__(self) -> None:
        self.events: list[e.Event] = []
        self.answers: list[e.Answer | None] = []

    def before(self, event: e.Event) -> None:
        self.events.append(event)

    def after(self, event: e.Event, side: Side) -> Side:
        self.answers.append(side.answer)
        return side


@dataclass
class LateReading:
    """The two runs of one case with one set of options."""

    case: Case
    trace: RewrittenTrace
    options: Mapping[str, Any]
    served: list[tuple[e.Event, ...]] = field(default_factory=list)  # of each event of the trace: what the engine got

    @cached_property
    def tables(self) -> list[RequestTable]:
        """The table of requests after every event."""
        rules, found = EventRules(self.trace.header), []
        for index, event in enumerate(self.trace.events):
            rules.apply(event, f"event {self.trace.origins[index]}")
            found.append(rules.table.as_it_stands())
        return found

    def hold(self) -> Results:
        last, chance = len(self.trace.events) - 1, random.Random(SEED)
        span = max(FEWEST, -(-last // POINTS))
        drawn = tuple(chance.randrange(first, min(first + span, last)) for first in range(0, last, span))
        kept = self._at_once((*drawn, last))
        if isinstance(kept, Comparison):
            yield kept
            return
        for points in (*((point,) for point in (*drawn, last)), (*drawn, last)):
            results, differing = self._late({point: kept[point] for point in points})
            if differing is not None:
                yield from self.located(tuple(point for point in points if point < differing), differing, results)
                return
            yield from results

    def located(self, before: tuple[int, ...], differing: int, results: Compared) -> Compared:
        """The results at the earliest reading point after `before` at which something differs, by bisection."""
        agreed = before[-1] if before else -1
        while differing - agreed > 1:
            middle = (agreed + differing) // 2
            found, wrong = self.compared((*before, middle))
            if wrong is None:
                agreed = middle
            else:
                results, differing = found, middle
        return results

    def compared(self, points: tuple[int, ...]) -> tuple[Compared, int | None]:
        """The results of two runs up to the first of these reading points at which they differ, and that point."""
        kept = self._at_once(points)
        return ([kept], None) if isinstance(kept, Comparison) else self._late(kept)

    def _at_once(self, points: tuple[int, ...]) -> dict[int, Reading] | Comparison:
        """Read everything after every event, and keep the readings at these points."""
        engine, noted = self.case.engine(self.trace.header, **self.options), Served()
        player = Player(AT_ONCE, engine, [noted])
        player.proposes = self.case.led is None and not self.case.labels
        kept: dict[int, Reading] = {}
        answers: dict[int, Sequence[e.Answer | None]] = {}
        self.served = []
        for index, event in enumerate(self.trace.events[: max(points) + 1]):
            noted.events, noted.answers = [], []
            with serving(self.trace.origins[index], event) as failed:
                player.serve(event)
                answers[index] = _copied(noted.answers)
                wanted, states, prefixes = self._asked(engine, index)
                pools = _pools(engine, copied=index in points)
            if failed:
                return unserved(NAME, failed[0], AT_ONCE)
            self.served.append(tuple(noted.events))
            if index in points:
                kept[index] = Reading(answers, wanted, states, prefixes, pools)
        return kept

    def _late(self, kept: Mapping[int, Reading]) -> tuple[Compared, int | None]:
        """Serve the same events, and read nothing between the reading points.

        Pools are read first: what `state` or a look-up writes is then not in them.
        """
        engine, results = self.case.engine(self.trace.header, **self.options), Compared()
        player = Player(LATE, engine)
        player.proposes = False  # an event is served as the other run has served it
        unread: dict[int, list[e.Answer | None]] = {}
        for index, events in enumerate(self.served[: max(kept, default=-1) + 1]):
            with serving(self.trace.origins[index], self.trace.events[index]) as failed:
                unread[index] = [player.serve(event).answer for event in events]
                if index not in kept:
                    continue
                pools = _pools(engine, copied=True)
                answers = {each: _copied(answer) for each, answer in unread.items()}
                late = Reading(answers, *self._asked(engine, index), pools)
            if failed:
                return [*results, unserved(NAME, failed[0], LATE)], index
            found, unread = list(self._readings(index, kept[index], late)), {}
            results += found
            if not all(one.agrees for one in found):
                return results, index
        return results, None

    def _asked(
        self, engine: Any, index: int
    ) -> tuple[int, dict[str, e.RequestState], dict[str, e.RequestState]]:
        """The wanted step count, and the states of all live requests and prefixes."""
        table = self.tables[index]
        with calling("next_num_steps"):
            wanted = checked_num_steps(engine, *table.coming())
        with calling("state"):
            states = {name: _copy(engine.state(name)) for name in table.live}
        with calling("prefix"):
            named = [name for name, kept in table.saved.items() if kept.prefix]
            return wanted, states, {name: _copy(engine.prefix(name)) for name in named}

    def _readings(self, point: int, one: Reading, other: Reading) -> Iterator[Comparison]:
        whole = self.case.led is None
        for index, late in other.answers.items() if whole else ():
            requests = getattr(self.trace.events[index], "requests", ())
            for answers in zip(one.answers[index], late, strict=True):
                for place, name, request, left, right in answer_parts(*answers, requests):
                    result = self._comparison(index, point, place, left, right, f"the answer's {name}", request)
                    if result.elements or result.worst:  # a draft without tokens has no picks to compare
                        yield result
        if whole:
            left, right = one.wanted_num_steps, other.wanted_num_steps
            yield self._comparison(point, point, WANTED, left, right, "next_num_steps")
        table = self.tables[point]
        for name, state in one.states.items():
            undefined = table.live[name].phase is Phase.VERIFIED  # conv windows and states, until the commit
            for place, left, right in parts(state, other.states[name], whole):
                if not (undefined and place.component in BLOCKS):
                    yield self._comparison(point, point, place, left, right, place.component, name)
        for name, state in one.prefixes.items():
            for place, left, right in parts(state, other.prefixes[name], whole):
                what, owner = f'{place.component} of the prefix "{name}"', table.saved[name].request
                yield self._comparison(point, point, place, left, right, what, owner)
        for place, left, right, says in pools(one.pools, other.pools):
            yield self._comparison(point, point, place, left, right, says.removesuffix(" differs"))

    def _comparison(
        self, index: int, point: int, place: Place, mine: Any, theirs: Any, what: str, request: str | None = None
    ) -> Comparison:
        """Compare what event `index` has left, as it is read after event `point`."""
        counts, standing = different(mine, theirs), self.tables[index].live.get(request or "")
        says = self._sentence(index, point, mine, theirs, what) if counts[1] else ""
        return bitwise(NAME, self.trace.origins[index], kind_of(self.trace.events[index]), place, counts, says, request,
                       None if standing is None else standing.slot)  # fmt: skip

    def _sentence(self, index: int, point: int, mine: Any, theirs: Any, what: str) -> str:
        late = f", after event {self.trace.origins[point]}" if index < point else ""
        late += " (rounds overlap)" * bool(self.options.get("overlap"))
        if isinstance(mine, torch.Tensor) and mine.dim() != 1:  # a table, or memory
            return f"{what} differs when it is read late{late}"
        return f"{what}: {as_text(theirs)} when it is read late{late}; {as_text(mine)} when it is read at once"


def _copied(answers: Sequence[e.Answer | None]) -> list[e.Answer | None]:
    """Read answers and copy them to the host, with every value that they look up only now."""
    return [_copy(materialized(answer)) for answer in answers]


def _copy(value: Any) -> Any:
    """The same value with copies of its tensors on the host, so that a later event cannot change them."""
    return with_others(value, lambda tensor: tensor.detach().to("cpu", copy=True), ())


def _pools(engine: Subject, *, copied: bool) -> list[e.Region]:
    with calling("regions"):
        regions = engine.regions()
        return [
            replace(one, units=_copy(one.units), gaps=None if one.gaps is None else _copy(one.gaps)) for one in regions
        ] if copied else []


def hold(case: Case) -> Results:
    """As the setting has it; for instep's own engine also with rounds that overlap, or that wait if it overlaps."""
    trace, setting = as_traced(case.trace), case.plan.setting
    if case.led is not None:
        yield Skipped(NAME, 0, BY_CALLBACKS)
    for options in ({"overlap": overlap} for overlap in (setting.overlap, not setting.overlap)) if case.ops else ({},):
        yield from LateReading(case, trace, options).hold()


def shows_no_memory(case: Case) -> str | None:
    silent = case.led is not None and not any(map(case.led.asked.has, ("state", "kv", "regions")))
    return f"{BY_CALLBACKS}, and this engine shows none" if silent else None


RELATION = Relation(
    NAME, "an engine that is read late answers and leaves what one that is read at once does",
    "copies to the host that share their memory", (Tier.BITWISE,), hold, shows_no_memory, to_the_finding=False,
)
