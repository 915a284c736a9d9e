"""Errors to one side: a slip that no event shows is found, and rounding of any shape is not.

Leaves out: false alarms of engines (`instep calibrate`).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instep import kit
from instep.checks.one_sided_errors import CALIBRATED, Samples, not_judged
from instep.checks.ops_on_own_inputs import once_in
from instep.diagnose import diagnose
from instep.kit.compare_with_reference import judged
from instep.run import replay as replays
from instep.run.replay import Outcome, Replay
from instep.run.run_variants import swapped
from instep.setting import Setting
from instep.subject.declared_rounding import rounded_once
from instep.tier_allowances import CONSTANT_ULPS, FEWEST_SAMPLES, one_sided_limit
from instep.trace.file import read
from instep.verdict import Comparison, Exit
from instep_optimized import load
from instep_proof.calibrate import long_runs
from instep_proof.calibrate.allowance_use import variants
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import COMPONENTS
from support.running.covering import TRACES, WHOLE

EPS = torch.finfo(torch.float32).eps
ROWS, WIDTH = 200, 16
Draw = Callable[[torch.Generator], torch.Tensor]

NOISE: dict[str, Draw] = {
    "rounding": lambda chance: EPS / 2 * (2 * torch.rand(ROWS, WIDTH, generator=chance, dtype=torch.float64) - 1),
    "normal": lambda chance: EPS * torch.randn(ROWS, WIDTH, generator=chance, dtype=torch.float64),
    "cauchy": lambda chance: EPS * torch.randn(ROWS, WIDTH, generator=chance, dtype=torch.float64)
    / torch.randn(ROWS, WIDTH, generator=chance, dtype=torch.float64),
    "one in 50": lambda chance: EPS * (torch.rand(ROWS, WIDTH, generator=chance) < 0.02).double()
    * torch.randn(ROWS, WIDTH, generator=chance, dtype=torch.float64),
}  # fmt: skip


def _used(error: torch.Tensor, truth: torch.Tensor, component: str = "normed") -> tuple[float, Samples, int]:
    """The largest part of a limit that these relative errors use; the samples, and the group."""
    samples = Samples(component, 0, 0)
    assert samples.add(truth * (1 + error), truth)
    mean, limit = samples.judged(CONSTANT_ULPS * EPS, one_sided_limit(1))
    used = np.abs(mean) / limit
    return float(used.max()), samples, int(used.argmax())


def _truth(chance: torch.Generator, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=chance, dtype=torch.float64)


@pytest.mark.parametrize("noise", NOISE)
def test_rounding_of_any_shape_is_not_found(noise: str) -> None:
    chance = torch.Generator().manual_seed(1)
    used = [_used(NOISE[noise](chance), _truth(chance))[0] for _ in range(20)]
    assert 0 < max(used) < 1


@pytest.mark.parametrize("size", [2.5e-7, -2.5e-7])
@pytest.mark.parametrize("noise", ["rounding", "one in 50"])
def test_a_slip_of_one_channel_is_found_at_that_channel(noise: str, size: float) -> None:
    chance = torch.Generator().manual_seed(2)
    error = NOISE[noise](chance)
    error[:, 5] += size
    used, samples, group = _used(error, _truth(chance))
    assert used > 1
    assert samples.group(group) == (" in channel 5", None)
    mean = samples.judged(0.0, 1.0)[0][group]
    assert mean == pytest.approx(size, abs=3e-8), "the message has the size of the slip, with its sign"


def test_a_constant_of_a_correct_engine_is_not_found() -> None:
    chance = torch.Generator().manual_seed(3)
    error = torch.full((4000, WIDTH), CONSTANT_ULPS * EPS, dtype=torch.float64)
    assert 0.9 < _used(error, _truth(chance, 4000))[0] < 1


def test_rows_that_are_not_finite_are_left_to_other_checks() -> None:
    chance = torch.Generator().manual_seed(7)
    error = NOISE["rounding"](chance)
    error[3, 2], error[4, 1] = torch.nan, torch.inf
    used, samples, _ = _used(error, _truth(chance))
    assert used < 1
    assert samples.count == ROWS - 2


def test_the_largest_finding_needs_more_samples_than_the_fewest() -> None:
    """Without noise, sum A = sqrt(n) sqrt(sum A^2) for equal samples, so t^2 samples bound every finding."""
    assert one_sided_limit(1) ** 2 < FEWEST_SAMPLES
    risks = [2 * np.exp(-(one_sided_limit(look) ** 2) / 2) for look in range(1, 2000)]
    assert sum(risks) == pytest.approx(1e-11, rel=1e-2), "all looks together take the risk once"


def test_a_limit_covers_every_constant_up_to_its_bound() -> None:
    """The limit is the largest over all beta, not only over the two ends that the check computes."""
    chance = torch.Generator().manual_seed(4)
    o = _truth(chance)
    e = o * 1e-7 * torch.randn(ROWS, WIDTH, generator=chance, dtype=torch.float64)
    _, samples, _ = _used(e / o, o)
    limit = samples.judged(1e-7, 7.0)[1]
    a, d = samples._by_row(e.numpy(), o.numpy())
    betas = np.linspace(-1e-7, 1e-7, 41)
    every = [beta + 7 * np.sqrt(np.square(a * np.sign(a.sum(0)) - beta * d).sum(0)) / d.sum(0) for beta in betas]
    np.testing.assert_allclose(limit, np.max(every, axis=0), rtol=1e-9)


def test_rows_with_the_same_bits_count_once() -> None:
    chance = torch.Generator().manual_seed(5)
    row, error = _truth(chance, 1), 3e-7 * torch.ones(ROWS, WIDTH, dtype=torch.float64)
    _, samples, _ = _used(error, row.expand(ROWS, WIDTH).contiguous())
    assert samples.count == 1
    assert _used(error, _truth(chance))[0] > 1, "in rows that differ it is found"


def test_rows_of_one_event_are_one_sample_of_a_state() -> None:
    chance, samples = torch.Generator().manual_seed(6), Samples("core", 0, 0)
    for _ in range(32):
        o = torch.randn(3, 4, 8, generator=chance, dtype=torch.float64)
        samples.add(o * (1 + 3e-7 * torch.arange(4, dtype=torch.float64)[:, None]), o, 3)
    assert samples.count == 32
    mean, _ = samples.judged(0.0, 1.0)
    np.testing.assert_allclose(mean[1:], 1e-7 * np.arange(4), rtol=1e-6, atol=1e-15)
    assert samples.group(3) == ("", 2)


def test_moved_samples_are_those_of_an_engine_with_a_slip() -> None:
    chance = torch.Generator().manual_seed(8)
    truth, error = _truth(chance), NOISE["rounding"](chance)
    moved, planted = _used(error, truth)[1].slipped(3e-7), _used(error + 3e-7, truth)[1]
    for had, right in zip(moved.judged(EPS, 7.3), planted.judged(EPS, 7.3), strict=True):
        np.testing.assert_allclose(had, right, rtol=1e-6)


def test_only_calibrated_op_sets_on_a_cpu_are_judged() -> None:
    assert [not_judged(name, "cpu") for name in CALIBRATED] == [""] * len(CALIBRATED)
    assert "not for cuda: tensor cores truncate sums" in not_judged("plain", "cuda")
    assert "not for this subject" in not_judged("mine:OPS", "cpu")


@WHOLE
def test_a_long_run_judges_a_correct_engine_and_finds_larger_slips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_runs, "LONG", 16)
    long = long_runs.LongRuns()
    long.run(next(iter(variants(1))))
    assert (long.alarms, long.ran[0]["form"]) == ([], "permuted")
    assert long.looks > 50 and 0 < long.used < 1
    for component in ("normed", "gated"):
        groups, *found = long.found[component]
        assert found == sorted(found) and found[0] < groups / 2 < found[-1], "larger slips are found more often"


@WHOLE
@pytest.mark.parametrize(("name", "until"), [("plain", 14), ("triton", 30), ("invariant", 14)])
def test_a_slip_of_one_norm_weight_is_found_and_located(
    name: str, until: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the slip the same events agree (`make replay`)."""
    right, place = load(name), ("trunk", 1, "normed")

    def norm(**given: Any) -> torch.Tensor:
        row: torch.Tensor = right.norm(**given)
        if tuple(given["to"]) == place:
            row[:, 33] = (row[:, 33].double() * (1 + 2e-7)).to(row.dtype)
        return row

    monkeypatch.setattr(replays, "_uncalibrated", lambda setting, variant: "")
    setting = Setting(name, handed=replace(right, norm=norm))
    outcome = diagnose(Replay(read(TRACES / "adaptive.jsonl"), setting), until=until, ladder=True)
    assert outcome.verdict.exit is Exit.DIVERGED
    assert [(one.check, tuple(one.place)) for one in outcome.verdict.findings] == [("one_sided", place)]
    said = re.match(r"is (\S+) of its size too large in channel 33, ", outcome.verdict.findings[0].diagnosis)
    assert said is not None
    assert 1.9e-7 <= float(said[1]) <= 2.1e-7, "the size of the slip, to a twentieth"
    assert outcome.located is not None
    assert outcome.located.says.startswith("cause: op `norm`")
    judged = [one for one in outcome.verdict.compared if one.check == "one_sided"]
    assert len(judged) > 20, "the slip is judged with other places"


