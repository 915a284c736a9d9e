"""The bank: all families of explanations in one table, and the choice of findings to explain.

Explanations cost time, so only the first findings of an event that diverged are explained. Leaves out: the explanations
themselves, and whether one fits (`diagnose/mistakes/explanation_fit.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from instep_reference.contract.place_names import Place

from ..checks.check_interface import NOWHERE
from ..checks.one_sided_errors import OneSided
from ..checks.op_call_contracts import Contracts
from ..checks.ops_on_own_inputs import OwnInputs
from ..checks.poison import Poison
from ..checks.ranks import Replicas
from ..checks.sampled_tokens import Draws
from ..checks.trace_bookkeeping import LENGTH, Identity
from ..checks.unchanged_bytes import Bytes
from ..checks.unused_positions import Tails
from ..finding_problem import Explained, Problem, Unexplained, WrongContent, names_of
from ..oracle.oracle import Oracle
from ..tier_allowances import NEAR
from ..verdict import Comparison, Tier
from ..watch.event_context import EventContext
from .mistakes.constants import constants
from .mistakes.delta_rule import half_of_recurrence, recurrence
from .mistakes.experts import experts, other_experts
from .mistakes.explanation_fit import agrees, nearest, only, part_left
from .mistakes.finding_case import NUMERIC, Case, Explanation, case_of
from .mistakes.fitted_constants import fitted, scales_of_entries
from .mistakes.formula_slips import MOST_TOKENS, slips, slips_of_scores
from .mistakes.norms import norms
from .mistakes.residual_streams import residual_streams
from .mistakes.rotary_and_visible_positions import positions, trees
from .mistakes.rounded_inside import products, shares
from .mistakes.run_history import RunHistory
from .mistakes.selective_states import selective
from .mistakes.step_controller import wrong_rule
from .mistakes.transformed_tensors import appearance
from .mistakes.wrong_inputs import inputs, other_rows, tokens
from .mistakes.wrong_labels import labels, made_from
from .mistakes.wrong_memory import known_rows, memory, unwritten
from .mistakes.wrong_ranks import every_shared_expert, ranks
from .mistakes.wrong_rows import elsewhere, known_windows, mixing, read_rows, result_rows, windows, written_rows
from .mistakes.wrong_states import known_states, states
from .mistakes.wrong_strides import addresses
from .mistakes.wrong_weights import other_weights
from .ops_by_place import ops_of

FOLLOWS = Explained("bank", "follows from an earlier error: it is correct for its own inputs")
CLAUSES = 2  # broken contracts that are quoted at most
# component of memory -> ops that read it and do not write it
READ_BY = dict.fromkeys(("keys", "values"), ("attend", "attend_latents"))
PLACES, OF_A_PLACE = 4, 2  # how many of the first places are explained, and how many requests at each
# An unexplained finding may have the mistake of the others, if at least FEWEST of them have it, and at least CLEARLY
# times as many as have none.
FEWEST, CLEARLY = 2, 2

# Groups of families in the order of trial; a group is tried only if none of the groups before explains the finding:
# wrong tensors that the maker of the right one knows; where the right tensor went; known mistakes of the delta rule;
# sums over ranks; how the tensor looks; mechanisms, which compete with each other; one slip in the reference's formula;
# and a number that is fitted to the finding, which precedes a slip in the scores of attention.
Family = Callable[[Case], Iterable[Explanation]]
BANK: tuple[tuple[Family, ...], ...] = (
    (known_rows, known_states, known_windows),
    (elsewhere,),
    (recurrence,),
    (ranks, every_shared_expert),
    (appearance,),
    (
        result_rows, read_rows, inputs, mixing, norms, products, constants, half_of_recurrence, positions, shares,
        memory, states, tokens, windows, labels, addresses, trees, experts, selective,
        residual_streams,
    ),
    (made_from,),
    (other_weights, other_rows, written_rows),
    (slips,),
    (fitted, other_experts, scales_of_entries),
    (slips_of_scores,),
)
FORMULAS: tuple[tuple[Family, ...], ...] = ((slips,), (slips_of_scores,))  # all requests have such a mistake
NOT_FINITE: tuple[Family, ...] = (recurrence, addresses)  # families that give infinite numbers at the same places


def explained(
    findings: Sequence[Comparison], context: EventContext | None, oracle: Oracle | None, history: RunHistory
) -> list[Comparison]:
    """The comparisons in their order; the first findings of the context's event with their explanations."""
    said = dict[int, Comparison]()
    if context is not None:
        here = [found for found in findings if found.event == context.index and not found.agrees]
        tensors = [found for found in here if found.check != OneSided.name]  # this one is about all events
        at: dict[object, Explained | Unexplained | None] = {}  # one explanation for all measurements of a tensor
        with torch.inference_mode():
            chosen = list(_first(tensors))
            for finding in chosen:
                what = _what(finding)
                if at.get(what) is None:  # of several comparisons of bits, another one may know more contents
                    try:
                        at[what] = _said(finding, context, oracle, history)
                    except Exception as error:  # a finding is reported even if its data break the bank
                        at[what] = Unexplained(error=f"{type(error).__name__}: {error}")
            _agree(at)
            at |= _shared(at, {_what(finding): finding for finding in reversed(chosen)},
                          lambda finding: case_of(finding, context, oracle, history))
            for finding in chosen:
                one = at[_what(finding)]
                problem = _contracts(finding.problem or Problem("differs"), finding, here, context)
                like = _like(finding, at) if finding.check == Poison.name else None
                if isinstance(one, Unexplained):
                    problem = replace(problem, unexplained=one)
                elif one is not None and not (like and one.vague):
                    problem = replace(problem, mistake=one, nearest=problem.mistake)
                elif finding.check == Poison.name:
                    problem = replace(problem, like=like)
                elif finding.check == Replicas.name and finding.request is None:
                    problem = replace(problem, mistake=_of_a_request(finding, at))
                said[id(finding)] = replace(finding, problem=problem)
    told_of = (said.get(id(found), found) for found in findings)
    return [one if one.sides is None else replace(one, sides=None) for one in told_of]


