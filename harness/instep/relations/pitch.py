"""Another aligned pitch: pools without red zones, packed as tightly as alignment lets them, give the same bits.

Leaves out: pitches that are not aligned, with which a compiler may choose another order of summation.
"""

from __future__ import annotations

from ..verdict import Tier
from .base import Case, Relation, Results
from .retold import as_traced
from .twins import Arm, Twins


def hold(case: Case) -> Results:
    told = as_traced(case.trace)
    arms = [
        Arm(name, case.engine(told.header, guarded=guarded), told)
        for name, guarded in (("guarded pools", True), ("packed pools", False))
    ]
    yield from Twins("pitch", arms[0], arms[1]).run()


def lacks(case: Case) -> str | None:
    return "an engine of somebody else sets its own pitches" if case.ops is None else None


RELATION = Relation("pitch", "pools of another aligned pitch give the same bits", (Tier.BITWISE,), hold, lacks)
