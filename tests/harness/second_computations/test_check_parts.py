"""Parts of checks, each alone on values made by hand, one of which is wrong.

Leaves out: whole runs (`test_checks.py`), the search for causes (`test_confirm_cause.py`), and formulas of
explanations (`test_mistakes.py`).
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep import tier_allowances
from instep.checks import (
    known_wrong_states,
    recomputed_values,
)
from instep.checks.error_measurement import Spot, granted_error, measured
from instep.checks.experts import Experts
from instep.checks.grown_trees import MISTAKES as TREES
from instep.checks.tensor_and_choice_judgement import flips, judge
from instep.verdict import UNDECIDABLE, Comparison, Tier, Verdict
from instep_reference.contract.engine import Load
from instep_reference.contract.place_names import Place
from instep_reference.draft.grow_draft_tree import Growing

TRUNK = Place("trunk", 0, "hidden")


def context(**given: Any) -> Any:
    """An event context of these facts. log: one without poison"""
    return SimpleNamespace(**{"index": 4, "kind": "forward", "log": SimpleNamespace(poison=None), **given})


# -- trees and experts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parents"), [("parent-one-beam-too-high", [3, 5, 4]),
                                               ("parent-one-beam-too-low", [5, 4, 3])])  # fmt: skip
def test_wrong_parents_are_beams_of_the_last_step(name: str, parents: list[int]) -> None:
    (wrong,) = (one.wrong for one in TREES if one.name == name)
    growing: Growing = wrong(3)
    growing.beams = [[-1], [0, 1, 2], [4, 3, 5]]
    assert [growing.parent(beam) for beam in range(3)] == parents


def test_a_request_parts_from_the_truth_with_a_copy_that_parted() -> None:
    """A load from a copy of a request that took other experts, and one from another copy."""
    experts = Experts(SimpleNamespace(config=SimpleNamespace(experts=0)))  # type: ignore[arg-type]
    experts.kept = {"parted"}
    for name in ("other", "parted"):
        assert not experts.parted
        assert not [*experts(context(event=Load("a", name), rounded=object()))]
    assert experts.parted == {"a"}



# -- allowances, votes, bounds -----------------------------------------------------------------------------


def test_the_looks_at_errors_of_one_side_share_one_risk() -> None:
    for look in (1, 2, 50):
        t = tier_allowances.one_sided_limit(look)
        assert 2 * math.exp(-t * t / 2) == pytest.approx(tier_allowances.ONE_SIDED_RISK / (look * (look + 1)))


def test_the_margin_of_a_choice_grows_with_the_logits_and_the_error() -> None:
    def granted(largest: float, noise: float, factor: float = 1.0) -> float:
        values = (torch.tensor(each, dtype=torch.float64) for each in (largest, noise))
        return float(tier_allowances.granted(*values, torch.float32, factor))

    assert granted(8, 0.25) == pytest.approx(2 * granted(4, 0.25)) == pytest.approx(granted(4, 0.25, 2.0))
    assert granted(1, 0.25) - granted(1, 0.125) == pytest.approx(
        tier_allowances.MARGIN_ERRORS * tier_allowances.YARDSTICK_FACTOR * 0.125)  # fmt: skip


def test_the_largest_error_of_all_draws_is_the_yardstick() -> None:
    """Two draws of one row, of which the second errs by a thousandth, and a subject that errs by 2 or 4 of these."""
    spot = Spot("derived", Tier.DERIVED, 0, "forward", Place("trunk", 0, "hidden"), "a", 1)
    truth = torch.ones(1, 16, dtype=torch.float64)
    draws = torch.stack([truth * (1 + 1e-9), truth * 1.001])
    for wrong, agrees in ((1.002, True), (1.004, False)):
        found = measured(spot, truth * wrong, truth, draws)
        assert found.agrees is agrees and found.allowed == pytest.approx(0.003)
    assert "(would pass at 4 times that)" in found.diagnosis
    granted = granted_error(spot.place, torch.float64, truth, draws)
    assert granted.flatten().tolist() == pytest.approx([0.003, 0.003])


def test_only_undecided_events_are_undecided() -> None:
    one, other = (Comparison(check, Tier.DERIVED, 0, "forward", TRUNK, elements=1, worst=2.0, allowed=1.0)
                  for check in (UNDECIDABLE, "derived"))  # fmt: skip
    for several, undecided in (([one, one], True), ([one, other], False), ([], False)):
        verdict = Verdict()
        verdict.add(several)
        assert verdict.undecided is undecided


# -- more measures and names of mistakes -------------------------------------------------------------------


def test_the_deviation_of_a_state_of_ones_is_half_a_unit() -> None:
    """2 heads of 4 x 12: a tile of 8 columns and one of 4."""
    right = torch.ones(2, 4, 12, dtype=torch.float64)
    spread = known_wrong_states._spread(torch.zeros(3, 2, 4, 12, dtype=torch.float64), right, 0.25)
    assert spread.flatten().tolist() == pytest.approx([0.125] * 4)


def test_rounding_flips_half_of_the_choices_between_two_equal_logits() -> None:
    logits = torch.tensor([[5.0, 5.0, 5.0], [9.0, 0.0, 0.0], [5.0, 5.0, 0.0]], dtype=torch.float64)
    assert [flips(row[None], 1e-3) for row in logits] == pytest.approx([1, 0, 0.5])
    assert flips(logits, 1e-3) == pytest.approx(1.5)


def test_no_draw_is_made_after_one_that_allows_the_error() -> None:
    """Three draws that err by a thousandth, and a subject that errs by 2, 4, or 4000 of these."""
    spot = Spot("propagated", Tier.PROPAGATED, 0, "forward", TRUNK, "a", 1)
    truth = torch.ones(1, 16, dtype=torch.float64)
    for wrong, agrees, made in ((1.002, True, 1), (1.004, False, 3), (5.0, False, 1)):
        draws = iter([(truth * 1.001, 0.0)] * 3)
        assert judge(spot, truth, draws, truth * wrong).agrees is agrees
        assert len([*draws]) == 3 - made


def test_a_request_without_narrow_prefixes_has_no_misrounded_state() -> None:
    piece: Any = SimpleNamespace(prefix="")
    state, check = torch.rand(1, 2, 2), SimpleNamespace(oracle=SimpleNamespace(rounds={}))
    assert recomputed_values.Derived._misrounded(check, piece, state, state) is None  # type: ignore[arg-type]
