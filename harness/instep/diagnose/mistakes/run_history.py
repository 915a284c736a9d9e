"""The history of a run: recent memory of every request, and the inputs of the step controller.

Nothing is copied, as an engine's state is a copy already. Leaves out: explanations from it (`wrong_memory.py`,
`step_controller.py`).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from instep_reference.contract.engine import Commit, Forward, RequestState
from instep_reference.contract.event_facts import restores

from ...verdict import Comparison, Skipped, Tier
from ...watch.event_context import EventContext
from .step_controller import Steps, Told, told

KEPT = 4  # states that are kept per request


class RunHistory:
    """An observer with the interface of a check; compares nothing."""

    name, tier = "history", Tier.IDENTITY

    def __init__(self, steps: Mapping[str, Any] | None = None) -> None:
        """steps: those of the plan, from which the step controller follows; None: there is none."""
        self.steps = None if steps is None else Steps(**steps)
        self.told: list[Told] = []
        self._states: dict[str, deque[tuple[int, RequestState]]] = {}
        self.forward: EventContext | None = None  # the last one, which may be this event

    def __call__(self, context: EventContext) -> Iterable[Comparison | Skipped]:
        event = context.event
        self.told.append(told(context))
        wrote: Iterable[str] = ()
        if isinstance(event, Forward):
            self.forward = context
            wrote = [row.request for row in event.rows if row.kind != "verify"]
        elif isinstance(event, Commit):
            wrote = event.requests
        elif name := restores(event):
            wrote = (name,)
        for name in wrote:
            if name in context.subject.after:
                kept = self._states.setdefault(name, deque(maxlen=KEPT))
                kept.append((context.index, context.subject.after[name]))
        for gone in context.subject.before.keys() - context.subject.after.keys():
            self._states.pop(gone, None)
        return ()

    def of(self, request: str, before: int) -> Iterator[tuple[str, RequestState]]:
        """Earlier states of a request, the latest first: a sentence, and the state.

        The state right before this event is not among them, as the request holds it rightly.
        """
        past = [(event, state) for event, state in self._states.get(request, ()) if event < before]
        for event, state in reversed(past[:-1]):
            yield f"after event {event}", state
