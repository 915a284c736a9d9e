"""The choice of findings to explain, their data, and what requests have in common, alone on values made by hand.

Leaves out: whether an explanation fits (`test_explanation_fit.py`), and findings of runs (`test_diagnose.py`).
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose import explanation_bank
from instep.diagnose.explanation_bank import BANK, FOLLOWS, explained
from instep.diagnose.mistakes import finding_case
from instep.diagnose.mistakes.explanation_fit import Fit
from instep.diagnose.mistakes.finding_case import Case, Explanation, case_of
from instep.finding_problem import Explained, Problem, Unexplained, WrongContent
from instep.verdict import Comparison, Sides, Tier
from instep.watch.event_context import RowSpan
from instep_reference.contract.declared_rounding import Blocked
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
    # Pages 5 and 6 are of "a", and 7 is of "b".
    facts: Any = SimpleNamespace(expected=SimpleNamespace(pages_in_use={"a": (5, 6), "b": (7,)}.__getitem__))
    astray = found(KEYS, None, check="tails", problem=write, units=(4, 6), rank=1)
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
        (found(KEYS, rank=1), astray, 0, True), (found(KEYS, rank=1, slot=3), astray, 0, True),
        (found(KEYS), astray, 0, False), (found(KEYS, "b", rank=1), astray, 0, False),
        (found(KEYS, None, rank=1), astray, 0, False), (found(KEYS._replace(layer=2), rank=1), astray, 0, False),
        (found(KEYS, rank=1), replace(astray, units=(4, 9)), 0, False),
        (found(KEYS, rank=1), replace(astray, check="copies"), 0, False),
    ):  # fmt: skip
        made = explanation_bank._contracts(Problem("differs"), of, [of, other], facts)
        assert (len(made.broken), made.written) == (quoted, write if written else None), (of, other)
    of, own = found(), replace(broken, clause="its own")
    several = [found(check="contracts", problem=replace(broken, clause=str(n))) for n in range(3)]
    made = explanation_bank._contracts(Problem("differs", written=own), of, [replace(of, problem=own), *several], facts)
    assert [one.clause for one in made.broken] == ["0", "1"] and made.written is own
    itself = found(check="contracts", problem=broken)
    assert not explanation_bank._contracts(broken, itself, [itself], facts).broken


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
    general = replace(ZERO, vague=True)
    for first, second, like, mistake in ((general, ZERO, ("b", ZERO), None), (general, general, None, general),
                                         (general, None, None, general)):  # fmt: skip
        said[CORE, "a"], said[CORE, "b"] = first, second
        problem = told([found(CORE, "a", check=poison), found(CORE, "b")])[0].problem
        assert problem is not None and (problem.like, problem.mistake) == (like, mistake)


def test_explanations_are_tried_in_groups_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with several fits ends the search. Numbers that are infinite have their own group."""
    fits, tried, agreeing = dict[Any, Any](), list[Any](), [False]
    monkeypatch.setattr(explanation_bank, "_best", lambda case, families: tried.append(families) or fits.get(
        families, (None, 0)))  # fmt: skip
    monkeypatch.setattr(explanation_bank, "agrees", lambda case: agreeing[0])
    unwritten: list[Explained | None] = [None]
    monkeypatch.setattr(explanation_bank, "unwritten", lambda case: unwritten[0])
    case: Any = SimpleNamespace(granted=torch.ones(2), found=torch.ones(2), finding=found())
    infinite: Any = SimpleNamespace(granted=torch.ones(2), found=torch.tensor([1.0, torch.inf]), finding=found())
    exact: Any = SimpleNamespace(granted=None, found=infinite.found, finding=found())
    of = explanation_bank.explanation_of
    assert of(case) == (None, 0) and tried == [*BANK] and of(exact) == (None, 0) and tried == [*BANK] * 2
    tried.clear()
    assert of(infinite) == (None, 0) and tried == [explanation_bank.NOT_FINITE]
    unwritten[0] = Explained("bank", "reads poison")
    assert of(infinite) == (unwritten[0], 1) and of(case) == (None, 0)
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
        fits[BANK[0]], fits[BANK[1]] = first, second
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


