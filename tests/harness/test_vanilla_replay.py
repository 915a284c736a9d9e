"""Vanilla drafting replayed: a trace of a model with several MTP layers is really compared, in labels and in numbers.

Leaves out: what the drafter does (`tests/optimized/test_vanilla.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.campaign.relations.same_tokens import WHY_NO_MTP_ROWS
from instep.cli.record import make
from instep.diagnose import diagnose
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.header import Part, Recording
from instep.trace.policy import Arrival, ScheduledAction, Steps
from instep.verdict import Exit
from instep_proof.faults.catalogue.fault import Wrap
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from support.inputs.checkpoints import write
from support.inputs.traces import PROMPTS, VOCAB, policy
from support.running.command import Runner
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # whole replays

VANILLA = "instep_optimized/draft/vanilla.py"
# The second chunk leaves one token of the prompt, the third one none: the last layers read what the first ones pick.
POLICY = policy(
    arrivals=(Arrival("a", "more", chunks=(7, 12, 1), max_new=9), Arrival("b", "one", max_new=8),
              Arrival("c", "few", arrive=1, chunks=(3,), max_new=6)),
    steps=(Steps(2, 3), Steps(4, 0), Steps(5, 3)),
    deeds=(ScheduledAction(3, "preempt", "b"), ScheduledAction(4, "resume", "b")),
    replay=(Part("ledger"), Part("plain")),
)  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("vanilla")
    model = write(folder / "model", vocab_size=VOCAB, num_hidden_layers=2, full_attention_interval=2,
                  mtp_num_hidden_layers=3)  # fmt: skip
    return make(model, PROMPTS, POLICY, folder / "vanilla.jsonl", Setting(dtype="float64", drafter="vanilla"))


@few(1)
@pytest.mark.parametrize("ops", ["ledger", "plain"])
def test_every_mtp_layer_is_compared(trace: Trace, ops: str) -> None:
    verdict = agreed(Replay(trace, Setting(ops)).run(until=None if ops == "ledger" else 20))
    numbers = {"derived", "propagated", "decisions", "bytes", "identity"}
    checks = {"ledger": {"labels", "bytes", "identity"}, "plain": numbers}[ops]
    for number in range(3):
        stage = f"extend.{number}" if number else "extend"
        seen = {c.check for c in verdict.compared if c.place.stage == stage}
        assert checks <= seen, (stage, checks - seen)
        assert {"keys", "values"} <= {c.place.component for c in verdict.compared if c.place.stage == stage}


def test_the_header_names_the_drafter(trace: Trace, instep: Runner) -> None:
    assert trace.header.recording == Recording("vanilla", "float64")
    told = instep("replay", trace.path, "--until", 6)
    assert told.code == Exit.AGREED, told.out + told.err
    refused = instep("replay", trace.path, "--ops", "plain", "--drafter", "eagle")
    assert refused.code == Exit.BAD_INPUT and "MTP" in refused.err


def test_fuzzed_from_the_command_line(trace: Trace, instep: Runner, tmp_path: Path) -> None:
    told = instep("fuzz", "--ops", "ledger", "--checkpoint", trace.path.parent / "model", "--drafter", "vanilla",
                  "--examples", 1, "--seed", 1, "--out", tmp_path)  # fmt: skip
    assert told.code == Exit.AGREED, told.out + told.err


NEVER_CHAINED = Wrap(VANILLA, "Vanilla.extend", "from dataclasses import replace\nself = replace(self, chained=False)")
ALWAYS_CHAINED = Wrap(VANILLA, "Vanilla.extend", "num_steps = self.layers")


@pytest.mark.parametrize(("ops", "graphs", "edit", "says"), [
    ("plain", False, NEVER_CHAINED, "reads the target's rows"),
    *(("ledger", graphs, edit, "") for graphs in (False, True) for edit in (NEVER_CHAINED, ALWAYS_CHAINED)),
])  # fmt: skip
def test_mtp_layer_that_reads_wrong_rows_is_located(
    trace: Trace, ops: str, graphs: bool, edit: Wrap, says: str, plant: Callable[..., None]
) -> None:
    """The second layer never reads the rows of the first one, or reads them with one step, too."""
    plant(edit)
    replay = Replay(trace, Setting(ops, graphs=graphs))
    first = (diagnose(replay) if says else replay.run(until=20)).verdict.findings[0]
    assert first.place == Place("extend.1", STAGE_LEVEL, "post_normed") and says in first.diagnosis, first


@pytest.mark.parametrize("ops", ["ledger", "plain"])
def test_drafts_that_are_not_the_layers_own_are_found(trace: Trace, ops: str, plant: Callable[..., None]) -> None:
    """The second and the third proposal change places on the way out: nothing else in the event would show it."""
    crossed = "if num_steps >= 3:\n    result = (*result[:-2], result[-1], result[-2])"
    plant(Wrap(VANILLA, "Vanilla.draft", result=crossed))
    first = Replay(trace, Setting(ops)).run().verdict.findings[0]
    assert first.kind == "draft" and "own draft 2 is" in first.diagnosis
    assert first.place == Place("extend.1", AFTER_LAYERS, "pick")


@pytest.mark.parametrize(("recorded", "replayed", "why"), [
    (Setting(dtype="float32"), Setting("plain"), "the recorder chose in float32; the reference chooses in float64"),
    (Setting(dtype="float64", drafter="eagle"), Setting("plain", drafter="vanilla"),
     "the recorder drafted with eagle; vanilla is replayed"),
])  # fmt: skip
def test_choices_of_another_recorder_are_not_compared(
    tmp_path: Path, recorded: Setting, replayed: Setting, why: str
) -> None:
    model = write(tmp_path / "model", vocab_size=VOCAB, num_hidden_layers=2, full_attention_interval=2,
                  mtp_num_hidden_layers=1)  # fmt: skip
    arrivals = (Arrival("a", "few", chunks=(3,), max_new=4),)
    alone = structs.replace(POLICY, arrivals=arrivals, num_steps=1, steps=(), deeds=(), adaptive=None)
    trace = make(model, PROMPTS, alone, tmp_path / "other.jsonl", recorded)
    verdict = agreed(Replay(trace, replayed).run())
    assert {one.reason for one in verdict.skipped if one.check == "remembered"} == {why}
    assert "remembered" not in {one.check for one in verdict.compared}


@few(1)
@pytest.mark.parametrize("name", [
    "split", "rejected_is_plain", *(pytest.param(one, marks=WHOLE) for one in ("alone", "speculation_off")),
])  # fmt: skip
def test_only_rows_of_later_mtp_layers_are_left_out(name: str, trace: Trace) -> None:
    """Later MTP layers read other rows if chunks and rounds end elsewhere. That is correct, so it is no finding."""
    brief = replace(trace, events=trace.events[:20])
    (one,) = held(Case.of(brief, Replay(brief, Setting("ledger")).plan), relations([name]))
    assert one.verdict.exit is Exit.AGREED, one.verdict.findings[:1]
    stages = {c.place.stage for c in one.verdict.compared}
    assert {"trunk", "extend"} <= stages and not {"extend.1", "extend.2"} & stages
    assert WHY_NO_MTP_ROWS in {skipped.reason for skipped in one.verdict.skipped}
