"""A cache of reference runs: runs that begin with the same events compute each of them once.

The reference depends on the model, the declared arithmetic, the draw and the events, and not on the subject. So all
runs of a trace (several op sets, the runs of the ladder, a shorter trace) share it. The reference's memories are
immutable values, so its state between two events can be stored and resumed.
Leaves out: which sides there are (`participants.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from instep_reference.contract.engine import Event
from instep_reference.rounds import Rounds

from ..lru_cache import EVENTS
from ..oracle.expert_routes import Route, Routes
from ..oracle.reordering import Reordered
from ..player import Side
from .participant import Participant

REMEMBERED = ("requests", "preempted", "saved", "num_steps")  # state of a reference engine, plus its controller


@dataclass(frozen=True)
class Served:
    """A served event. left: the engine's state after it. chance, form: the state of its arithmetic. routes: choices."""

    side: Side
    left: Mapping[str, Any]
    chance: torch.Tensor | None
    form: str | None
    routes: tuple[Route, ...] = ()


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

    def _noted(self, side: Side) -> Served:
        engine, within = self.reference, self.arithmetic
        left = {name: copy(getattr(engine, name)) for name in REMEMBERED}
        left["controller"] = deepcopy(engine.controller)
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
