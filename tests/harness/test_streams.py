"""Exact streams: codes, relabelled traces, clean runs of every strategy, and messages about misplaced states.

Leaves out: slightly wrong numbers, which labels cannot show.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from instep.bundled import fixtures
from instep.campaign.streams import run_stamped_trace
from instep.campaign.streams.run_stamped_trace import LEVELS, streamed
from instep.campaign.streams.stamped_trace import (
    MOST_POSITIONS,
    STAMPED,
    Stamp,
    before_silu,
    code,
    config,
    decoded,
    relabelled,
    stream_checkpoint,
    vocabulary,
)
from instep.cli import app
from instep.setting import Setting
from instep.trace.event_rules import verified
from instep.trace.file import Trace
from instep.verdict import Exit, Verdict
from instep_optimized.commit import STRATEGIES
from instep_proof.faults.catalogue import by_id
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from support.inputs.few_channels import few_channels
from support.inputs.traces import committed
from support.running.command import Runner, advances, complaint
from support.running.covering import WHOLE, each_value, few
from support.running.planting import planted_here
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # whole replays or commands

ragged = committed("faults/ragged")


adaptive = committed("adaptive")


def test_every_stamp_has_its_own_code_in_every_head_and_layer() -> None:
    stamps = [Stamp.of(token) for token in range(vocabulary(3))]
    assert [stamp.token for stamp in stamps] == list(range(vocabulary(3)))
    assert Stamp(2, 41).token == (2 * MOST_POSITIONS + 41) * 2 and Stamp(2, 41, True).token % 2
    codes = {tuple(code(stamp, head, layer)) for stamp in stamps[::37] for head in (0, 1) for layer in (0, 2)}
    assert len(codes) == 4 * len(stamps[::37]) and max(map(max, codes)) <= 16
    assert all(decoded(torch.tensor(code(stamp, 1, 2)), 1, 2) == stamp for stamp in stamps[::37])
    assert decoded(torch.tensor(code(stamps[5], 1, 2)), 0, 2) is None and decoded(torch.zeros(16), 0, 0) is None


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1.5])
def test_non_integer_row_is_no_code(number: float) -> None:
    row = torch.tensor(code(Stamp(2, 41), 1, 2), dtype=torch.float32)
    assert decoded(row, 1, 2) == Stamp(2, 41)
    row[5] = number
    assert decoded(row, 1, 2) is None


@pytest.mark.parametrize("level", ["model", pytest.param("op", marks=WHOLE)])
def test_poison_that_is_read_is_a_finding(level: str) -> None:
    fault, trace = by_id()["pending-after-load"], few_channels("leaving", 2)
    with planted_here(*fault.edits):
        found = streamed(trace, Setting("plain", graphs=True), level, until=24).verdict
    assert found.exit is Exit.DIVERGED and "what is not finite" in found.findings[0].diagnosis, found.findings[:1]


def test_more_requests_or_positions_than_labels_are_refused(adaptive: Trace) -> None:
    with pytest.raises(BadInput, match="at most 16"):
        vocabulary(17)
    first = adaptive.events[0]
    long = e.Admit(first.request, tuple([1] * (MOST_POSITIONS + 1)))
    with pytest.raises(BadInput, match="position 256"):
        relabelled(Trace(adaptive.path, adaptive.header, (long,), {}, ""))


@pytest.mark.parametrize("value", [1.0, 2.0, 16.0])
def test_silu_is_undone(value: float) -> None:
    assert torch.nn.functional.silu(torch.tensor(before_silu(value))).item() == pytest.approx(value, rel=1e-6)


def test_the_model_gives_back_the_code_of_every_token() -> None:
    """In fp64, and from bf16 weights: the hidden row of any layer is the embedding."""
    from instep_reference.gdn import causal_conv
    from instep_reference.norms import rms_norm
    from instep_reference.weights import Weights

    made = config(2)
    weights = Weights.of(stream_checkpoint(made))
    tokens = [Stamp(1, 200).token, Stamp(0, 7, True).token]
    mixer = weights.layers[1].mixer
    normed = rms_norm(weights.embedding[tokens], weights.layers[1].input_norm, made.eps)
    fed = causal_conv(normed @ mixer.qkv.T, mixer.conv, torch.zeros(len(mixer.conv), 3, dtype=torch.float64))[0]
    values = torch.nn.functional.silu(fed[:, 64:]).view(2, 4, 16)
    for row, token in zip(values, tokens, strict=True):
        assert [decoded(one.round(), head, 1) for head, one in enumerate(row)] == [Stamp.of(token)] * 4


def test_relabelled_trace_is_legal_and_marks_rejected_drafts(adaptive: Trace) -> None:
    labelled = relabelled(adaptive)
    assert verified(labelled.trace) and len(labelled.held) == len(adaptive.events)
    rejected = 0
    for event, held in zip(labelled.trace.events, labelled.held, strict=True):
        for name, one in held.items():
            stamps = [Stamp.of(token) for token in one.tokens[: one.length]]
            assert [stamp.position for stamp in stamps] == list(range(one.length)), name
            assert not any(stamp.rejected for stamp in stamps)
        if isinstance(event, e.Draft):
            rejected += sum(Stamp.of(token).rejected for picks in event.picks or () for token in picks)
    assert rejected > 0


@pytest.mark.parametrize(("strategy", "level", "recurrence"), each_value(STRATEGIES, LEVELS, STAMPED))
def test_right_engines_hold_what_they_should(strategy: str, level: str, recurrence: str, ragged: Trace) -> None:
    setting = Setting("plain", strategy=strategy, conv="widened")
    found = agreed(streamed(ragged, setting, level, until=9, recurrence=recurrence))
    read_off = [c for c in found.compared if c.check == "stream"]
    assert {c.place.component for c in read_off} == {"conv", "state", "values"}
    assert {c.place.stage for c in read_off} == {"trunk", "extend"} and sum(c.elements for c in read_off) > 50_000


IN_TREES = [
    ("the node before the last accepted one", "instep_optimized/round_for_step_count.py",
     "acceptance.last_correct_step_indices, acceptance.accept_lens,",
     "(acceptance.last_correct_step_indices - 1).clamp(min=0), acceptance.accept_lens,", "snapshot", "state"),
    ("a node continues the one before it", "instep_optimized/packed_batch.py", "plan.before.flatten()",
     "(plan.before - (plan.before > 0).long()).flatten()", "snapshot", "conv"),
    ("keys and values stay at their nodes", "instep_optimized/ops/plain/row_places_and_lengths.py",
     "place = before[:, None] + node", "place = before[:, None] + torch.arange(node.shape[1])", "columns", "values"),
]


UNTIL = {"snapshot": 16, "columns": 9}  # the second of them shows where a tree continues below another sibling


branching = committed("faults/branching")


@pytest.fixture(scope="module")
def right(branching: Trace) -> Callable[[str], Verdict]:
    """The tree states of a correct engine, by its strategy; run once."""
    return cache(lambda strategy: streamed(
        branching, Setting("plain", strategy=strategy), "op", until=UNTIL[strategy]).verdict)


@few(1)
@pytest.mark.parametrize(("file", "old", "new", "strategy", "component"), [one[1:] for one in IN_TREES],
                         ids=[one[0] for one in IN_TREES])  # fmt: skip
def test_accepted_path_leaves_the_stamps_of_its_nodes(
    branching: Trace, right: Callable[..., Any], file: str, old: str, new: str, strategy: str, component: str
) -> None:
    """The stamp of a draft has its depth, and whether it is on the accepted path: siblings have the same depth."""
    setting, until = Setting("plain", strategy=strategy), UNTIL[strategy]
    assert right(strategy).exit is Exit.AGREED and right(strategy).elements > 50_000
    drafts = [event for event in relabelled(branching).trace.events[:until] if isinstance(event, e.Draft)]
    stamps = [Stamp.of(token) for event in drafts for picks in event.picks or () for token in picks]
    assert {stamp.rejected for stamp in stamps} == {True, False}
    assert any(len({stamp.position for stamp in stamps if stamp.rejected is wrong}) > 1 for wrong in (True, False))
    with planted_here(Edit(file, old, new)):
        findings = streamed(branching, setting, "op", until=until).verdict.findings
    said = [found.diagnosis for found in findings if found.check == "stream" and found.place.component == component]
    assert any("holds position" in one and "a rejected draft" in one for one in said), findings[:4]


@few(1)
@pytest.mark.parametrize("level", LEVELS)
def test_prompts_in_chunks_preemptions_and_loads_keep_their_stamps(level: str) -> None:
    """Chunk boundaries, preemptions and a resume; at the op level also a reload, and slots that are used again."""
    trace = few_channels("leaving", 2)
    found = streamed(trace, Setting("plain", graphs=True), level, until=16 if level == "model" else None)
    assert found.verdict.exit is Exit.AGREED and found.verdict.events == (17 if level == "model" else found.of)


@pytest.mark.parametrize(("dtype", "level"), [
    pytest.param("float32", "model", marks=WHOLE), ("bfloat16", "op"),
])  # fmt: skip
def test_kernels_hold_what_they_should(dtype: str, level: str) -> None:
    trace = few_channels("short", 2)
    assert streamed(trace, Setting("triton", dtype=dtype), level).verdict.exit is Exit.AGREED


SAID = (
    ("BEFORE", "ragged", 'holds request "b" up to position'),
    ("SWAPPED", "ragged", 'expected request "'),
    ("TURNED", "ragged", "holds a transposed state"),
    ("BEGUN_ANEW", "adaptive", "holds nothing in head 0 where position"),
)


@pytest.mark.parametrize(("wrong", "level"), each_value(SAID, LEVELS))
def test_misplaced_state_is_named_with_its_owner(
    wrong: tuple[str, str, str], level: str, request: pytest.FixtureRequest
) -> None:
    ops, name, says = wrong
    setting = Setting(f"support.wrong.stream_ops:{ops}", strategy="snapshot")
    verdict = streamed(request.getfixturevalue(name), setting, level, until=14).verdict
    assert verdict.exit is Exit.DIVERGED
    said = [found.diagnosis for found in verdict.findings if found.check == "stream"]
    assert any(says in one and one.startswith("slot ") for one in said), said


def test_state_is_exact_in_bits_per_op_and_in_labels_per_model(ragged: Trace) -> None:
    setting = Setting("support.wrong.stream_ops:SIGNED", strategy="snapshot")
    exact = streamed(ragged, setting, "op", until=2).verdict
    assert exact.exit is Exit.DIVERGED and {found.check for found in exact.findings} == {"stream"}
    assert streamed(ragged, setting, "model", until=2).verdict.exit is Exit.AGREED


def test_command_prints_and_writes_its_result(tmp_path: Path) -> None:
    trace, file = str(few_channels("ragged", 2).path), tmp_path / "found.json"
    told = ["--strategy", "rerun", "--level", "op", "--json", str(file)]
    done = CliRunner().invoke(app, ["streams", trace, *told])
    assert done.exit_code == Exit.AGREED, done.output
    assert json.loads(file.read_text())["runs"][0]["elements"] > 0 and "stamps, op level" in done.output
    wrong = CliRunner().invoke(app, [
        "streams", trace, "--ops", "support.wrong.stream_ops:BEFORE", "--strategy", "snapshot",
    ])  # fmt: skip
    assert wrong.exit_code == Exit.DIVERGED and "expected up to position" in " ".join(wrong.output.split())
    with pytest.raises(BadInput, match="op or model"):
        CliRunner().invoke(app, ["streams", trace, "--level", "bit"], catch_exceptions=False)


def test_recurrence_is_that_of_the_traces_model_unless_one_is_given(
    instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = run_stamped_trace.streamed, list[str]()
    monkeypatch.setattr(run_stamped_trace, "streamed", lambda *given, **how: (
        seen.append(how["recurrence"]), run(*given, **how))[1])  # fmt: skip
    words = (fixtures() / "traces" / "faults" / "kimi.jsonl", "--strategy", "rerun", "--level", "op", "--until", 3)
    assert instep("streams", *words).code == instep("streams", *words, "--recurrence", "gdn").code == Exit.AGREED
    assert instep("streams", few_channels("ragged", 2).path, *words[1:]).code == Exit.AGREED
    assert seen == ["kda", "gdn", "gdn"]
    assert "expected one of gdn, kda" in complaint(instep("streams", *words, "--recurrence", "mamba2"))


def test_streams_shows_its_progress(instep: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = advances(monkeypatch)
    words = ("--strategy", "snapshot", "--strategy", "rerun", "--level", "op", "--until", 3)
    assert instep("streams", few_channels("ragged", 2).path, *words).code == Exit.AGREED
    runs = ("op level [plain, snapshot], run 1 of 2", "op level [plain, rerun], run 2 of 2")
    assert seen == [one for at, run in enumerate(runs) for one in ((run, at, 2), *((run, n, 4) for n in range(1, 5)))]
