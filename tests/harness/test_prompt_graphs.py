"""Forwards with prompts in graphs, under every check: what a report counts, what checks name, and what is no pass.

Leaves out: the engine alone (`optimized/test_engine_prompt_graphs.py`), and the planted family, which `instep faults`
runs (`test_faults.py`).
"""

from collections.abc import Callable
from typing import Any

import pytest

from instep.bundled import fixtures
from instep.campaign.relations.same_tokens import prompt_rows
from instep.report.outcome_data import notes, of
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.verdict import Exit, Verdict
from instep.watch import host_reads
from instep.watch.op_calls import Calls
from instep_optimized.graphs import capture_and_replay, emulator
from instep_proof.faults.catalogue import by_id
from instep_reference.contract.errors import BadInput
from support.inputs.few_channels import same_events
from support.running.covering import WHOLE, few

pytestmark = pytest.mark.slow  # whole replays or commands

GRAPHS = {"graphs": True, "prompt_graphs": "16,64"}
TWO_FORWARDS = 6  # the last event of the first round: forwards of 1 and of 16 rows


@pytest.fixture(scope="module")
def prompts() -> Trace:
    return same_events("prompts", 2)


def replayed(trace: Trace, ops: str = "ledger", until: int | None = None, **setting: Any) -> Outcome:
    return Replay(trace, Setting(ops, **(GRAPHS | setting))).run(until=until)


def test_trace_fills_graphs_to_the_end_in_part_and_not_at_all(prompts: Trace) -> None:
    rows = prompt_rows(prompts)
    assert len(rows) == 8 and min(rows) == 1 and max(rows) > 64
    assert 16 in rows and any(1 < one < 16 or 16 < one < 64 for one in rows)


@pytest.mark.parametrize(("ops", "setting", "replays"), [
    ("ledger", {"strategy": "columns"}, 7), pytest.param("plain", {"overlap": True}, 7, marks=WHOLE),
    pytest.param("plain", {"prompt_graphs": "16", "strategy": "snapshot", "conv": "widened"}, 3, marks=WHOLE),
    pytest.param("plain", {"prompt_graphs": "128,32", "dtype": "bfloat16", "layout": "KV"}, 8, marks=WHOLE),
    pytest.param("ledger", {"drafter": "external"}, 7, marks=WHOLE),
    pytest.param("plain", {"ranks": 2}, 7, marks=WHOLE),
])  # fmt: skip
def test_every_forward_that_fits_is_replayed(
    prompts: Trace, ops: str, setting: dict[str, Any], replays: int
) -> None:
    outcome = replayed(prompts, ops, **setting)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    assert (outcome.verdict.replayed, outcome.verdict.prompts) == (replays, 8)
    assert f"in graphs, with {replays} of 8 forwards with prompts," in "\n".join(notes([outcome]))
    assert of([outcome]).found["runs"][0]["prompts"] == {"forwards": 8, "replayed": replays}


@WHOLE
def test_other_traces_agree_in_graphs_of_prompts(prompts: Trace) -> None:
    """Trees next to prompts, and several MTP layers with shared prefixes."""
    for name, until in (("trees", 12), ("faults/shared", 12)):
        outcome = replayed(read(fixtures() / "traces" / f"{name}.jsonl"), until=until, drafter=None)
        assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
        assert outcome.verdict.replayed == outcome.verdict.prompts > 0


@WHOLE
def test_run_without_a_replay_is_no_pass(prompts: Trace) -> None:
    outcome = replayed(prompts, until=TWO_FORWARDS, prompt_graphs="16")
    assert outcome.verdict.exit is Exit.AGREED and outcome.verdict.replayed == 2
    outcome = replayed(read(fixtures() / "traces" / "faults" / "graphs.jsonl"), until=8, prompt_graphs="1")
    assert outcome.verdict.exit is Exit.INCONCLUSIVE and not outcome.verdict.findings
    assert "each has more tokens than --prompt-graphs 1" in "\n".join(notes([outcome]))


def test_a_claim_without_a_replay_is_inconclusive() -> None:
    done = Verdict(served=True, segmented=True, prompts=3)
    assert done.exit is Exit.INCONCLUSIVE


@pytest.mark.parametrize(("setting", "said"), [
    ({"prompt_graphs": "16"}, "no --graphs"), ({"graphs": True, "prompt_graphs": "x"}, "'x'"),
    ({"graphs": True, "prompt_graphs": "16,"}, "numbers of tokens from 1"),
    ({"graphs": True, "prompt_graphs": "0"}, "numbers of tokens from 1"),
    ({"graphs": True, "prompt_graphs": "9999999"}, "to 1048576"),
])  # fmt: skip
def test_sizes_are_refused_by_name(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match="--prompt-graphs") as refused:
        Setting("plain", **setting)
    assert said in str(refused.value)


