"""Compares nothing. Reports events that an engine did not serve as recorded, and requests that were dropped.

Leaves out: memory and results that an engine does not show, which `watch/visible_places.py` lists.
"""

from collections.abc import Iterator

from instep_reference.contract.engine import Refused

from ..verdict import Skipped, Tier
from ..watch.event_context import EventContext

NOT_OFFERED = "this illegal event was not played: the engine does not set `refuses = True`"


class Played:
    """Yields one `Skipped` per sentence."""

    name = "played"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Skipped]:
        for said in context.shown.said:
            yield Skipped(self.name, context.index, said)
        if isinstance(context.event, Refused) and not context.shown.refuses:
            yield Skipped(self.name, context.index, NOT_OFFERED)
