"""Parts of checks, each alone on values made by hand, one of which is wrong.

Leaves out: whole runs (`test_checks.py`), the search for causes (`test_confirm_cause.py`), and formulas of
explanations (`test_mistakes.py`).
"""

import math
from dataclasses import make_dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep import tier_allowances
from instep.checks import (
    accumulated_errors,
    known_wrong_states,
    ops_on_own_inputs,
    recomputed_values,
)
from instep.checks.error_measurement import Spot, granted_error, measured
from instep.checks.experts import Experts
from instep.checks.grown_trees import MISTAKES as TREES
from instep.checks.tensor_and_choice_judgement import flips, judge
from instep.verdict import UNDECIDABLE, Comparison, Skipped, Tier, Verdict
from instep.watch.event_context import RowSpan
from instep_reference.contract.engine import Evict, Load, Save
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
    assert not [*experts(context(event=Evict("other"), rounded=None))] and experts.kept == {"parted"}
    assert not [*experts(context(event=Save("a", "saved"), rounded=None))] and experts.kept == {"parted"}
    assert not [*experts(context(event=Evict("parted"), rounded=None))] and not experts.kept



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


@pytest.mark.parametrize("first", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("more", [False, True])
def test_all_draws_are_made_before_a_value_is_wrong(
    first: tuple[bool, bool], more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two places. By all draws the first agrees, and the second only if it did before. more: to leave, or to draw"""
    asked, every = list[str](), (True, first[1])

    def results(self: Any, context: Any, piece: Any, but: Any = None) -> Any:
        asked.append(type(self).__name__ + ", all" * piece.all)
        return [SimpleNamespace(place=at, agrees=agrees) for at, agrees in enumerate(every if piece.all else first)]

    monkeypatch.setattr(recomputed_values.Derived, "_piece", results)
    monkeypatch.setattr(ops_on_own_inputs, "_said", lambda result: result)
    monkeypatch.setattr(ops_on_own_inputs, "Recomputation", SimpleNamespace)
    drawn = SimpleNamespace(near=1, from_own_inputs=SimpleNamespace(all=True), all=True, truth=None)
    piece: Any = SimpleNamespace(**vars(drawn) | {"all": False, "from_own_inputs": SimpleNamespace(all=False)},
                                 drawn_further=more or None, with_all_draws=lambda: drawn)  # fmt: skip
    found = recomputed_values.Derived._judged(recomputed_values.Derived(None), None, piece)  # type: ignore[arg-type]
    assert [one.agrees for one in found] == [*(every if more else first)]
    assert asked == ["Derived", *["Derived, all"] * (more and not all(first))]
    asked.clear()
    piece.drawn_further = 1
    own = ops_on_own_inputs.OwnInputs(SimpleNamespace(at=lambda context: [piece]), once=more)  # type: ignore[arg-type]
    assert [one.agrees for one in own(None)] == ([True] if more and not every[1] else [*every])  # type: ignore[arg-type, union-attr]
    assert asked == ["OwnInputs", *["OwnInputs, all"] * (not all(first)),
                     *["Derived", "Derived, all"] * (more and not all(every))]  # fmt: skip


def test_equal_bits_are_compared_twice_only_if_less_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, given in (("due", True), ("sampled_rows", None), ("scale_of", None)):
        monkeypatch.setattr(recomputed_values, name, lambda *of, given=given: given)
    monkeypatch.setattr(recomputed_values, "rows", lambda side, place, span: None if place.component == "q" else 1)

    class Alone(recomputed_values.Derived):
        _spot: Any = staticmethod(lambda context, piece, component: component)
        _measured: Any = staticmethod(lambda spot, *given: spot)
        rounded_once: Any = staticmethod(lambda component, found, sampled: found is not None and component == "core")

    truth = {Place("trunk", 1, name): torch.ones(2) for name in ("normed", "q", "v", "core")}
    other = {place: x + (place.component == "v") for place, x in truth.items()}
    piece: Any = SimpleNamespace(truth=SimpleNamespace(places=truth, state=None), span=None, writes_state=False)
    check, given = Alone(SimpleNamespace(rounds={})), context(subject=None)  # type: ignore[arg-type]
    assert [*check._piece(given, piece)] == ["normed", "q", "v", "core"]  # type: ignore[comparison-overlap]
    assert [*check._piece(given, piece, SimpleNamespace(places=other, state=None))] == ["v", "core"]  # type: ignore[arg-type, comparison-overlap]


def test_a_read_out_of_a_narrower_state_is_not_rounded_once() -> None:
    for state, once in ((torch.bfloat16, [False, True, False]), (torch.float32, [True, True, False])):
        oracle: Any = SimpleNamespace(rounds={"state": state}, runner=SimpleNamespace(once={"core", "normed"}))
        own, found = ops_on_own_inputs.OwnInputs(oracle), torch.ones(1, dtype=torch.bfloat16)
        assert [own.rounded_once(name, found, torch.ones(1)) for name in ("core", "normed", "mixer")] == once
        assert not own.rounded_once("normed", found.float(), torch.ones(1))


def test_a_narrower_tensor_than_declared_is_named_by_both_dtypes() -> None:
    spot, ones = Spot("derived", Tier.DERIVED, 0, "forward", TRUNK, "a", 1), torch.ones(2, 64)
    check = recomputed_values.Derived(SimpleNamespace(rounds={"hidden": torch.float32}))  # type: ignore[arg-type]
    for dtype, wrong in product((torch.float32, torch.bfloat16), (0.0, 1.0)):
        problem = check._measured(spot, (ones + wrong).to(dtype), ones, ones[None], None).problem
        assert (problem is not None) is bool(wrong)
        assert problem is None or (problem.dtypes is not None) is (dtype is torch.bfloat16)


def test_the_scale_of_an_update_has_the_sizes_of_value_and_recall() -> None:
    place, beta, v, recall = Place("trunk", 0, "update"), numbers(1, 3, 2).abs(), *numbers(2, 2, 3, 2, 4)
    truth = SimpleNamespace(folded=lambda: (None, v, None, beta), places={place: beta[..., None] * (v - recall)})
    found = recomputed_values.scale_of(SimpleNamespace(truth=truth), place)  # type: ignore[arg-type]
    torch.testing.assert_close(found, beta[..., None] * (v.abs() + recall.abs()))
    piece: Any = SimpleNamespace(layer=0, span=SimpleNamespace(start=4, count=1))
    known, state = [*recomputed_values.fell(piece, range(2), (5 << 32) + 7, None)][4]
    assert known.says.endswith(f"the seed 7, the lower word of {(5 << 32) + 7}")
    assert state is not None and state.seed == 7


# -- errors of a whole run ---------------------------------------------------------------------------------


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_errors_of_the_rounded_run_by_request_and_by_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of all rows of a request in the target, and in the draft head where both sides ran on the same."""
    spans = [RowSpan("a", "verify", 0, 2, 0, 0, 2), RowSpan("b", "verify", 2, 1, 0, 2, 0)]
    monkeypatch.setattr(accumulated_errors, "row_spans", lambda context, stage: spans)
    monkeypatch.setattr(accumulated_errors, "parted", lambda context, stage, span: (stage, span.request) == (
        "chain.0", "b"))  # fmt: skip
    places = [Place(*each) for each in (("trunk", 0, "hidden"), ("trunk", 1, "hidden"), ("chain.0", 1, "hidden"),
                                        ("trunk", -1, "logits"), ("trunk", 0, "q"), ("extend", 0, "hidden"))]
    truth = {place: numbers(70 + at, 3, 4) for at, place in enumerate(places)}
    truth[places[5]] = numbers(76, 0, 4)
    rounded = {place: x + 10.0 ** -(4 + at % 2) * numbers(80 + at, *x.shape)
               for at, (place, x) in enumerate(truth.items())}  # fmt: skip
    due: dict[Any, float] = {}
    for place in places[:4]:
        for span in spans if place.component == "hidden" else spans[:1]:
            rows = slice(span.begin, span.begin + span.count)
            parts = [1e-12] if (place.stage, span.request) == ("chain.0", "b") else [
                float(size(rounded[place][rows] - truth[place][rows]) / size(truth[place][rows]))
                for size in (torch.linalg.vector_norm, lambda x: x.abs().max())]  # fmt: skip
            key = span.request, place.stage == "trunk"
            due[key] = max(due.get(key, 1e-12), *parts)
    memory = [(Place("trunk", 0, "state"), numbers(90, 2, 4, 8)), (Place("trunk", 1, "state"), numbers(91, 2, 4, 8)),
              (Place("trunk", 2, "keys"), numbers(92, 0, 2, 4)), (Place("extend", 0, "keys"), numbers(93, 3, 2, 4))]
    off = [(place, x * (1 + 1e-3 / (1 + place.layer))) for place, x in memory]
    sides: list[Any] = [SimpleNamespace(places=of, after={"a": SimpleNamespace(parts=lambda its=its: its)})
                        for of, its in ((truth, memory), (rounded, off))]  # fmt: skip
    given = context(truth=sides[0], rounded=sides[1])
    assert accumulated_errors.carried(given) == {key: pytest.approx(part) for key, part in due.items()}
    assert {*accumulated_errors.carried(context(truth=sides[0], rounded=None)).values()} == {1e-12}
    assert accumulated_errors.kept(given, "a") == {"state": pytest.approx(1e-3)}


def test_further_draws_are_made_once_in_an_event() -> None:
    asked = list[tuple[int, int]]()
    runs: Any = SimpleNamespace(side=lambda index, number: asked.append((index, number)) or number)
    check = accumulated_errors.Propagated(runs)
    for index in (4, 5):
        given = make_dataclass("Facts", ("index", "rounded"))(index, 0)
        for _ in range(2):
            assert [one.rounded for one in check._draws(given)] == [*range(8)]
    assert asked == [(index, number) for index in (4, 5) for number in range(1, 8)]
    assert [*accumulated_errors.Propagated()._draws(given)] == [given]


def test_rows_that_went_elsewhere_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    place, spans = Place("chain.0", 1, "hidden"), [SimpleNamespace(request=name) for name in ("a", "b", "c", "gone")]
    monkeypatch.setattr(accumulated_errors, "_probes", lambda context: [(place, span) for span in spans])
    monkeypatch.setattr(accumulated_errors, "parted", lambda context, stage, span: span.request == "b")
    monkeypatch.setattr(accumulated_errors.Propagated, "_rows", lambda self, context, place, span: span.request)
    shown = SimpleNamespace(place=lambda place: True, gone={"gone"}, whole=True)
    found = accumulated_errors.Propagated(others={"c", "gone"})(context(rounded=object(), shown=shown))
    assert [*found] == ["a", Skipped("propagated", 4, "the drafts differ", f"{place} of b"),
                        Skipped("propagated", 4, accumulated_errors.OTHER_EXPERTS, f"{place} of c")]  # fmt: skip
