"""Parts of checks of results, states and grown trees, and of the choice of explanations, on values made by hand.

Leaves out: what another file of this folder computes, and formulas of explanations (`test_explanations.py`).
"""

import ast
import math
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import instep.diagnose
from instep.checks import (
    accumulated_errors,
    experts,
    grown_trees,
    of_ranks,
    recomputed_values,
    unchanged_bytes,
)
from instep.checks.one_sided_errors import OneSided, Samples
from instep.diagnose import RunHistory
from instep.diagnose.mistakes import source_slips
from instep.oracle import state_oracle
from instep.run.run_variants import Variant
from instep.tier_allowances import TRUTH_ERROR, log_prob_error, sums_error
from instep.verdict import Comparison, Tier, Verdict
from instep_reference.contract.engine import Draft, Drafted, Forward, Preempt, Save
from instep_reference.contract.engine import Row as BatchRow
from instep_reference.contract.place_names import Place
from support.inputs.check_contexts import of_facts as context

KEYS, STATE = Place("trunk", 0, "keys"), Place("trunk", 0, "state")


def state(**tensors: torch.Tensor) -> Any:
    """A request's memory in layer 0, by component."""
    parts = [(Place("trunk", 0, name), tensor) for name, tensor in tensors.items()]
    return SimpleNamespace(parts=lambda: parts)


def finding(place: Place = STATE, request: str = "a", check: str = "derived", **more: Any) -> Comparison:
    return Comparison(check, Tier.DERIVED, 4, "forward", place, elements=1, worst=2.0, allowed=1.0, request=request,
                      **more)  # fmt: skip


# -- which checks ----------------------------------------------------------------------


def test_ranks_stages_and_replicas_are_compared_where_there_are_several() -> None:
    named = {how: [check.name for check in of_ranks(*how)] for how in ((1,), (2,), (2, 3), (1, 2), (1, 1, 2))}
    assert named == {(1,): [], (2,): ["agreement", "collectives", "replicas"], (2, 3): ["agreement", "stages"],
                     (1, 2): ["agreement", "stages"], (1, 1, 2): ["agreement", "group"]}  # fmt: skip


def test_updates_alone_have_the_two_parts_of_a_ring() -> None:
    rows = torch.tensor([1 + 2.0**-12], dtype=torch.float64)
    narrow: Any = {"ring": torch.bfloat16}
    for component, ring, parts in (("update", narrow, True), ("k", narrow, False), ("update", {}, False)):
        place = Place("trunk", 0, component)
        piece: Any = SimpleNamespace(yardsticks=SimpleNamespace(places={place: rows + 2.0**-30}))
        assert torch.equal(recomputed_values.sampled_rows(piece, place, ring), rows) is parts


# -- choices, graphs and states -------------------------------------------------------------------------


def test_a_window_of_other_paths_is_a_tie_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last choice differs, or the beams of the second step. Up to a part of 1 the truth's scores are a tie."""
    given = context(expected=SimpleNamespace(grown=3, slots_after={}, slots_before={}), subject=SimpleNamespace(
        places={grown_trees.PLACE._replace(component="logits"): torch.zeros(1)}))  # fmt: skip
    monkeypatch.setattr(grown_trees, "paths_of", lambda side, beams: beams)
    monkeypatch.setattr(grown_trees, "_level", lambda truth, step: step)

    def side(*beams: Any, chosen: Any = ((2,),)) -> Any:
        growing = SimpleNamespace(beams=[(), ((8,),), *beams, ()], candidates=[0] * 5, chosen=lambda drafts: chosen)
        return SimpleNamespace(logits=[0] * 4, growing=growing)

    truth = side(((9,),), ((9, 9),))
    for part, ours, at, against in (
        (0.5, side(((9,),), ((9, 9),), chosen=((1,),)), 3, range(5)), (5.0, truth, 3, None),
        *((part, side(((9,),), ((7, 7),)), 2, 3) for part in (0.5, 1.0, 1.5, 2.0)),
    ):  # fmt: skip
        asked = list[Any]()
        monkeypatch.setattr(grown_trees, "Scores", lambda *of, part=part, asked=asked: SimpleNamespace(
            disorder=lambda kept, among, ordered: asked.append((among, ordered)) or part))  # fmt: skip
        check, differs = grown_trees.Grown(), ours is not truth
        found = check._chosen(given, "a", ours, truth, 0.0)
        assert asked == [(against, at == 2)] * differs
        ties = int(differs and part <= 1)
        assert (found.undecided, check.ties.ties, check.ties.made, found.elements) == (ties, ties, 1, 6)
        assert (found.place.stage, found.worst) == (f"chain.{at}", part * differs)
        assert found.agrees is (found.diagnosis == "") is (found.worst <= 1)


