"""What a relation is: it varies a run and says what must then be equal.

Leaves out: the relations themselves (`pairwise.py`, `rewritten.py`, and a file for each that has more to it); what they
are given (`case.py`); how two runs are compared (`compare.py`, `ab_run.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..verdict import Comparison, Skipped, Tier
from .case import Case

__all__ = ["Case", "Relation", "Results", "not_by_verbs", "our_own"]

Results = Iterator[Comparison | Skipped]


@dataclass(frozen=True)
class Relation:
    """One claim about two runs of a trace.

    says     the claim, in one sentence
    catches  a wrong engine that it exists for; a test plants one
    tiers    in which it is compared: the first where it is exact, the last where it is not
    hold     the comparisons; `lacks`: why it has no meaning for this case, None where it has
    of_the_trace  whether its events are the trace's, so that a shorter trace shows the same
    """

    name: str
    says: str
    catches: str
    tiers: tuple[Tier, ...]
    hold: Callable[[Case], Results]
    lacks: Callable[[Case], str | None] = lambda case: None
    of_the_trace: bool = True


def our_own(what: str) -> Callable[[Case], str | None]:
    """Has a meaning only for an engine of ours; `what`: why an engine of somebody else cannot be asked."""
    return lambda case: what if case.ops is None else None


def not_by_verbs(what: str) -> Callable[[Case], str | None]:
    """Has no meaning for an engine that is led by verbs; `what`: which of them would have to be there."""
    return lambda case: what if case.led is not None else None
