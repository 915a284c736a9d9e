"""The bank: every family of explanations in one table, and the findings that they are tried on.

Explanations cost time, so they are made for the first findings of an event that diverged, and never for a clean run.
Leaves out: the explanations themselves, and which of them explains (`judge.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from ..checks.base import NOWHERE
from ..checks.own_inputs import OwnInputs
from ..localise.order import ops_of
from ..observe.context import EventContext
from ..observe.oracle import Oracle
from ..verdict import Comparison, Explained, Tier
from .addresses import addresses
from .appearance import appearance
from .case import NUMERIC, Case, Explanation, case_of
from .constants import constants
from .fitted import fitted
from .inputs import inputs
from .judge import agrees, best
from .memory import known_rows, memory
from .mixing import mixing
from .older import Older
from .positions import positions
from .rows import read_rows, result_rows
from .shares import shares
from .states import known_states, states
from .tokens import tokens
from .windows import known_windows, windows

UNEXPLAINED = "unexplained"
PLACES, OF_A_PLACE = 4, 2  # places that are looked at, the first ones, and requests at each of them

# In this order, and the next only where none of the one before explains it: what whoever made the right tensor knows of
# wrong ones; what the tensor looks like, whatever put it there; mechanisms, which compete with each other; and a number
# that is fitted to the finding.
Family = Callable[[Case], Iterable[Explanation]]
BANK: tuple[tuple[Family, ...], ...] = (
    (known_rows, known_states, known_windows),
    (appearance,),
    (result_rows, read_rows, inputs, mixing, constants, positions, shares, memory, states, tokens, windows, addresses),
    (fitted,),
)


def explained(
    findings: Sequence[Comparison], context: EventContext | None, oracle: Oracle | None, older: Older
) -> list[Comparison]:
    """Comparisons in the order given; of the context's event, the first that disagree with what explains them."""
    said = dict[int, Comparison]()
    if context is not None:
        here = [found for found in findings if found.event == context.index and not found.agrees]
        at: dict[object, tuple[Explained | None, str]] = {}  # every measurement of one tensor has one explanation
        with torch.no_grad():
            for finding in _first(here):
                what = (finding.place, finding.request, finding.tier in NUMERIC)
                if what not in at:
                    try:
                        at[what] = _said(finding, context, oracle, older)
                    except Exception as error:  # a divergence that was found is told, whatever its data do to the bank
                        at[what] = None, f"; {UNEXPLAINED}: the bank raised {type(error).__name__}: {error}"
                one, behind = at[what]
                before = "" if one is None else f"{one.says}; "
                told = f"{before}{finding.diagnosis}{behind}{_contract(finding, here)}"
                said[id(finding)] = replace(finding, diagnosis=told, explained=one or finding.explained)
    return [replace(said.get(id(f), f), sides=None) for f in findings]


def explanation_of(case: Case) -> tuple[Explained | None, int]:
    """What explains it, if one thing does, and how many do equally well; known mistakes have sentences of their own."""
    if case.granted is not None and case.finding.check != OwnInputs.name and agrees(case):
        return Explained("bank", "follows from what stands before it: it is right for what it was computed from"), 1
    for number, families in enumerate(BANK):
        sentence, count = best(case, (one for family in families for one in family(case)))
        if count:
            by: Literal["hypothesis", "bank"] = "bank" if number else "hypothesis"
            return (None if sentence is None else Explained(by, sentence)), count
    return None, 0


def _said(
    finding: Comparison, context: EventContext, oracle: Oracle | None, older: Older
) -> tuple[Explained | None, str]:
    """What explains it, and what to put behind the finding's own words."""
    case = case_of(finding, context, oracle, older)
    if case is None or not case.found.numel():
        return None, ""
    if case.granted is not None and not case.found.isfinite().all():
        return None, ""  # and that is what it says
    one, count = explanation_of(case)
    if one is not None or case.granted is None:  # which bytes, which labels: that has been said
        return one, ""
    return None, f"; {UNEXPLAINED}" + (f": {count} explanations fit equally well" if count else "")


def _first(findings: Sequence[Comparison]) -> Iterator[Comparison]:
    """The first findings at the first places; none at a place that another finding explains, or looks at closer."""
    kept: dict[object, list[str | None]] = {}
    named = {(f.place, f.request) for f in findings if f.tier is Tier.DIRECTED and not _unknown(f)}
    closer = {(f.place, f.request) for f in findings if f.tier is Tier.DERIVED}
    for finding in sorted(findings, key=Comparison.order):
        at = (finding.place, finding.request)
        if at in named or (finding.tier is Tier.PROPAGATED and at in closer):
            continue
        if finding.sides is None and finding.tier in (Tier.IDENTITY, Tier.DECISIONS) and finding.check != "labels":
            continue
        here = kept.setdefault(finding.place, [])
        if len(kept) > PLACES:
            return
        if finding.request not in here and len(here) < OF_A_PLACE:
            here.append(finding.request)
        if finding.request in here:
            yield finding


def _unknown(finding: Comparison) -> bool:
    return finding.diagnosis.startswith("unknown")


def _contract(finding: Comparison, findings: Iterable[Comparison]) -> str:
    """What an op call broke there, or in the event as a whole, is said with what came of it."""
    where, ops = finding.place, set(ops_of(finding.place))
    for other in findings:
        same = other.place in (where, NOWHERE) or (
            other.place[:2] == where[:2] and bool(ops & set(ops_of(other.place))))
        if other.check == "contracts" and same and finding.check != "contracts":
            return f"; its contract is broken there: {other.diagnosis}"
    return ""
