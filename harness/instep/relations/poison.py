"""Poison: outputs do not hang on what fresh and freed memory was filled with, NaN or a number.

Leaves out: where poison stands in memory, which the byte checks of a replay look at.
"""

from __future__ import annotations

import math

from ..verdict import Tier
from .base import Case, Relation, Results
from .retold import as_traced
from .twins import Arm, Twins

FINITE = 12288.0  # exact in every float, and large beside whatever a model holds


def hold(case: Case) -> Results:
    told = as_traced(case.trace)
    arms = [
        Arm(name, case.engine(told.header, poison=pattern), told)
        for name, pattern in (("poisoned with NaN", math.nan), (f"poisoned with {FINITE:g}", FINITE))
    ]
    yield from Twins("poison", arms[0], arms[1]).run()


def lacks(case: Case) -> str | None:
    return "an engine of somebody else fills its own memory" if case.ops is None else None


RELATION = Relation("poison", "no output hangs on what free memory holds", (Tier.BITWISE,), hold, lacks)
