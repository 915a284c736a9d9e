"""Engines of several pipeline stages: traces agree, and a wrong stage is found, located and named.

With 2 stages (i - 1) mod 2 = (i + 1) mod 2, which hides a wrong micro-batch. So these tests have 3 stages and 2
micro-batches. Leaves out: the catalogue's faults (`catalogue/stages.py`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.checks.ranks import Stages
from instep.cli.record import make
from instep.diagnose import diagnose
from instep.kit.model_and_trace import PROMPTS
from instep.report.outcome_data import why_inconclusive
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.trace.micro_batches import due_steps
from instep.trace.policy import Arrival, Policy
from instep.verdict import Comparison, Exit
from instep.watch import host_reads, op_calls
from instep_optimized.graphs import emulator
from instep_optimized.pipeline import Step, schedule
from instep_proof.faults.catalogue.fault import TRACES as FAULTS
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract.engine import Commit, Draft, Forward, Row
from instep_reference.contract.errors import InstepError
from support.inputs.checkpoints import TWO_LAYERS, write
from support.inputs.traces import brief, first, policy, recorded, recording
from support.running.covering import TRACES, WHOLE
from support.running.planting import planted_here

pytestmark = pytest.mark.slow  # whole replays

STAGE, OVER = (f"instep_optimized/pipeline/{name}.py" for name in ("stage_engine", "ops_of_stage"))
THREE: dict[str, Any] = {"stages": 3, "micro_batches": 2}

three_layers = recording(brief(), num_hidden_layers=3, full_attention_interval=2)  # stage 1 has the attention
three_layers_bf16 = recording(first(4), num_hidden_layers=3, full_attention_interval=2, dtype=torch.bfloat16)


def replayed(trace: Trace, *edits: Edit, **how: Any) -> Outcome:
    with planted_here(*edits):
        return diagnose(Replay(trace, Setting(**{**THREE, **how})))


@pytest.mark.parametrize("how", [
    {"ops": "ledger"}, pytest.param({"ops": "ledger", "graphs": True, "strategy": "columns"}, marks=WHOLE),
    pytest.param({"ops": "plain", "overlap": True, "conv": "widened"}, marks=WHOLE),
], ids=lambda how: "-".join(map(str, how.values())))
def test_three_stages_agree_with_the_reference(three_layers: Trace, how: dict[str, Any]) -> None:
    verdict = replayed(three_layers, **how).verdict
    assert verdict.exit == Exit.AGREED and verdict.events == len(three_layers.events)
    commits = [event for event in three_layers.events if isinstance(event, Commit)]
    assert verdict.relayed == len(commits) > 1 and any(len(event.requests) > 1 for event in commits)
    assert {"stages", "agreement", "graphs", "bytes", "identity"} <= {one.check for one in verdict.compared}


@pytest.mark.parametrize(("ops", "graphs", "device"), [
    pytest.param("triton", True, "cpu", marks=WHOLE), pytest.param("invariant", False, "cpu", marks=WHOLE),
    *(pytest.param(ops, graphs, "cuda", marks=pytest.mark.gpu)
      for ops in ("triton", "invariant") for graphs in (False, True)),
])  # fmt: skip
def test_kernels_run_on_three_stages(three_layers_bf16: Trace, ops: str, graphs: bool, device: str) -> None:
    """On a GPU all stages run on one card, and each has its own CUDA graphs."""
    verdict = replayed(three_layers_bf16, ops=ops, dtype="bfloat16", graphs=graphs, device=device).verdict
    assert verdict.exit == Exit.AGREED and verdict.relayed and verdict.overlapped


@WHOLE
def test_calls_inside_graphs_of_stages_are_not_missed(three_layers: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph hides the calls of its replays. Ops around it are called, as a stage reads and writes roots."""
    inside, replay, wrapper = [0], emulator.Recorded.replay, op_calls.Calls.wrapper

    def hidden(recording: Any) -> None:
        inside[0] += 1
        replay(recording)
        inside[0] -= 1

    def seen_outside(self: Any, name: str, op: Any) -> Any:
        seen = wrapper(self, name, op)
        return lambda **given: (op if inside[0] else seen)(**given)

    monkeypatch.setattr(emulator.Recorded, "replay", hidden)
    monkeypatch.setattr(op_calls.Calls, "wrapper", seen_outside)
    monkeypatch.setattr(host_reads.Reads, "note", lambda self: None)
    outcome = replayed(three_layers, ops="ledger", graphs=True)
    skipped = {one.reason for one in outcome.verdict.skipped if one.check == "contracts"}
    assert outcome.verdict.exit == Exit.AGREED
    assert "conv inside a CUDA graph is not judged; run without --graphs to judge it" in skipped