def _what(finding: Comparison) -> tuple[Place, str | None, bool]:
    """The key of its explanation."""
    return finding.place, finding.request, finding.tier in NUMERIC


def _agree(at: dict[Any, Explained | Unexplained | None]) -> None:
    """Keep what the requests of a place have in common, so that no sentence stays that fits one of them by accident.

    at: (place, request, whether its findings are numeric) -> the explanation
    """
    for place in dict.fromkeys(place for place, *_ in at):
        here = {what: one for what, one in at.items() if what[0] == place and one is not FOLLOWS}
        found = {what: one for what, one in here.items() if isinstance(one, Explained)}
        others = any(isinstance(one, Unexplained) and not one.partly for one in here.values())
        common = set[WrongContent]().union(*(one.readings for one in found.values()))
        common = common.intersection(*(one.readings for one in found.values()))
        for what, one in found.items():
            if common:
                at[what] = one.only(common)
            if one.by_all and (others or not common):
                at[what] = Unexplained()


def _shared(
    at: Mapping[Any, Explained | Unexplained | None], findings: Mapping[Any, Comparison],
    case: Callable[[Comparison], Case | None],
) -> dict[Any, Explained]:
    """For unexplained findings: the one mistake of all explained ones, if nothing else is as near to their error.

    Every finding is judged from its own inputs, so none follows from another. A second, small effect may hide the
    mistake in one of them. The sentence then ends in the part of the error that the mistake leaves there.
    """
    shared, known = dict[Any, Explained](), dict[Any, Explained]()
    for what, finding in findings.items():
        if isinstance(said := at[what] or finding.explained, Explained) and said is not FOLLOWS:
            known[what[:2]] = said
    lacking = {what[:2]: what for what, said in at.items() if isinstance(said, Unexplained) and what[:2] not in known}
    total = len(known) + len(lacking) - 1  # other findings of each of these
    if len(known) < max(FEWEST, CLEARLY * (total - len(known))):
        return shared
    common = set.intersection(*({reading.name or reading.says for reading in said.readings} for said in known.values()))
    if any(said.by_all or said.vague for said in known.values()) or not common:
        return shared
    for what in lacking.values():
        if at[what] not in (Unexplained(), Unexplained(partly=True)):
            continue  # several fit, or the search broke off
        if (of := case(findings[what])) is None or of.granted is None:
            continue
        tried = [(part_left(of, one), one, families) for families in BANK for family in families for one in family(of)]
        if not tried:
            continue
        left, one, families = min(tried, key=lambda each: each[0])
        if left <= NEAR and (one.name or one.sentence) in common:
            shared[what] = Explained(
                "hypothesis" if families is BANK[0] or one.name else "bank", one.sentence,
                f", as in {len(known)} of {total} other findings of this event, but {left:.1%} of this error remains",
                names=names_of([WrongContent(one.sentence, name=one.name)]))  # fmt: skip
    return shared


def explanation_of(case: Case) -> tuple[Explained | None, int]:
    """The explanation of a case, if exactly one fits best, and how many fit equally well."""
    if case.granted is not None and case.finding.check != OwnInputs.name and agrees(case):
        return FOLLOWS, 1
    finite = case.granted is None or bool(case.found.isfinite().all())
    for families in BANK if finite else (NOT_FINITE,):
        one, count = _best(case, families)
        if count:
            return one, count
    if not finite and (vague := unwritten(case)):
        return vague, 1
    return None, 0


def _best(case: Case, families: Sequence[Family]) -> tuple[Explained | None, int]:
    near = nearest(case, (one for family in families for one in family(case)))
    sentence, count = only(near)
    if sentence is None:
        return None, count
    known, equal = families is BANK[0] or bool(near[0].name), tuple(WrongContent(f.sentence, name=f.name) for f in near)
    return Explained("hypothesis" if known else "bank", near[0].sentence, equal=equal if near[1:] else (),
                     names=names_of(equal), by_all=families in FORMULAS), count  # fmt: skip


