"""A model without a whole reference: T0, T1 and T2d pass where all is right, and name what is wrong.

Leaves out: real sizes, which need a GPU (`tests/on_gpu.sh`).
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.bundled import fixtures
from instep.campaign.shapes import run_real_shape as shapes_run
from instep.campaign.shapes.random_weights import random_checkpoint
from instep.campaign.shapes.run_real_shape import course
from instep.cli import main
from instep.oracle.oracle import Oracle
from instep.oracle.recomputation import Recomputation
from instep.oracle.state_oracle import StateOracle
from instep.report.divergence_message import divergence
from instep.run.build_compared_engines import Plan
from instep.run.large_model import outcome, participants
from instep.run.lockstep import Lockstep
from instep.setting import Setting
from instep.trace.event_rules import verified
from instep.trace.file import Trace, read
from instep.verdict import Exit, Tier
from instep_proof.faults.catalogue import TRACES
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.weights import Weights
from support.inputs.narrow_models import narrow
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow

SETUP = Setting("plain", dtype="bfloat16")


@pytest.fixture(scope="module")
def made() -> tuple[Checkpoint, Trace]:
    checkpoint = random_checkpoint(narrow("qwen3.5-9b"))
    return checkpoint, course(checkpoint, "narrow", requests=2, rounds=7)


def test_forced_trace_covers_the_failure_conditions_of_a_commit(made: tuple[Checkpoint, Trace]) -> None:
    _, trace = made
    assert verified(trace) is trace
    commits = [event for event in trace.events if isinstance(event, e.Commit)]
    assert {0, 7} <= {len(path.nodes) for event in commits for path in event.accepted}
    kinds = [Counter(row.kind for row in event.rows) for event in trace.events if isinstance(event, e.Forward)]
    assert any(kind["prefill"] and kind["verify"] for kind in kinds) and any(kind["decode"] for kind in kinds)
    assert {event.num_steps for event in trace.events if isinstance(event, e.SetNumSteps)} >= {1, 3}


@WHOLE
def test_every_state_of_every_gdn_layer_is_judged(made: Any) -> None:
    checkpoint, trace = made
    found = outcome(trace, checkpoint, SETUP)
    assert found.verdict.exit is Exit.AGREED and found.verdict.events == len(trace.events)
    judged = [one for one in found.verdict.compared if one.check == "directed"]
    writes = sum(
        len(event.requests) if isinstance(event, e.Commit) else sum(row.kind != "verify" for row in event.rows)
        for event in trace.events if isinstance(event, e.Commit | e.Forward)
    )
    assert len(judged) == 3 * writes and {one.place.layer for one in judged} == {0, 1, 2}
    assert {one.tier for one in found.verdict.compared} == {Tier.IDENTITY, Tier.BITWISE, Tier.DIRECTED}
    assert found.calls["gdn"] > 0


def test_every_check_without_a_whole_reference_runs(made: tuple[Checkpoint, Trace]) -> None:
    checkpoint, trace = made
    for how in ({}, {"strategy": "columns", "conv": "widened", "graphs": True}):
        verdict = agreed(outcome(trace, checkpoint, Setting("plain", dtype="bfloat16", **how), until=6, layers=(0,)))
        asked = {one.check for one in verdict.compared}
        assert asked >= {"bounds", "contracts", "capacity", "aliasing", "graphs", "hostreads", "tails", "poison"}
        assert not verdict.skipped, verdict.skipped[:3]


def test_a_model_without_attention_names_no_pool_that_it_lacks() -> None:
    checkpoint = random_checkpoint(narrow("qwen3.5-9b", layers=1))
    agreed(outcome(course(checkpoint, "narrow", requests=2, rounds=3), checkpoint, SETUP))


@pytest.mark.parametrize(("ops", "check", "how"), [
    ("ONE_COLUMN_MORE", "tails", {"strategy": "snapshot"}), ("DOUBLED", "contracts", {}), ("POISONED", "poison", {}),
])  # fmt: skip
def test_fault_outside_states_is_found_at_real_sizes(
    made: tuple[Checkpoint, Trace], ops: str, check: str, how: dict[str, str]
) -> None:
    checkpoint, trace = made
    found = outcome(trace, checkpoint, Setting(f"support.wrong.ops:{ops}", **how), layers=(0,)).verdict.findings
    assert check in {finding.check for finding in found}, found[:2]


def test_the_command_that_is_printed_is_one_and_does_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And where no command does the same, none is printed."""
    monkeypatch.setattr(shapes_run, "shape", lambda name, layers, vocab: narrow(name, layers=layers))
    found = shapes_run.shaped("qwen3.5-9b", Setting("support.wrong.ops:DOUBLED", strategy="snapshot"), until=12)
    command = divergence(found).splitlines()[-1].split()
    assert command[:5] == ["instep", "shapes", "--layers", "4", "qwen3.5-9b"]
    monkeypatch.setattr("sys.argv", [*command, "--json", str(tmp_path / "again.json")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == Exit.DIVERGED
    again = json.loads((tmp_path / "again.json").read_text())["runs"][0]
    first = found.verdict.findings[0]
    assert (again["events"], again["findings"][0]["diagnosis"]) == (found.verdict.events, first.diagnosis)
    nowhere = replace(found, again=())
    assert divergence(nowhere).splitlines() == divergence(found).splitlines()[:-1]


def test_a_commit_that_moves_nothing_is_named(made: tuple[Checkpoint, Trace]) -> None:
    checkpoint, trace = made
    found = outcome(trace, checkpoint, Setting("support.wrong.ops:UNMOVED", strategy="snapshot"))
    assert found.verdict.exit is Exit.DIVERGED
    first = next(one for one in found.verdict.findings if one.check == "directed")
    assert first.kind == "commit" and "holds the state from before the step" in first.diagnosis


def test_different_rounding_is_no_wrong_state() -> None:
    """As with a library that adds the parts of a split sum in 16 bits: errors of twice the size, which lean nowhere."""
    checkpoint = random_checkpoint(narrow("qwen3.5-9b", layers=1, hidden=256, key_dim=128, value_dim=128))
    trace = course(checkpoint, "wider", requests=2, rounds=2)
    for ops in ("plain", "support.wrong.ops:IN_FOUR_PARTS"):
        found = agreed(outcome(trace, checkpoint, Setting(ops, dtype="bfloat16"), until=6))
        judged = [one for one in found.compared if one.check == "directed"]
        assert judged and max(one.worst for one in judged) < 0.2


def _apart(draws: torch.Tensor) -> torch.Tensor:
    """How far half of the draws lie from the middle one: one that rounds a tie the other way moves nothing here."""
    return (draws - draws.median(0).values).flatten(1).norm(dim=1).median()


def test_rounding_draws_need_a_narrow_storage(made: tuple[Checkpoint, Trace]) -> None:
    checkpoint, trace = made
    for dtype, narrow_places in (("bfloat16", True), ("float32", False)):
        setting = replace(SETUP, dtype=dtype)
        seats = participants(Plan.of(trace.header, checkpoint, setting, "narrow"))
        rounds = setting.op_set().rounds(setting.activation, torch.float32)
        oracle, lockstep = StateOracle(checkpoint, rounds, torch.float32, torch.device("cpu")), Lockstep(trace, seats)
        seen = set()
        for _ in range(7):
            for piece in oracle.at(lockstep.step()):
                if isinstance(piece, Recomputation) and piece.writes_state:
                    assert piece.narrow is narrow_places
                    seen.add(piece.span.kind)
                    shared, sampled = (_apart(x) for x in (piece.yardsticks.state, piece.dithered(8).state))
                    assert (sampled > 100 * shared) == narrow_places
        assert seen >= {"prefill", "commit"}


def test_layers_that_are_not_judged_are_not_computed(made: tuple[Checkpoint, Trace]) -> None:
    checkpoint, trace = made
    found = outcome(trace, checkpoint, SETUP, until=6, layers=(1,))
    assert {one.place.layer for one in found.verdict.compared if one.check == "directed"} == {1}
    assert found.verdict.events == 7


def test_states_are_those_of_the_whole_oracle(made: tuple[Checkpoint, Trace]) -> None:
    checkpoint, trace = made
    seats = participants(Plan.of(trace.header, checkpoint, SETUP, "narrow"))
    lockstep, rounds = Lockstep(trace, seats), SETUP.op_set().rounds(torch.bfloat16, torch.float32)
    whole = Oracle(checkpoint, rounds, torch.float32)
    lean = StateOracle(checkpoint, rounds, torch.float32, torch.device("cpu"))
    compared = 0
    for _ in range(9):
        context = lockstep.step()
        right, found = (
            [piece for piece in oracle.at(context) if isinstance(piece, Recomputation) and piece.writes_state]
            for oracle in (whole, lean)
        )
        for ours, theirs in zip(found, right, strict=True):
            assert (ours.layer, ours.request) == (theirs.layer, theirs.request)
            assert torch.allclose(ours.truth.state, theirs.truth.state, rtol=1e-12, atol=1e-14)
            compared += 1
    assert compared >= 15


@pytest.mark.parametrize("name", ["olmo", "minimax"])
def test_layers_of_states_alone_are_those_of_the_model(name: str) -> None:
    """Norms of OLMo-Hybrid have other names; a decay of MiniMax depends on the layer's number among all layers."""
    checkpoint = Checkpoint.open(fixtures() / name)
    whole = Weights.of(checkpoint)
    lean = StateOracle(checkpoint, {}, torch.float64, torch.device("cpu")).runner.truth
    for number, layer in enumerate(checkpoint.config.recurrent):
        right, found = whole.layers[layer], lean.layers[number]
        pairs = [(due, vars(found.mixer)[part]) for part, due in vars(right.mixer).items() if part != "out"]
        for due, got in [(right.input_norm, found.input_norm), *pairs]:
            assert (due is None and got is None) or torch.equal(due, got)
    assert len(lean.layers) == len(checkpoint.config.recurrent) == 2


@few(1)
@pytest.mark.parametrize("name", ["handed", "several"])
def test_other_drafters_have_a_ledger_too(name: str) -> None:
    """`eagle` alone does not serve three MTP layers, and has a draft head where drafts are handed in."""
    trace = read(TRACES / f"{name}.jsonl")
    checkpoint = Checkpoint.open(TRACES / trace.header.checkpoint.near)
    agreed(outcome(trace, checkpoint, Setting("plain").recorded(trace.header.recording), until=24, layers=(0,)))