def test_an_unexplained_finding_takes_the_one_mistake_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two others at least, twice as many as are unexplained, by one mistake, which is the nearest to this one's error.

    An error of 1, 2, 3 and the mistake's of 1, 2, 2: a third of 14 ** -0.5 is left. A reading of several counts, too.
    """
    error, mine = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, 2.0]])
    case: Any = SimpleNamespace(found=error, right=torch.zeros(1, 3), granted=torch.ones(2), once=False)
    at = [Explanation("is late", mine, name="late"), Explanation("is other", 2 * error),
          Explanation("has another shape", error[0]), Explanation("is infinite", error / 0)]  # fmt: skip
    near, bank = list(at), {"known": 0}
    monkeypatch.setattr(explanation_bank, "BANK", ((lambda of: near[bank["known"] :],), (lambda of: near,)))
    late, other = Explained("hypothesis", "is late by 2", names=("late",)), Explained("bank", "is other")
    either = replace(late, equal=(WrongContent("is other"), WrongContent("is late by 2", name="late")))
    first, no = (CORE, "a", True), Unexplained()

    def said(*others: Any, one: Any = no, by_check: Any = None, of: Any = case) -> Any:
        places = {(Place("trunk", 2 + number, "core"), "a", True): each for number, each in enumerate(others)}
        findings = {what: found(what[0], problem=Problem("identified", "", by_check) if number else None)
                    for number, what in enumerate((first, *places))}
        made = explanation_bank._shared({first: one, **places}, findings, lambda finding: of)
        return made.pop(first, None), made

    left = f"{14 ** -0.5:.1%}"
    assert left == "26.7%" and said(late, late) == (None, {}), "more than the largest part"
    near[0] = at[0]._replace(wrong=torch.tensor([[1.0, 2.0, 2.5]]))
    where = ", as in 2 of 2 other findings of this event, but 13.4% of this error remains"
    due = Explained("hypothesis", "is late", where, names=("late",))
    assert said(late, late) == (due, {}) and said(late, either) == (due, {}) and said(late, late, FOLLOWS) == (due, {})
    assert said(None, None, by_check=late) == (due, {}) and said(late, late, None)[0] == due
    assert said(late, late, no)[0].where.startswith(", as in 2 of 3 other")
    assert said(late, late, one=Unexplained(partly=True))[0] == due
    for others in ((late,), (late, other), (late, late, other), (late, late, no, no), (other, other), (no, no), (
            replace(late, by_all=True), late), (late, replace(late, vague=True)), (FOLLOWS, FOLLOWS)):  # fmt: skip
        assert said(*others)[0] is None, others
    for one in (Unexplained(2), Unexplained(error="KeyError"), None, other):
        assert said(late, late, one=one)[0] is None
    exact = SimpleNamespace(**{**vars(case), "granted": None})
    assert said(late, late, of=None)[0] is None and said(late, late, of=exact)[0] is None
    near[1] = Explanation("is other", error * 1.01)
    assert said(late, late)[0] is None, "another mistake is nearer"
    assert said(other, other)[0] == Explained("hypothesis", "is other", where.replace("13.4", "1.0"))
    bank["known"] = 2
    assert said(other, other)[0].by == "bank"
    near.clear()
    assert said(late, late) == (None, {}), "nothing was tried"


# -- the data of a finding -----------------------------------------------------------------------------------


def span(request: str, begin: int, count: int) -> RowSpan:
    return RowSpan(request, "prefill", begin, count, 3, begin, count)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Recomputations of the event, and what else `oracle.at` gives."""
    several: list[Any] = []
    monkeypatch.setattr(finding_case, "Recomputation", SimpleNamespace)
    monkeypatch.setattr(finding_case, "row_spans", lambda context, stage: [span("a", 0, 2), span("b", 2, 1), span(
        "c", 3, 0)] if stage == "trunk" else [])  # fmt: skip
    return several


