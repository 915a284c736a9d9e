"""The type of a relation: a claim that something stays equal when a run is varied.

Leaves out: the relations themselves (`same_events.py`, `same_tokens.py`, and one file for each larger relation), their
input (`case.py`), and how two runs are compared (`compare_bitwise.py`, `ab_run.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...verdict import Comparison, Skipped, Tier
from .case import Case

__all__ = ["Case", "Relation", "Results", "not_by_verbs", "our_own"]

Results = Iterator[Comparison | Skipped]


@dataclass(frozen=True)
class Relation:
    """One claim about two runs of a trace.

    says     the claim, in one sentence
    catches  an example of a wrong engine that the relation detects; a test plants one
    tiers    the first tier is used when the case is exact, the last when it is not
    hold     yields the comparisons
    lacks    returns why the relation does not apply to a case; None: it applies
    of_the_trace  whether the relation replays the trace's own events
    to_the_finding  whether a trace that ends with the event of a finding shows the same finding
    """

    name: str
    says: str
    catches: str
    tiers: tuple[Tier, ...]
    hold: Callable[[Case], Results]
    lacks: Callable[[Case], str | None] = lambda case: None
    of_the_trace: bool = True
    to_the_finding: bool = True


def our_own(what: str) -> Callable[[Case], str | None]:
    """Apply only to instep's engine; `what` is the reason printed for any other engine."""
    return lambda case: what if case.ops is None else None


def not_by_verbs(what: str) -> Callable[[Case], str | None]:
    """Do not apply to engines driven through callbacks; `what` is the callback that they would need."""
    return lambda case: what if case.led is not None else None
