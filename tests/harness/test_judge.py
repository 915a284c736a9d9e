"""The one judge of T3 and T4: when another draw is made, what is granted, and when ties are too many.

Leaves out: the callers (`test_checks.py`, `test_relations.py`, `test_generate.py`, `test_gate.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from operator import ne

import pytest
import torch

from instep.checks.decisions import apart
from instep.checks.error_measurement import Spot
from instep.checks.sampled_tokens import Row
from instep.checks.tensor_and_choice_judgement import Chosen, Draw, Ties, chosen, flips, judge
from instep.tier_allowances import LUCK, MARGIN_ERRORS, TIES_ALWAYS, allowed
from instep.verdict import Tier
from instep_reference.contract.place_names import Place
from instep_reference.contract.sampling import Sampling
from instep_reference.sampling import Drawing

PLACE = Place("trunk", 0, "hidden")
SPOT = Spot("a check", Tier.PROPAGATED, 3, "commit", PLACE, "a", 5)
TRUTH = torch.linspace(1, 2, 64, dtype=torch.float64)[None]


def off(part: float) -> torch.Tensor:
    return TRUTH * (1 + part)


def counted(draws: list[Draw], made: list[int]) -> Iterator[Draw]:
    for number, draw in enumerate(draws):
        made.append(number)
        yield draw


@pytest.mark.parametrize(("error", "made", "agrees"), [
    (2e-3, [0], True),  # within 3 times the first draw's error
    (5e-3, [0, 1], True),  # the second draw errs as much
    (9e-3, [0, 1, 2], False),  # no draw does
    (4e-3 * LUCK, [0], False),  # no luck explains it: called wrong at once
    (float("nan"), [0], False),
])  # fmt: skip
def test_another_draw_is_made_only_before_an_error_is_called_wrong(error: float, made: list[int], agrees: bool) -> None:
    asked: list[int] = []
    result = judge(SPOT, TRUTH, counted([(off(1e-3), 0.0), (off(2e-3), 0.0), (off(1e-3), 0.0)], asked), off(error))
    assert (asked, result.agrees) == (made, agrees)
    assert (result.check, result.event, result.slot, result.request) == ("a check", 3, 5, "a")


def test_a_draw_counts_as_no_less_than_its_least_error() -> None:
    exact = judge(SPOT, TRUTH, [(TRUTH, 0.0)], off(1e-3))
    assert not exact.agrees
    assert judge(SPOT, TRUTH, [(TRUTH, 1e-3)], off(1e-3)).agrees


def test_factor_multiplies_the_allowance() -> None:
    one, two = (judge(SPOT, TRUTH, [(off(1e-3), 0.0)], off(5e-3), factor=factor) for factor in (1.0, 2.0))
    assert not one.agrees and two.agrees and two.allowed == pytest.approx(2 * one.allowed)


def test_the_stored_dtype_grants_its_own_rounding() -> None:
    found = off(1e-3)
    assert not judge(SPOT, TRUTH, [(TRUTH, 0.0)], found, stored=torch.float32).agrees
    assert judge(SPOT, TRUTH, [(TRUTH, 0.0)], found, stored=torch.bfloat16).agrees


def test_missing_tensor_never_agrees() -> None:
    assert not judge(SPOT, TRUTH, [(TRUTH, 0.0)], None).agrees


def test_a_choice_may_differ_while_the_truth_hardly_chose() -> None:
    noise = 1e-3
    granted = MARGIN_ERRORS * 10.0 * float(allowed(torch.tensor(noise), torch.float32))
    logits = torch.tensor([[10.0, 10.0 - granted / 2], [10.0, 10.0 - granted * 2], [10.0, 1.0]], dtype=torch.float64)
    choices = chosen(logits, torch.tensor([0, 0, 0]), torch.tensor([1, 1, 0]), noise, torch.float32)
    assert choices.ties == 1 and choices.row == 1
    assert choices.worst == pytest.approx(2.0) and choices.part.tolist()[2] == 0.0
    twice = chosen(logits, torch.tensor([0, 0, 0]), torch.tensor([1, 1, 0]), noise, torch.float32, factor=2.5)
    assert twice.ties == 2 and twice.worst == pytest.approx(0.8)


def test_nan_margin_is_no_tie() -> None:
    logits = torch.tensor([[float("nan"), 1.0]], dtype=torch.float64)
    choices = chosen(logits, torch.tensor([1]), torch.tensor([0]), 1e-3, torch.float32)
    assert choices.ties == 0 and not choices.worst <= 1


def test_too_many_ties_are_a_finding() -> None:
    ties = Ties(made=100, ties=5)
    assert not list(ties.too_many("ties", 4, "commit", PLACE))
    ties.ties += 1
    (found,) = ties.too_many("ties", 4, "commit", PLACE)
    assert not found.agrees and found.diagnosis == "6 of 100 choices so far were ties: too many"
    assert (found.check, found.event, found.kind, found.undecided) == ("ties", 4, "commit", 6)


@pytest.mark.parametrize(("gap", "error"), [(0.1, 0.02), (0.02, 0.02), (0.0, 1e-3)])
def test_expected_number_of_ties_follows_from_the_error(gap: float, error: float) -> None:
    draw, vocab, many = torch.Generator().manual_seed(0), 32, 4000
    logits = torch.randn(1, vocab, generator=draw, dtype=torch.float64).clamp(max=1.0)
    logits[0, 5], logits[0, 9] = 2.0, 2.0 - gap
    noisy = logits + error * torch.randn(many, vocab, generator=draw, dtype=torch.float64)
    fell = float((noisy.argmax(-1) != 5).double().mean())
    own = float(logits.square().mean().sqrt())
    assert flips(logits, error / own) == pytest.approx(fell, abs=0.025)
    assert flips(logits, 0.0) == (0.5 if gap == 0 else 0.0)
    drawing = Drawing(Sampling(0.7, 20, 0.9), (0, 3, 7), (-1, 0, 0), (0.0,) * 4)
    beside = [Row(row, drawing, 0) for row in (logits[0], noisy[0])]
    drawing_at = [replace(drawing, uniforms=(u, u, u, u)) for u in torch.linspace(0, 1, 201)[:-1].tolist()]
    parted = [replace(one, drawing=how).drawn for one in beside for how in drawing_at]
    other = sum(map(ne, parted[:200], parted[200:])) / 200
    assert 0 < apart(*beside[:1], noisy[0]) == pytest.approx(other, abs=0.02)


def test_expected_ties_from_rounding_are_granted() -> None:
    ties = Ties(made=24, ties=6, expected=1.0)
    assert not list(ties.too_many("ties", 0, "commit", PLACE))
    ties.ties += 1
    assert list(ties.too_many("ties", 0, "commit", PLACE))
    lost = torch.full((1, 4), torch.nan, dtype=torch.float64)
    assert chosen(lost, torch.tensor([1]), torch.tensor([1]), 0.1, torch.float32).expected == 0
    near, either = torch.tensor([[2.0, 1.99, 0.0]], dtype=torch.float64), torch.tensor([[0], [1]])
    one, other = (chosen(near, n, 1 - n, 1e-2, torch.float32).expected for n in either)
    assert 0 < one == other < 0.5, "choosing the smaller one grants no more ties"


def test_a_few_ties_are_always_allowed_and_all_choices_are_counted() -> None:
    ties, hardly = Ties("tokens"), Chosen(torch.zeros(2), torch.tensor([0.5, 0.0]), torch.tensor([True, False]))
    for _ in range(TIES_ALWAYS):
        ties.add(hardly)
    assert (ties.made, ties.ties) == (2 * TIES_ALWAYS, TIES_ALWAYS)
    assert not list(ties.too_many("ties", 0, "generate", PLACE))
    ties.add(hardly)
    (found,) = ties.too_many("ties", 0, "generate", PLACE)
    assert "tokens were ties" in found.diagnosis


def test_differing_choice_is_the_one_reported() -> None:
    """Two equal logits: the part of what is allowed is 0 in every row."""
    zeros = torch.zeros(3, dtype=torch.float64)
    assert Chosen(zeros, zeros, torch.tensor([False, True, False])).row == 1
    assert Chosen(zeros, torch.tensor([0.0, 0.1, 2.0]), torch.tensor([False, True, True])).row == 2
    lost = torch.tensor([0.5, torch.nan, 0.1])
    assert Chosen(lost, lost, torch.tensor([True, True, True])).row == 1
    assert Chosen(zeros, zeros, torch.tensor([False, False, False])).worst == 0