def piece_of(request: str = "a", layer: int = 1, places: Any = (CORE,), **given: Any) -> Any:
    def place(component: str) -> Place:
        return Place("trunk", layer, component)

    more = {"writes_state": True, "prefix": "", "own": {}, "from_own_inputs": None, **given}
    return SimpleNamespace(request=request, stage="trunk", layer=layer, place=place, truth=SimpleNamespace(places=dict(
        places) if isinstance(places, dict) else dict.fromkeys(places)), **more)  # fmt: skip


def test_numbers_are_rounded_to_dtypes_that_hold_them_and_change_them() -> None:
    for x, said in (([1.0], []), ([1 + 2.0**-9], ["bfloat16"]), ([1 + 2.0**-12, 1.0], ["bfloat16", "float16"]),
                    ([70000.0, 1.0], ["bfloat16"]), ([65536.0, 1.0], [])):  # fmt: skip
        made = dict(finding_case.in_16_bits(torch.tensor(x)))
        assert [*made] == said
        assert all(torch.equal(y, torch.tensor(x).to(finding_case.NARROW[name]).float()) for name, y in made.items())


def test_a_finding_has_a_case_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {name: None for name in ("_of_labels", "_piece", "_free_running", "_of_piece")}
    for name in of:
        monkeypatch.setattr(finding_case, name, lambda *given, name=name: of[name] or name)
    context, history, oracle, raised = (SimpleNamespace() for _ in range(4))

    def case(**given: Any) -> Any:
        return case_of(found(**given), context, oracle, history)  # type: ignore[arg-type]

    both = sides()
    made = case(sides=both, request=None)
    assert (made.found, made.right, made.granted, made.oracle) == (both.found, both.right, None, oracle)
    for given, due in (
        ({"raised": raised}, None), ({"request": None}, None), ({"tier": Tier.IDENTITY}, None),
        ({"tier": Tier.IDENTITY, "check": "labels"}, "_of_labels"), ({}, "_of_piece"),
        ({"tier": Tier.DIRECTED}, "_of_piece"),
        ({"check": "labels"}, "_of_piece"), ({"tier": Tier.IDENTITY, "check": finding_case.Poison.name}, "_of_piece"),
    ):  # fmt: skip
        assert case(**given) == due
    monkeypatch.setattr(finding_case, "_piece", lambda *given: None)
    assert case() == "_free_running"


def test_a_finding_is_compared_with_the_recomputation_of_its_request(pieces: list[Any]) -> None:
    """A state belongs to a prefix or to the request itself."""
    mine, theirs, prefix = piece_of(), piece_of("b"), piece_of(places=(), prefix="p")
    other, reads = piece_of(layer=2, places=()), piece_of(places=(), writes_state=False)
    for of, several, due in (
        (found(), [object(), theirs, mine], mine), (found(), [theirs], None), (found(), [other], None),
        (found(STATE), [theirs, other, reads, prefix, mine], mine), (found(STATE), [reads, prefix], None),
        (found(STATE, problem=Problem("differs", prefix="p")), [mine, prefix], prefix),
        (found(STATE, problem=Problem("differs")), [prefix, mine], mine), (found(KEYS), [mine], None),
    ):  # fmt: skip
        oracle: Any = SimpleNamespace(at=lambda context, several=several: several)
        assert finding_case._piece(of, None, oracle) is due  # type: ignore[arg-type]
    assert finding_case._piece(found(), None, None) is None  # type: ignore[arg-type]


def side(**given: Any) -> Any:
    return SimpleNamespace(places=given.pop("places", {}), after=given)


