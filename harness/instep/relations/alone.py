"""Batch is alone: whoever else is in the batch, a request's rows and states are those that it has by itself.

Leaves out: batches in which a row's bits hang on the number of rows; those are held within the tiers.
"""

from __future__ import annotations

from ..verdict import Tier
from .arms import alike, by_itself, no_trees
from .base import Case, Relation, Results


def hold(case: Case) -> Results:
    yield from alike("alone", case, case.traced(), by_itself(case))


RELATION = Relation(
    "alone", "a request alone in the engine is served as in the batch", (Tier.BITWISE, Tier.PROPAGATED), hold, no_trees
)