def test_a_tree_follows_from_its_own_logits_up_to_their_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that differs by nothing has a path that its own logits do not have."""
    named = list[str]()
    monkeypatch.setattr(grown_trees, "mistake", lambda context, name, wrong: named.append(name))
    mine, told = ([4, 5, 6], [0, 1, 1]), ([4, 5, 7], [0, 1, 1])
    trees: Any = {"a": told}
    for due, part, worst in ((told, 0.0, 0.0), (mine, 0.5, 0.5), (mine, 1.0, 1.0), (mine, 1.5, 1.5),
                             (mine, 0.0, math.inf)):  # fmt: skip
        monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name, due=due: grown(due))
        monkeypatch.setattr(grown_trees, "_own_part", lambda context, ours, told, part=part: part)
        given = context(rounded=object(), subject=None, expected=SimpleNamespace(
            grown=3, slots_after={}, slots_before={}))  # fmt: skip
        assert grown_trees._wrong(given, trees) == (trees if worst > 1 else {})
        one = grown_trees.Grown()._follows(given, "a", trees, due, part)
        assert (one.worst, one.undecided, one.elements) == (worst, int(0 < worst <= 1), 6)
        assert one.agrees is (one.diagnosis == "") is (worst <= 1) and named == ["a"] * (worst > 1)
        named.clear()
    monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name: None)
    assert grown_trees._wrong(given, trees) == trees


class Layer(SimpleNamespace):
    """A layer that was recomputed."""


def test_choices_of_experts_are_judged_for_layers_that_were_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle has a layer with experts, one without, and a result that is no recomputation."""
    of = {"request": "a", "stage": "trunk", "span": None}
    layers = [Layer(near=SimpleNamespace(truth=SimpleNamespace(route=route)), **of) for route in (1, None)]
    other = SimpleNamespace(**vars(layers[0]))
    monkeypatch.setattr(experts, "Recomputation", Layer)
    oracle: Any = SimpleNamespace(config=SimpleNamespace(experts=4), at=lambda context: [*layers, other])
    monkeypatch.setattr(experts, "carried", lambda context: {})
    monkeypatch.setattr(experts, "parted", lambda context, stage, span: False)
    monkeypatch.setattr(experts.Experts, "_piece", lambda self, context, piece, route, noise: [route])
    assert [*experts.Experts(oracle)(context(event=Draft(("a",)), rounded=object()))] == [1]
    check = experts.Experts(oracle)
    check.parted = {"a"}
    for event in (Save("a", "one"), Save("b", "two"), Preempt("a"), Draft(("a", "b"))):
        assert not [*check(context(event=event, rounded=object()))]
    assert check.kept == {"one"}, "copies of a request that parted"


def test_a_state_inside_a_chunk_has_the_last_of_its_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged_bytes, "kept_in", lambda rounds, forward: ("chunk", "kept") if forward else ())
    monkeypatch.setattr(unchanged_bytes, "off_the_grid", lambda found, storage: None if storage == "kept" else 1)
    its: Any = SimpleNamespace(_narrow={}, name="bytes", tier=Tier.BITWISE)
    for event, agrees in ((Forward((BatchRow("a", "prefill", 4),)), [True]), (Draft(("a",)), [])):
        given = context(event=event, expected=SimpleNamespace(slots_after={"a": 1}, slots_before={}))
        span: Any = SimpleNamespace(request="a")
        found = [*unchanged_bytes.Bytes._on_the_grid(its, given, span, STATE, torch.ones(2))]
        assert [one.agrees for one in found] == agrees


