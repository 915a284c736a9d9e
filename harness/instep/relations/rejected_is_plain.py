"""Path parity: a round in which every draft is rejected is one decode step.

Leaves out: rounds that accept something (`schedule.py`).
"""

from __future__ import annotations

from ..verdict import Tier
from .arms import alike, nobody_decodes, token_by_token
from .base import Case, Relation, Results
from .retold import alone, rejected


def hold(case: Case) -> Results:
    header = case.trace.header
    manner = rejected(sorted({*header.candidates} - {0}), header.checkpoint.vocab)
    wrong = case.told("rounds of wrong drafts", lambda: alone(case.trace, manner))
    yield from alike("rejected_is_plain", case, token_by_token(case), wrong)


RELATION = Relation(
    "rejected_is_plain", "a round whose drafts are all rejected is one decode step", (Tier.BITWISE, Tier.PROPAGATED),
    hold, nobody_decodes,
)
