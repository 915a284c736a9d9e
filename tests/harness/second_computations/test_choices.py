"""Choices, grown trees and experts that a side takes: judged a second time with plain numbers.

Leaves out: tokens that are drawn (`test_drawn_tokens.py`), and whole runs (`test_decisions.py`, `test_trees.py`).
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import decisions
from instep.checks.accumulated_errors import OTHER_EXPERTS
from instep.checks.error_measurement import Spot
from instep.checks.sampled_tokens import PICK, Row
from instep.checks.tensor_and_choice_judgement import Chosen, Ties, chosen, flips, judge
from instep.verdict import Comparison, Skipped, Tier
from instep.watch.event_context import RowSpan
from instep_reference.contract.answers import Committed, Drafted
from instep_reference.contract.engine import Commit, Draft, Idle
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.contract.sampling import Sampling
from instep_reference.sampling import Drawing
from support.inputs.check_contexts import of_facts as context

EPS = torch.finfo(torch.float32).eps
LOGITS = PICK._replace(component="logits")


def granted(largest: float, noise: float, eps: float = EPS, factor: float = 1.0) -> float:
    """Twice the error that T3 allows a logit of this size: 3 times that of the rounded run, and 4 units."""
    return 2 * factor * largest * (3 * noise + 4 * eps)


# -- T3 and T4 of one tensor -----------------------------------------------------------------------------


def test_further_draws_are_made_for_an_error_that_they_may_grant() -> None:
    """Errors of 1e-3 and 5e-4; a draw with an error of 4e-4 grants 1.2e-3. One of 100 allowances ends it at once."""
    spot, truth = Spot("derived", Tier.DERIVED, 1, "forward", LOGITS, "a", 3), torch.ones(2, dtype=torch.float64)
    drawn: list[float] = []

    def draws(*errors: float, least: float = 0.0) -> Any:
        for error in errors:
            drawn.append(error)
            yield truth * (1 + error), least

    for off, errors, more, made, agrees in (
        (1e-3, (4e-4, 9e-4), {}, 1, True),
        (1e-3, (3e-4, 2e-4, 4e-4, 9e-4), {}, 3, True),
        (1e-3, (3e-4, 2e-4), {}, 2, False),
        (1e-3, (3e-6, 4e-4), {}, 1, False),
        (1e-3, (3e-6, 4e-4), {"least_draws": 2}, 2, True),
        (1e-3, (2e-6, 3e-6, 4e-4), {"least_draws": 2}, 2, False),
        (1e-3, (2e-4,), {"factor": 2.0}, 1, True),
        (1e-3, (0.0,), {"stored": torch.bfloat16}, 1, True),
        (math.nan, (1e-4, 1e-4), {}, 1, False),
    ):
        drawn.clear()
        result = judge(spot, truth, draws(*errors), truth * (1 + off), **more)  # type: ignore[arg-type]
        assert (len(drawn), result.agrees) == (made, agrees), (off, errors, more)
        noise, eps = max(errors[:made]), torch.finfo(more.get("stored", torch.float64)).eps
        assert result.allowed == pytest.approx(more.get("factor", 1.0) * (3 * noise + 4 * eps), rel=1e-9)
    assert judge(spot, truth, draws(1e-4, 1e-5, least=4e-4), truth * 1.001).agrees, "each draw counts at least this"


def test_choices_by_the_margin_of_the_truth() -> None:
    """Rows whose choices agree, tie at half the allowed margin, tie at all of it, and differ by twice that."""
    logits = torch.tensor([[4.0, 1.0, 0.0]] * 4, dtype=torch.float64)
    for factor, stored in ((1.0, torch.float32), (2.0, torch.bfloat16)):
        most = granted(4.0, 1 / 64, torch.finfo(stored).eps, factor)
        logits[:, 1] = 4.0 - torch.tensor([1.0, 0.5, 1.0, 2.0]) * most
        right, own = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 1, 1])
        found = chosen(logits, right, own, 1 / 64, stored, factor=factor, rounded=logits + 1.0)
        assert found.part.tolist() == pytest.approx([0.0, 0.5, 1.0, 2.0])
        assert found.margin.tolist() == pytest.approx([0.0, most / 2, most, 2 * most])
        assert (found.differs.tolist(), found.row) == ([False, True, True, True], 3)
        assert found.worst == pytest.approx(2.0) and found.expected == factor * flips(logits, 1 / 64, logits + 1.0)
    for part, differs, row, ties in (
        ([1.0, 0.5, 0.25], [0, 1, 1], 1, 2),
        ([0.0, 0.5, 1.5], [0, 0, 0], 0, 0),
        ([1.0, 0.0, 1.5], [1, 1, 1], 2, 2),
        ([0.5, 0.0, 0.75], [0, 1, 0], 1, 1),
    ):
        tensor = torch.tensor(part)
        its = Chosen(tensor, tensor, torch.tensor(differs, dtype=torch.bool))
        assert (its.row, its.worst, its.ties, its.expected) == (row, part[row], ties, 0.0)


def test_expected_flips_are_the_chance_that_a_smaller_logit_wins() -> None:
    """A normal number exceeds m with the chance erfc(m / sqrt(2)) / 2; at most one choice of a row can flip."""
    x = torch.tensor(
        [[3.0, 2.0, -1.0, 2.5], [1.0, 1.0, 1.0, 1.0], [0.5, 0.25, 0.0, 0.1], [9.0, 0, 0, 0]], dtype=torch.float64
    )
    for off in (
        None,
        torch.tensor([[0.5, -1.0, 0.25, 0.1], [0.1, 0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0]]),
    ):
        due = 0.0
        for row, wrong in zip(x.tolist(), (0.25 * x if off is None else off).tolist(), strict=True):
            deviation = math.sqrt(sum(one * one for one in wrong) / 4)
            others = sorted(row)[:-1]
            due += min(1.0, sum(math.erfc((max(row) - other) / max(2 * deviation, 1e-300)) / 2
                                for other in others))  # fmt: skip
        assert flips(x, 0.25, None if off is None else x + off) == pytest.approx(due, rel=1e-6)
    assert flips(x * math.nan, 0.25) == 0.0


def test_ties_of_a_run_are_added_and_capped() -> None:
    """At most 3 and 3 of each expected one, or a twentieth of all choices."""
    ties = Ties("trees")
    for differs, expected in (([1, 1, 0], 0.25), ([1, 1, 1, 1], 0.25)):
        ties.add(Chosen(torch.ones(len(differs)), torch.ones(len(differs)), torch.tensor(differs) > 0, expected))
    assert (ties.made, ties.ties, ties.expected) == (7, 6, 0.5)
    (found,) = ties.too_many("grown", 9, "draft", PICK)
    assert (found.check, found.tier, found.event, found.kind, found.place) == (
        "grown",
        Tier.DECISIONS,
        9,
        "draft",
        PICK,
    )
    assert (found.elements, found.worst, found.allowed, found.undecided) == (7, 6.0, 4.5, 6)
    assert found.diagnosis == "6 of 7 trees were ties: too many"
    for made, count, expected, cap in (
        (10, 3, 0.0, None),
        (10, 4, 0.0, 3.0),
        (200, 10, 0.0, None),
        (200, 11, 0.0, 10.0),
        (200, 14, 4.0, None),
        (200, 16, 4.0, 15.0),
    ):
        assert [one.allowed for one in Ties("x", made, count, expected).too_many("c", 1, "k", PICK)] == [cap] * (
            cap is not None
        )


# -- the choices of an event -----------------------------------------------------------------------------


def test_drawn_choices_have_the_allowed_error_of_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit may err by half the allowed margin; the margin is the part of that, and each row expects its flips."""
    logits = torch.tensor([[1.0, -8.0], [2.0, 0.5]], dtype=torch.float64)
    rows, asked = Row.every(logits, Drawing.alone(Sampling(1.0), (0.5,))), list[Any]()
    monkeypatch.setattr(decisions, "against", lambda *given: asked.append(given) or [0.5, 3.0])
    monkeypatch.setattr(decisions, "apart", lambda row, theirs: float(theirs[0] + row.logits[1]))
    right, own = torch.tensor([1, 0]), torch.tensor([0, 0])
    most = [granted(8.0, 0.25), granted(2.0, 0.25)]
    for rounded, expected in ((None, 0.0), (logits + 1, 2.0 - 8.0 + 3.0 + 0.5)):
        found = decisions.drawn_choices(rows, right, own, 0.25, torch.float32, rounded)
        assert found.margin.tolist() == pytest.approx([0.5 * most[0], 3 * most[1]])
        assert found.part.tolist() == [0.5, 3.0] and found.differs.tolist() == [True, False]
        assert found.expected == expected
    drawn_from, due, its, errors, stored = asked[0]
    assert (drawn_from, due, its, stored) == (rows, [1, 0], [0, 0], torch.float32)
    assert errors == pytest.approx([most[0] / 2, most[1] / 2])


