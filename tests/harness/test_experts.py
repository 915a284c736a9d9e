"""Models that differ in a layer: experts, whose ties may be broken in any way, and convs of width 1 without history.

A wrong mixture is found and named, a rerouted row is no yardstick, and an empty window is not counted. Leaves out: the
rest of the campaign (`instep faults --family experts`), and that `transformers` computes the same
(`tests/reference/test_oracle.py`).
"""

import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.campaign.relations.engine_modifications import row_by_row
from instep.checks.accumulated_errors import OTHER_EXPERTS
from instep.checks.experts import Experts
from instep.diagnose import diagnose
from instep.oracle.expert_routes import Route, Routes, scores_of
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.verdict import Exit, Tier
from instep.watch.pool_addresses import Pools
from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.ops.plain.mlp import _shared, _swiglu
from instep_proof.faults.catalogue import FAMILIES, TRACES, by_id
from instep_proof.faults.catalogue.experts import CHOSEN
from instep_proof.faults.catalogue.fault import Edit, Expected
from instep_proof.faults.rerecord import retraced
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import RequestState
from instep_reference.mlp import route
from support.inputs.checkpoints import config_of, write
from support.inputs.traces import brief, recording
from support.running.covering import each_value, few
from support.running.planting import judged_here
from support.running.verdicts import agreed, first_finding

pytestmark = pytest.mark.slow  # whole replays or commands

MLP = "instep_optimized/ops/plain/mlp.py"
RANKED = "chances.sort(dim=-1, descending=True, stable=True)"
ELSEWHERE = "    chosen[0, 0] = next(e for e in range(len(weights.router)) if e not in chosen[0])\n"
FIRST = FAMILIES["experts"][0]
ONE_ROW = replace(  # no catalogue's sentence: the bank fits it
    FIRST, id="one-row-elsewhere", edits=(Edit(MLP, CHOSEN, CHOSEN + ELSEWHERE),),
    other=Expected(FIRST.event, *FIRST.place, "row 0 goes to expert"))  # fmt: skip