Norm = Callable[..., torch.Tensor]


def _one_channel(norm: Norm, size: float) -> Norm:
    def wrong(**given: Any) -> torch.Tensor:
        row = norm(**{**given, "x": given["x"].float()})
        row[:, 33] *= 1 + size
        return row.to(given["x"].dtype)

    return wrong


def _rounded_before_its_weight(norm: Norm) -> Norm:
    def wrong(**given: Any) -> torch.Tensor:
        row = norm(**{**given, "weight": torch.zeros_like(given["weight"])})
        return (row.float() * (1 + given["weight"].float())).to(row.dtype)

    return wrong


def _in_layer_1(change: Callable[[Norm], Norm]) -> Norm:
    right = load("plain").norm

    def norm(**given: Any) -> torch.Tensor:
        return (change(right) if tuple(given["to"]) == ("trunk", 1, "normed") else right)(**given)

    return norm


def _in_16_bits(change: Callable[[Norm], Norm], until: int) -> Outcome:
    """The run of `plain` in bf16 with another norm in layer 1."""
    setting = Setting("plain", handed=replace(load("plain"), norm=_in_layer_1(change)), dtype="bfloat16")
    return Replay(read(TRACES / "adaptive.jsonl"), setting).run(until=until)


@pytest.mark.parametrize(("change", "until"), [
    (partial(_one_channel, size=1e-3), 2),
    pytest.param(partial(_one_channel, size=1e-4), 9, marks=WHOLE),  # two commits later
    (_rounded_before_its_weight, 2),
], ids=["1e-3 of a channel", "1e-4 of a channel", "rounded before its weight"])
def test_a_slip_that_changes_one_byte_of_a_16_bit_run_is_found(
    change: Callable[[Norm], Norm], until: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "_op_set", lambda setting: setting.ops)
    findings = _in_16_bits(change, until).verdict.findings
    assert {(one.event, one.check, tuple(one.place)) for one in findings} == {
        (until, "own_inputs", ("trunk", 1, "normed"))}  # fmt: skip
    assert "from the op's own inputs: before it is stored in bfloat16, relative error" in findings[0].diagnosis