def _said(
    finding: Comparison, context: EventContext, oracle: Oracle | None, history: RunHistory
) -> Explained | Unexplained | None:
    """The explanation of a finding; None if the finding's own clause must do."""
    wish = (finding.check, finding.place, finding.request) == (Identity.name, LENGTH, None)
    if wish and history.steps is not None:
        return wrong_rule(history.steps, history.told, context.subject.wanted_num_steps)
    case = case_of(finding, context, oracle, history)
    if case is None or not case.found.numel():
        return None
    if finding.explained is not None:
        return _nearer(case)
    one, count = explanation_of(case)
    if one is not None and one is not FOLLOWS and (sent := _sent(finding, context)):
        one = replace(one, where=one.where + sent)
    said = case.granted is None or not case.found.isfinite().all()  # the clause has bytes, labels or infinite numbers
    many = case.piece is not None and case.piece.span.count > MOST_TOKENS
    return one if one is not None or said else Unexplained(count, partly=many)


def _sent(finding: Comparison, context: EventContext) -> str:
    """For the first rows of a pipeline stage: the stages between which they went."""
    facts, place = context.stages, finding.place
    stage = None if facts is None or place.component != "normed" else facts.stage_of(place)
    if facts is None or not stage or place.layer != facts.layers[stage].start:
        return ""
    return f", as stage {stage} received them from stage {stage - 1}"


def _nearer(case: Case) -> Explained | None:
    """The explanation of a state within the allowance, if no wrong state of T2d fits that well."""
    if not case.found.isfinite().all() or _best(case, BANK[0])[1]:
        return None
    for families in BANK[1:]:
        one, count = _best(case, families)
        if count:
            return one
    return None


def _like(
    finding: Comparison, at: Mapping[Any, Explained | Unexplained | None]
) -> tuple[str, Explained] | None:
    """For poison, which does not reveal a mistake: the mistake at the same place of another request."""
    for (place, request, _), one in at.items():
        if place == finding.place and request != finding.request and isinstance(one, Explained) and one is not FOLLOWS:
            return None if one.vague else (request, one)
    return None


def _of_a_request(
    finding: Comparison, at: Mapping[Any, Explained | Unexplained | None]
) -> Explained | None:
    """For a finding about the rows of all requests: the mistake in those of one of them."""
    return next((one for (place, _, _), one in at.items()
                 if place == finding.place and isinstance(one, Explained) and one is not FOLLOWS), None)  # fmt: skip


def _first(findings: Sequence[Comparison]) -> Iterator[Comparison]:
    """The first findings at the first places, without places that another finding explains or measures better."""
    kept: dict[object, list[str | None]] = {}
    named = {(f.place, f.request): f for f in findings if f.tier is Tier.DIRECTED and not (_unknown(f) or f.lost)}
    yield from list(named.values())[:PLACES]
    closer = {(f.place, f.request) for f in findings if f.tier is Tier.DERIVED}
    for finding in sorted(findings, key=Comparison.order):
        at = (finding.place, finding.request)
        if at in named or (finding.tier is Tier.PROPAGATED and at in closer):
            continue
        if finding.check == Draws.name:  # has tried all its mistakes already
            continue
        exact = finding.tier in (Tier.IDENTITY, Tier.DECISIONS) and finding.check != "labels"
        if finding.sides is None and exact and finding.place != LENGTH:
            continue
        here = kept.setdefault(finding.place, [])
        if len(kept) > PLACES:
            return
        if finding.request not in here and len(here) - (None in here) < OF_A_PLACE:
            here.append(finding.request)
        if finding.request in here:
            yield finding


def _unknown(finding: Comparison) -> bool:
    return finding.problem is not None and finding.problem.code == "unidentified"


def _contracts(
    problem: Problem, finding: Comparison, findings: Iterable[Comparison], context: EventContext
) -> Problem:
    """The problem with the broken contracts at its place or in the whole event, and a forbidden write to its memory.

    A write at other positions of the request's pages is one.
    """
    where, broken, written = finding.place, list[Problem](), problem.written
    ops = {*ops_of(where), *READ_BY.get(where.component, ())}
    for other in findings:
        if other.problem is None or other is finding:
            continue
        same = other.place in (where, NOWHERE) or (
            other.place[:2] == where[:2] and bool(ops & set(ops_of(other.place))))
        if other.check == Contracts.name and same and finding.check != Contracts.name:
            broken.append(other.problem)
        if other.problem.code == "forbidden_write" and other.place == where and (
            (other.check == Bytes.name and other.slot == finding.slot)
            or (other.check == Tails.name and other.rank == finding.rank and finding.request is not None
                and bool({*other.units} & {*context.expected.pages_in_use(finding.request)}))
        ):  # fmt: skip
            written = written or other.problem
    return replace(problem, broken=tuple(broken[:CLAUSES]), written=written)
