"""Any schedule of step counts gives the same rows and states at the same tokens.

Leaves out: how a schedule is chosen; the tokens are the trace's, and wrong drafts are drawn beside the right ones.
"""

from __future__ import annotations

from ..verdict import Tier
from .arms import alike, by_itself, no_trees, token_by_token
from .base import Case, Relation, Results
from .retold import alone, rescheduled


def hold(case: Case) -> Results:
    trace, counts = case.trace, sorted({0, *case.trace.header.candidates})
    up_and_down = [*counts, *counts[-2:0:-1]]
    turned = case.told(
        "step counts in turn", lambda: alone(trace, rescheduled(up_and_down, trace.header.checkpoint.vocab))
    )
    plain = token_by_token(case)
    for other in (by_itself(case), turned):
        yield from alike("schedule", case, plain, other)


RELATION = Relation(
    "schedule", "any schedule of step counts is plain decoding", (Tier.BITWISE, Tier.PROPAGATED), hold, no_trees
)