def test_a_row_of_choices_is_compared_with_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of request "a" after one of another. The truth chooses 0 by half the allowance or by twice that."""
    noise, most = 0.125, granted(4.0, 0.125)
    truth = torch.tensor([[9.0, 0.0], [4.0, 4.0 - most / 2], [4.0, 4.0 - 2 * most]], dtype=torch.float64)
    picks, extend = torch.tensor([0, 0, 0]), Place("extend", AFTER_LAYERS, "pick")
    drawing = Drawing.alone(Sampling(1.0), (0.5,))
    monkeypatch.setattr(decisions, "drawing_of", lambda context, span: None if span.request == "a" else drawing)
    monkeypatch.setattr(decisions, "drawn_choices", lambda *given: drawn.append(given) or tie)
    drawn, tie = list[Any](), Chosen(*[torch.tensor([0.0, 0.75])] * 2, torch.tensor([False, True]), 0.5)

    def judged(
        own: Any, logits: Any, name: str = "a", place: Place = PICK, rounded: Any = None, kind: str = "verify"
    ) -> Any:
        span = RowSpan(name, kind, 1, 2, 0, 1, 2)  # type: ignore[arg-type]
        sides = [{place: of, place._replace(component="logits"): its} for of, its in
                 ((picks, truth), (own, logits), (picks, rounded))]  # fmt: skip
        sides[1] = {where: tensor for where, tensor in sides[1].items() if tensor is not None}
        check = decisions.Decisions()
        check.noise = {(name, True): noise, (name, False): 0.5}
        given = context(truth=SimpleNamespace(places=sides[0]), subject=SimpleNamespace(places=sides[1]),
                        rounded=None if rounded is None else SimpleNamespace(places=sides[2]))  # fmt: skip
        one = check._chosen(given, place, span)
        assert (one.check, one.tier, one.event, one.place, one.agrees) == (
            "decisions",
            Tier.DECISIONS,
            4,
            place,
            one.problem is None or one.worst <= 1 == one.allowed,
        )
        return one.diagnosis, one.worst, one.elements, one.blocks, one.undecided, one.request, check

    def mine(*own: int) -> Any:
        """Choices, and logits of fp32 whose largest they are."""
        return torch.tensor([0, *own]), torch.eye(2)[torch.tensor([0, *own])] * 4

    def says(row: int, margin: float) -> str:
        return f"row {row} chose 1, the truth 0 by a margin of {margin:.3g}"

    for own, part, row, ties in (((0, 0), 0.0, None, 0), ((1, 0), 0.5, 0, 1), ((0, 1), 2.0, 1, 0), ((1, 1), 2.0, 1, 1)):
        for kind in ("verify", "decode"):
            found = judged(*mine(*own), kind=kind)
            assert found[0] == ("" if row is None else says(row, part * most))
            assert found[1:6] == (pytest.approx(part), 2, 2, ties, "a")
            assert found[6].ties == Ties(made=2, ties=ties, expected=flips(truth[1:], noise))
            assert found[6].tied == ({"a"} if ties and kind == "verify" else set())
    rounded = truth + torch.tensor([0.5, 1.0])
    assert judged(*mine(0, 0), rounded=rounded)[6].ties.expected == flips(truth[1:], noise, rounded[1:])
    own, logits = mine(1, 0)
    assert judged(own, logits, place=extend)[1] == pytest.approx(most / 2 / granted(4.0, 0.5)), "the error of the head"
    assert judged(own, -logits)[:2] == ("chose [1, 0] against its own logits; expected [0, 1]", 1.0)
    for shown, of, count in ((None, logits, 0), (own[:2], logits, 1), (own[:1], logits, 0), (own, None, 2)):
        found = judged(shown, of)
        assert found[:2] == (f"has {count} choices; expected 2" * (count != 2), count != 2)
    assert judged(own, -logits, "b", rounded=rounded)[:5] == (
        says(1, 0.75).replace("chose 1", "chose 0"),
        0.75,
        2,
        2,
        1,
    )
    ((rows, right, its, error, stored, beside),) = drawn
    assert [row.logits.tolist() for row in rows] == truth[1:].tolist() and [row.node for row in rows] == [0, 1]
    assert (right.tolist(), its.tolist(), error, stored) == ([0, 0], [1, 0], noise, torch.float32)
    assert torch.equal(beside, rounded[1:])
    assert judged(own, -logits, "b", extend)[0].startswith("chose"), "only the target draws"


def test_picks_of_an_event_are_judged_where_both_sides_ran_on_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [
        RowSpan(name, "decode", 0, 1, 0, 0, name != "norow")
        for name in ("gone", "norow", "others", "parted", "lost", "a")
    ]
    monkeypatch.setattr(decisions, "row_spans", lambda context, stage: spans if stage == "extend" else [])
    monkeypatch.setattr(decisions, "parted", lambda context, stage, span: span.request in ("parted", "norow", "gone"))
    lost = Skipped("decisions", 4, "lost")
    monkeypatch.setattr(decisions.Decisions, "_without_choice", lambda self, context, place, span: lost if (
        span.request == "lost") else None)  # fmt: skip
    monkeypatch.setattr(decisions.Decisions, "_chosen", lambda self, context, place, span: (place, span.request))
    place = Place("extend", AFTER_LAYERS, "pick")
    assert [*decisions.Decisions({"others", "gone"})._picks(context(shown=SimpleNamespace(gone=("gone",))), place)] == [
        Skipped("decisions", 4, OTHER_EXPERTS, f"{place} of others"),
        Skipped("decisions", 4, "the drafts differ", f"{place} of parted"), lost, (place, "a")]  # fmt: skip


def test_part_of_uniforms_that_draws_another_token() -> None:
    """Count uniforms in the middle of 1000 parts. The children 3 and 1 come first, and then the others by number."""
    drawing, order = Drawing(Sampling(1.0), (9, 3, 1, 3), (-1, 0, 0, 0), (0.0,) * 5), (3, 1, 0, 2)

    def token(chances: tuple[float, ...], uniform: float) -> int:
        return next(one for at, one in enumerate(order) if sum(chances[each] for each in order[: at + 1]) > uniform)

    for mine, other in (((0.1, 0.2, 0.3, 0.4), (0.4, 0.1, 0.3, 0.2)), ((0.1, 0.2, 0.3, 0.4), (0.1, 0.2, 0.3, 0.4)),
                        ((0.7, 0.1, 0.1, 0.1), (0.1, 0.1, 0.1, 0.7))):  # fmt: skip
        differ = sum(token(mine, at / 1000 + 0.0005) != token(other, at / 1000 + 0.0005) for at in range(1000))
        logits, theirs = (torch.tensor(each, dtype=torch.float64).log() for each in (mine, other))
        assert decisions.apart(Row(logits, drawing, 0), theirs) == pytest.approx(differ / 1000)
    assert decisions.apart(Row(logits, drawing, 0), theirs * math.nan) == 0.0


def test_own_drafts_are_judged_by_the_logits_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests "a" and "b" in a batch of three; "b" has no row in step 2. The truth's fourth draft has no logits."""
    most = granted(4.0, 1 / 64)
    logits = {1: torch.tensor([[4.0, 4.0 - most / 2, 0.0], [4.0, 4.0 - most, 0.0]], dtype=torch.float64),
              2: torch.tensor([[0.0, 0.0, 4.0]], dtype=torch.float64),
              3: torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 4.0]], dtype=torch.float64)}  # fmt: skip
    spans = {"chain.1": ["a", "b"], "chain.2": ["a"], "chain.3": ["a"], "chain.4": ["a"]}
    monkeypatch.setattr(decisions, "row_spans", lambda context, stage: [
        RowSpan(name, "draft", at, 1, 0, at, 1) for at, name in enumerate(spans[stage])])  # fmt: skip
    right = torch.tensor([[7, 9, 9, 9, 9], [1, 0, 2, 5, 9], [1, 0, 9, 9, 9]])
    places = {Place(f"chain.{step}", AFTER_LAYERS, "logits"): its for step, its in logits.items()}
    for ours, gone, due in (
        ([0, 2, 0], (), [("a", 1, 0.0, 0, ""), ("b", 1, 0.0, 0, ""), ("a", 2, 0.0, 0, "")]),
        ([1, 2, 1], (), [("a", 1, 0.5, 1, ""), ("b", 1, 1.0, 1, ""), ("a", 2, 0.0, 0, "")]),
        ([2, 2, 2], (), [("a", 1, 4 / most, 0, "own draft 2 is 2; the truth's is 0"),
                         ("b", 1, 4 / most, 0, "own draft 2 is 2; the truth's is 0"), ("a", 2, 0.0, 0, "")]),
        ([-1, 3, 0], ("b",), [("a", 1, math.inf, 0, "own draft 2 is -1; the truth's is 0"),
                              ("a", 2, math.inf, 0, "own draft 3 is 3; the truth's is 2")]),
    ):  # fmt: skip
        due = [*due, ("a", 3, 0.0, 0, "")]
        own = torch.tensor([[7, 9, 9, 9, 9], [1, *ours[:2], 5, 8], [1, ours[2], 9, 9, 9]])
        event = Draft(("x", "a", "b"))
        sides = [SimpleNamespace(answer=Drafted(each[:, 0], each, None), places=places) for each in (right, own)]
        check = decisions.Decisions()
        check.noise = {(name, False): 1 / 64 for name in "ab"}
        given = context(event=event, truth=sides[0], subject=sides[1], shown=SimpleNamespace(gone=gone))
        found = [*check._drafts(given, event)]
        assert [(one.request, one.diagnosis, one.undecided) for one in found] == [
            (name, says, ties if worst <= 1 else 0) for name, _, worst, ties, says in due]  # fmt: skip
        assert [one.worst for one in found] == pytest.approx([worst for _, _, worst, _, _ in due])
        assert [one.place for one in found] == [Place(f"chain.{step}", AFTER_LAYERS, "pick") for _, step, *_ in due]
        assert all((one.elements, one.allowed) == (1, 1.0) for one in found) and check.ties.made == len(due)