def _declared(once: tuple[str, ...], until: int | None = 2, trace: str = "short", **ops: Any) -> Outcome:
    """The run in bf16 of an op set that is not known, which declares what it rounds once."""
    setting = Setting("plain", handed=replace(load("plain"), name="mine", once=once, **ops), dtype="bfloat16")
    return Replay(read(next(TRACES.rglob(f"{trace}.jsonl"))), setting).run(until=until)


def _swiglu(*, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Any) -> torch.Tensor:
    gate, up = (x.float() @ gate_up.float().mT).chunk(2, -1)
    middle = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    return (middle.float() @ down.float().mT).to(x.dtype)


def _one_unit(norm: Norm) -> Norm:
    def wrong(**given: Any) -> torch.Tensor:
        row = norm(**given)
        row[:, 33] = row[:, 33].view(torch.int16).add(1).view(torch.bfloat16)
        return row

    return wrong


YET = "from the op's own inputs: declares that it rounds only its result, yet errs before it is stored in bfloat16: "


@pytest.mark.parametrize(("ops", "component"), [
    pytest.param({"mlp": _swiglu}, "mlp", id="its middle is rounded, too"),
    pytest.param({"norm": _in_layer_1(_one_unit)}, "normed", id="a unit of one channel", marks=WHOLE),
])  # fmt: skip
def test_an_op_set_that_declares_one_rounding_is_held_to_it(ops: dict[str, Any], component: str) -> None:
    findings = _declared(("*",), **ops).verdict.findings
    assert {(one.event, one.check, one.place.component) for one in findings} == {(2, "own_inputs", component)}
    assert all(one.diagnosis.startswith(YET) for one in findings)


