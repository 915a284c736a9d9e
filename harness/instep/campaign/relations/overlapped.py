"""Overlapped rounds, launched before the counts of the round before are known, must equal rounds that wait.

Reading from an engine makes it wait, so nothing is read while the engine runs. Answers are kept unread until the last
event was served; a state is read when its request ends, or after the last event. Overlapping rounds reserve pages
earlier, for the worst case, so page ownership may rightly differ. Therefore the trace runs twice: with its own pages,
and with pages that hold a whole request, where every byte of every pool must be equal.
Leaves out: what a round may know of the round before (`trace/event_rules.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import facts, kind_of, named
from instep_reference.contract.place_names import Place

from ...adapters import Subject
from ...player import Observer, Player
from ...subject.guarded_calls import checked_num_steps
from ...verdict import Comparison, Tier
from ...watch.batched_host_copies import on_host
from .case import Case, Relation, Results, our_own
from .compare_records import WANTED, answer_parts, as_text, bitwise, different, parts, pools, unserved
from .position_record import serving, state_of
from .request_timelines import RewrittenTrace, as_traced
from .rewrites import in_one_page

NAME = "overlapped"
WAITING, OVERLAPPING = "waiting", "overlapping"


@dataclass(frozen=True)
class Ran:
    """The answers and memory of one engine.

    states: (event before which it was read, request) -> the request's logical state
    wanted_num_steps: after the last event, by the number of requests in the round that comes
    """

    answers: Sequence[e.Answer | None]
    states: Mapping[tuple[int, str], e.RequestState]
    wanted_num_steps: Mapping[int, int]
    pools: Sequence[e.Region]


class _Ends(Observer):
    """Reads a state when its request ends, unless a window is in flight: then the state is undefined."""

    def __init__(self, engine: e.Engine) -> None:
        self._engine, self._index = engine, 0
        self._live: dict[str, bool] = {}  # request -> whether it is between rounds
        self.states: dict[tuple[int, str], e.RequestState] = {}

    def before(self, event: e.Event) -> None:
        for name in named(event) if facts(event).ends else ():
            if self._live.pop(name, False):
                self._read(name)
        if isinstance(event, e.Admit):
            self._live[event.request] = True
        elif isinstance(event, e.Forward):
            self._live |= {row.request: False for row in event.rows if row.kind == "verify"}
        elif isinstance(event, e.Commit):
            self._live |= dict.fromkeys(event.requests, True)
        self._index += 1

    def end(self) -> None:
        for name, between in self._live.items():
            if between:
                self._read(name)

    def _read(self, name: str) -> None:
        self.states[self._index, name] = state_of(self._engine, name)


def hold(case: Case) -> Results:
    for trace in (as_traced(case.trace), in_one_page(case.trace)):
        alike = trace.header != case.trace.header
        ran: list[Ran] = []
        for name, overlap in ((WAITING, False), (OVERLAPPING, True)):
            done = _run(name, case.engine(trace.header, overlap=overlap), trace)
            if isinstance(done, Comparison):
                yield done
                return
            ran.append(done)
        yield from compared(trace, *ran, alike=alike)


def compared(trace: RewrittenTrace, waiting: Ran, overlapping: Ran, *, alike: bool) -> Iterator[Comparison]:
    """Answers in order, then states and the wanted step count; with the same pages (`alike`) every pool, too."""
    for index, (mine, theirs) in enumerate(zip(waiting.answers, overlapping.answers, strict=True)):
        requests = getattr(trace.events[index], "requests", ())
        for place, what, name, one, other in answer_parts(mine, theirs, requests):
            says = f"the answer's {what} parts: {as_text(other)}"
            yield _comparison(trace, index, place, one, other, says, name)
    for (index, name), state in waiting.states.items():
        for place, one, other in parts(state, overlapping.states[index, name]):
            yield _comparison(trace, index, place, one, other, f"the state of {name!r} parts", name)
    last = len(trace.events) - 1
    for batch, wish in waiting.wanted_num_steps.items():
        other = overlapping.wanted_num_steps[batch]
        yield _comparison(trace, last, WANTED, wish, other, f"next_num_steps requests {other}, not {wish},")
    for place, left, right, says in pools(waiting.pools, overlapping.pools) if alike else ():
        yield _comparison(trace, last, place, left, right, says)


def _run(name: str, engine: Subject, trace: RewrittenTrace) -> Ran | Comparison:
    """All events, one after another, and only then a look at anything."""
    ends = _Ends(engine)
    player, answers = Player(name, engine, [ends]), []
    for index, event in enumerate(trace.events):
        with serving(trace.origins[index], event) as failed:
            answers.append(player.serve(event).answer)
        if failed:
            return unserved(NAME, failed[0], name)
    ends.end()
    # Without a controller by batch size the wish is the same for every number of requests.
    sizes = range(1, len(trace.header.capacity.slots) + 1) if trace.header.controller else (1,)
    wishes = {size: checked_num_steps(engine, size, size) for size in sizes}
    return Ran([on_host(answer) for answer in answers], ends.states, wishes, engine.regions())


def _comparison(
    trace: RewrittenTrace, index: int, place: Place, mine: Any, theirs: Any, says: str, request: str | None = None
) -> Comparison:
    index = min(index, len(trace.events) - 1)
    event = trace.events[index]
    says = f'{says} between "{WAITING}" and "{OVERLAPPING}"'
    return bitwise(NAME, trace.origins[index], kind_of(event), place, different(mine, theirs), says, request)


RELATION = Relation(
    NAME, "rounds that overlap say and leave what rounds that wait do", "a count that is taken one round late",
    (Tier.BITWISE,), hold, our_own("an engine of somebody else decides by itself what it waits for"),
)
