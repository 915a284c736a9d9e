"""The bank: every family of explanations in one table, and the findings that they are tried on.

Explanations cost time, so they are made for the first findings of an event that diverged, and never for a clean run.
Leaves out: the explanations themselves, and which of them explains (`judge.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from ..checks.base import NOWHERE
from ..checks.bytes import FORBIDDEN
from ..checks.draws import Draws
from ..checks.identity import LENGTH, Identity
from ..checks.own_inputs import OwnInputs
from ..checks.poison import Poison
from ..localise.order import ops_of
from ..observe.context import EventContext
from ..observe.oracle import Oracle
from ..verdict import Comparison, Explained, Tier
from .addresses import addresses
from .appearance import appearance
from .case import NUMERIC, Case, Explanation, case_of
from .constants import constants
from .elsewhere import elsewhere
from .experts import experts, other_experts
from .fitted import fitted
from .inputs import inputs
from .judge import agrees, best
from .labels import labels
from .memory import known_rows, memory
from .mixing import mixing
from .norms import norms
from .older import Older
from .positions import positions
from .products import products
from .recurrence import recurrence
from .rows import read_rows, result_rows
from .shares import shares
from .states import known_states, states
from .tokens import tokens
from .trees import trees
from .windows import known_windows, windows
from .wishes import wrong_rule

UNEXPLAINED = "unexplained"
FOLLOWS = Explained("bank", "follows from what stands before it: it is right for what it was computed from")
NEAREST = "of the wrong states the nearest is: "
CLAUSES = 2  # of broken contracts that are quoted
READ_BY = dict.fromkeys(("keys", "values"), ("attend",))  # component of memory -> ops that read it and do not write it
PLACES, OF_A_PLACE = 4, 2  # places that are looked at, the first ones, and requests at each of them

# In this order, and the next only where none of the one before explains it: what whoever made the right tensor knows of
# wrong ones; where the right one went; what the tensor looks like, whatever put it there; mechanisms, which compete
# with each other; and a number that is fitted to the finding.
Family = Callable[[Case], Iterable[Explanation]]
BANK: tuple[tuple[Family, ...], ...] = (
    (known_rows, known_states, known_windows),
    (elsewhere,),
    (appearance,),
    (
        result_rows, read_rows, inputs, mixing, norms, products, constants, recurrence, positions, shares, memory,
        states, tokens, windows, labels, addresses, trees, experts,
    ),
    (fitted, other_experts),
)
NOT_FINITE: tuple[Family, ...] = (recurrence, addresses)  # what would not be finite at the same places


def explained(
    findings: Sequence[Comparison], context: EventContext | None, oracle: Oracle | None, older: Older
) -> list[Comparison]:
    """Comparisons in the order given; of the context's event, the first that disagree with what explains them."""
    said = dict[int, Comparison]()
    if context is not None:
        here = [found for found in findings if found.event == context.index and not found.agrees]
        at: dict[object, tuple[Explained | None, str]] = {}  # every measurement of one tensor has one explanation
        with torch.inference_mode():
            chosen = list(_first(here))
            for finding in chosen:
                what = (finding.place, finding.request, finding.tier in NUMERIC)
                if what not in at:
                    try:
                        at[what] = _said(finding, context, oracle, older)
                    except Exception as error:  # a divergence that was found is told, whatever its data do to the bank
                        at[what] = None, f"; {UNEXPLAINED}: the bank raised {type(error).__name__}: {error}"
            for finding in chosen:
                one, behind = at[finding.place, finding.request, finding.tier in NUMERIC]
                mine = one or finding.explained  # what explains another request's finding is told, no more
                if one is None and finding.check == Poison.name:
                    one = _beside(finding, at)
                before = "" if one is None or one.says in finding.diagnosis else (
                    f"{one.says}; {NEAREST * (finding.explained is not None)}")
                told = f"{before}{finding.diagnosis}{behind}{_contract(finding, here)}"
                said[id(finding)] = replace(finding, diagnosis=told, explained=mine)
    told_of = (said.get(id(found), found) for found in findings)
    return [one if one.sides is None else replace(one, sides=None) for one in told_of]


