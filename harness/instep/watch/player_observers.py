"""Observers of a player: copy answers and named tensors, read states, wrap the event in a context, keep last states.

The tensors that a side hands to `see` during one event are joined per place in call order.
Leaves out: the player (`player.py`), which request a row belongs to (`rows_by_request.py`), and the memory watch
(`memory_changes.py`).
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from instep_reference.contract.engine import Admit, Answer, Engine, Event, Finish, RequestState
from instep_reference.contract.event_facts import facts, moves, named, tracked
from instep_reference.contract.place_names import Place

from ..player import Observer, Side
from ..trace.write_bound import Bound
from .batched_host_copies import brought, on_host
from .memory_changes import Watch

T = TypeVar("T")
Answered = Callable[[Event, Answer | None], None]


class OnHost(Observer):
    """Copies the answer to the host, where the truth is."""

    def after(self, event: Event, side: Side) -> Side:
        return replace(side, answer=on_host(side.answer))


class Within(Observer):
    """Serves every event inside a context: an order of sums, a trap for host reads.

    answered: called with the event and the engine's answer, still inside the context
    """

    def __init__(
        self, context: AbstractContextManager[Any], answered: Answered = lambda event, answer: None
    ) -> None:
        self._context, self._answered = context, answered

    def before(self, event: Event) -> None:
        self._context.__enter__()

    def after(self, event: Event, side: Side) -> Side:
        try:
            self._answered(event, side.answer)
        finally:
            self._context.__exit__(None, None, None)
        return side

    def failed(self, event: Event, error: BaseException) -> None:
        self._context.__exit__(type(error), error, error.__traceback__)


class States(Observer):
    """Reads the logical state of every live request after each event, and the wanted step count.

    resting  whether it reads nothing; it catches up before the first event that is served when it does not rest
    coming   the requests that would decode or verify in a round after this event, and those that would have rows,
             from the trace (`RequestTable.coming`): with these numbers the step count is requested
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.resting = self._behind = False
        self.coming = (1, 1)
        self._live: dict[str, None] = {}
        self._prefixes: set[str] = set()  # tracked, and not evicted
        self.now: dict[str, RequestState] = {}

    def after(self, event: Event, side: Side) -> Side:
        if isinstance(event, Admit):
            self._live[event.request] = None
        for name in named(event) if facts(event).ends else ():
            self._live.pop(name, None)
        if self.resting:
            self._behind = True
            return side
        before, self.now = self.now, self._asked()
        prefixes: Any = self._engine  # an engine that tracks prefixes shows them as well (`Tracks`)
        names = set(tracked(event, side.answer))
        self._prefixes |= names
        if facts(event).copy == "drop":
            self._prefixes.discard(getattr(event, "name", ""))
        names |= self._prefixes & {moves(event)}
        kept = on_host({under: prefixes.prefix(under) for under in names})
        wish = self._engine.next_num_steps(*self.coming)
        return replace(side, before=before, after=self.now, tracked=kept, wanted_num_steps=wish)

    def before(self, event: Event) -> None:
        if self._behind and not self.resting:
            self.now, self._behind = self._asked(), False

    def _asked(self) -> dict[str, RequestState]:
        return on_host({name: self._engine.state(name) for name in self._live})

    def live(self, now: Mapping[str, RequestState]) -> None:
        """These requests are live, and their states are known."""
        self._live, self.now = dict.fromkeys(now), dict(now)

    def bring(self, other: "States", name: str) -> None:
        """Receive a copy from another engine."""
        if name in other._prefixes:
            other._prefixes.discard(name)
            self._prefixes.add(name)

    def look(self, name: str) -> None:
        """Read one state once more, because something outside has changed it."""
        self.now = {**self.now, name: on_host(self._engine.state(name))}


class Watching(Observer):
    """Looks at every byte of the pools before and after an event, and reports nothing."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def before(self, event: Event) -> None:
        self._watch.before(event, Bound())  # a replay judges the writes

    def after(self, event: Event, side: Side) -> Side:
        self._watch.after()
        return side


class LastStates(Observer, Generic[T]):
    """The state of a request when it finished. kept: maps a state to the kept value; names: of which requests, None:
    all.
    """

    def __init__(
        self, engine: Engine, kept: Callable[[RequestState], T], names: Collection[str] | None = None
    ) -> None:
        self._engine, self._kept, self._names = engine, kept, names
        self.found: dict[str, T] = {}

    def before(self, event: Event) -> None:
        if isinstance(event, Finish) and (self._names is None or event.request in self._names):
            self.found[event.request] = self._kept(self._engine.state(event.request))


class Activations(Observer):
    """A hook that copies its tensors and returns them; `take` empties it. As an observer it fills in the places."""

    def __init__(self) -> None:
        self._kept: dict[Place, list[torch.Tensor]] = {}
        self.last: Place | None = None  # the place seen last: how far a side got before it failed

    def __call__(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        self.last = place
        self._kept.setdefault(place, []).append(tensor.detach().clone())
        return tensor

    def after(self, event: Event, side: Side) -> Side:
        return replace(side, places=self.take())

    def take(self) -> dict[Place, torch.Tensor]:
        """Place -> all rows of the event, packed in batch order, on the host."""
        whole = [parts[0].contiguous() if len(parts) == 1 else torch.cat(parts) for parts in self._kept.values()]
        places = dict(zip(self._kept, brought(whole), strict=True))
        self._kept, self.last = {}, None
        return places
