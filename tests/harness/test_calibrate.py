"""Calibration and allowances: correct engines pass with room, small injected errors are as large as they say and found.

Leaves out: the whole run, whose result is committed (`fixtures/results/calibration.json`), and faults of addresses and
schedules (`instep faults`).
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from documentation.calibration_tables import of_a_correct_engine, undecided
from documentation.tables import RESULTS
from instep.adapters import find
from instep.campaign import farm
from instep.campaign.farm import Ended
from instep.checks.accumulated_errors import Propagated
from instep.checks.one_sided_errors import CALIBRATED
from instep.checks.ops_on_own_inputs import OwnInputs
from instep.checks.recomputed_values import Derived
from instep.oracle import recomputation
from instep.oracle.oracle import Oracle
from instep.oracle.recomputation import Runner as ModelRunner
from instep.oracle.reordered_arithmetic import FUNCTIONS, REDUCTIONS, Reordered
from instep.report.result import Result
from instep.run.build_compared_engines import participants_of, rounded_participant, truth_participant
from instep.run.compared_engine import Participant, RepeatedRuns
from instep.run.lockstep import Lockstep, run
from instep.run.replay import Replay
from instep.setting import Setting
from instep.tier_allowances import REDRAWS, UNDECIDED_CAP
from instep.trace.file import read
from instep.verdict import Comparison, Exit, Tier, Verdict
from instep_optimized.ops.op_protocols import ExpertWeights
from instep_proof import calibrate as calibration
from instep_proof.calibrate import correct_op_sets
from instep_proof.calibrate.allowance_use import STORAGES, STRATEGIES, Stage, Variant, variants
from instep_proof.calibrate.calibration_traces import scene, trees
from instep_proof.calibrate.graded_errors import ERRORS, IN_MEMORY, NUMBERS, OWN, Limit, limit, names
from instep_proof.calibrate.graded_errors import STORAGES as ACTIVATIONS
from instep_proof.calibrate.long_runs import LongRuns
from instep_proof.calibrate.tables import Calibration, Rate, by_tier, joined
from instep_proof.faults.catalogue import TRACES
from instep_reference import mlp, trunk
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.engine import Commit
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place
from instep_reference.weights import Weights
from support.inputs.checkpoints import write as write_checkpoint
from support.inputs.few_channels import few_channels
from support.inputs.traces import recorded
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few

pytestmark = pytest.mark.slow

X = torch.randn(7, 5, 48, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(11, 48, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


def test_expert_sums_have_other_orders_and_every_fourth_scene_has_experts() -> None:
    assert [bool(scene(number).checkpoint.config.experts) for number in range(4)] == [False, False, False, True]
    drawn = torch.Generator().manual_seed(3)
    sizes = (6, 48), (6, 32, 48), (6, 48, 16), (20, 48), (48, 10), (1, 48)
    weights = ExpertWeights(*(torch.randn(size, generator=drawn) / 7 for size in sizes))
    given = {"x": X[:, 0], "weights": weights, "top_k": 2, "norm_topk": True, "to": Place("trunk", 0, "mlp")}
    plain = correct_op_sets.PLAIN.moe(**given)
    for form in correct_op_sets.FORMS:
        found = correct_op_sets.correct(form, 4).moe(**given)
        assert torch.allclose(found, plain, rtol=1e-4, atol=1e-5)
        assert form == "chunked" or not torch.equal(found, plain), form


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_an_expert_whose_share_is_not_normed_is_found(
    activations: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = replace(correct_op_sets.correct("blocked", 1), moe=partial(spoiled, correct_op_sets.PLAIN.moe))
    monkeypatch.setattr(correct_op_sets, "SPOILED", ops, raising=False)
    name = f"{correct_op_sets.__name__}:SPOILED"
    found = stage.run(Variant(3, name, (activations, "float32"), "rerun", "windows", "VK", 3)).findings
    assert found and found[0].place.component == "mlp", found[:1]


def spoiled(moe: Callable[..., Any], **given: Any) -> torch.Tensor:
    return moe(**given | {"norm_topk": False})


def test_every_form_sums_the_same_terms_in_its_own_order() -> None:
    seen = {}
    for form in correct_op_sets.FORMS:
        if form == "chunked":
            continue
        order = correct_op_sets.Order(form, 4)
        total, product = order.total(X), order.product(X[:, 0], WEIGHT)
        assert torch.allclose(total, X.sum(-1), rtol=1e-4, atol=1e-5)
        assert torch.allclose(product, X[:, 0] @ WEIGHT.T, rtol=1e-4, atol=1e-5)
        seen[form] = total.numpy().tobytes()
    assert len(set(seen.values())) == len(seen), "no two forms give the same bits"


def test_correct_op_sets_are_found_by_name() -> None:
    assert find("instep_proof.calibrate.correct_op_sets:running_3").name == "running_3"
    for wrong in ("running", "running_x", "walking_3", "running_3_narrow"):
        with pytest.raises(BadInput):
            find(f"instep_proof.calibrate.correct_op_sets:{wrong}")


def test_200_variants_are_all_different_and_meet_every_kind() -> None:
    made = list(variants(200))
    assert len({one.ops for one in made}) == len(made), "the seed is the number"
    forms = correct_op_sets.FORMS
    assert {(one.form, one.storage) for one in made} == {(f, storage) for f in forms for storage in STORAGES}
    assert {(one.strategy, one.conv) for one in made} == set(STRATEGIES)
    assert {(one.strategy, one.form) for one in made} >= {(s, f) for s, _ in STRATEGIES for f in forms}
    assert len({one.scene for one in made}) >= 24 and {one.layout for one in made} == {"VK", "KV"}


def test_a_scene_owns_what_can_go_wrong() -> None:
    for number in range(8):
        events = scene(number).trace.events
        kinds = [type(event) for event in events]
        commits = [event for event in events if isinstance(event, e.Commit)]
        shapes = {shape for event in events if isinstance(event, e.Draft) for shape in event.parents or ()}
        assert kinds.count(e.Commit) == 2 and (e.SetNumSteps in kinds) is not trees(number)
        assert len(shapes) == (2 if trees(number) else 0)
        counts = {len(path.nodes) for commit in commits for path in commit.accepted}
        assert len(counts) > 1, "ragged acceptance"
        assert any(
            any(row.kind == "decode" for row in event.rows) and not any(row.kind == "verify" for row in event.rows)
            for event in events if isinstance(event, e.Forward)
        ), "a plain step after a commit"


@few(1)
@pytest.mark.parametrize("variant", [
    Variant(2, "running", ("float32", "bfloat16"), "columns", "widened", "KV", 1),
    pytest.param(Variant(3, "chunked", ("bfloat16", "float32"), "lazy_rerun", "windows", "VK", 1), marks=WHOLE),
    Variant(4, "blocked", ("bfloat16", "float32"), "snapshot", "windows", "VK", 2),
], ids=lambda variant: variant.form)  # fmt: skip
def test_a_correct_engine_is_left_alone(stage: Stage, variant: Variant) -> None:
    verdict = stage.run(variant)
    assert not verdict.findings and verdict.events == len(stage.on(variant.scene).trace.events)
    assert {one.tier for one in verdict.compared} == set(Tier)


def test_a_variant_that_takes_a_tree_for_a_chain_is_wrong(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Variant(4, "blocked", ("float32", "float32"), "snapshot", "windows", "VK", 2)
    monkeypatch.setattr(correct_op_sets.GDN, "ancestry", lambda part, who: None)
    found = stage.run(variant).findings
    assert found and "the tree is taken for a chain" in str([found[0].diagnosis, found[0].explained])


def test_truth_runs_once_for_all_variants_of_a_scene(stage: Stage) -> None:
    on = stage.on(2)
    plan, kept = on.plan(Setting()), []
    for _ in range(2):
        truth = participants_of(plan).truth
        kept.append([truth.serve(event) for event in on.trace.events[:3]])
    assert all(one is other for one, other in zip(*kept, strict=True))


def test_a_wrong_engine_is_a_false_alarm_with_a_name(stage: Stage) -> None:
    variant = Variant(0, "support.wrong.ops:UNMOVED", ("float32", "float32"), "snapshot", "windows", "VK", 1)
    result = Calibration("cpu")
    result.add(variant, stage.run(variant))
    assert result.alarms and "from before the step" in str(result.alarms[0]["diagnosis"])
    told = result.as_data()
    assert told["alarms"][0]["form"] == "support.wrong.ops:UNMOVED"
    assert sum(rate["alarms"] for rate in told["false_alarms"]) == len(result.alarms)


@WHOLE
def test_parts_are_all_variants_and_errors_and_join_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variant runs: its verdict has a comparison of its number."""
    monkeypatch.setattr(Stage, "run", lambda self, one: Verdict([
        compared(math.nan if one.number == 9 else one.number / 100)]))
    monkeypatch.setattr(calibration, "limit", lambda name, storage, stages: Limit(name, storage, 0.1, {}, 3, 4))

    def long_run(self: LongRuns, one: Variant) -> None:
        self.add({"looks": 2, "groups": 3, "used": one.number / 100, "by": str(one.number), "alarms": [],
                  "ran": [{"number": one.number}], "found": {"core": [4, one.number]}})  # fmt: skip

    monkeypatch.setattr(LongRuns, "run", long_run)
    parts = [Calibration("cpu") for _ in range(4)]
    for number, part in enumerate(parts[1:], 1):
        calibration.calibrate(part, 20, part=(number, 3), long=9)
    calibration.calibrate(whole := parts[0], 20, long=9)
    again = joined("cpu", (Result(0, "cpu", one.as_data()).data() for one in parts[:0:-1]))
    left, right = (Result(0, "cpu", one.as_data() | {"seconds": 0}).data() for one in (whole, again))
    assert left | {"date": 0} == right | {"date": 0} and len(left["ran"]) == 20 and len(left["alarms"]) == 1
    assert len(left["limits"]) == 2 * len([*names()])
    assert left["long"]["looks"] == 18 and left["long"]["by"] == "8" and left["long"]["found"] == {"core": [36, 36]}