GIVEN = {"drafter": "external"}  # with the drafts of the trace, where no fault is one of the draft head
ONCE = 6  # event: a prompt, a window and a commit
TWICE = 9  # event: by then each request has had a prompt, a window and a commit, and one step without drafts
CONFIG = ModelConfig.from_dict(config_of("moe"))  # 2 of 4 experts to a row


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A trained model, in which some rows are close to a tie."""
    return read(TRACES / "experts.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random experts: as many, and as many to a row, as the trained model has."""
    return write(tmp_path_factory.mktemp("random"), "moe", vocab_size=256, dtype=torch.bfloat16, num_hidden_layers=2,
                 full_attention_interval=2, num_experts=6, num_experts_per_tok=3)  # fmt: skip


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The same events through it."""
    return read(retraced(TRACES, ["experts"], model, tmp_path_factory.mktemp("small")) / "experts.jsonl")


@few(1)
@pytest.mark.parametrize("options", [
    {}, {"dtype": "bfloat16", "strategy": "snapshot", "graphs": True},
], ids=str)  # fmt: skip
def test_another_choice_between_experts_that_tie_is_right(trace: Trace, options: dict[str, Any], plant: Any) -> None:
    """The model has two experts with the same row in the router. Here the higher number wins, not the lower."""
    last_first = f"{RANKED.replace('chances', 'chances.flip(-1)')}"
    plant(Edit(MLP, f"    ranked = {RANKED}\n", f"    ranked = {last_first}\n"),
          Edit(MLP, "ranked.indices[:, :top_k]", "chances.shape[-1] - 1 - ranked.indices[:, :top_k]"))  # fmt: skip
    verdict = agreed(Replay(trace, Setting(**options, **GIVEN)).run(until=ONCE))
    compared = {check: sum(one.blocks for one in verdict.compared if one.check == check)
                for check in ("experts", "own_inputs", "propagated")}  # fmt: skip
    assert all(compared.values()) and compared["experts"] > 20
    ties = [one for one in verdict.compared if one.check == Experts.name and one.undecided]
    assert ties and all(len(set(re.findall(r"\[[\d, ]+\]", one.diagnosis))) == 2 for one in ties), "two choices each"


def test_experts_that_are_equal_have_equal_scores() -> None:
    """The columns of one product differ in their last bits, in most of these shapes (measured on an AMD EPYC)."""
    generator = torch.Generator().manual_seed(0)
    for count, width in product(range(1, 6), (16, 64, 128)):
        rows, router = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (count, 6))
        router[4] = router[1]
        scores = scores_of(rows, router)
        assert torch.equal(scores[:, 1], scores[:, 4])
        torch.testing.assert_close(scores, rows @ router.T)


def test_free_run_is_skipped_when_rounding_reroutes_a_row(trace: Trace) -> None:
    verdict = agreed(Replay(trace, Setting(dtype="bfloat16", **GIVEN)).run(until=TWICE))
    ties = sum(one.undecided for one in verdict.compared if one.check == Experts.name)
    assert ties and any(one.reason == OTHER_EXPERTS for one in verdict.skipped)
    assert max(one.used for one in verdict.compared if one.check == "own_inputs") < 0.5


def test_a_yardstick_follows_the_truth_and_stays_sharp(trace: Trace, plant: Any) -> None:
    """An error of 1e-4 in one expert is found in every event although the router does not decide in every fifth row."""
    plant(Edit(MLP, "answer * share[row, rank, None]", "answer * (1 + 1e-4 * (expert == 4)) * share[row, rank, None]"))
    first = first_finding(Replay(trace, Setting(**GIVEN)).run())
    assert (first.event, first.place.component, first.check) == (2, "mlp", "derived")


def test_a_row_that_goes_to_another_expert_is_found_located_and_named() -> None:
    one = judged_here(ONE_ROW)
    assert one.found and one.located and one.named_by == "bank", one.arm.findings[:1]


def test_faults_are_planted_under_a_model_with_experts_too(model: Path, tmp_path: Path, plant: Any) -> None:
    """`instep faults --checkpoint` records the trace of another family again."""
    fault = by_id()["commit-index-minus-one"]
    anew = read(retraced(TRACES, [fault.trace], model, tmp_path) / f"{fault.trace}.jsonl")
    assert Replay(anew, fault.how).run(until=fault.event).verdict.exit is Exit.AGREED
    plant(*fault.edits)
    outcome = diagnose(Replay(anew, fault.how), until=fault.event)
    first = outcome.verdict.findings[0]
    assert outcome.plan.checkpoint.config.experts and (first.event, first.place) == (fault.event, fault.place)
    assert first.explained is not None and first.explained.names == (fault.mistake,)
    assert fault.says in first.diagnosis


def test_a_tie_is_a_choice_that_the_scores_hardly_decide() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.999, 0.0], [3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    found = Route.of(CONFIG, scores)
    assert found.ranking[:, :2].tolist() == [[0, 1], [0, 1], [0, 1]]
    other = torch.tensor([[True, False, True, False]] * 3)
    assert found.shortfall(other).tolist() == pytest.approx([1e-3, 1.0, 0.0])
    for error, ties in ((0.0, [False, False, True]), (1e-4, [True, False, True]), (0.1, [True, True, True])):
        assert found.ties(other, torch.tensor(error), torch.float32).tolist() == ties
    assert not found.ties(found.chosen(), torch.tensor(1.0), torch.float32).any(), "the same choice is no tie"


def test_expert_choices_are_recorded_and_forced() -> None:
    scores = torch.randn(5, CONFIG.experts, generator=torch.Generator().manual_seed(0))
    with Routes(CONFIG) as noted:
        natural = route(CONFIG, scores)
    (seen,) = noted.seen
    assert torch.equal(seen.chosen(), natural > 0) and torch.equal(seen.scores, scores)
    given = seen.ranking.flip(-1)
    with Routes(CONFIG, [given]):
        forced = route(CONFIG, scores)
    assert torch.equal(forced > 0, seen.chosen(given))
    torch.testing.assert_close(forced.sum(-1), torch.ones(5))


def apart(*, x: torch.Tensor, by_arrival: bool, **given: Any) -> torch.Tensor:
    """Row by row, the experts of each in the order of choice, or from another one on, by how many rows there are."""
    first, rows = len(x) if by_arrival else 0, []
    for row in x.split(1):
        scores = linear(row.float(), given["weights"].router.float()).softmax(-1)[0]
        chosen = scores.sort(descending=True, stable=True).indices[: given["top_k"]].roll(-first)
        share = scores[chosen] / scores[chosen].sum() if given["norm_topk"] else scores[chosen]
        total = _shared(row, given["weights"])
        for number, expert in enumerate(chosen.tolist()):
            answer = _swiglu(row, given["weights"].gate_up[expert], given["weights"].down[expert])
            total = total + share[number] * answer
        rows.append(total)
    return torch.cat(rows) if rows else torch.zeros_like(x)


APART = replace(row_by_row(load("plain")), name="apart", moe=partial(apart, by_arrival=False))
ARRIVING = replace(APART, name="arriving", moe=partial(apart, by_arrival=True))


@pytest.mark.parametrize("ops", ["APART", "ARRIVING"])
def test_expert_order_that_depends_on_other_rows_is_found(small: Trace, ops: str) -> None:
    """No run by itself is wrong: both orders are sums of the same terms."""
    brief = replace(small, events=small.events[:6])
    on = Replay(brief, Setting(f"{__name__}:{ops}", **GIVEN))
    assert on.run().verdict.exit is Exit.AGREED
    (found,) = held(Case.of(brief, on.plan), relations(["alone"]))
    assert found.verdict.exit is (Exit.AGREED if ops == "APART" else Exit.DIVERGED)
    assert ops == "APART" or found.verdict.findings[0].place.component == "mlp"


def test_rows_per_expert_may_differ_with_other_rejected_drafts(trace: Trace) -> None:
    """`plain` multiplies the rows of an expert together, and torch sums two rows in another order than three."""
    brief = replace(trace, events=trace.events[:12])  # two rounds, and what reads the second one
    case = Case.of(brief, Replay(brief, Setting(**GIVEN)).plan)
    (found,) = held(case, relations(["later_rows"]))
    assert found.verdict.exit is Exit.AGREED, found.verdict.findings[:1]
    assert {Tier.BITWISE, Tier.PROPAGATED} <= {one.tier for one in found.verdict.compared}


width_one = recording(brief(), linear_conv_kernel_dim=1)


@few(1)
@pytest.mark.parametrize(("strategy", "conv"), each_value(STRATEGIES, CONV_FORMS))
def test_every_strategy_agrees_and_the_empty_window_is_not_counted(width_one: Trace, strategy: str, conv: str) -> None:
    """To a commit of two; labels tell where every row is up to the end. Drafts are given: their head has no conv."""
    how = Setting("plain", strategy=strategy, conv=conv, graphs=strategy == "rerun", drafter="external")
    ran = Replay(width_one, how).run(until=16).verdict
    assert ran.exit is Exit.AGREED and ran.events == 17, ran.findings[:2]
    compared = [found for found in ran.compared if found.place.component == "conv"]
    assert all(found.elements > 0 for found in compared)
    assert "a conv of width 1 keeps no inputs" in " ".join(skipped.reason for skipped in ran.skipped)


@few(1)
@pytest.mark.parametrize(("ops", "conv", "until"), [
    ("ledger", "windows", None), ("ledger", "widened", None), ("triton", "widened", 16),  # kernels: to a commit of two
])  # fmt: skip
def test_labels_and_kernels_agree(width_one: Trace, ops: str, conv: str, until: int | None) -> None:
    drafter = "external" if ops == "triton" else None
    ran = Replay(width_one, Setting(ops, conv=conv, drafter=drafter)).run(until=until).verdict
    assert ran.exit is Exit.AGREED and ran.events == len(width_one.events[:until]) + bool(until), ran.findings[:2]


def test_engine_that_still_keeps_inputs_is_found(width_one: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(self: OptimizedEngine, request: str) -> RequestState:
        told = right(self, request)
        return replace(told, conv={layer: torch.zeros(len(window), 1) for layer, window in told.conv.items()})

    right = OptimizedEngine.state
    monkeypatch.setattr(OptimizedEngine, "state", state)
    found = Replay(width_one, Setting("plain")).run().verdict.findings[0]
    assert (found.check, found.place.component, found.kind) == ("bytes", "conv", "forward")


def test_empty_packed_pools_have_no_address(width_one: Trace) -> None:
    checkpoint = Checkpoint.open(width_one.path.parent / width_one.header.checkpoint.near)
    served = OptimizedEngine(
        checkpoint, load("plain"), Options(guarded=False), width_one.header.room(), num_steps=width_one.header.num_steps
    )
    for event in width_one.events[:3]:
        event.on(served)
    empty = [region.units for region in served.regions() if region.name == "conv"]
    pools = Pools(served.regions())
    assert empty and all(not units.numel() and not pools.clauses("read", units, 0) for units in empty)