def test_sizes_are_sorted_and_printed() -> None:
    setting = Setting("plain", graphs=True, prompt_graphs="64, 16,16")
    assert setting.prompt_buckets == (16, 64) and setting.options().prompt_graphs == (16, 64)
    assert setting.options(graphs=False).prompt_graphs is None
    assert " ".join(setting.words()) == "--ops plain --graphs --prompt-graphs 64, 16,16"


@pytest.mark.parametrize(("name", "event", "option", "hidden"), [
    ("prompts", 1, "--prompt-graphs", ("attention",)), ("unread", 6, "--graphs", ("conv", "gdn", "attention")),
])  # fmt: skip
def test_calls_that_a_real_graph_hides_are_skipped_with_a_reason(
    name: str, event: int, option: str, hidden: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay of CUDA shows no op call inside.

    The eager draft extend after a prompt has attention, too; with `device_widths` two index ops run next to a graph.
    """
    judging, begin, replay = list[Calls](), Calls.begin, emulator.Recorded.replay

    def begun(self: Calls, regions: Any) -> None:
        judging[:] = [self]
        begin(self, regions)

    def hides(self: emulator.Recorded) -> None:
        calls, = judging
        calls._on = False
        with calls._reads.paused():
            replay(self)
        calls._on = True

    monkeypatch.setattr(Calls, "begin", begun)
    monkeypatch.setattr(emulator.Recorded, "replay", hides)
    outcome = replayed(read(fixtures() / "traces" / "faults" / f"{name}.jsonl"), until=event + 1)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    skipped = {one.reason for one in outcome.verdict.skipped if one.check == "contracts" and one.event == event}
    says = "{} inside a CUDA graph is not judged; run without {} to judge it"
    assert skipped == {says.format(op, option) for op in hidden}


def test_a_missing_call_is_no_hidden_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator shows the other calls of the graph."""
    wrapper = Calls.wrapper

    def without_windows(self: Calls, name: str, op: Any) -> Any:
        seen = wrapper(self, name, op)
        windows = lambda parts=(), **_: name == "conv" and all(part.form == "window" for part in parts)  # noqa: E731
        return lambda **given: (op if windows(**given) else seen)(**given)

    monkeypatch.setattr(Calls, "wrapper", without_windows)
    monkeypatch.setattr(host_reads.Reads, "note", lambda self: None)  # of the op that is not wrapped
    first, *rest = replayed(read(fixtures() / "traces" / "faults" / "unread.jsonl"), until=7).verdict.findings
    assert {one.check for one in (first, *rest)} == {"contracts"}
    assert first.event == 6 and "op conv (trunk.0.mixed): no call serves the" in first.diagnosis, first


NAMED = {  # a planted fault, and what the first finding says
    "prompt-inputs-held-weakly": "were freed after it was captured",
    "prompt-eager-call-first": "eager 0 of the graph ran where segment 0 was due",
    "prompt-never-replayed": "0 graphs were replayed; the event is one replay of ('prompt', 0)",
    "prompt-other-bucket": "0 segments and eager calls ran; 1 GDN layers need 3",
    "prompt-padding-of-the-last": 'the graph has rows 0 to 4 for request "a"; the trace has 0 to 0',
}


@few(1)
@pytest.mark.parametrize("fault", NAMED)
def test_first_finding_names_the_fault(prompts: Trace, fault: str, plant: Callable[..., None]) -> None:
    plant(*by_id()[fault].edits)
    found = replayed(prompts, "plain", until=2).verdict.findings
    assert found[0].event == 1 and NAMED[fault] in found[0].diagnosis, found[0]


@WHOLE
def test_wider_bucket_than_needed_is_found(
    prompts: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = capture_and_replay.Runner.bucket

    def widest(self: Any, rows: int) -> int:
        return self.buckets[-1] if self._breaks else right(self, rows)

    monkeypatch.setattr(capture_and_replay.Runner, "bucket", widest)
    found = replayed(prompts, until=2).verdict.findings
    assert "the bucket is for 64 rows; for 1 it is the one for 16" in found[0].diagnosis


@WHOLE
def test_kept_copy_in_memory_of_graphs_is_found_before_it_is_overwritten(
    prompts: Trace, plant: Callable[..., None]
) -> None:
    plant(*by_id()["prompt-prefix-in-the-room"].edits)
    found = replayed(prompts, "plain").verdict.findings
    assert found[0].event == 9 and {one.check for one in found} == {"graphs"}
    assert 'final of the copy "c, 0" is in memory of graphs, which the next replay overwrites' in found[0].diagnosis
