"""Parts of checks, each alone on values made by hand, one of which is wrong.

Leaves out: whole runs (`test_checks.py`), the search for causes (`test_confirm_cause_alone.py`), and formulas of
explanations (`test_mistakes.py`).
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep import tier_allowances
from instep.checks import (
    check_interface,
    known_wrong_states,
    recomputed_values,
    unchanged_bytes,
)
from instep.checks.error_measurement import Spot, granted_error, measured
from instep.checks.exact_labels import folded, states_of_window
from instep.checks.experts import Experts
from instep.checks.grown_trees import MISTAKES as TREES
from instep.checks.tensor_and_choice_judgement import flips, judge
from instep.checks.trace_bookkeeping import Identity
from instep.verdict import UNDECIDABLE, Comparison, Tier, Verdict
from instep.watch.memory_changes import pattern
from instep_reference.contract.engine import Draft, Forward, Idle, Load, Row
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.draft.grow_draft_tree import Growing

TRUNK = Place("trunk", 0, "hidden")


def context(**given: Any) -> Any:
    """An event context of these facts. log: one without poison"""
    return SimpleNamespace(**{"index": 4, "kind": "forward", "log": SimpleNamespace(poison=None), **given})


# -- trees, experts, bookkeeping -------------------------------------------------------------------------


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


def test_a_place_that_the_subject_lacks_has_0_rows() -> None:
    whole = SimpleNamespace(place=lambda place: True, whole=True, has=lambda feed: feed == "watch")
    span = SimpleNamespace(at=lambda place: (0, 3))
    event = Forward((Row("a", "prefill", 3),))
    expected = SimpleNamespace(prompts={"a": (1, 2, 3)}, lengths_after={"a": 3}, windows={}, parents={})
    truth = SimpleNamespace(places={TRUNK: torch.zeros(3, 2)})
    given = context(event=event, truth=truth, subject=SimpleNamespace(places={}), shown=whole, expected=expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instep.checks.trace_bookkeeping.row_spans", lambda context, stage: [span])
        (found,) = Identity()._row_counts(given)
        whole.whole = False  # the harness itself packs what comes after the layers
        truth.places[Place("trunk", AFTER_LAYERS, "final")] = torch.zeros(1, 2)
        assert [*Identity()._row_counts(given)] == [found]
    assert found.diagnosis == "has 0 rows; expected 3"


def test_picks_of_a_draft_head_are_those_of_its_kind() -> None:
    """Two requests with two drafts each. A block has the root, whose pick is not used, and the drafts."""
    picks = {Place("block", AFTER_LAYERS, "pick"): torch.tensor([90, 11, 12, 91, 21, 22])}
    state = SimpleNamespace(block_keys={0: torch.zeros(1)})
    expected = SimpleNamespace(lengths_after={"a": 5, "b": 7}, parents={"a": (-1, 0, 1), "b": (-1, 0, 1)}, topk=None)
    # An MTP head: the first draft was proposed before, the second is the pick of the step after it.
    chain = {Place("chain.1", AFTER_LAYERS, "pick"): torch.tensor([31, 32])}
    head = SimpleNamespace(block_keys={}, proposal=8)
    subject = SimpleNamespace(before={"b": head}, places=chain)
    given = context(event=Draft(("a", "b")), expected=expected, subject=subject)
    assert [pick for *_, pick in Identity()._heads(given, 1, "b", 2)] == [8, 32]
    assert not [*Identity()._heads(given, 1, "b", 0)] and not [*Identity()._heads(given, 0, "a", 2)]
    given = context(event=Draft(("a", "b")), expected=expected,
                    subject=SimpleNamespace(before={"a": state, "b": state}, places=picks))  # fmt: skip
    found = [pick for *_, pick in Identity()._heads(given, 1, "b", 2)]
    assert found == [21, 22] and [*Identity()._heads(given, 1, "b", 0)] == []


# -- helpers of checks -------------------------------------------------------------------------------------


def test_a_batch_is_in_another_order_if_all_wrong_requests_exchange_their_values() -> None:
    """Lengths of three requests. One that was not there before has not grown, so nothing is known of its growth."""
    nobody = SimpleNamespace(slots_after={}, slots_before={})
    check, right, before = Identity(), {"a": 5, "b": 9, "c": 4}, {"a": 4, "b": 6, "c": 2}

    def said(found: dict[str, Any], before: dict[str, int] | None) -> list[str]:
        results = check_interface.in_batch(check, context(expected=nobody), TRUNK, found, right, "is {}", before)
        return [one.diagnosis.partition(": ")[2].partition(",")[0] for one in results]

    assert said({"a": 9, "b": 5, "c": 4}, None) == ['it is the one of request "b"', 'it is the one of request "a"', ""]
    grown = ['it grew by the tokens of request "b"', 'it grew by the tokens of request "a"', ""]
    assert said({"a": 7, "b": 7, "c": 4}, before) == grown
    assert said({"a": 7, "b": 7, "c": 4}, {"a": 4, "c": 2}) == ["", "", ""]
    assert said({"a": 9, "b": 9, "c": 4}, None) == ["", "", ""]


def test_a_number_with_the_bits_of_the_poison_is_poison() -> None:
    given = context(log=SimpleNamespace(poison=3.0), expected=SimpleNamespace(slots_after={}, slots_before={}))
    for found, says in ((pattern(3.0, torch.int64), "is poison"), (7, "is 7; expected 8")):
        assert says in check_interface.exact(Identity(), given, TRUNK, found, 8, "is {}").diagnosis


def test_units_are_listed_up_to_eight() -> None:
    listed = check_interface.listed
    assert (listed("slot", {3}), listed("slot", {5, 3})) == ("slot 3", "slots 3, 5")
    assert listed("page", range(10)) == "pages 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


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


def test_a_verified_window_is_picked_only_if_all_its_nodes_are_there() -> None:
    rows = torch.arange(3.0)
    assert unchanged_bytes._picked(rows, [0, 3]) is None and unchanged_bytes._picked(None, [0]) is None
    assert torch.equal(unchanged_bytes._picked(rows, [2, 0]), rows[[2, 0]])  # type: ignore[arg-type]


def test_draft_kv_that_is_valid_up_to_a_position_is_counted() -> None:
    """4 positions of 2 channels, of which the third is half wrong and the fourth right."""
    place, right = Place("extend", 0, "keys"), torch.ones(4, 2)
    found = right.clone()
    found[2, 1] = 0
    states = [SimpleNamespace(parts=lambda one=one: [(place, one)], final=None) for one in (found, right)]
    given = context(event=Load("a", "copy"), subject=SimpleNamespace(after={"a": states[0]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unchanged_bytes, "kept_of", lambda context: SimpleNamespace(state=states[1]))
        said = unchanged_bytes.draft_alone(given, place)
    assert said == "the target's memory came back, the draft KV is valid only for its first 2 of 4 positions: "


def test_labels_of_a_tree_continue_from_their_parents() -> None:
    """A chain and a tree of 3 nodes: the third node follows the second, or the root."""
    part = {name: torch.arange(3) + 10 * number for number, name in enumerate(("k", "v", "log_decay", "beta"), 1)}
    places = {Place("trunk", 0, name): labels for name, labels in part.items()}
    state = SimpleNamespace(state={0: torch.tensor([7])})
    span = SimpleNamespace(kind="verify", begin=0)
    made = dict[tuple[int, ...], list[int]]()
    for parents in ((-1, 0, 1), (-1, 0, 0)):
        forward: Any = SimpleNamespace(spans={"a": span}, parents={"a": parents},
                                       truth=SimpleNamespace(before={"a": state}, places=places))  # fmt: skip
        made[parents] = states_of_window(forward, "a", 0)
    chain, tree = made.values()
    assert chain[:3] == tree[:3] and chain[0] == 7 and len({*chain, *tree}) == 5
    after = [int(labels[2]) for labels in part.values()]
    assert (chain[3], tree[3]) == tuple(folded(0, chain[node], *after, True) for node in (2, 1))


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


def test_pages_of_a_live_request_do_not_move() -> None:
    """An engine that orders pages by itself may give pages back and take others."""
    for before, now, moved in (((1, 2, 3), (1, 2), False), ((1, 2), (1, 2, 3), False), ((1, 2), (2, 1), True)):
        check = Identity()
        check.known = {"a": before}
        given = context(subject_pages={"a": now}, event=Idle(), shown=SimpleNamespace(memory=lambda name: True),
                        expected=SimpleNamespace(slots_after={}, slots_before={}))  # fmt: skip
        (found,) = check._moved(given)
        assert found.agrees is not moved and check.known == {"a": now}
