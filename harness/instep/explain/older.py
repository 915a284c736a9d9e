"""What every request held after the last few events that wrote it, so that memory of an older round has a name;
and what every event told the controller of step counts.

Leaves out: what is made of it (`memory.py`). Nothing is copied: an engine's state is a copy already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from instep_reference.adaptive import resolve
from instep_reference.contract.adaptive import AdaptiveFile
from instep_reference.contract.engine import Commit, Forward, Load, RequestState, Resume

from ..observe.context import EventContext
from ..verdict import Comparison, Skipped, Tier
from .wishes import Told, told

KEPT = 4  # events that wrote a request's memory


class Older:
    """Compares nothing: an observer in the place of a check."""

    name, tier = "older", Tier.IDENTITY

    def __init__(self, adaptive: AdaptiveFile | None = None, num_steps: int = 0) -> None:
        """By what rules step counts are wished for, and the first of them; None: by none."""
        self.candidates = None if adaptive is None else resolve(adaptive, num_steps)
        self.told: list[Told] = []
        self._states: dict[str, deque[tuple[int, RequestState]]] = {}
        self.forward: EventContext | None = None  # the last one, this event's too

    def __call__(self, context: EventContext) -> Iterable[Comparison | Skipped]:
        event = context.event
        self.told.append(told(context))
        wrote: Iterable[str] = ()
        if isinstance(event, Forward):
            self.forward = context
            wrote = [row.request for row in event.rows if row.kind != "verify"]
        elif isinstance(event, Commit):
            wrote = event.requests
        elif isinstance(event, Load | Resume):
            wrote = (event.request,)
        for name in wrote:
            if name in context.subject.after:
                kept = self._states.setdefault(name, deque(maxlen=KEPT))
                kept.append((context.index, context.subject.after[name]))
        for gone in self._states.keys() - context.subject.after.keys():
            del self._states[gone]
        return ()

    def of(self, request: str, before: int) -> Iterator[tuple[str, RequestState]]:
        """What a request held after each event that wrote it, the latest first: a sentence, and the state.

        The latest of them, before this event, is what the request holds rightly, and is left out.
        """
        past = [(event, state) for event, state in self._states.get(request, ()) if event < before]
        for event, state in reversed(past[:-1]):
            yield f"after event {event}", state
