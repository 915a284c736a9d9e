"""Compares nothing: tells what an engine led by verbs was served otherwise, and which requests have left the run.

Leaves out: what is not shown at all, which stands in one table (`observe/shown.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..observe.context import EventContext
from ..verdict import Skipped, Tier


class Played:
    """One `Skipped` for each sentence."""

    name = "played"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Skipped]:
        for said in context.shown.said:
            yield Skipped(self.name, context.index, said)
