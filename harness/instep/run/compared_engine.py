"""An engine in a comparison, with its visible data on the host after every event, and repeated runs of one.

Leaves out: which engines are compared (`build_compared_engines.py`) and running them in step (`lockstep.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from instep_reference.contract.engine import Admit, Commit, Draft, Engine, Event, Forward, RequestState, Watched
from instep_reference.contract.event_facts import committed_paths
from instep_reference.contract.place_names import Place, See, unseen

from ..oracle.expert_routes import Routes
from ..oracle.reordered_arithmetic import Reordered, aside
from ..player import Observer, Player, Side
from ..subject.guarded_calls import Checked, GuardedEngine, Materialized
from ..watch.player_observers import Activations, Answered, OnHost, States, Within


class WatchedEngine(Engine, Watched, Protocol):
    """An engine with visible places."""


class Participant(Player):
    """A player with a recorder of activations on its engine.

    arithmetic  the context in which every event is served
    answered    called with each event and its answer before the answer is copied to the host
    first       a hook between the engine and the recorded activations
    closest     further observers, closest to the engine
    asked       whether states and the requested step count are read after every event
    """

    def __init__(
        self, name: str, engine: WatchedEngine, *, arithmetic: AbstractContextManager[Any] | None = None,
        answered: Answered = lambda event, answer: None, first: See = unseen, asked: bool = True,
        closest: Sequence[Observer] = (),
    ) -> None:
        self.activations, self.states = Activations(), States(engine)
        self.arithmetic: AbstractContextManager[Any] = nullcontext() if arithmetic is None else arithmetic
        within = Within(self.arithmetic, answered)
        looking = [*([self.states] if asked else []), self.activations, OnHost(), Materialized(), within]
        super().__init__(name, engine, [*looking, *closest])
        self._first = first
        engine.watch(aside(self._seen) if isinstance(self.arithmetic, Reordered) else self._seen)

    def _seen(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        return self.activations(place, self._first(place, tensor))

    def rankings(self) -> list[torch.Tensor]:
        """The experts that rows chose in the event that was just served, router by router."""
        return [route.ranking for route in self.arithmetic.seen] if isinstance(self.arithmetic, Routes) else []

    def serve_following(self, event: Event, rankings: list[torch.Tensor]) -> Side:
        """Serve an event with its rows sent to these experts: those of the truth, so that only arithmetic errs."""
        if isinstance(self.arithmetic, Reordered) and self.arithmetic.following is not None:
            self.arithmetic.following.given = rankings
        return self.serve(event)


def unchanged(draw: Participant) -> None:
    """Leave a draw at its start."""


class Step(NamedTuple):
    """An event of the rounded run. rankings: the truth's choices of experts; follows: states that come before it.

    brought: copies of another engine that come before it, as each draw of that engine has them
    """

    event: Event
    rankings: list[torch.Tensor]
    follows: Mapping[str, RequestState]
    brought: Mapping[str, Callable[[int], Any]] = MappingProxyType({})


@dataclass
class OneRequest:
    """A draw that runs the events of one request. done: the steps so far; drafts: of the window that is open."""

    run: Any
    done: int = 0
    drafts: tuple[int, ...] = ()


class RepeatedRuns:
    """Further draws of the rounded run, each from its start, or from a later event, to the last event.

    Costly, so each draw runs only once per event, and only when a check asks for it. All choices are in the trace.
    Draws that begin at a later event begin with the memory of one rounded run. If they shared its roundings, they would
    understate the error of a correct engine. So they begin where its recurrent states are those of the subject, and
    later follow each state that the subject shows. Its KV entries are shared: attention averages over them, so their
    roundings count less than those of the rows that each draw computes.
    """

    def __init__(self, make: Callable[[int], Participant]) -> None:
        """make: the rounded run at its start, as the draw with this number."""
        self._make = make
        self._first = 0  # the event at which draws begin
        self._resume: Callable[[Any], None] = unchanged  # brings a new draw there
        self._steps: list[Step] = []
        self._follows: Mapping[str, RequestState] = {}  # of the next event
        self._brought: dict[str, Callable[[int], Any]] = {}  # the same
        self._sides: dict[tuple[int, int, str], Side] = {}  # of the last event; "": of all requests
        self._running: dict[tuple[int, str], OneRequest] = {}

    def begin_at(self, index: int, resume: Callable[[Any], None]) -> None:
        """Begin all further draws at event `index`. resume: brings a new draw there."""
        self._first, self._resume, self._steps, self._follows, self._running = index, resume, [], {}, {}

    def follow(self, shown: Mapping[str, RequestState]) -> None:
        """Let draws continue from these states of the subject before the next event."""
        self._follows = shown

    def add(self, event: Event, rankings: list[torch.Tensor]) -> None:
        """Add the next event, with the experts that the truth chose in it."""
        self._steps.append(Step(event, rankings, self._follows, self._brought))
        self._follows, self._brought = {}, {}
        self._sides.clear()

    def bring(self, other: "RepeatedRuns", name: str) -> None:
        """Let draws take in a copy of another engine before the next event."""
        self._brought[name] = partial(other._given, name, len(other._steps))

    def _given(self, name: str, count: int, draw: int) -> Any:
        rounded = self._drawn(draw)
        for step in self._steps[:count]:
            self._serve(rounded, step, draw)
        return rounded.give(name)

    def _serve(self, rounded: Any, step: Step, draw: int) -> Side:
        for name, state in step.follows.items():
            rounded.continue_from(name, state)
        for name, given in step.brought.items():
            rounded.take(name, given(draw))
        side: Side = rounded.serve_following(step.event, step.rankings)
        return side

    @torch.inference_mode()
    def side(self, index: int, draw: int) -> Side:
        """The rounded run at event `index`, as the draw with this number."""
        if (index, draw, "") not in self._sides:
            rounded = self._drawn(draw)
            for step in self._steps[: index + 1 - self._first]:
                side = self._serve(rounded, step, draw)
            self._sides[index, draw, ""] = side
        return self._sides[index, draw, ""]

    @torch.inference_mode()
    def side_of(self, index: int, draw: int, request: str) -> Side:
        """The same with the memory of one request, which is cheaper for draws that begin at a later event.

        A window is then only its accepted path, because no other node leaves anything. Models with experts run whole.
        """
        if self._resume is unchanged or any(step.rankings for step in self._steps):
            return self.side(index, draw)
        if (index, draw, request) not in self._sides:
            one = self._running.setdefault((draw, request), OneRequest(self._drawn(draw)))
            steps, side = self._steps[one.done : index + 1 - self._first], None
            one.done += len(steps)
            for step in steps:
                if request in step.follows:
                    one.run.continue_from(request, step.follows[request])
                event = of_one(request, step.event, one)
                if isinstance(event, AcceptedPath):
                    side = one.run.take_path(event)
                elif event is not None:
                    side = one.run.serve(event)
            assert side is not None, "the event names the request"
            self._sides[index, draw, request] = side
        return self._sides[index, draw, request]

    def _drawn(self, draw: int) -> Any:
        rounded = self._make(draw)
        self._resume(rounded)
        return rounded


class AcceptedPath(NamedTuple):
    """The accepted path of a request's window: these drafts after the root, then the bonus."""

    request: str
    drafts: tuple[int, ...]
    bonus: int


def of_one(request: str, event: Event, one: OneRequest) -> Event | AcceptedPath | None:
    """The event reduced to one request, if it changes its memory."""
    match event:
        case Draft(picks=picks) if request in event.requests and picks is not None:
            one.drafts = picks[event.requests.index(request)]
        case Commit() if request in event.requests and event.accepted is not None:
            path = committed_paths(event)[event.requests.index(request)]
            return AcceptedPath(request, tuple(one.drafts[node - 1] for node in path.nodes), path.bonus)
        case Forward(rows=rows):
            mine = tuple(row for row in rows if row.request == request and row.kind != "verify")
            return Forward(mine) if mine else None
        case Admit(request=name) if name == request:
            return event
    return None


def guarded(name: str, subject: WatchedEngine, *, labels: bool = False, **given: Any) -> Participant:
    """A participant with guarded calls: exceptions and wrong types become its findings.

    labels: whether it moves labels.
    """
    engine: Any = GuardedEngine(subject, labels)
    return Participant(name, engine, closest=[Checked()], **given)
