"""The rows that the subject has to show: no component inside a fused op, and updates of the delta rule only for the
rows of a verify in engines whose rings keep them.

The reference shows the update of every token, so a context's copy is reduced to the rows that the subject has to show.
Rows of other requests in the same forward are zeros there. Leaves out: the allowed error
(`checks/recomputed_values.py`).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from instep_reference.contract.engine import Region
from instep_reference.contract.place_names import Place

from ..player import Side
from .event_context import EventContext, RowSpan
from .rows_by_request import row_spans

UPDATE = "update"  # the component


def kept(regions: Sequence[Region]) -> bool:
    """Whether an engine with these pools keeps updates."""
    return any(region.means is not None and region.means.keeps == UPDATE for region in regions)


def due(context: EventContext, place: Place, span: RowSpan) -> bool:
    """Whether the subject has to show these rows of a place."""
    return context.shown.place(place) and (place.component != UPDATE or (context.updates and span.kind == "verify"))


def cut_down(context: EventContext) -> EventContext:
    """The context reduced, on every side, to the rows that the subject has to show."""
    verified = [span for span in row_spans(context, "trunk") if context.updates and span.kind == "verify"]
    inside, rounded = context.shown.inside, context.rounded
    return replace(
        context, subject=_side(context.subject, verified, inside), truth=_side(context.truth, verified, inside),
        rounded=None if rounded is None else _side(rounded, verified, inside))


def _side(side: Side, verified: Sequence[RowSpan], inside: Collection[str]) -> Side:
    places: dict[Place, torch.Tensor] = {}
    for place, tensor in side.places.items():
        if place.component in inside:
            continue
        if place.component != UPDATE:
            places[place] = tensor
        elif verified:
            places[place] = torch.zeros_like(tensor)
            for span in verified:
                rows = slice(span.begin, span.begin + span.count)
                places[place][rows] = tensor[rows]
    return replace(side, places=places)

