"""Path parity: draft extend over a whole window's layout is draft extend over the accepted rows alone.

Leaves out: the same of the target (it comes along: windows that end where they were accepted to are verified, too).
"""

from __future__ import annotations

from ..verdict import Tier
from .arms import alike, by_itself, nobody_decodes
from .base import Case, Relation, Results
from .retold import alone, exact_windows


def hold(case: Case) -> Results:
    exact = case.told("windows without a rejected draft", lambda: alone(case.trace, exact_windows))
    yield from alike("draft_layout", case, by_itself(case), exact)


def lacks(case: Case) -> str | None:
    return nobody_decodes(case) or (None if case.trace.header.checkpoint.mtp_layers else "this model has no draft head")


RELATION = Relation(
    "draft_layout", "draft extend over a window's rows is draft extend over its accepted rows alone",
    (Tier.BITWISE, Tier.PROPAGATED), hold, lacks,
)