def test_whole_runs_in_place_of_an_oracle_make_no_narrow_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_oracle, "_left", lambda side, piece: torch.ones(2))
    its: Any = SimpleNamespace(_redrawn=lambda context, piece: None)
    piece = make_dataclass("Piece", ("writes_state", "yardsticks", "dithered", "narrow"))(True, None, None, True)
    for given, one in ((context(rounded=None), piece), (context(rounded=object()), replace(piece, writes_state=False))):
        assert state_oracle.FreeOracle._by(its, given, one) is one
    found = state_oracle.FreeOracle._by(its, context(rounded=object()), piece)
    assert not found.narrow and found.yardsticks.state is not None and found.yardsticks.state.shape == (1, 2)
    monkeypatch.setattr(state_oracle.StateOracle, "__init__", lambda self, *given: setattr(
        self, "runner", SimpleNamespace(truth=None)))  # fmt: skip
    monkeypatch.setattr(state_oracle, "TrueRunner", lambda *given: None)
    for rounds, products, most in (({"q": torch.float32}, {}, 7), ({"q": torch.float32}, {"gdn": 1}, 16),
                                   ({"q": torch.float32, "state": torch.bfloat16}, {}, 16)):  # fmt: skip
        made: Any = state_oracle.FreeOracle(None, rounds, torch.float32, products, redraws=7, dithered=16)  # type: ignore[arg-type]
        assert made.numbers == range(1, most + 1)


