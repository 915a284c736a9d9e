"""The bank: every family of explanations in one table, and the findings that they are tried on.

Explanations cost time, so they are made for the first findings of an event that diverged, and never for a clean run.
Leaves out: the explanations themselves, and which of them explains (`judge.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from ..localise.order import ops_of
from ..observe.context import EventContext
from ..observe.oracle import Oracle
from ..verdict import Comparison, Explained, Tier
from .addresses import addresses
from .appearance import appearance
from .case import Case, Explanation, case_of
from .constants import constants
from .fitted import fitted
from .inputs import inputs
from .judge import agrees, best
from .memory import memory
from .mixing import mixing
from .older import Older
from .positions import positions
from .rows import result_rows
from .states import states
from .tokens import tokens
from .windows import windows

UNEXPLAINED = "unexplained"
PLACES, OF_A_PLACE = 4, 2  # places that are looked at, the first ones, and findings at each of them

# What a tensor is like outranks how it may have come about; the mechanisms compete with each other. A number that is
# fitted to the finding is asked for where nothing that is known explains it.
FIRST: tuple[Callable[[Case], Iterable[Explanation]], ...] = (appearance,)
BANK: tuple[Callable[[Case], Iterable[Explanation]], ...] = (
    result_rows, inputs, mixing, constants, positions, memory, states, tokens, windows, addresses,
)  # fmt: skip
LAST: tuple[Callable[[Case], Iterable[Explanation]], ...] = (fitted,)


def explained(
    findings: Sequence[Comparison], context: EventContext | None, oracle: Oracle | None, older: Older
) -> list[Comparison]:
    """The findings of one event, in the order given, the first of them with what explains them."""
    said = dict[int, Comparison]()
    if context is not None:
        with torch.no_grad():
            for finding in _first([f for f in findings if f.event == context.index]):
                said[id(finding)] = _with_contract(_said(finding, context, oracle, older), findings)
    return [replace(said.get(id(finding), finding), sides=None) for finding in findings]


def explanation_of(case: Case) -> tuple[Explained | None, int]:
    """What explains it, if one thing does, and how many do equally well."""
    if case.granted is not None and agrees(case):
        return Explained("bank", "follows from what stands before it: it is right for what it was computed from"), 1
    for families in (FIRST, BANK, LAST):
        one, count = best(case, _all(case, families))
        if count:
            return one, count
    return None, 0


def _all(case: Case, families: Iterable[Callable[[Case], Iterable[Explanation]]]) -> Iterator[Explanation]:
    for family in families:
        yield from family(case)


def _said(finding: Comparison, context: EventContext, oracle: Oracle | None, older: Older) -> Comparison:
    case = case_of(finding, context, oracle, older)
    if case is None or not case.found.numel():
        return finding
    if case.granted is not None and not case.found.isfinite().all():
        return finding  # and that is what it says
    one, count = explanation_of(case)
    if one is not None:
        return replace(finding, diagnosis=f"{one.says}; {finding.diagnosis}", explained=one)
    if case.granted is None:  # which bytes, which labels: that has been said
        return finding
    several = f": {count} explanations fit equally well" if count else ""
    return replace(finding, diagnosis=f"{finding.diagnosis}; {UNEXPLAINED}{several}")


def _first(findings: Sequence[Comparison]) -> Iterator[Comparison]:
    """The first findings at the first places; none at a place that another finding explains, or looks at closer."""
    kept: dict[object, list[Comparison]] = {}
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
        if len(here) < OF_A_PLACE:
            here.append(finding)
            yield finding


def _unknown(finding: Comparison) -> bool:
    return finding.diagnosis.startswith("unknown")


def _with_contract(finding: Comparison, findings: Iterable[Comparison]) -> Comparison:
    """What an op call broke there is said with what came of it."""
    ops = set(ops_of(finding.place))
    for other in findings:
        at, where = other.place, finding.place
        same = at == where or (at[:2] == where[:2] and ops & set(ops_of(at)))
        if other.check == "contracts" and same and finding.check != "contracts":
            return replace(finding, diagnosis=f"{finding.diagnosis}; its contract is broken there: {other.diagnosis}")
    return finding
