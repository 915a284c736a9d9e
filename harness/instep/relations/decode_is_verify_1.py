"""Path parity: a window of the root alone, verified and committed, is a decode step.

Leaves out: wider windows (`later_rows.py`, `rejected_is_plain.py`). No event says this, so our own engine is asked.
"""

from __future__ import annotations

from ..adapters import Subject
from ..verdict import Tier
from .arms import alike, no_trees, token_by_token
from .base import Case, Relation, Results
from .inside import WindowsOfOne
from .retold import alone, decoded


def hold(case: Case) -> Results:
    windows = case.told("windows of one token", lambda: alone(case.trace, decoded), _windowed)
    yield from alike("decode_is_verify_1", case, token_by_token(case), windows)


def _windowed(engine: Subject) -> Subject:
    windowed: Subject = WindowsOfOne(engine)
    return windowed


def lacks(case: Case) -> str | None:
    return no_trees(case) or ("only our own engine serves a window of one token" if case.ops is None else None)


RELATION = Relation(
    "decode_is_verify_1", "a verify with T = 1 is a decode step", (Tier.BITWISE, Tier.PROPAGATED), hold, lacks
)