def test_farm_has_a_trial_per_scene(instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[str]()

    def told(words: Sequence[str], more: object) -> Ended:
        ran.append(" ".join(words))
        one = Calibration("cpu", 5, ran=[{"number": len(ran)}])
        return Ended(0, json.dumps(Result(0, "cpu", one.as_data()).data()).encode(), "", farm.source_of(words))

    monkeypatch.setattr(farm, "run_trial", told)
    words = ("calibrate", "--variants", 20, "--runs", 0, "--farm", tmp_path / "farm", "--json", tmp_path / "all.json")
    assert instep(*words).code == Exit.AGREED
    assert ran == [f"calibrate --variants 20 --runs 0 --part {number}/3" for number in (1, 2, 3)]
    found = json.loads((tmp_path / "all.json").read_text())
    assert (found["pairs"], found["variants"], found["machines"][0]["trials"]) == (15, 3, 3)
    for part in ("0/3", "4/3", "3"):
        assert "3/16" in complaint(instep("calibrate", "--part", part))


# -- injected errors ---------------------------------------------------------------------------------------


def test_zero_error_changes_no_bit_and_a_small_one_only_its_place() -> None:
    names = ("plain", *(f"instep_proof.calibrate.graded_errors:qkv@{size}" for size in ("0.0", "0.01")))
    plain, none, small = map(find, names)
    given = {"x": X[:, 0], "weight": WEIGHT, "shape": (11,)}
    place = ERRORS["qkv"].place
    right, same, off = (ops.linear(**given, to=place) for ops in (plain, none, small))
    assert torch.equal(right, same) and not torch.equal(right, off)
    assert (off != right).any(0).nonzero().flatten().tolist() == [3]
    elsewhere = Place("trunk", 2, "qkv")
    assert torch.equal(small.linear(**given, to=elsewhere), right)
    for wrong in ("qkv", "qkv@much", "nothing@0.1"):
        with pytest.raises(BadInput):
            find(f"instep_proof.calibrate.graded_errors:{wrong}")


def test_memory_error_is_found_down_to_a_correct_engines_error(stage: Stage) -> None:
    found = limit("state, part of the one before", "float32", [stage])
    assert set(found.found) == set(NUMBERS) and found.correct < 2e-6
    assert found.found["T2d"] <= 1.0 and found.found["T3"] is None
    assert 1e-6 <= found.found[OWN] <= found.found["T2"] <= 1e-4


@few(4)
@pytest.mark.parametrize("name", ERRORS)
def test_an_injected_error_is_found_at_its_place(stage: Stage, name: str) -> None:
    """T2 at the first event in which it acts; run up to there alone."""
    on, place = stage.on(2), ERRORS[name].place
    plan = on.plan(Setting(f"instep_proof.calibrate.graded_errors:{name}@0.01"))
    participants = participants_of(plan)
    oracle = Oracle(plan.checkpoint, participants.declared.rounds, torch.float32)
    verdict = run(Lockstep(on.trace, participants), [Derived(oracle)])
    assert verdict.findings[0].place == place and verdict.findings[0].event == 2


def test_mixes_in_memory_reach_from_right_to_wrong() -> None:
    right, before = X[:4, :, :32], -X[:4, :, :32]
    for name, mix in IN_MEMORY.items():
        assert torch.equal(mix(right, before, 0.0), right)
        wrong = mix(right, before, 1.0) != right
        assert wrong.any() and (not wrong[1:].any() and not wrong[0, :, 8:].any()) == ("tile" in name)


# -- tables ------------------------------------------------------------------------------------------------


def compared(worst: float, blocks: int = 4, tier: Tier = Tier.DERIVED) -> Comparison:
    return Comparison("derived", tier, 0, "forward", Place("trunk", 0, "k"), 8, worst, 1.0, blocks=blocks, undecided=1)


def test_a_rate_counts_blocks_and_bounds_what_was_never_seen() -> None:
    rate = Rate("T2", "float32")
    assert rate.bound == 1.0
    for worst in (0.1, 0.4, 0.2):
        rate = rate.with_one(compared(worst), f"at {worst}")
    assert (rate.comparisons, rate.blocks, rate.elements, rate.undecided, rate.alarms) == (3, 12, 24, 3, 0)
    assert (rate.worst, rate.by, rate.bound) == (0.4, "at 0.4", 3 / 12)
    many = replace(rate, blocks=3000)
    assert many.bound == 1e-3
    bounds = [replace(many, alarms=alarms).bound for alarms in range(12)]
    assert all(one < two for one, two in pairwise(bounds))
    wrong = rate.with_one(compared(math.nan), "worst of all")
    assert wrong.alarms == 1 and math.isnan(wrong.worst) and wrong.by == "worst of all"


def test_tiers_are_summed_over_storages() -> None:
    one = Rate("T2", "float32").with_one(compared(0.5), "running")
    two = Rate("T2", "bfloat16").with_one(compared(0.3), "exact")
    (total,) = by_tier([one, two])
    assert (total.blocks, total.worst, total.by) == (8, 0.5, "running, float32")


# -- the command -------------------------------------------------------------------------------------------


def test_the_command_writes_both_tables_and_leaves_correct_engines_alone(instep: Runner, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    ran = instep("calibrate", "--variants", "1", "--runs", "0", "--json", str(file), "--commit", "abc")
    assert ran.code == 0, ran
    told = json.loads(file.read_text())
    assert told["commit"] == "abc" and told["command"].endswith("--commit abc") and {"date", "machine"} <= told.keys()
    assert told["variants"] == 1 and told["alarms"] == [] and told["ran"][0]["form"] == "permuted"
    assert {rate["tier"] for rate in told["false_alarms"]} == {*(tier.value for tier in Tier), OWN}
    assert "1 correct engine" in ran.out and "upper bound" in ran.out


def test_the_command_refuses_what_computes_nothing(instep: Runner) -> None:
    assert "ledger" in complaint(instep("calibrate", "--ops", "ledger"))
    assert "at least one of either" in complaint(instep("calibrate", "--variants", "0", "--runs", "0"))


def test_an_injected_error_of_size_0_that_is_found_is_a_mistake(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IN_MEMORY, "state, one tile", lambda right, before, size: right * 1.5)
    with pytest.raises(RuntimeError, match=r"finds an injected error of size 0 at .*state"):
        limit("state, one tile", "float32", [stage])


def test_the_committed_result_is_of_enough_engines_and_called_none_wrong() -> None:
    told = json.loads((RESULTS / "calibration.json").read_text())
    assert told["variants"] == len(told["ran"]) >= 200 and told["alarms"] == []
    forms = correct_op_sets.FORMS
    assert {(one["form"], one["states"]) for one in told["ran"]} >= {(f, s) for f in forms for _, s in STORAGES}
    for tier in Tier:
        rates = [rate for rate in told["false_alarms"] if rate["tier"] == tier.value]
        assert sum(rate["blocks"] for rate in rates) >= 1000 and all(rate["worst"] < 1 for rate in rates)
    assert undecided(told) < UNDECIDED_CAP / 2
    assert {(one["place"], one["storage"]) for one in told["limits"]} == {(n, s) for n in names() for s in ACTIVATIONS}
    for one in told["limits"]:
        correct = of_a_correct_engine(one)
        assert correct == of_a_correct_engine({"correct": correct}) == of_a_correct_engine({"honest": correct})
        assert correct < one["found"]["T2"] <= 100 * correct + 1e-5, "T2 looks at every place, and closely"


def test_the_committed_long_runs_accused_no_engine_and_find_small_slips() -> None:
    long = json.loads((RESULTS / "one-sided.json").read_text())["long"]
    assert long["engines"] == len(long["ran"]) == 200 and long["alarms"] == []
    assert long["used"] < 0.7 and long["groups"] > 1_500_000
    assert {one["form"] for one in long["ran"]} >= {*correct_op_sets.FORMS}
    ran = Counter(one["form"] for one in long["ran"])
    assert all(ran[name] == 20 for name in {*CALIBRATED} - {"plain"})
    at = long["slips"].index(2e-7)
    for place in ("log_decay", "normed", "gated"):
        groups, *found = long["found"][place]
        assert found == sorted(found) and found[at] > groups / 2


MLP = Place("trunk", 0, "mlp")
HIDDEN = Place("extend", 0, "hidden")

# Ops with one rounding or none, which the reference calls in addition to sums and inexact functions.
EXACT = {
    "__get__", "__getitem__", "__len__", "add", "any", "arange", "as_tensor", "cat", "div", "flatten", "masked_fill",
    "mul", "neg", "nonzero", "ones", "repeat", "repeat_interleave", "reshape", "scatter", "sort", "split", "stack",
    "sub", "to", "tolist", "triu", "unbind", "zeros_like",
}  # fmt: skip


@few(2)
@pytest.mark.parametrize(("form", "strategy", "trained"), [
    ("running", "snapshot", False), ("pairwise", "rerun", False), ("split", "columns", False),
    ("chunked", "rerun", True), *(pytest.param(*one, True, marks=WHOLE) for one in (
        ("running", "snapshot"), ("pairwise", "rerun"), ("split", "columns"),
    )),
])  # fmt: skip
def test_another_order_of_summation_passes_with_room(
    form: str, strategy: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the trained model, or one of few channels, to the first commit; hundreds of random ones: `calibrate`.

    All draws are made, as before a finding: the first ones alone show how much is used at most.
    """
    for check, compares in ((Derived, "_judged"), (OwnInputs, "_near")):
        of = getattr(check, compares)
        monkeypatch.setattr(check, compares, lambda self, context, piece, of=of: of(
            self, context, piece.with_all_draws()))  # fmt: skip
    setting = Setting(f"instep_proof.calibrate.correct_op_sets:{form}_7", strategy=strategy)
    trace = read(TRACES / "accepted.jsonl") if trained else few_channels("accepted", 2)
    outcome = Replay(trace, setting).run(until=5)
    assert outcome.verdict.exit == Exit.AGREED
    for tier in (Tier.DERIVED, Tier.PROPAGATED):
        assert max(one.used for one in outcome.verdict.compared if one.tier is tier) < 0.7


@few(5)
@pytest.mark.parametrize(("error", "component"), [
    ("EPS_ON_THE_MEAN", "q"), ("SCALE_OFF", "attended"), ("THETA_OFF", "query"),
    ("NARROW_BETA_IN_SNAPSHOTS", "state"), ("LOUD_TILE_OF_QKV", "qkv"), ("LOUD_TILE_OF_Z", "z"),
    ("LOUD_TILE_OF_MIXER", "mixer"), ("LOUD_TILE_OF_FUSED", "fused"), ("CAST_BEFORE_THE_WEIGHT", "gated"),
])  # fmt: skip
def test_a_small_error_is_found_where_it_is_made(error: str, component: str) -> None:
    given = None if error == "LOUD_TILE_OF_FUSED" else "external"  # that is an op of the draft head
    setting = Setting(f"support.wrong.small_errors:{error}", strategy="snapshot", drafter=given)
    findings = Replay(few_channels("accepted", 2), setting).run(until=6).verdict.findings
    derived = [finding for finding in findings if finding.tier is Tier.DERIVED]
    assert derived and findings[0].place.component == derived[0].place.component == component


def test_unlucky_draw_is_repeated_and_an_error_is_not_excused(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    lockstep = Lockstep(trace, participants_of(Replay(trace, Setting("plain")).plan))
    context = next(m for m in (lockstep.step() for _ in trace.events) if isinstance(m.event, Commit))
    repeated_runs = lockstep.participants.repeated_runs
    again = repeated_runs.side(context.index, 1)
    assert again.places.keys() == context.rounded.places.keys()
    assert not torch.equal(again.places[HIDDEN], context.rounded.places[HIDDEN])
    lucky = replace(context, rounded=context.truth)  # a draw without any error

    def disagreeing(part: float, repeated_runs: RepeatedRuns | None) -> set[Place]:
        rows = {**lucky.subject.places, HIDDEN: lucky.subject.places[HIDDEN] * (1 + part)}
        off = replace(lucky, subject=replace(lucky.subject, places=rows))
        return {one.place for one in Propagated(repeated_runs)(off) if not one.agrees}

    assert disagreeing(1e-6, None) == {HIDDEN}
    assert disagreeing(1e-6, repeated_runs) == set()
    assert disagreeing(2e-5, repeated_runs) == disagreeing(1e-2, repeated_runs) == {HIDDEN}


@pytest.mark.parametrize(("setting", "place"), [
    (Setting("plain", dtype="bfloat16"), Place("trunk", 0, "hidden")),
    (Setting("plain", state_dtype="bfloat16"), Place("trunk", 0, "state")),
], ids=["rows", "states"])  # fmt: skip
def test_draws_of_the_whole_run_share_no_declared_rounding(setting: Setting, place: Place) -> None:
    """In a model of few channels, where sums in another order change next to nothing of what is rounded to 16 bits."""
    trace = few_channels("short")
    plan = Replay(trace, setting).plan

    def shown(run: Participant) -> torch.Tensor:
        side = [run.serve(event) for event in trace.events[:3]][-1]
        return {**side.places, **dict(side.after["b"].parts())}[place]

    truth = shown(truth_participant(plan))
    draws = [shown(rounded_participant(plan, setting.subject(), number)) for number in range(1 + REDRAWS)]
    for one, other in combinations(draws, 2):
        assert torch.equal(one, one.bfloat16().to(one)) and float((one != other).float().mean()) > 0.1
    nearest, *others = [float((one.double() - truth).square().mean().sqrt()) for one in draws]
    assert 1 < sum(others) / len(others) / nearest < 2, "sqrt(2), as it is derived"


def test_correct_16_bit_engine_agrees_when_one_number_decides_errors() -> None:
    """As draws of the rounded run: they err more than a right engine does. Without redraws some of them are wrong."""
    trace = few_channels("short")
    lockstep = Lockstep(trace, participants_of(Replay(trace, Setting("plain", dtype="bfloat16")).plan))
    context, repeated_runs = [lockstep.step() for _ in range(3)][-1], lockstep.participants.repeated_runs
    wrong = dict.fromkeys((0, REDRAWS), 0)
    for number in range(100, 120):
        engine = replace(context, subject=repeated_runs.side(context.index, number))
        for redraws, draws in ((0, None), (REDRAWS, repeated_runs)):
            found = Propagated(draws)(engine)
            wrong[redraws] += any(isinstance(each, Comparison) and not each.agrees for each in found)
    assert wrong[0] > wrong[REDRAWS] == 0, wrong


def test_the_deviation_of_a_sum_is_that_of_running_sums() -> None:
    """Against sums that are really formed one term after another, with and without a large sum to carry."""
    draws, generator = 4000, torch.Generator().manual_seed(3)
    for terms, mean in ((16, 0.0), (64, 0.0), (256, 0.0), (64, 3.0), (256, 1.0)):
        each = torch.randn(draws, terms, generator=generator) + mean
        running = torch.zeros(draws)
        for term in each.unbind(1):
            running = running + term
        real = (running.double() - each.double().sum(1)).square().mean().sqrt()
        with Reordered(generator):
            told = (each.sum(1).double() - each.sum(1).double()).square().mean().sqrt() / math.sqrt(2)
        assert 0.8 < float(told / real) < 1.25, (terms, mean, float(told), float(real))


def test_every_kind_of_sum_is_moved_and_nothing_else(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(8, 64, generator=generator), torch.rand(8, 64, generator=generator)
    sums = {
        "matmul": lambda: x @ y.T, "einsum": lambda: torch.einsum("td,ld->tl", x, y), "sum": lambda: x.sum(-1),
        "mean": lambda: x.mean(-1, keepdim=True), "softmax": lambda: x.softmax(-1),
        "exp": lambda: x.exp(), "rsqrt": lambda: x.rsqrt(), "pow": lambda: 1e7**-x,
    }  # fmt: skip
    for name, work in sums.items():
        with Reordered(generator):
            once, again = work(), work()
        off = ((once - work()).norm() / work().norm()).item()
        assert once.shape == work().shape and 1e-8 < off < 1e-6, (name, off)
        assert not torch.equal(once, again), name
    before, outer = generator.get_state(), torch.einsum("tk,tv->tkv", x, y)
    with Reordered(generator):
        assert torch.equal(x + y, torch.add(x, y)) and torch.equal(x[:, :1].sum(-1), x[:, 0])
        assert torch.equal(torch.einsum("tk,tv->tkv", x, y), outer) and torch.equal(x[:, :1] @ y[:1], x[:, :1] * y[:1])
    assert torch.equal(generator.get_state(), before), "where nothing is summed, nothing is drawn"


@pytest.mark.parametrize("runs", [(48,), (48, 32)])
def test_draws_on_one_axis_err_as_the_numbers_of_their_run_do(runs: tuple[int, ...]) -> None:
    """The terms of the second run nearly cancel: its sums err 100 times as much."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 4, 8, 64, generator=generator), torch.rand(4, 64, 8, generator=generator)
    x[1, ..., ::2], x[1, ..., 1::2] = x[1, ..., ::2] + 100, x[1, ..., 1::2] - 100
    sums: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "matmul": lambda x: x @ y, "einsum": lambda x: torch.einsum("btk,bkv->btv", x, y), "sum": lambda x: x.sum(-1),
        "mean": lambda x: x.mean(-1), "softmax": lambda x: (x / 100).softmax(-1),
    }  # fmt: skip
    of = torch.tensor([number for number, draws in enumerate(runs) for _ in range(draws)])
    for name, work in sums.items():
        with Reordered(generator, runs=runs):
            together = torch.func.vmap(lambda one, work=work: work(x[one]), randomness="different")(of)
        for number in range(len(runs)):
            with Reordered(generator):
                alone = torch.stack([work(x[number]) for _ in range(48)])
            off = [(each.double() - work(x[number].double().float())).flatten(1).norm(dim=1)
                   for each in (together[of == number], alone)]  # fmt: skip
            assert 0.8 < float(off[0].mean() / off[1].mean()) < 1.25, (name, number)
            assert len(off[0].unique()) > runs[number] / 2, "each is a separate draw"


@pytest.mark.parametrize("family", ["dense", "next", "moe"])
def test_reference_calls_only_ops_with_a_known_error(family: str, tmp_path: Path) -> None:
    opened = Checkpoint.open(write_checkpoint(tmp_path, family))
    weights, called = Weights.of(opened, torch.float32), set()

    class Listed(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            called.add(func.__name__)
            return func(*args, **(kwargs or {}))

    memories = trunk.empty_memories(weights)
    with Listed():
        final, _ = trunk.advance(weights, [1, 2, 3, 4], memories, 0)
        trunk.logits(weights, final)
    assert called - FUNCTIONS - REDUCTIONS <= EXACT, called - FUNCTIONS - REDUCTIONS - EXACT


@pytest.mark.parametrize("products", [{}, {"moe": Product("tf32")}, {"moe": Product("bf16")}], ids=str)
def test_expert_draws_err_alike_together_and_row_by_row(
    products: dict[str, Product], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Checkpoint.open(write_checkpoint(tmp_path, "moe"))
    runner = ModelRunner(Weights.of(opened, torch.float64), Weights.of(opened, torch.float32), {}, products)
    x = torch.randn(6, opened.config.hidden, generator=torch.Generator().manual_seed(0))

    def work(weights: Weights, see: Callable[..., Any]) -> None:
        rows = see(Place("trunk", 0, "post_normed"), x.to(weights.embedding))
        see(MLP, mlp.mixture(weights.config, weights.layers[0].mlp, rows))

    errors, many = {}, recomputation.MOST_EXPERTS
    for most in (many, 0):
        monkeypatch.setattr(recomputation, "MOST_EXPERTS", most)
        runs, *_ = runner(work, len(x))
        off = runs.yardsticks.places[MLP].double() - runs.truth.places[MLP]
        assert 8 < len({tuple(one.flatten().tolist()) for one in off}) == len(off), "each is a separate draw"
        errors[most] = off.flatten(1).norm(dim=1)
    together, apart = errors[many], errors[0]
    assert 0.8 < float(together.mean() / apart.mean()) < 1.25
    assert 0.8 < float(together.max() / apart.max()) < 1.25