@pytest.mark.parametrize(("edit", "says"), [
    pytest.param("        found = serve(asked)\n        if not stage.last:\n            "
                 "{stage.comm.send => stage.first and stage.comm.send}(self._passed.left.of(rows), stage.number + 1, "
                 "FINAL)", "rank 2 waits in recv from rank 1 for trunk final", id="no-send",
                 marks=WHOLE),
    pytest.param("        {found = serve(asked) => pass}\n        if not stage.last:\n            stage.comm.send("
                 "self._passed.left.of(rows), stage.number + 1, FINAL){ => \n        found = serve(asked)}", "",
                 id="sends-before-the-replay", marks=WHOLE),
    pytest.param("{self._passed.received.of(rows).copy_(stage.comm.recv(rows, stage.number - 1, FINAL)) => "
                 "stage.comm.recv(rows, stage.number - 1, FINAL)}", "", id="rows-of-the-replay-before",
                 marks=WHOLE),
])  # fmt: skip
def test_rows_that_miss_a_graph_are_found(three_layers: Trace, edit: str, says: str) -> None:
    """The first graph of a stage runs in the first forward without a prompt, and gets or gives wrong rows."""
    (found, *_) = replayed(three_layers, Edit.of(STAGE, edit), ops="ledger", graphs=True).verdict.findings
    assert found.kind == "forward" and says in found.diagnosis and (says or found.rank == 1)


@WHOLE
@pytest.mark.parametrize(("name", "ops", "graphs"), [
    ("adaptive", "ledger", True), ("trees", "plain", True), ("slots", "ledger", False),
    ("slots-overlapped", "plain", False),
])
def test_long_traces_agree_on_three_stages(name: str, ops: str, graphs: bool) -> None:
    trace = read(TRACES / f"{name}.jsonl")
    recorded = trace.header.recording
    setting = Setting(ops=ops, graphs=graphs, overlap=name.endswith("overlapped"), strategy="snapshot",
                      snapshot_layout="KV", **THREE)  # fmt: skip
    verdict = Replay(trace, setting if recorded is None else setting.recorded(recorded)).run(until=24).verdict
    assert verdict.exit == Exit.AGREED and verdict.relayed > 1


@WHOLE
@pytest.mark.parametrize("how", [THREE, {"dp": 2}], ids=["stages", "replicas"])
def test_relations_hold_on_stages_and_replicas(three_layers_bf16: Trace, how: dict[str, Any]) -> None:
    names = ["graph_is_eager", "unseen", "slots", "later_rows", "prompt_buckets", "decode_is_verify_1"]
    case = Case.of(three_layers_bf16, Replay(three_layers_bf16, Setting("ledger", **how)).plan)
    found = {one.relation.name: one for one in held(case, relations(names))}
    lacking = {name for name, one in found.items() if one.lacks}
    assert lacking == {"prompt_buckets", "decode_is_verify_1"} | ({"later_rows"} if "dp" in how else set())
    for name in found.keys() - lacking:
        assert found[name].verdict.exit == Exit.AGREED and found[name].verdict.elements > 1000, name


def test_run_without_a_relayed_commit_is_inconclusive(three_layers: Trace) -> None:
    first = next(n for n, event in enumerate(three_layers.events) if isinstance(event, Commit))
    outcome = Replay(three_layers, Setting(ops="ledger", **THREE)).run(until=first - 1)
    assert outcome.verdict.exit == Exit.INCONCLUSIVE and outcome.verdict.elements
    assert why_inconclusive(outcome).startswith("no commit was relayed to the other stages")


def test_run_without_several_micro_batches_is_inconclusive(tmp_path: Path) -> None:
    alone = policy(arrivals=(Arrival("b", "one", max_new=4),), steps=(), deeds=())
    trace = recorded(tmp_path, alone, num_hidden_layers=3, full_attention_interval=3)
    outcome = Replay(trace, Setting(ops="ledger", **THREE)).run()
    assert outcome.verdict.exit == Exit.INCONCLUSIVE and outcome.verdict.relayed
    assert why_inconclusive(outcome).startswith("no event had several micro-batches")
    assert Replay(trace, Setting(ops="ledger", stages=3)).run().verdict.exit == Exit.AGREED


def test_stage_runs_a_micro_batch_while_the_stage_before_runs_the_next_one() -> None:
    """The engine's schedule is the one that the harness derives on its own."""
    steps = schedule("forward", 3, 2)
    assert {Step(1, 1, 0, "run"), Step(1, 0, 1, "run"), Step(3, 0, 0, "relay"), Step(5, 1, 1, "relay")} <= {*steps}
    parts, rows = (("a",), ("b",)), tuple(Row(name, "verify") for name in "ab")
    for event in (Forward(rows), Draft(("a", "b")), Commit(("a", "b"))):
        made = schedule("forward" if isinstance(event, Forward) else "choice", 3, 2)
        for stage in range(3):
            due = [step[:3] for step in due_steps(event, parts, stage, 3)]
            assert [(one.tick, one.micro_batch, one.action) for one in made if one.stage == stage] == due


@pytest.mark.parametrize(("how", "says"), [
    ({"stages": 4}, "at most 3, the layers of the model"), ({"stages": 2, "ranks": 2}, "expected one of the two"),
    ({"stages": 1}, "expected several stages"), ({"micro_batches": 0}, "expected at least 1"),
    ({"graphs": True, "prompt_graphs": "16"}, "pipeline stages with forwards with prompts in graphs"),
])  # fmt: skip
def test_settings_without_stages_are_refused(three_layers: Trace, how: dict[str, Any], says: str) -> None:
    with pytest.raises(InstepError, match=says):
        Replay(three_layers, Setting(**{**THREE, **how})).run(until=0)


