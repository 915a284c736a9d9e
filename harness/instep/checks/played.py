"""Compares nothing: tells what an engine was served otherwise or not at all, and which requests have left the run.

Leaves out: what is not shown at all, which stands in one table (`observe/shown.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from instep_reference.contract.engine import Refused

from ..observe.context import EventContext
from ..verdict import Skipped, Tier

NOT_OFFERED = "this illegal event was not offered: the engine has no true attribute `refuses`"


class Played:
    """One `Skipped` for each sentence."""

    name = "played"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Skipped]:
        for said in context.shown.said:
            yield Skipped(self.name, context.index, said)
        if isinstance(context.event, Refused) and not context.shown.refuses:
            yield Skipped(self.name, context.index, NOT_OFFERED)
