"""What a relation is: it varies a run and says what must then be equal.

Leaves out: the relations themselves, a file each; what they are given (`case.py`); how two runs are compared
(`compare.py`, `twins.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..verdict import Comparison, Skipped, Tier
from .case import Case

__all__ = ["Case", "Relation", "Results"]

Results = Iterator[Comparison | Skipped]


@dataclass(frozen=True)
class Relation:
    """One claim about two runs of a trace.

    says     the claim, in one sentence
    tiers    in which it is compared: the first where it is exact, the last where it is not
    hold     the comparisons; `lacks`: why it has no meaning for this case, None where it has
    of_the_trace  whether its events are the trace's, so that a shorter trace shows the same
    """

    name: str
    says: str
    tiers: tuple[Tier, ...]
    hold: Callable[[Case], Results]
    lacks: Callable[[Case], str | None] = lambda case: None
    of_the_trace: bool = True
