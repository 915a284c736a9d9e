"""The allowances bite and do not cry wolf: right engines that sum otherwise pass with room, small errors are found.

Leaves out: faults of addresses and schedules (`instep faults`), and the long table (`instep calibrate`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from instep.checks.accumulated_errors import Propagated
from instep.oracle import recomputation
from instep.oracle.recomputation import Runner
from instep.oracle.reordered_arithmetic import FUNCTIONS, REDUCTIONS, Reordered
from instep.run.build_compared_engines import participants_of, rounded_participant, truth_participant
from instep.run.compared_engine import Participant, RepeatedRuns
from instep.run.lockstep import Lockstep
from instep.run.replay import Replay
from instep.setting import Setting
from instep.tier_allowances import REDRAWS
from instep.trace.file import read
from instep.verdict import Comparison, Exit, Tier
from instep_proof.faults.catalogue import TRACES
from instep_reference import mlp, trunk
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.engine import Commit
from instep_reference.contract.place_names import Place
from instep_reference.weights import Weights
from support.inputs.checkpoints import write as write_checkpoint
from support.inputs.few_channels import few_channels
from support.inputs.traces import recorded
from support.running.covering import WHOLE, few

pytestmark = pytest.mark.slow  # whole traces, in several orders of summation

MLP = Place("trunk", 0, "mlp")
HIDDEN = Place("extend", 0, "hidden")

# Ops with one rounding or none, which the reference calls in addition to sums and inexact functions.
EXACT = {
    "__get__", "__getitem__", "__len__", "add", "any", "arange", "as_tensor", "cat", "div", "flatten", "masked_fill",
    "mul", "neg", "nonzero", "ones", "repeat_interleave", "reshape", "scatter", "sort", "split", "stack", "sub", "to",
    "tolist", "triu", "unbind", "zeros_like",
}  # fmt: skip


@few(2)
@pytest.mark.parametrize(("form", "strategy", "trained"), [
    ("running", "snapshot", False), ("pairwise", "rerun", False), ("split", "columns", False),
    ("chunked", "rerun", True), *(pytest.param(*one, True, marks=WHOLE) for one in (
        ("running", "snapshot"), ("pairwise", "rerun"), ("split", "columns"),
    )),
])  # fmt: skip
def test_another_order_of_summation_passes_with_room(form: str, strategy: str, trained: bool) -> None:
    """On the trained model, or one of few channels, to the first commit; hundreds of random ones: `calibrate`."""
    setting = Setting(f"instep_proof.calibrate.correct_variants:{form}_7", strategy=strategy)
    trace = read(TRACES / "accepted.jsonl") if trained else few_channels("accepted", 2)
    outcome = Replay(trace, setting).run(until=5)
    assert outcome.verdict.exit == Exit.AGREED
    for tier in (Tier.DERIVED, Tier.PROPAGATED):
        assert max(one.used for one in outcome.verdict.compared if one.tier is tier) < 0.7


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
    runner = Runner(Weights.of(opened, torch.float64), Weights.of(opened, torch.float32), {}, products)
    x = torch.randn(6, opened.config.hidden, generator=torch.Generator().manual_seed(0))

    def work(weights: Weights, see: Callable[..., Any]) -> None:
        rows = see(Place("trunk", 0, "post_normed"), x.to(weights.embedding))
        see(MLP, mlp.mixture(weights.config, weights.layers[0].mlp, rows))

    errors, many = {}, recomputation.MOST_EXPERTS
    for most in (many, 0):
        monkeypatch.setattr(recomputation, "MOST_EXPERTS", most)
        runs, _ = runner(work, len(x))
        off = runs.yardsticks.places[MLP].double() - runs.truth.places[MLP]
        assert 8 < len({tuple(one.flatten().tolist()) for one in off}) == len(off), "each is a separate draw"
        errors[most] = off.flatten(1).norm(dim=1)
    together, apart = errors[many], errors[0]
    assert 0.8 < float(together.mean() / apart.mean()) < 1.25
    assert 0.8 < float(together.max() / apart.max()) < 1.25