def explanation_of(case: Case) -> tuple[Explained | None, int]:
    """What explains it, if one thing does, and how many do equally well; known mistakes have sentences of their own."""
    if case.granted is not None and case.finding.check != OwnInputs.name and agrees(case):
        return FOLLOWS, 1
    finite = case.granted is None or bool(case.found.isfinite().all())
    for number, families in enumerate(BANK if finite else (NOT_FINITE,)):
        sentence, count = best(case, (one for family in families for one in family(case)))
        if count:
            by: Literal["hypothesis", "bank"] = "bank" if number or not finite else "hypothesis"
            return (None if sentence is None else Explained(by, sentence)), count
    return None, 0


def _said(
    finding: Comparison, context: EventContext, oracle: Oracle | None, older: Older
) -> tuple[Explained | None, str]:
    """What explains it, and what to put behind the finding's own words."""
    wish = (finding.check, finding.place, finding.request) == (Identity.name, LENGTH, None)
    if wish and older.candidates is not None:
        rule = wrong_rule(older.candidates, older.told, context.subject.wanted_num_steps)
        return None if rule is None else Explained("hypothesis", rule), ""
    case = case_of(finding, context, oracle, older)
    if case is None or not case.found.numel():
        return None, ""
    if finding.explained is not None:
        return _nearer(case), ""
    one, count = explanation_of(case)
    said = case.granted is None or not case.found.isfinite().all()  # which bytes, which labels, that it is not finite
    if one is not None or said:
        return one, ""
    return None, f"; {UNEXPLAINED}" + (f": {count} explanations fit equally well" if count else "")


def _nearer(case: Case) -> Explained | None:
    """What explains a state to within the allowance, where no wrong state of T2d does: that one is only the nearest."""
    if not case.found.isfinite().all() or best(case, (one for family in BANK[0] for one in family(case)))[1]:
        return None
    for families in BANK[1:]:
        sentence, count = best(case, (one for family in families for one in family(case)))
        if count:
            return None if sentence is None else Explained("bank", sentence)
    return None


def _beside(finding: Comparison, at: Mapping[Any, tuple[Explained | None, str]]) -> Explained | None:
    """Poison tells nothing of its own: what explains the same place of another request, which holds some numbers."""
    for (place, request, _), (one, _) in at.items():
        if place == finding.place and request != finding.request and one not in (None, FOLLOWS):
            assert one is not None, "asked just now"
            return replace(one, says=f'{one.says} (seen in request "{request}")')
    return None


def _first(findings: Sequence[Comparison]) -> Iterator[Comparison]:
    """The first findings at the first places; none at a place that another finding explains, or looks at closer."""
    kept: dict[object, list[str | None]] = {}
    named = {(f.place, f.request): f for f in findings if f.tier is Tier.DIRECTED and not _unknown(f)}
    yield from list(named.values())[:PLACES]
    closer = {(f.place, f.request) for f in findings if f.tier is Tier.DERIVED}
    for finding in sorted(findings, key=Comparison.order):
        at = (finding.place, finding.request)
        if at in named or (finding.tier is Tier.PROPAGATED and at in closer):
            continue
        if finding.check == Draws.name:  # has said what mistake draws such tokens, or that none does
            continue
        exact = finding.tier in (Tier.IDENTITY, Tier.DECISIONS) and finding.check != "labels"
        if finding.sides is None and exact and finding.place != LENGTH:
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
    """What an op call broke there, or in the event as a whole, and what was written there unasked: said with what came
    of it."""
    where, told = finding.place, list[str]()
    ops, written = {*ops_of(where), *READ_BY.get(where.component, ())}, ""
    for other in findings:
        same = other.place in (where, NOWHERE) or (
            other.place[:2] == where[:2] and bool(ops & set(ops_of(other.place))))
        if other.check == "contracts" and same and finding.check != "contracts":
            told.append(other.diagnosis)
        if FORBIDDEN in other.diagnosis and (other.place, other.slot) == (where, finding.slot) and other is not finding:
            written = written or f"; {other.diagnosis}"
    return (f"; its contract is broken there: {'; '.join(told[:CLAUSES])}" if told else "") + written
