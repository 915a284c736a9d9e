"""The choice of findings to explain, their data, and what requests have in common, alone on values made by hand.

Leaves out: whether an explanation fits (`test_explanation_fit_alone.py`), and findings of runs (`test_diagnose.py`).
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose import explanation_bank
from instep.diagnose.explanation_bank import BANK, FOLLOWS, explained
from instep.diagnose.mistakes.explanation_fit import Fit
from instep.finding_problem import Explained, Problem, Unexplained, WrongContent
from instep.verdict import Comparison, Sides, Tier
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from support.inputs.check_contexts import of_facts

CORE, STATE, KEYS = (Place("trunk", 1, name) for name in ("core", "state", "keys"))
LENGTH = Place("trunk", AFTER_LAYERS, "length")
ZERO = Explained("bank", "is all zero")


def found(place: Place = CORE, request: str | None = "a", tier: Tier = Tier.DERIVED, check: str = "derived",
          event: int = 4, **more: Any) -> Comparison:  # fmt: skip
    return Comparison(check, tier, event, "forward", place, elements=1, worst=2.0, allowed=1.0, request=request, **more)


def sides(value: float = 1.0) -> Sides:
    return Sides(torch.full((2,), value), torch.zeros(2))


# -- which findings ----------------------------------------------------------------------------------------


def test_findings_that_others_explain_or_measure_better_are_left_out() -> None:
    """T2d explains a place, if it recognised a state. T2 is closer than T3. Bits need their tensors, or are labels."""
    directed = found(STATE, tier=Tier.DIRECTED, problem=Problem("identified"))
    for others, kept in (
        ([directed, found(STATE)], [0]), ([directed, found(STATE, "b")], [0, 1]), ([directed, found(CORE)], [0, 1]),
        ([found(STATE, tier=Tier.DIRECTED, problem=Problem("unidentified")), found(STATE)], [0, 1]),
        ([found(STATE, tier=Tier.DIRECTED, problem=Problem("not_finite")), found(STATE)], [0, 1]),
        ([found(STATE, tier=Tier.DIRECTED), found(STATE)], [0]),
        ([found(tier=Tier.PROPAGATED), found()], [1]), ([found(tier=Tier.PROPAGATED), found(request="b")], [0, 1]),
        ([found(tier=Tier.PROPAGATED), found(STATE)], [0, 1]), ([found(check="sampled")], [0]),
        ([found(check="draws")], []),
        ([found(tier=Tier.IDENTITY)], []), ([found(tier=Tier.DECISIONS)], []), ([found(tier=Tier.BITWISE)], [0]),
        ([found(tier=Tier.IDENTITY, check="labels")], [0]), ([found(tier=Tier.IDENTITY, sides=sides())], [0]),
        ([found(LENGTH, tier=Tier.IDENTITY)], [0]),
    ):  # fmt: skip
        if others[0].check == "draws":
            others = [replace(others[0], check=explanation_bank.Draws.name)]
        chosen = {id(one) for one in explanation_bank._first(others)}
        assert [number for number, one in enumerate(others) if id(one) in chosen] == kept, others


def test_two_requests_of_the_first_four_places_are_explained() -> None:
    """And findings about all requests, in the order of the data flow; of directed findings four places are."""
    places = [Place("trunk", layer, "mixer") for layer in range(6)]
    several = [found(place, name) for place in reversed(places) for name in ("b", None, "a", "c", "b")]
    chosen = [(one.place.layer, one.request) for one in explanation_bank._first(several)]
    assert chosen == [(layer, name) for layer in range(4) for name in ("b", None, "a", "b")]
    directed = [found(place, tier=Tier.DIRECTED) for place in places]
    assert [one.place.layer for one in explanation_bank._first(directed)] == [0, 1, 2, 3]


def test_broken_contracts_and_forbidden_writes_belong_to_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, write = Problem("broken_contract", "is broken"), Problem("forbidden_write", "8 bytes changed")
    nowhere = explanation_bank.NOWHERE
    attend = Place("trunk", 1, "attended")
    for of, other, quoted, written in (
        (found(), found(check="contracts", problem=broken), 1, False), (found(), found(
            nowhere, check="contracts", problem=broken), 1, False),
        (found(), found(STATE, check="contracts", problem=broken), 1, False),
        (found(KEYS), found(attend, check="contracts", problem=broken), 1, False),
        (found(STATE), found(attend, check="contracts", problem=broken), 0, False),
        (found(), found(STATE._replace(layer=2), check="contracts", problem=broken), 0, False),
        (found(), found(STATE._replace(stage="extend"), check="contracts", problem=broken), 0, False),
        (found(check="contracts"), found(check="contracts", problem=broken), 0, False),
        (found(), found(check="bounds", problem=broken), 0, False), (found(), found(check="contracts"), 0, False),
        (found(STATE, slot=3), found(STATE, slot=3, check="bytes", problem=write), 0, True),
        (found(STATE, slot=3), found(STATE, slot=4, check="bytes", problem=write), 0, False),
        (found(STATE, slot=3), found(CORE, slot=3, check="bytes", problem=write), 0, False),
        (found(STATE, slot=3), found(STATE, slot=3, check="contracts", problem=write), 1, False),
        (found(STATE, slot=3), found(STATE, slot=3, check="bytes", problem=broken), 0, False),
    ):  # fmt: skip
        made = explanation_bank._contracts(Problem("differs"), of, [of, other])
        assert (len(made.broken), made.written) == (quoted, write if written else None), (of, other)
    of, own = found(), replace(broken, clause="its own")
    several = [found(check="contracts", problem=replace(broken, clause=str(n))) for n in range(3)]
    made = explanation_bank._contracts(Problem("differs", written=own), of, [replace(of, problem=own), *several])
    assert [one.clause for one in made.broken] == ["0", "1"] and made.written is own
    itself = found(check="contracts", problem=broken)
    assert not explanation_bank._contracts(broken, itself, [itself]).broken


# -- their explanations ------------------------------------------------------------------------------------


def test_findings_get_the_explanation_of_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all measurements of a tensor; of several comparisons of bits the first that knows one."""
    asked = list[Any]()
    said: dict[Any, Any] = {}

    def say(finding: Comparison, *given: Any) -> Any:
        asked.append((finding.place.component, finding.request, finding.tier))
        one = said.get((finding.place, finding.request, finding.tier), said.get((finding.place, finding.request)))
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(explanation_bank, "_said", say)

    def told(findings: list[Comparison], index: int = 4) -> list[Comparison]:
        asked.clear()
        return explained(findings, SimpleNamespace(index=index), None, None)  # type: ignore[arg-type]

    own = replace(ZERO, says="by the check")
    said[CORE, "a"], said[STATE, "a"], said[KEYS, "a"] = ZERO, Unexplained(2), KeyError("x")
    findings = [found(problem=Problem("identified", "differs", own)), found(STATE), found(KEYS, sides=sides()), found(
        event=3), replace(found(), worst=0.5), found(CORE, "b")]  # fmt: skip
    made = told(findings)
    assert made[0].problem == Problem("identified", "differs", ZERO, own)
    assert made[1].problem == Problem("differs", unexplained=Unexplained(2))
    assert made[2].problem == Problem("differs",
                                      unexplained=Unexplained(error="KeyError: 'x'")) and made[2].sides is None
    assert made[3:5] == findings[3:5] and made[5].problem == Problem("differs")
    assert len(asked) == 4
    assert explained(findings[2:3], None, None, None)[0].sides is None  # type: ignore[arg-type]
    assert told([found(check=explanation_bank.OneSided.name)])[0].problem is None and not asked
    bits = [found(KEYS, "c", tier, sides=sides()) for tier in (Tier.BITWISE, Tier.IDENTITY, Tier.BITWISE)]
    said[KEYS, "c", Tier.IDENTITY] = ZERO
    assert [one.explained for one in told(bits)] == [ZERO] * 3 and len(asked) <= 3
    assert len([*told([found(), found(), found(tier=Tier.BITWISE, sides=sides())])]) == 3 and len(asked) == 2
    poison, replicas = explanation_bank.Poison.name, explanation_bank.Replicas.name
    for one, like, mistake in ((found(CORE, "b", check=poison), ("a", ZERO), None),
                               (found(CORE, None, check=replicas), None, ZERO), (found(CORE, None), None, None),
                               (found(CORE, "b", check=replicas), None, None), (found(CORE, "b"), None, None),
                               (found(STATE, "b", check=poison), None, None), (found(STATE, None, check=replicas), None,
                                                                              None)):  # fmt: skip
        problem = told([found(), one])[1].problem
        assert problem is not None and (problem.like, problem.mistake) == (like, mistake)
    for known in (FOLLOWS, Unexplained()):
        said[CORE, "a"] = known
        for one in (found(CORE, "b", check=poison), found(CORE, None, check=replicas)):
            problem = told([found(), one])[1].problem
            assert problem is not None and problem.like is None and problem.mistake is None
    said[CORE, "a"], said[CORE, "b"] = ZERO, None
    assert told([found(CORE, "a", check=poison), found(CORE, "b")])[0].problem == Problem("differs", mistake=ZERO)


