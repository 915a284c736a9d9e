"""A cache of reference runs: runs that begin with the same events compute each of them once.

The reference depends on the model, the declared arithmetic, the draw and the events, and not on the subject. So all
runs of a trace (several op sets, the runs of the ladder, a shorter trace) share it. The reference's memories are
immutable values, so its state between two events can be stored and resumed.
Leaves out: which sides there are (`build_compared_engines.py`).
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from instep_reference import trunk
from instep_reference.contract.engine import Commit, Event, Forward, RequestState, SetNumSteps
from instep_reference.contract.event_facts import committed_paths
from instep_reference.controllers import Controller
from instep_reference.speculative_rounds import Rounds, Standing
from instep_reference.trunk import WithState

from ..lru_cache import EVENTS
from ..oracle.expert_routes import Route, Routes
from ..oracle.reordered_arithmetic import Reordered
from ..player import Side
from .compared_engine import AcceptedPath, Participant
from .reference_with_declared_storage import StoringEngine

REMEMBERED = ("requests", "preempted", "saved", "num_steps")  # state of a reference engine, plus its controller


@dataclass(frozen=True)
class Served:
    """A served event. left: the engine's state after it. chance, form: the state of its arithmetic. routes: choices."""

    side: Side
    left: Mapping[str, Any]
    chance: torch.Tensor | None
    form: str | None
    routes: tuple[Route, ...] = ()


class Given(NamedTuple):
    """A kept copy of one engine for another one. path: a digest of the events that made it."""

    standing: Standing[Any, Any, Any]
    path: bytes


class Reusing(Participant):
    """A side of the reference that computes an event only if no earlier run did.

    of: a digest of everything but the events
    """

    _last: Served | None = None
    _behind = False  # whether the engine has not served the cached events

    def __init__(self, name: str, engine: Rounds[Any, Any, Any], of: bytes, **given: Any) -> None:
        self.reference, self._path, self._run = engine, of, set[bytes]()
        super().__init__(name, engine, **given)

    @property
    def engine(self) -> Any:
        """The engine after the last event; it first resumes from cached events that it has not served."""
        if self._behind and self._last is not None:
            self._take_up(self._last.left)
            self._behind = False
        return self.reference

    @engine.setter
    def engine(self, engine: Any) -> None:
        assert engine is self.reference, "a side has one engine"

    def serve(self, event: Event) -> Side:
        path = hashlib.sha256(self._path + repr(event).encode()).digest()
        served = EVENTS.get(path)
        if served is None:
            served = self._noted(super().serve(event))
            EVENTS.put(path, served, self._run)
        else:
            self._behind = True
            self.states.live(served.side.after)
            self._arithmetic_at(served)
        self._path, self._last = path, served
        self._run.add(path)
        return served.side

    # -- other starts than the first event -------------------------------------------------------

    def count(self, events: Iterable[Event]) -> None:
        """Count events that were not served here: their step counts, and their accepted drafts for the controller."""
        for event in events:
            if isinstance(event, SetNumSteps):
                self.engine.num_steps = event.num_steps
            count(self.engine.controller, event)
            self._path = hashlib.sha256(self._path + b"counted" + repr(event).encode()).digest()

    def continue_from(self, request: str, shown: RequestState) -> bool:
        """Replace a request's conv windows and recurrent states with those that another engine shows.

        Returns whether it shows those of every layer.
        """
        live, engine = self.engine.requests[request], self.reference
        config = engine.model.config
        memory = tuple(
            replace(kept, **vars(trunk.memory_of(config, config.mixers[layer], shown, layer, kept.state)))
            if isinstance(kept, WithState) and layer in shown.state else kept
            for layer, kept in enumerate(live.standing.memory)
        )
        engine.requests[request] = replace(live, standing=replace(live.standing, memory=memory))
        key = hashlib.sha256(self._path + b"continued" + request.encode())
        for layer in sorted(shown.state):
            held = (shown.conv, shown.state, shown.ngram, shown.ple_conv)
            for part in (one[layer] for one in held if layer in one):
                key.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        self._path = key.digest()
        self.states.look(request)
        return all(layer in shown.state for layer, kept in enumerate(memory) if isinstance(kept, WithState))

    def give(self, name: str) -> Given:
        """Give a kept copy to the reference of another engine."""
        given = Given(self.engine.saved.pop(name), self._path)
        self._path = hashlib.sha256(self._path + b"gave" + name.encode()).digest()
        return given

    def take(self, name: str, given: Given) -> None:
        """Take the copy in, as this engine stores states."""
        engine, kept = self.engine, given.standing
        engine.saved[name] = engine.as_stored(kept) if isinstance(engine, StoringEngine) else kept
        self._path = hashlib.sha256(self._path + b"took" + name.encode() + given.path).digest()

    def resumption(self) -> "Callable[[Reusing], None]":
        """A function that brings another draw of this run to where this one is: with its memory, KV included."""
        left, path, now = self._left(), self._path, dict(self.states.now)

        def resume(draw: Reusing) -> None:
            draw._take_up(left)
            draw._path = hashlib.sha256(draw._path + b"resumed" + path).digest()
            draw.states.live(now)

        return resume

    def take_path(self, path: AcceptedPath) -> Side:
        """Commit an accepted path without its window. Only the memory of the request is read."""
        with self.arithmetic:
            self.engine.take_path(*path)
        self.activations.take()
        self.states.look(path.request)
        self._path = hashlib.sha256(self._path + repr(path).encode()).digest()
        return Side(self.name, None, after=self.states.now)

    def _left(self) -> dict[str, Any]:
        left = {name: copy(getattr(self.engine, name)) for name in REMEMBERED}
        return left | {"controller": deepcopy(self.engine.controller)}

    def _noted(self, side: Side) -> Served:
        within, left = self.arithmetic, self._left()
        routes = tuple(within.seen) if isinstance(within, Routes) else ()
        drawn = within.generator.get_state() if isinstance(within, Reordered) else None
        operands = within.operands if isinstance(within, Reordered) else None
        return Served(side, left, drawn, None if operands is None else operands.form, routes)

    def _take_up(self, left: Mapping[str, Any]) -> None:
        for name, value in left.items():
            setattr(self.reference, name, deepcopy(value) if name == "controller" else copy(value))

    def _arithmetic_at(self, served: Served) -> None:
        within = self.arithmetic
        if isinstance(within, Routes):
            within.seen = list(served.routes)
        if isinstance(within, Reordered) and served.chance is not None:
            within.generator.set_state(served.chance)
            if within.operands is not None:
                within.operands.form = served.form


def count(controller: Controller, event: Event) -> None:
    """Tell a controller of an event that its engine did not serve."""
    if isinstance(event, SetNumSteps):
        controller.set_num_steps(event.num_steps)
    elif isinstance(event, Forward) and event.rows:
        controller.forwarded(sum(row.kind == "decode" for row in event.rows))
    elif isinstance(event, Commit):
        controller.committed([len(path.nodes) for path in committed_paths(event)])