def test_own_acceptance_is_exact_unless_a_choice_of_the_window_was_undecided() -> None:
    names = ("gone", "tied", "lost", "both", "others", "right", "drafts", "bonus")
    none, right = torch.zeros(8, dtype=torch.int64), (torch.full((8,), 2), torch.arange(8))
    own = right[0] - torch.tensor([1, 1, 1, 1, 1, 0, 1, 0]), right[1] + torch.tensor([0, 0, 0, 0, 0, 0, 0, 5])
    answers = [Committed(none, none, none[:, None], none, none, *each) for each in (right, own)]
    check = decisions.Decisions({"others"})
    check.tied, check.lost = {"tied", "both"}, {"lost", "both"}
    given = context(subject=SimpleNamespace(answer=answers[1]), truth=SimpleNamespace(answer=answers[0]),
                    shown=SimpleNamespace(gone=("gone",)))  # fmt: skip
    found = [*check._accepted(given, Commit(names))]
    skipped = [(one.check, one.event, one.reason, one.where) for one in found if isinstance(one, Skipped)]
    assert skipped == [("decisions", 4, why, f"{PICK} of {name}") for name, why in (
        ("tied", "a choice in the window was a tie"), ("lost", decisions.NO_CHOICE), ("both", decisions.NO_CHOICE),
        ("others", OTHER_EXPERTS))]  # fmt: skip
    assert [(one.request, one.diagnosis, one.place) for one in found if isinstance(one, Comparison)] == [
        ("right", "", PICK), ("drafts", "own (accepted drafts, bonus) are (1, 6); expected (2, 6)", PICK),
        ("bonus", "own (accepted drafts, bonus) are (2, 12); expected (2, 7)", PICK)]  # fmt: skip
    assert (check.tied, check.lost) == (set(), set())