def test_a_state_alone_is_planned_for_each_request_that_shows_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk begins with its own state. One that continues a prompt may follow any conv window."""
    monkeypatch.setattr(state_oracle, "state_before", lambda before, layer, start, device: ("base", layer))
    monkeypatch.setattr(state_oracle, "to_state", lambda hidden, *of: (hidden, *of[1:]))
    monkeypatch.setattr(state_oracle, "rows", lambda side, place, span: side.get(place.layer))
    monkeypatch.setattr(state_oracle.StatePlanner, "_parents", lambda self, span: None)
    monkeypatch.setattr(state_oracle.StatePlanner, "_hidden", lambda self, span, layer: {2: "2", 3: "3"}.get(layer))
    config: Any = SimpleNamespace(keeping=lambda component: (4, 5, 6))
    side = {4: torch.ones(3, 2), 5: torch.ones(2, 2)}
    plan = state_oracle.StatePlanner(context(subject=side), config, {}, True, gdn_layers=(1, 2, 3, 4, 5, 6),
                                     device=torch.device("cpu"))  # fmt: skip
    for kind, start in (("prefill", 0), ("prefill", 5), ("verify", 5)):
        span: Any = SimpleNamespace(kind=kind, start=start, count=3)
        tasks = [*plan._target(span, SimpleNamespace(conv={2: "window"}))]  # type: ignore[arg-type]
        assert [(task.layer, task.recurrence.number) for task in tasks if task.recurrence] == [(2, 1), (3, 2), (4, 3)]
        for task in tasks:
            assert task.recurrence is not None and task.recurrence.base == ("base", task.layer)  # type: ignore[comparison-overlap]
            assert task.chunk == (("base", task.layer) if kind == "prefill" else None)
            assert (task.recurrence.window is not None) is (kind == "prefill" and start == 5 and task.layer == 2)


# -- grown trees -------------------------------------------------------------------------------------------


def grown(tree: Any, paths: Any = (), **more: Any) -> Any:
    growing = SimpleNamespace(tree=lambda drafts: tree, candidates=paths, path=lambda number: paths[number], topk=2)
    return SimpleNamespace(growing=growing, whole=True, **more)


def test_only_a_tree_that_follows_from_its_own_logits_is_compared_with_the_truth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = ([4, 5], [0, 1]), ([4, 6], [0, 1])
    monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name: grown(mine))
    monkeypatch.setattr(grown_trees, "carried", lambda context: {})
    monkeypatch.setattr(grown_trees, "_own_part", lambda context, ours, told: 0.5)
    monkeypatch.setattr(grown_trees.Grown, "_follows", lambda self, context, name, trees, mine, part: part)
    monkeypatch.setattr(grown_trees.Grown, "_chosen", lambda self, *given: "compared")
    for told, says in ((mine, [0.0, "compared"]), (other, [0.5])):
        answer, right = (
            Drafted(torch.tensor([tree[0]]), *(torch.tensor([each]) for each in tree)) for tree in (told, mine)
        )
        given = context(
            event=Draft(("a",)),
            subject=SimpleNamespace(answer=answer),
            truth=SimpleNamespace(answer=right),
            expected=SimpleNamespace(topk=2, grown=2, slots_after={}, slots_before={}),
            shown=SimpleNamespace(whole=True),
            rounded=object(),
        )
        found: list[Any] = [*grown_trees.Grown()(given)]
        assert found == says
    for lost in (given.subject, given.truth):
        monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name, lost=lost: SimpleNamespace(
            **vars(grown(mine)) | {"whole": side is not lost}))  # fmt: skip
        (one,) = grown_trees.Grown()(given)
        assert isinstance(one, Comparison) and one.diagnosis.startswith("the grown tree is ([4, 6], [0, 1]); expected")


def test_the_order_of_a_window_is_no_order_of_its_scores() -> None:
    """Two children of the root, the less probable one first. Rows below the fork count for an error."""
    growth = grown(None, paths=[(0,), (1,)], logits=[torch.tensor([[0.0, 3.0]], dtype=torch.float64)])
    place = Place("chain.0", grown_trees.PLACE.layer, "logits")
    given = context(subject=SimpleNamespace(places=dict.fromkeys(
        (place, grown_trees.PLACE._replace(component="logits")), growth.logits[0])))  # fmt: skip
    assert grown_trees._own_part(given, growth, ([0, 1], [0, 0])) == 0
    assert grown_trees._own_part(given, growth, ([0, 0], [0, 0])) == math.inf
    assert grown_trees._told_paths(([4], [-1])) is None
    rows: Any = SimpleNamespace(_granted=lambda path: 10.0 ** len(path), _rounding=lambda path: 0.0)
    for one, other, error in (((1,), (1, 2), 10), ((1, 2), (1, 3), 10), ((1, 2), (3,), 11), ((1,), (1,), 0)):
        assert grown_trees.Scores._error(rows, one, other) == error


def test_the_tree_of_another_request_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = {"a": ([4, 5], [0, 1]), "b": ([6, 7], [0, 0])}
    monkeypatch.setattr(grown_trees, "MISTAKES", ())
    monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name: grown(trees[name], said=()))
    given = context(event=Draft(("a", "b")), subject=None, expected=SimpleNamespace(grown=2))
    for name, told, others in (("a", "b", 1), ("b", "a", 1), ("a", "a", 0)):
        assert len(grown_trees._fitting(given, name, trees[told])) == others


# -- sampling, one-sided errors ----------------------------------------------------------------------------


def test_log_probabilities_err_by_the_logits_and_by_the_vocabulary() -> None:
    """Each part of x - max - log(sum) has its error: a right one may err by more if any part is larger."""
    assert sums_error(16, 2.0**-20) == 8 * 2.0**-20  # 2 sqrt(16) additions, each within half a unit, and the total's
    without = log_prob_error(0.0, 1, 2.0**-20) - sums_error(1, 2.0**-20)  # log(1) is 0
    for largest, vocab in ((2.0, 1), (0.0, 1000), (2.0, 1000)):
        error = log_prob_error(largest, vocab, 2.0**-20) - sums_error(vocab, 2.0**-20)
        assert error == pytest.approx(without * (1 + largest + math.log(vocab)), rel=1e-9)


def test_the_error_of_memory_is_the_largest_by_norm_or_element() -> None:
    """One of 8 ones is off by 1: by the norm that is 1 / sqrt(8). A component without an error has that of fp64."""
    rounded, truth = torch.ones(8), torch.ones(8)
    rounded[3] = 2
    given = context(rounded=SimpleNamespace(after={"a": state(conv=rounded, keys=truth)}),
                    truth=SimpleNamespace(after={"a": state(conv=truth, keys=truth)}))  # fmt: skip
    assert accumulated_errors.kept(given, "a") == {"conv": 1.0, "keys": TRUTH_ERROR}


def test_a_row_of_zeros_is_a_sample_without_an_error_to_one_side() -> None:
    samples = Samples("hidden", 0, 0)
    a, d = samples._by_row(np.array([[1.0, 3.0], [1.0, 3.0]]), np.array([[0.0, 0.0], [2.0, -2.0]]))
    assert not a[0].any() and not d[0].any() and a[1].any() and d[1].all()
    samples._sums = np.zeros((5, 2))
    mean, limit = samples.judged(0.1, 3.0)
    assert not mean.any() and np.isinf(limit).all()


def test_looks_at_errors_of_one_side_are_counted() -> None:
    """512 rows that are all too large by a thousandth, or not; each look shares its risk with the earlier ones."""
    oracle: Any = SimpleNamespace(runner=SimpleNamespace(rounded=SimpleNamespace(embedding=torch.zeros(1))))
    g, check = torch.Generator().manual_seed(2), OneSided(oracle)
    truth = torch.randn(512, 4, generator=g, dtype=torch.float64)
    for scale, agrees in ((1.001, False), (1.0, True)):
        samples = Samples("hidden", 0, 0)
        assert samples.add(truth * scale, truth)
        for looks in (1, 2):
            (found,) = check._look(context(), KEYS, "a", samples, torch.float32)
            assert (found.agrees, samples.looks, samples.looked) == (agrees, looks, 512)


# -- the choice of explanations ----------------------------------------------------------------------------


def test_causes_are_confirmed_only_on_request_and_without_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further runs cost minutes."""
    for name, made in (("explain_outcome", lambda outcome, history: outcome), ("locate", lambda *given: "located"),
                       ("replace", lambda outcome, located: located)):  # fmt: skip
        monkeypatch.setattr(instep.diagnose, name, made)
    for ladder, findings, variant, runs in (
        (True, [1], Variant(), True),
        (False, [1], Variant(), False),
        (True, [], Variant(), False),
        (True, [1], Variant(calm=True), False),
    ):
        outcome = SimpleNamespace(verdict=SimpleNamespace(findings=findings))
        replay: Any = SimpleNamespace(plan=SimpleNamespace(steps=None), run=lambda outcome=outcome, **given: outcome)
        found: Any = instep.diagnose.diagnose(replay, ladder=ladder, variant=variant)
        assert (found == "located") is runs