def test_without_a_recomputation_a_place_is_compared_with_the_truth_of_the_run(
    pieces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request "a" has rows 0 and 1."""
    monkeypatch.setattr(finding_case, "granted_error", lambda place, dtype, truth, rounded: (
        place, dtype, truth.tolist(), rounded.tolist()))  # fmt: skip
    x, y, z = (torch.arange(4.0) + at for at in (0, 10, 20))
    sides_of = {"subject": side(places={CORE: x}), "truth": side(places={CORE: y}), "rounded": side(places={CORE: z})}
    made: Any = finding_case._free_running(found(), of_facts(**sides_of), None)  # type: ignore[arg-type]
    assert (made.found.tolist(), made.right.tolist()) == ([0, 1], [10, 11])
    assert made.granted == (CORE, torch.float32, [10, 11], [[20, 21]])
    for change in ({"rounded": None}, {"subject": side()}, {"truth": side()}, {"rounded": side()},
                   {"truth": side(places={CORE: y[:1]})}):  # fmt: skip
        assert finding_case._free_running(found(), of_facts(**{**sides_of, **change}),
                                          None) is None  # type: ignore[arg-type]
    for of in (found(CORE._replace(stage="extend")), found(request="d"), found(request="c")):
        assert finding_case._free_running(of, of_facts(**sides_of), None) is None  # type: ignore[arg-type]


def test_labels_are_those_of_rows_or_of_memory_that_the_check_did_not_recognise(pieces: list[Any]) -> None:
    x, y = torch.arange(4), torch.arange(4) + 10
    state = [SimpleNamespace(parts=lambda x=x: [(KEYS, x)]) for x in (x, y, x[:1], x[:0])]
    differs = found(KEYS, problem=Problem("differs"))
    given = {"subject": side(places={CORE: x}, a=state[0]), "truth": side(places={CORE: y}, a=state[1])}
    empty = {name: side(places={CORE: x}, a=state[3]) for name in given}
    for of, change, due in (
        (found(), {}, ([0, 1], [10, 11])), (found(request="b"), {}, ([2], [12])), (found(request="d"), {}, None),
        (found(request="c"), {}, None), (found(), {"subject": side()}, None), (found(), {"truth": side()}, None),
        (found(), {"truth": side(places={CORE: y[:1]})}, None), (differs, {}, (x.tolist(), y.tolist())),
        (found(KEYS, problem=Problem("unidentified")), {}, (x.tolist(), y.tolist())),
        (found(KEYS, problem=Problem("identified")), {}, None), (found(KEYS), {}, None),
        (replace(differs, request="b"), {}, None), (differs, {"truth": side(a=state[2])}, None), (differs, empty, None),
    ):  # fmt: skip
        made: Any = finding_case._of_labels(of, of_facts(**{**given, **change}), None)  # type: ignore[arg-type]
        assert (made and (made.found.tolist(), made.right.tolist(), made.granted)) == (due and (*due, None))


def test_a_case_knows_rows_of_its_request_and_of_others(pieces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows inside a fused op are those of the recomputation. Right rows of others are computed from their own."""
    ours, right = (torch.arange(4.0).view(4, 1) + at for at in (0, 10))
    own, inside = torch.ones(1), torch.zeros(1)
    mixed, q = Place("trunk", 1, "mixed"), Place("trunk", 1, "q")
    monkeypatch.setattr(finding_case, "rerun", lambda piece, weights, changes=None: SimpleNamespace(
        places={CORE: (piece.request, piece.layer, weights, changes)}, state="state"))  # fmt: skip
    context = of_facts(subject=side(places={CORE: ours}), truth=side(places={CORE: right}), shown=SimpleNamespace(
        inside=("q",)))  # fmt: skip
    oracle: Any = SimpleNamespace(at=lambda context: pieces, runner=SimpleNamespace(truth="weights"))
    mine = piece_of(places={CORE: None, q: inside}, own={mixed: own, q: own})
    case = Case(found(), ours, right, None, context, None, oracle, mine)  # type: ignore[arg-type]
    pieces += [object(), mine, piece_of("b"), piece_of("c", layer=2), piece_of("d", places=()), piece_of("e")]
    pieces[-1].stage = "extend"
    assert [*case.rights()] == [('of request "b"', ("b", 1, "weights", None))] and len(case.pieces) == 5
    assert torch.equal(case.own("mixed"), own.double()) and torch.equal(case.own("q"),
                                                                        inside.double())  # type: ignore[arg-type]
    assert case.own("k") is None and case.again({"q": own}) == ("a", 1, "weights", {"q": own})
    assert case.again(weights="others") == ("a", 1, "others", None)  # type: ignore[arg-type, comparison-overlap]
    assert replace(case, finding=found(STATE)).again() == "state" and replace(case,
                                                                              finding=found(KEYS)).again() is None  # type: ignore[comparison-overlap]
    mine.from_own_inputs = SimpleNamespace(truth=SimpleNamespace(places={q: inside + 2}))
    assert torch.equal(case.own("q"), inside.double() + 2)  # type: ignore[arg-type]
    assert [(whose, x.tolist(), x.dtype) for whose, x in case.others("core")] == [
        ('of request "b"', [[2.0]], torch.float64)]  # fmt: skip
    assert [(whose, x.tolist()) for whose, x in case.everybody(CORE)] == [("a", [[0], [1]]), ("b", [[2]])]
    free = replace(case, piece=None, oracle=None)
    assert [(whose, x.tolist()) for whose, x in free.rights()] == [('of request "b"', [[12]])]
    assert not [*replace(free, context=of_facts(truth=side())).rights()]
    assert free.pieces == [] and free.own("mixed") is None
    assert [one.sentence for one in case.made("is made")] == ["is made"]
    assert not [*replace(case, finding=found(KEYS)).made("is made")]


def test_a_recomputation_gives_the_right_tensor_and_the_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of another dtype than declared is reported by its finding. `once`: it was rounded once."""
    x, right, tiles = torch.ones(2), torch.zeros(2).double(), Blocked(torch.float8_e4m3fn, (2, 3))
    other, sampled = SimpleNamespace(shape=x.shape, cpu=lambda: "other"), torch.zeros(3, 2).double()
    rounded_once, stored = [False], [x.dtype]
    for name, made in (
        ("rows", lambda side, place, span: side), ("scale_of", lambda near, place: "scale"),
        ("sampled_rows", lambda near, place, rounds: sampled), ("granted_error", lambda *given: given),
        ("OwnInputs", lambda oracle: SimpleNamespace(rounded_once=lambda *given: rounded_once[0],
                                                     stored=lambda *given: stored[0])),
    ):  # fmt: skip
        monkeypatch.setattr(finding_case, name, made)

    def near(right: Any, own: Any = None) -> Any:
        return SimpleNamespace(from_own_inputs=own, truth=SimpleNamespace(state=right, places={CORE: right}),
                               yardsticks=SimpleNamespace(state=sampled))  # fmt: skip

    def case(place: Place, shown: Any = x, of: Any = None, declared: Any = torch.float32, **given: Any) -> Any:
        piece = SimpleNamespace(**{"with_all_draws": lambda: of or near(right), "layer": 1, "span": None,
                                   "near": object(),
                                   "left": lambda side: SimpleNamespace(state={1: side}), "narrow": False, **given})
        piece.kept_in = lambda rounds: piece.narrow
        oracle = None if declared == "none" else SimpleNamespace(rounds={"state": declared})
        return finding_case._of_piece(found(place), SimpleNamespace(subject=shown), oracle, None,
                                      piece)  # type: ignore[arg-type]

    for place, scale in ((CORE, "scale"), (STATE, None)):
        for once, storage in ((False, torch.float32), (True, torch.float64)):
            rounded_once[0] = once
            made = case(place)
            assert made.found is x and torch.equal(made.right, right) and made.once is once and made.scale == scale
            assert (made.granted[:2], made.granted[3:]) == ((place, storage), (sampled, scale))
            assert not case(place, near=None).once
        assert case(place, of=near(right, near(other))).right == "other"
        assert case(place, shown=None) is None and case(place, shown=torch.ones(3)) is None
        assert case(place, of=near(None)) is None and case(place, declared="none").granted[1] == torch.float32
        stored[0] = torch.bfloat16
        assert case(place) is None and case(place, declared="none") is not None
        stored[0] = torch.float32
    for declared, narrow, known in ((torch.bfloat16, False, False), (torch.float32, True, False), (None, False, True),
                                    (tiles, False, tiles.shown == x.dtype), (torch.bfloat16, True, False)):
        assert (case(STATE, declared=declared, narrow=narrow) is not None) is known
        assert case(CORE, declared=declared, narrow=narrow) is not None
