"""An engine in a comparison, with its visible data on the host after every event, and repeated runs of one.

Leaves out: which engines are compared (`build_compared_engines.py`) and running them in step (`lockstep.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from instep_reference.contract.engine import Admit, Commit, Draft, Engine, Event, Forward, RequestState, Watched
from instep_reference.contract.place_names import Place, See, unseen

from ..oracle.expert_routes import Routes
from ..oracle.reordered_arithmetic import Reordered, aside
from ..player import Observer, Player, Side
from ..subject.guarded_calls import Checked, GuardedEngine, Materialized
from ..watch.observers import Answered, OnHost, States, Within
from ..watch.seen_tensors import Activations


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


class RepeatedRuns:
    """Further draws of the rounded run, each from its start, or from a later event, to the last event.

    Costly, so each draw runs only once per event, and only when a check asks for it. All choices are in the trace.
    """

    def __init__(self, make: Callable[[int], Participant]) -> None:
        """make: the rounded run at its start, as the draw with this number."""
        self._make = make
        self._first = 0  # the event at which draws begin
        self._resume: Callable[[Any], None] = unchanged  # brings a new draw there
        self._events: list[tuple[Event, list[torch.Tensor]]] = []  # with the truth's choices of experts
        self._continued: dict[int, dict[str, RequestState]] = {}  # states that are put in before an event
        self._sides: dict[tuple[int, int, str], Side] = {}  # of the last event; "": of all requests

    def begin_at(self, index: int, resume: Callable[[Any], None]) -> None:
        """Begin all further draws at event `index`. resume: brings a new draw there."""
        self._first, self._resume, self._events, self._continued = index, resume, [], {}

    def continue_from(self, index: int, shown: Mapping[str, RequestState]) -> None:
        """Let further draws continue from these states of requests before event `index`, as the rounded run does.

        They are not all states, so draws begin earlier: what the rounded run erred since then is drawn again.
        """
        self._continued[index] = dict(shown)

    def add(self, event: Event, rankings: list[torch.Tensor]) -> None:
        """Add the next event, with the experts that the truth chose in it."""
        self._events.append((event, rankings))
        self._sides.clear()

    @torch.inference_mode()
    def side(self, index: int, draw: int) -> Side:
        """The rounded run at event `index`, as the draw with this number."""
        if (index, draw, "") not in self._sides:
            rounded = self._drawn(draw)
            for number, (event, rankings) in enumerate(self._events[: index + 1 - self._first], self._first):
                for name, state in self._continued.get(number, {}).items():
                    rounded.continue_from(name, state)
                side = rounded.serve_following(event, rankings)
            self._sides[index, draw, ""] = side
        return self._sides[index, draw, ""]

    @torch.inference_mode()
    def side_of(self, index: int, draw: int, request: str) -> Side:
        """The same with the memory of one request, which is cheaper for draws that begin at a later event.

        A window is then only its accepted path, because no other node leaves anything. Models with experts run whole.
        """
        if self._resume is unchanged or any(rankings for _, rankings in self._events):
            return self.side(index, draw)
        if (index, draw, request) not in self._sides:
            rounded, side = self._drawn(draw), None
            for event in of_one(request, self._steps(index)):
                if isinstance(event, Continued):
                    rounded.continue_from(*event)
                else:
                    side = rounded.take_path(event) if isinstance(event, AcceptedPath) else rounded.serve(event)
            assert side is not None, "the event names the request"
            self._sides[index, draw, request] = side
        return self._sides[index, draw, request]

    def _steps(self, index: int) -> Iterator[Event | Continued]:
        """The events up to `index`, each after the states that are put in before it."""
        for number, (event, _) in enumerate(self._events[: index + 1 - self._first], self._first):
            yield from (Continued(*one) for one in self._continued.get(number, {}).items())
            yield event

    def _drawn(self, draw: int) -> Any:
        rounded = self._make(draw)
        self._resume(rounded)
        return rounded


class Continued(NamedTuple):
    """A request whose memory is replaced with the state that another engine shows."""

    request: str
    shown: RequestState


class AcceptedPath(NamedTuple):
    """The accepted path of a request's window: these drafts after the root, then the bonus."""

    request: str
    drafts: tuple[int, ...]
    bonus: int


def of_one(request: str, events: Iterable[Event | Continued]) -> Iterator[Event | AcceptedPath | Continued]:
    """The events that change the memory of one request, reduced to it."""
    drafts: tuple[int, ...] = ()
    for event in events:
        match event:
            case Draft(picks=picks) if request in event.requests and picks is not None:
                drafts = picks[event.requests.index(request)]
            case Commit(accepted=paths) if request in event.requests and paths is not None:
                path = paths[event.requests.index(request)]
                yield AcceptedPath(request, tuple(drafts[node - 1] for node in path.nodes), path.bonus)
            case Forward(rows=rows):
                mine = tuple(row for row in rows if row.request == request and row.kind != "verify")
                if mine:
                    yield Forward(mine)
            case Admit(request=name) | Continued(request=name) if name == request:
                yield event


def guarded(name: str, subject: WatchedEngine, *, labels: bool = False, **given: Any) -> Participant:
    """A participant with guarded calls: exceptions and wrong types become its findings.

    labels: whether it moves labels.
    """
    engine: Any = GuardedEngine(subject, labels)
    return Participant(name, engine, closest=[Checked()], **given)