def test_explanations_see_the_memory_of_earlier_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instep.diagnose, "explained", lambda compared, last, oracle, history: [history])
    config = SimpleNamespace(hidden=8)
    outcome = make_dataclass("Outcome", ("verdict", "plan", "last", "oracle"))(
        Verdict(), SimpleNamespace(checkpoint=SimpleNamespace(config=config)), None, object())
    for history in (RunHistory(), None):
        of: Any = instep.diagnose.explain_outcome(outcome, history)
        (seen,) = of.verdict.compared
        assert of.oracle is None and (seen is history or (history is None and isinstance(seen, RunHistory)))


def test_slips_change_a_number_by_one_and_show_a_short_expression() -> None:
    assert [one.value for one in source_slips.others(ast.Constant(3))] == [4, 2]  # type: ignore[attr-defined]
    for product, without in (("a * (b + c)", "a * b + c"), ("(a - b) / c", "a - b / c")):
        made = map(ast.unparse, source_slips.others(ast.parse(product, mode="eval").body))
        assert without in made, product
    assert {(slip.right, slip.wrong) for slip in source_slips.of_function(_turned)} >= {
        ("a * b - c * d", wrong) for wrong in ("a * b - c + d", "a * b - (c + d)", "a + b - c * d")}
    for longer, shown in ((0, True), (1, False)):
        name = "x" * (source_slips.SHOWN - len(" + 1") + longer)
        tree = ast.parse(f"{name} + 1")
        parents = {below: above for above in ast.walk(tree) for below in ast.iter_child_nodes(above)}
        node = next(one for one in ast.walk(tree) if isinstance(one, ast.Constant))
        assert isinstance(source_slips._shown(node, parents), ast.BinOp) is shown


def _turned(a: float, b: float, c: float, d: float) -> float:
    return a * b - c * d