@WHOLE
@pytest.mark.parametrize(("once", "ops"), [
    (("normed", "mixer"), {"mlp": _swiglu}), ((), {"norm": _in_layer_1(_rounded_before_its_weight)}),
])  # fmt: skip
def test_an_engine_that_does_not_declare_it_may_round_on_the_way(once: tuple[str, ...], ops: dict[str, Any]) -> None:
    assert _declared(once, **ops).verdict.exit is Exit.AGREED


@WHOLE
@pytest.mark.parametrize("trace", ["experts", "nemotron"])
def test_a_right_op_set_that_declares_one_rounding_everywhere_agrees(trace: str) -> None:
    verdict = _declared(("*",), 5, trace).verdict
    assert verdict.exit is Exit.AGREED
    own = {one.place.component for one in verdict.compared if one.check == "own_inputs"}
    assert own >= {"mixer"} and own & {"mlp", "attended"}


def test_an_op_that_comes_from_another_set_keeps_what_both_declare() -> None:
    mine = replace(load("plain"), name="mine", once=("*",))
    assert {*COMPONENTS} == swapped(mine, {"mlp": "plain"}).once, "plain rounds nothing on the way"
    assert swapped(mine, {"mlp": "triton"}).once == frozenset()


def test_a_declaration_that_is_no_collection_of_components_is_refused() -> None:
    for said in (3, None, (torch.bfloat16,), "norm"):
        with pytest.raises(BadInput, match=r"once: found .*, expected components: embedding, "):
            rounded_once(said)


@WHOLE
def test_an_engine_with_verbs_is_held_to_one_rounding_that_it_declares() -> None:
    """fp16 has three bits more than bf16: a number within 1/16 of a unit of a tie falls to the other side."""
    def run(name: str) -> list[Comparison]:
        setting = Setting(engine=f"support.wrong.engines:{name}", dtype="bfloat16")
        return Replay(read(TRACES / "faults" / "short.jsonl"), setting).run(until=2).verdict.findings

    assert run("rounds_once") == []
    wrong = run("rounds_twice")
    assert {tuple(one.place) for one in wrong} == {("trunk", 1, "normed")} and wrong[0].diagnosis.startswith(YET)


@WHOLE
def test_the_kit_holds_an_op_to_one_rounding_that_it_declares() -> None:
    cases = [case for case in kit.op_cases("mlp") if case.build("cpu").inputs["x"].dtype is torch.bfloat16]
    right = replace(load("plain"), name="mine", once=("mlp",))
    assert cases and judged(right, cases).exit is Exit.AGREED
    assert judged(replace(right, mlp=_swiglu, once=()), cases).exit is Exit.AGREED
    wrong = judged(replace(right, mlp=_swiglu), cases).findings
    assert wrong and all(one.diagnosis.startswith(YET.removeprefix("from the op's own inputs: ")) for one in wrong)


def test_values_are_judged_before_their_rounding_only_where_all_roundings_are_known() -> None:
    exact = once_in("plain", "cpu", {})
    assert {"core", "normed", "mixer", "logits"} < exact and not {"attended", "mlp"} & exact
    for less in (once_in("triton", "cuda", {}), once_in("plain", "cpu", {"linear": Product("bf16")})):
        assert {"core", "normed", "residual"} < less and not {"mixer", "qkv", "attended", "mlp"} & less
    assert once_in("mine:OPS", "cpu", {}) == {"core"}


@WHOLE
def test_a_run_without_calibration_lists_errors_as_not_compared() -> None:
    trace: Path = TRACES / "faults" / "steps.jsonl"
    outcome = Replay(read(trace), Setting("plain", handed=load("plain"))).run(until=1)
    assert not [one for one in outcome.verdict.compared if one.check == "one_sided"]
    assert len([one for one in outcome.verdict.skipped if one.check == "one_sided"]) == 1