class Judge:
    """The findings of the check of stages over facts that a test changed."""

    def __init__(self, outcome: Outcome) -> None:
        assert outcome.last is not None and outcome.last.stages is not None
        self.context, self.facts = outcome.last, outcome.last.stages

    def __call__(self, stage: int, *ran: Any) -> list[Comparison]:
        changed = tuple(ran if n == stage else own for n, own in enumerate(self.facts.ran))
        context = replace(self.context, stages=replace(self.facts, ran=changed))
        return [one for one in Stages()(context) if not one.agrees]


def test_wrong_steps_and_relays_are_located(three_layers: Trace) -> None:
    commit = next(n for n, event in enumerate(three_layers.events)
                  if isinstance(event, Commit) and len(event.requests) == 2)  # fmt: skip
    judge = Judge(Replay(three_layers, Setting(ops="ledger", **THREE)).run(until=commit))
    for stage in range(3):
        first, second = judge.facts.ran[stage]
        assert not judge(stage, first, second)
        late = second._replace(step=second.step._replace(tick=9))
        for ran, says in (
            ((first,), "step 1 is nothing; the schedule has run micro-batch 1"),
            ((second, first), "step 0 is run micro-batch 1 with"), ((first, late), "at tick 9; the schedule has"),
        ):
            found = judge(stage, *ran)
            assert found and {one.rank for one in found} == {stage} and any(says in one.diagnosis for one in found)
    first, second = judge.facts.ran[1]
    ((number, place, accepted, *rest),) = second.relayed
    for line, says in (
        ((), "stage 1 received no relay of the request"),
        (((number - 1, place, accepted, *rest),), f"received micro-batch {number - 1} in its relay; expected {number}"),
        (((number, place, accepted + 1, *rest),), f"received accepted length {accepted + 1} in its relay"),
        (((number, place, accepted, *rest[:2], 0, *rest[3:]),), "received cap 0 in its relay; expected -1"),
        (((number, place, accepted, *rest[:-1], 7),), "received path"),
    ):  # fmt: skip
        (found,) = judge(1, first, second._replace(relayed=line))
        assert found.rank == 1 and found.request == second.requests[0] and says in found.diagnosis


def test_path_that_an_earlier_stage_does_not_move_is_found(tmp_path: Path) -> None:
    """The entries of an accepted path cross a page, and the pages of the request are in no order."""
    trees = msgspec.json.decode((FAULTS / "branching.policy.json").read_bytes(), type=Policy)
    model = write(tmp_path / "model", **{**TWO_LAYERS, "vocab_size": 256, "num_hidden_layers": 4})
    texts = dict(zip(sorted({one.prompt for one in trees.arrivals}), PROMPTS.values(), strict=False))
    trace = make(model, texts, trees, tmp_path / "trees.jsonl")
    unmoved = Edit(STAGE, "gather_path(ops, self.model.memory, inputs.slots, path, before, inputs.begin)", "pass")
    found = replayed(trace, unmoved, ops="ledger", stages=4).verdict.findings[0]
    assert found.rank == 1 and (found.place.layer, found.place.component) == (1, "keys")
    assert "was written 2 positions too late, to page 6, position 0 of keys@1, not to page 1" in found.diagnosis


def test_first_wrong_stage_is_located(three_layers: Trace) -> None:
    """A commit on the last stage alone, and rows of the micro-batch before that go to the next stage."""
    commit = next(n for n, event in enumerate(three_layers.events) if isinstance(event, Commit))
    alone = Edit.of(STAGE, "{self.strategy.commit => (lambda *given: None)}(ops, AcceptedWindows(inputs.rows, inputs."
                           "slots, last, lens, before, None if table.parents is None else path))")  # fmt: skip
    found = replayed(three_layers, alone, ops="ledger").verdict.findings[0]
    assert found.rank == 0 and found.place.layer == 0 and found.event >= commit
    swapped = Edit.of(OVER, "comm.send({x => x.flip(0)}, stage.number + 1, FINAL)")
    found = replayed(three_layers, swapped, ops="ledger").verdict.findings[0]
    assert (found.rank, found.place.stage, found.place.layer) == (1, "trunk", 1)
    assert found.diagnosis.startswith("row 0 is that of row 2, row 2 is that of row 0, as stage 1 received them from")
    before = (Edit.of(OVER, "comm.send({x => getattr(norm, 'was', x) if getattr(norm, 'was', x).shape == x.shape else "
                            "x}, stage.number + 1, FINAL)"),
              Edit.of(OVER, "        {return x.clone() => norm.was = x.clone()\n        return x.clone()}"))
    found = replayed(three_layers, *before, ops="ledger").verdict.findings[0]
    assert found.diagnosis.startswith('each row is that of request "b", as stage 1 received them from stage 0')
