"""Facts that events leave for later events: the last forward, proposals, and saved copies.

The run updates them and passes them in every context, so that no check has to remember them.
Leaves out: owners, lengths and windows, which follow from the trace (`context.Expected`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from instep_reference.contract.engine import Commit, Evict, Forward, Load, Preempt, Resume, Save
from instep_reference.contract.place_names import Place

from ..player import Side
from .event_context import Earlier, EventContext, KeptCopy, LastForward
from .rows_by_request import row_spans, rows


def left_by(context: EventContext | None) -> Earlier:
    """The facts for the next event; None: it is the first."""
    if context is None:
        return Earlier()
    event, earlier, before = context.event, context.earlier, context.subject.before
    if isinstance(event, Forward | Commit):
        proposed = {**earlier.proposed, **_proposed(context)}
        made = {name: KeptCopy(prefix, ()) for name, prefix in context.subject.tracked.items()}
        return replace(earlier, forward=last_forward(context), proposed=proposed, saved={**earlier.saved, **made})
    if isinstance(event, Save | Preempt) and event.request in before:
        kept = KeptCopy(before[event.request], earlier.proposed.get(event.request, ()))
        if isinstance(event, Save):
            return replace(earlier, saved={**earlier.saved, event.name: kept})
        return replace(earlier, preempted={**earlier.preempted, event.request: kept})
    if isinstance(event, Resume):
        return replace(earlier, preempted={n: kept for n, kept in earlier.preempted.items() if n != event.request})
    if isinstance(event, Evict):
        return replace(earlier, saved={name: kept for name, kept in earlier.saved.items() if name != event.name})
    if isinstance(event, Load) and event.name in earlier.saved:
        return replace(earlier, proposed={**earlier.proposed, event.request: earlier.saved[event.name].proposed})
    return earlier


def last_forward(context: EventContext) -> LastForward | None:
    """The forward whose rows an event uses: its own, or the last one before it."""
    if not isinstance(context.event, Forward):
        return context.earlier.forward
    spans = {span.request: span for span in row_spans(context, "trunk")}
    subject, truth = (_brought(side, spans) for side in (context.subject, context.truth))
    return LastForward(spans, subject, truth, context.expected.windows, context.expected.parents)


def _brought(side: Side, names: Collection[str]) -> Side:
    """A side of a forward without the parts that no later event uses."""
    places = {place: tensor for place, tensor in side.places.items() if place.stage == "trunk"}
    return replace(side, places=places, before={name: side.before[name] for name in names}, after={})


def _proposed(context: EventContext) -> dict[str, tuple[int, ...]]:
    """The pick of every MTP layer after the root, for each request with a draft extend."""
    found: dict[str, tuple[int, ...]] = {span.request: () for span in row_spans(context, "extend")}
    for place in sorted(context.subject.places, key=Place.order):
        if place.component == "pick" and place.stage.startswith("extend"):
            for span in row_spans(context, place.stage):
                picks = rows(context.subject, place, span)
                if picks is not None and len(picks) == 1:
                    found[span.request] += (int(picks[0]),)
    return found
