"""The only loop over an engine: serve events to it, with observers called around each event.

    player = Player("plain", engine, [States(engine), OnHost()])
    side = player.serve(event)

Without observers `serve` calls `event.on(engine)` and nothing else, so a timer measures the engine alone.
Leaves out: which event is legal (`trace/event_rules.py`), and the observers (`watch/player_observers.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from instep_reference.contract.engine import Answer, Draft, Drafted, Engine, Event, RequestState
from instep_reference.contract.place_names import Place

Places = Mapping[Place, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """One engine's answer to one event, and what the observers recorded. Fields without an observer are empty.

    answer          as the engine gave it, or on the host (`OnHost`)
    places          named tensors, rows packed in batch order (`Activations`)
    before, after   request -> logical state of every live request (`States`)
    tracked         name -> prefix that this event tracked, according to the engine's answer, or moved (`States`)
    wanted_num_steps  `next_num_steps` (`States`)
    instead         whether the window has the recorded drafts instead of the engine's own
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
    """Called around each event that a player serves. Subclasses override the hooks that they need."""

    def before(self, event: Event) -> None:
        """Called before the event is served."""

    def after(self, event: Event, side: Side) -> Side:
        """Called after the event was served; returns the side with this observer's records added."""
        return side

    def failed(self, event: Event, error: BaseException) -> None:
        """Called instead of `after` when the engine raised, or an observer closer to it."""


class Player:
    """Serves events to one engine. The first observer is the outermost, the last is closest to the engine."""

    proposes = True  # whether the engine drafts itself

    def __init__(self, name: str, engine: Engine, observers: Sequence[Observer] = ()) -> None:
        self.name, self.engine, self.observers = name, engine, tuple(observers)

    def serve(self, event: Event) -> Side:
        """Serve the event on the engine, between the hooks of the observers.

        A draft event marked `own` is served without the recorded drafts first. If the engine drafts other tokens, the
        event is served again with the recorded ones.
        """
        if isinstance(event, Draft) and event.own and self.proposes:
            side = self._served(Draft(event.requests))
            if _is(side.answer, event):
                return side
            return replace(self._served(event), instead=True)
        return self._served(event)

    def _served(self, event: Event) -> Side:
        """Serve once. If anything raises, `failed` is called for every observer whose `before` has returned."""
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