def test_explanations_are_tried_in_groups_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with several fits ends the search. Numbers that are infinite have their own group."""
    fits, tried, agreeing = dict[Any, Any](), list[Any](), [False]
    monkeypatch.setattr(explanation_bank, "_best", lambda case, families: tried.append(families) or fits.get(
        families, (None, 0)))  # fmt: skip
    monkeypatch.setattr(explanation_bank, "agrees", lambda case: agreeing[0])
    unwritten = [""]
    monkeypatch.setattr(explanation_bank, "unwritten", lambda case: unwritten[0])
    case: Any = SimpleNamespace(granted=torch.ones(2), found=torch.ones(2), finding=found())
    infinite: Any = SimpleNamespace(granted=torch.ones(2), found=torch.tensor([1.0, torch.inf]), finding=found())
    exact: Any = SimpleNamespace(granted=None, found=infinite.found, finding=found())
    of = explanation_bank.explanation_of
    assert of(case) == (None, 0) and tried == [*BANK] and of(exact) == (None, 0) and tried == [*BANK] * 2
    tried.clear()
    assert of(infinite) == (None, 0) and tried == [explanation_bank.NOT_FINITE]
    unwritten[0] = "reads poison"
    assert of(infinite) == (Explained("bank", "reads poison"), 1) and of(case) == (None, 0)
    for result in ((ZERO, 1), (None, 2)):
        fits[BANK[2]] = result
        tried.clear()
        assert of(case) == result and tried == [*BANK[:3]]
    fits[explanation_bank.NOT_FINITE] = (ZERO, 1)
    assert of(infinite) == (ZERO, 1)
    agreeing[0] = True
    assert of(case) == (FOLLOWS, 1) and of(exact) == (None, 2)
    case.finding = found(check=explanation_bank.OwnInputs.name)
    assert of(case) == (None, 2)
    nearer = explanation_bank._nearer
    for first, second, said in (((None, 0), (ZERO, 1), ZERO), ((ZERO, 1), (ZERO, 1), None), ((None, 2), (ZERO, 1),
                                                                                             None),
                                ((None, 0), (None, 2), None), ((None, 0), (None, 0), None)):  # fmt: skip
        fits.clear()
        fits[BANK[0]], fits[BANK[3]] = first, second
        assert nearer(case) == said and nearer(infinite) is None


def test_the_best_explanation_keeps_its_names_and_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (Fit(says, 0.0, False, torch.ones(1), name) for says, name in (("is a", "a-name"), ("is b", "")))
    both = (WrongContent("is a"), WrongContent("is b"))
    group, slips = BANK[5], BANK[8]
    for fits, families, due in (
        ([a], BANK[0], Explained("hypothesis", "is a", names=("a-name",))),
        ([b], BANK[0], Explained("hypothesis", "is b")),
        ([a], group, Explained("hypothesis", "is a", names=("a-name",))), ([b], group, Explained("bank", "is b")),
        ([a, b], group, Explained("hypothesis", "is a", equal=both, names=("a-name",))),
        ([b, a], group, Explained("bank", "is b", equal=both[::-1], names=("a-name",))),
        ([b], slips, Explained("bank", "is b", by_all=True)), ([b], BANK[-1], Explained("bank", "is b", by_all=True)),
    ):  # fmt: skip
        monkeypatch.setattr(explanation_bank, "nearest", lambda case, made, fits=fits: fits)
        assert explanation_bank._best(SimpleNamespace(), families) == (due, 1)  # type: ignore[arg-type]
    monkeypatch.setattr(explanation_bank, "nearest", lambda case, made: [*made])
    other = replace(b, stands=torch.zeros(1))
    assert explanation_bank._best(SimpleNamespace(), (lambda case: [a], lambda case: [other])) == (None,
                                                                                                   2)  # type: ignore[arg-type, list-item]
    assert explanation_bank._best(SimpleNamespace(), ()) == (None, 0)  # type: ignore[arg-type]


def test_a_finding_is_unexplained_only_if_it_has_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    result, case = [(None, 3)], SimpleNamespace(found=torch.ones(2), granted=torch.ones(2), piece=None)
    made: list[Any] = [case]
    monkeypatch.setattr(explanation_bank, "case_of", lambda *given: made[0])
    monkeypatch.setattr(explanation_bank, "explanation_of", lambda case: result[0])
    monkeypatch.setattr(explanation_bank, "_nearer", lambda case: "nearer")
    monkeypatch.setattr(explanation_bank, "_sent", lambda finding,
                        context: ", as sent" if finding.place == CORE else "")
    monkeypatch.setattr(explanation_bank, "wrong_rule", lambda steps, told, wanted: (steps, told, wanted))
    history: Any = SimpleNamespace(steps=None, told="told")
    context: Any = of_facts(subject=SimpleNamespace(wanted_num_steps=3))

    def said(of: Comparison) -> Any:
        return explanation_bank._said(of, context, None, history)

    assert said(found()) == Unexplained(3)
    most = explanation_bank.MOST_TOKENS
    for count, partly in ((most, False), (most + 1, True)):
        case.piece = SimpleNamespace(span=SimpleNamespace(count=count))
        assert said(found()) == Unexplained(3, partly=partly)
    result[0] = (ZERO, 1)  # type: ignore[assignment]
    assert said(found()) == replace(ZERO, where=", as sent") and said(found(STATE)) == ZERO
    assert said(found(problem=Problem("identified", "", ZERO))) == "nearer"
    result[0] = (FOLLOWS, 1)  # type: ignore[assignment]
    assert said(found()) is FOLLOWS
    result[0] = (None, 0)
    for change in ({"granted": None}, {"found": torch.tensor([1.0, torch.nan])}):
        made[0] = SimpleNamespace(**{**vars(case), **change})
        assert said(found()) is None
    for nothing in (None, SimpleNamespace(**{**vars(case), "found": torch.zeros(0)})):
        made[0] = nothing
        assert said(found()) is None
    wish = found(explanation_bank.LENGTH, None, Tier.IDENTITY, explanation_bank.Identity.name)
    assert said(wish) is None
    history.steps = "steps"
    assert said(wish) == ("steps", "told", 3) and said(replace(wish, request="a")) is None


def test_the_first_rows_of_a_stage_came_from_the_stage_before() -> None:
    facts = SimpleNamespace(stage_of=lambda place: place.layer // 2, layers=[range(0, 2), range(2, 4)])
    for component, layer, stages, says in (
        ("normed", 2, facts, ", as stage 1 received them from stage 0"), ("normed", 3, facts, ""),
        ("normed", 0, facts, ""),
        ("core", 2, facts, ""), ("normed", 2, None, ""),
    ):  # fmt: skip
        context: Any = of_facts(stages=stages)
        assert explanation_bank._sent(found(Place("trunk", layer, component)), context) == says


def test_requests_of_a_place_keep_the_mistakes_that_all_of_them_may_have() -> None:
    """Two of three sentences fit the rows of "b", which are few; a formula is wrong for every request or for none."""
    place, other = Place("trunk", 1, "query"), Place("trunk", 1, "key")
    first, second, third = (WrongContent(says, name=name) for says, name in (("A", ""), ("B", "of-b"), ("C", "")))
    a, b = Explained("bank", "B", names=("of-b",)), Explained("bank", "A", "!", (first, second), ("of-b",))
    at: dict[Any, Any] = {(place, "a", True): a, (place, "b", True): b, (other, "b", True): b}
    explanation_bank._agree(at)
    assert [one.sentence for one in at.values()] == ["B", "B!", "A! [equal bits: B]"]
    assert at[place, "b", True].names == ("of-b",)
    slip = replace(b, equal=(first, third), names=(), by_all=True)
    for theirs, stays in ((a, False), (Unexplained(), False), (Unexplained(partly=True), True), (None, True)):
        at = {(place, "a", True): theirs, (place, "b", True): slip}
        explanation_bank._agree(at)
        assert (at[place, "b", True] == slip) is stays and at[place, "a", True] == theirs
