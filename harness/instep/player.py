"""One engine that serves events, and the observers that look on: the only loop over an engine.

    player = Player("plain", engine, [States(engine), OnHost()])
    side = player.serve(event)

Without observers `serve` does `event.on(engine)` and asks the engine nothing else, so what is timed is the engine.
Leaves out: which event is legal (`trace/event_rules.py`), and the observers that there are (`observe/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from instep_reference.contract.engine import Answer, Draft, Drafted, Engine, Event, RequestState
from instep_reference.contract.place import Place

Places = Mapping[Place, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """What one engine said to one event, and what its observers saw; what nobody looked at is empty.

    answer          as the engine gave it, or on the host (`OnHost`)
    places          named tensors, rows packed in batch order (`Activations`)
    before, after   request -> logical state of every live request (`States`)
    tracked         name -> prefix that this event tracked, by the engine's own answer, or moved (`States`)
    wanted_num_steps  `next_num_steps()` (`States`)
    instead         whether the recorded drafts are the window instead of the engine's own
    """

    name: str
    answer: Answer | None
    places: Places = field(default_factory=dict)
    before: Mapping[str, RequestState] = field(default_factory=dict)
    after: Mapping[str, RequestState] = field(default_factory=dict)
    tracked: Mapping[str, RequestState] = field(default_factory=dict)
    wanted_num_steps: int = 0
    instead: bool = False


class Observer:
    """Looks on while a player serves an event. Every hook does nothing unless a subclass says otherwise."""

    def before(self, event: Event) -> None:
        """The event is about to be served."""

    def after(self, event: Event, side: Side) -> Side:
        """The event was served; returns the side with what this observer saw added to it."""
        return side

    def failed(self, event: Event, error: BaseException) -> None:
        """The engine raised, or an observer closer to it: `after` is not called for this event."""


class Player:
    """Serves events to one engine. The first observer is the outermost, the last stands closest to the engine."""

    proposes = True  # whether the engine has a drafter of its own

    def __init__(self, name: str, engine: Engine, observers: Sequence[Observer] = ()) -> None:
        self.name, self.engine, self.observers = name, engine, tuple(observers)

    def serve(self, event: Event) -> Side:
        """The event on the engine, between the hooks of the observers.

        A draft of the engine's own is asked for without the recorded one, and served again with it if that is another.
        """
        if isinstance(event, Draft) and event.own and self.proposes:
            side = self._served(Draft(event.requests))
            if _is(side.answer, event):
                return side
            return replace(self._served(event), instead=True)
        return self._served(event)

    def _served(self, event: Event) -> Side:
        """Whoever raises, the engine or an observer: every observer that has begun hears of one end."""
        begun: list[Observer] = []
        try:
            for observer in self.observers:
                observer.before(event)
                begun.append(observer)
            side = Side(self.name, event.on(self.engine))
            while begun:
                side = begun.pop().after(event, side)
        except BaseException as error:
            for observer in reversed(begun):
                observer.failed(event, error)
            raise
        return side


def _is(answer: Answer | None, recorded: Draft) -> bool:
    """Whether the drafts of an answer are the recorded ones, in the same shape."""
    if not isinstance(answer, Drafted) or answer.drafts.tolist() != [[*picks] for picks in recorded.picks or ()]:
        return False
    told = None if answer.own_parents is None else tuple(map(tuple, answer.own_parents.tolist()))
    return told == recorded.parents