def test_parts_of_an_event_are_judged_where_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Picks of every shown stage, chains of drafts, acceptance, and once in a run the total of ties."""
    monkeypatch.setattr(decisions, "carried", lambda context: {"carried": context.index})
    for name in ("_picks", "_drafts", "_accepted"):
        monkeypatch.setattr(decisions.Decisions, name, lambda self, context, of, name=name: [(name, of)])
    picks = [Place(stage, AFTER_LAYERS, "pick") for stage in ("trunk", "extend", "extend.1")]
    places, check = dict.fromkeys([LOGITS, *picks]), decisions.Decisions()
    for event, whole, feeds, topk, due in (
        (Idle(), False, ("draft", "logits"), None, []), (Draft(("a",)), False, ("draft",), None, ["_drafts"]),
        (Draft(("a",)), False, ("logits",), None, []), (Draft(("a",)), True, ("draft",), None, []),
        (Draft(("a",)), False, ("draft",), 2, []), (Commit(("a",)), False, ("logits",), None, ["_accepted"]),
        (Commit(("a",)), True, ("draft",), None, []),
    ):  # fmt: skip
        given = context(event=event, truth=SimpleNamespace(places=places), expected=SimpleNamespace(topk=topk),
                        shown=SimpleNamespace(whole=whole, has=lambda what, feeds=feeds: what in feeds,
                                              place=lambda place: place.stage != "extend"))  # fmt: skip
        assert [*check(given)] == [("_picks", picks[0]), ("_picks", picks[2]), *((name, event) for name in due)]
        assert check.noise == {"carried": 4}
    check.ties.ties = 4
    assert [isinstance(one, Comparison) for one in check(given)] == [False, False, True]
    assert check.full and len([*check(given)]) == 2
