"""An engine that takes part in a comparison: what it shows is known after every event, on the host.

Leaves out: which engines are compared (`participants.py`) and running them in step (`lockstep.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from instep_reference.contract.engine import Engine, Watched
from instep_reference.contract.place import Place, See, unseen

from ..observe.activations import Activations
from ..observe.observers import Answered, OnHost, States, Within
from ..observe.reorder import Reordered, aside
from ..observe.routes import Routes
from ..player import Observer, Player
from .guard import Checked, GuardedEngine, Materialized


class WatchedEngine(Engine, Watched, Protocol):
    """An engine whose places can be seen."""


class Participant(Player):
    """A player with a recorder of activations on its engine.

    arithmetic  the context in which every event is served
    answered    is given each event and its answer before it is brought to the host
    first       a hook between the engine and the recorded activations
    closest     further observers, next to the engine
    asked       whether states and the wished step count are asked for after every event
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

    def follow(self, rankings: list[torch.Tensor]) -> None:
        """Rows of the next event go to these."""
        if isinstance(self.arithmetic, Reordered) and self.arithmetic.following is not None:
            self.arithmetic.following.given = rankings


def guarded(name: str, subject: WatchedEngine, *, labels: bool = False, **given: Any) -> Participant:
    """A participant of which nothing is believed: whatever it raises, or gives of a wrong type, is its own finding.

    labels: whether it moves labels.
    """
    engine: Any = GuardedEngine(subject, labels)
    return Participant(name, engine, closest=[Checked()], **given)
