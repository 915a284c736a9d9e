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
from ..checks.bytes import Bytes
from ..checks.contracts import Contracts
from ..checks.draws import Draws
from ..checks.identity import LENGTH, Identity
from ..checks.own_inputs import OwnInputs
from ..checks.poison import Poison
from ..localise.order import ops_of
from ..observe.context import EventContext
from ..observe.oracle import Oracle
from ..problem import Explained, Problem, Unexplained
from ..verdict import Comparison, Tier
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

FOLLOWS = Explained("bank", "follows from what stands before it: it is right for what it was computed from")
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
        at: dict[object, Explained | Unexplained | None] = {}  # every measurement of one tensor has one explanation
        with torch.inference_mode():
            chosen = list(_first(here))
            for finding in chosen:
                what = (finding.place, finding.request, finding.tier in NUMERIC)
                if what not in at:
                    try:
                        at[what] = _said(finding, context, oracle, older)
                    except Exception as error:  # a divergence that was found is told, whatever its data do to the bank
                        at[what] = Unexplained(error=f"{type(error).__name__}: {error}")
            for finding in chosen:
                one = at[finding.place, finding.request, finding.tier in NUMERIC]
                problem = _contracts(finding.problem or Problem("differs"), finding, here)
                if isinstance(one, Unexplained):
                    problem = replace(problem, unexplained=one)
                elif one is not None:
                    problem = replace(problem, mistake=one, nearest=problem.mistake)
                elif finding.check == Poison.name:
                    problem = replace(problem, like=_like(finding, at))
                said[id(finding)] = replace(finding, problem=problem)
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
) -> Explained | Unexplained | None:
    """What explains it; None: nothing does, and the finding's own clause says what is there."""
    wish = (finding.check, finding.place, finding.request) == (Identity.name, LENGTH, None)
    if wish and older.candidates is not None:
        rule = wrong_rule(older.candidates, older.told, context.subject.wanted_num_steps)
        return None if rule is None else Explained("hypothesis", rule)
    case = case_of(finding, context, oracle, older)
    if case is None or not case.found.numel():
        return None
    if finding.explained is not None:
        return _nearer(case)
    one, count = explanation_of(case)
    said = case.granted is None or not case.found.isfinite().all()  # which bytes, which labels, that it is not finite
    return one if one is not None or said else Unexplained(count)


def _nearer(case: Case) -> Explained | None:
    """What explains a state to within the allowance, where no wrong state of T2d does: that one is only the nearest."""
    if not case.found.isfinite().all() or best(case, (one for family in BANK[0] for one in family(case)))[1]:
        return None
    for families in BANK[1:]:
        sentence, count = best(case, (one for family in families for one in family(case)))
        if count:
            return None if sentence is None else Explained("bank", sentence)
    return None


def _like(
    finding: Comparison, at: Mapping[Any, Explained | Unexplained | None]
) -> tuple[str, Explained] | None:
    """For poison, which is the same whatever wrote it: the mistake at the same place of another request."""
    for (place, request, _), one in at.items():
        if place == finding.place and request != finding.request and isinstance(one, Explained) and one is not FOLLOWS:
            return request, one
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
    return finding.problem is not None and finding.problem.code == "unidentified"


def _contracts(problem: Problem, finding: Comparison, findings: Iterable[Comparison]) -> Problem:
    """With the contracts that an op call broke there or in the whole event, and a forbidden write to that memory."""
    where, broken, written = finding.place, list[Problem](), problem.written
    ops = {*ops_of(where), *READ_BY.get(where.component, ())}
    for other in findings:
        if other.problem is None or other is finding:
            continue
        same = other.place in (where, NOWHERE) or (
            other.place[:2] == where[:2] and bool(ops & set(ops_of(other.place))))
        if other.check == Contracts.name and same and finding.check != Contracts.name:
            broken.append(other.problem)
        forbidden = other.problem.code == "forbidden_write" and other.check == Bytes.name
        if forbidden and (other.place, other.slot) == (where, finding.slot):
            written = written or other.problem
    return replace(problem, broken=tuple(broken[:CLAUSES]), written=written)
