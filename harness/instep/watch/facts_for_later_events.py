"""Facts that events leave for later events: the last forward, proposals, and saved copies.

The run updates them and passes them in every context, so that no check has to remember them.
Leaves out: owners, lengths and windows, which follow from the trace (`context.Expected`).
"""

from collections.abc import Collection
from dataclasses import replace

from instep_reference.contract.engine import Commit, Forward
from instep_reference.contract.event_facts import facts
from instep_reference.contract.place_names import Place

from ..player import Side
from .event_context import Earlier, EventContext, KeptCopy, LastForward
from .rows_by_request import row_spans, rows, tokens_of

MOST_DROPPED = 4  # copies of one name that are remembered


def left_by(context: EventContext | None) -> Earlier:
    """The facts for the next event; None: it is the first."""
    if context is None:
        return Earlier()
    event, earlier, before = context.event, context.earlier, context.subject.before
    if isinstance(event, Forward | Commit):
        proposed = {**earlier.proposed, **_proposed(context)}
        made = {name: KeptCopy(prefix, ()) for name, prefix in context.subject.tracked.items()}
        return replace(earlier, forward=last_forward(context), proposed=proposed, saved={**earlier.saved, **made})
    request, name = (getattr(event, field, "") for field in ("request", "name"))
    copies = dict(earlier.saved if name else earlier.preempted)
    match facts(event).copy:
        case "keep" if request in before:
            copies[name or request] = KeptCopy(before[request], earlier.proposed.get(request, ()))
        case "restore" if name in copies:
            return replace(earlier, proposed={**earlier.proposed, request: copies[name].proposed})
        case "drop" if name in copies:
            under = copies.pop(name), *earlier.dropped.get(name, ())
            earlier = replace(earlier, dropped={**earlier.dropped, name: under[:MOST_DROPPED]})
        case "restore" | "drop":
            copies.pop(name or request, None)
    return replace(earlier, saved=copies) if name else replace(earlier, preempted=copies)


def last_forward(context: EventContext) -> LastForward | None:
    """The forward whose rows an event uses: its own, or the last one before it."""
    if not isinstance(context.event, Forward):
        return context.earlier.forward
    spans = {span.request: span for span in row_spans(context, "trunk")}
    subject, truth = (_brought(side, spans) for side in (context.subject, context.truth))
    uniforms = {row.request: row.uniforms for row in context.event.rows if row.uniforms}
    tokens = {name: tokens_of(context, span) for name, span in spans.items() if subject.before[name].ngram}
    return LastForward(spans, subject, truth, context.expected.windows, context.expected.parents, uniforms, tokens)


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
