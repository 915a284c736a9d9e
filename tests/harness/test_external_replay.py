"""Drafts that are handed in, through the commands: recorded with the n-gram look-up or any callable, replayed, fuzzed.

Leaves out: the engines (`tests/optimized/test_external.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from instep.cli.record import make
from instep.diagnose import diagnose
from instep.run.build_compared_engines import Plan, reference
from instep.run.engine_without_comparison import header_of
from instep.run.replay import Replay
from instep.setting import Setting
from instep.subject.proposers import ngram
from instep.trace.event_rules import EventRules
from instep.trace.event_scheduler import drive
from instep.trace.file import Trace, read
from instep.trace.header import Recording
from instep.trace.policy import read_policy, read_prompts
from instep.verdict import Exit, Tier
from instep_proof.faults.catalogue import FAMILIES
from instep_proof.faults.catalogue.fault import Edit, Fault
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Commit, Draft, Forward
from instep_reference.contract.errors import BadInput
from support.running.command import Runner, complaint
from support.running.covering import BEGUN, WHOLE, few
from support.running.planting import begun

HOME = Path(__file__).resolve().parents[2] / "fixtures" / "traces" / "drafters"
TRACES = HOME.parent / "faults"
PROMPTS = read_prompts(HOME / "prompts.json")
POLICY = read_policy(TRACES / "handed.policy.json")


@pytest.fixture(scope="module")
def handed() -> Trace:
    return read(TRACES / "handed.jsonl")


@pytest.mark.parametrize(("text", "count", "drafts"), [
    ((1, 2, 3, 9, 1, 2, 3), 3, [9, 1, 2]), ((1, 2, 1, 2, 7, 1, 2), 1, [7]), ((5, 1, 2, 6, 1, 2), 2, [6, 1]),
    ((1, 2, 3), 3, []), ((4,), 1, []), ((7, 7, 7), 4, [7, 7, 7, 7]),
])  # fmt: skip
def test_ngram_drafter_continues_the_earlier_text(text: tuple[int, ...], count: int, drafts: list[int]) -> None:
    """The latest occurrence counts, of three tokens before two. New tokens propose nothing."""
    assert ngram(text, count) == drafts


def test_a_recording_with_the_ngram_drafter_is_what_is_committed(handed: Trace, tmp_path: Path) -> None:
    """Ragged acceptance by itself: nothing is forced. Some requests decode, for nothing is proposed to them."""
    again = make(HOME, PROMPTS, POLICY, tmp_path / "again.jsonl", Setting(dtype="float64", drafter="ngram"))
    assert again.events == handed.events and again.header.recording == handed.header.recording
    assert handed.header.recording.drafter == "external"
    taken = [tuple(len(path.nodes) for path in event.accepted) for event in handed.events if isinstance(event, Commit)]
    assert {1, 2, 3} <= {count for counts in taken for count in counts}
    assert any(len(set(counts)) > 1 for counts in taken)
    kinds = [{row.kind for row in event.rows} for event in handed.events if isinstance(event, Forward)]
    assert {"verify", "decode"} in kinds
    for event in handed.events:
        assert not isinstance(event, Draft) or all(map(len, event.picks))


@WHOLE
def test_command_without_anything_to_judge_is_inconclusive(handed: Any) -> None:
    verdict = Replay(handed, Setting("plain")).run(until=BEGUN["handed"] - 1).verdict
    assert verdict.exit is Exit.AGREED, verdict.findings[:1]
    stages = {one.place.stage for one in verdict.compared if one.check == "derived"}
    assert stages == {"trunk"}, "no head is computed again"
    reasons = {one.reason for one in verdict.skipped if one.check == "derived"}
    assert "no draft head is in use, as drafts come from outside" in reasons


RUNS = (Edit("instep_optimized/engine_from_checkpoint.py",
             "in_use(checkpoint.config, options.drafter)", "checkpoint.config"),
        Edit("instep_optimized/engine_from_checkpoint.py", "in_use(config, options.drafter)", "config"),
        Edit("instep_optimized/engine_from_checkpoint.py", "MODES[options.drafter]", 'MODES["vanilla"]'))  # fmt: skip
OPINION = (Edit("instep_optimized/draft_answers.py", "torch.full_like(drafts, NO_OPINION)", "drafts.clone()"),)


@pytest.mark.slow
@pytest.mark.parametrize("edits", [RUNS, OPINION])
def test_engine_that_ignores_external_drafts_is_found(
    handed: Trace, plant: Callable[..., None], edits: tuple[Edit, ...]
) -> None:
    plant(*edits)
    found = Replay(handed, Setting("ledger")).run().verdict.findings[0]
    assert "own drafts are" in found.diagnosis, found


@pytest.mark.slow
def test_one_trace_serves_both_ways(instep: Runner) -> None:
    """A trace of a head's drafts replayed with the drafts handed in; what the recorder chose is then not compared."""
    told = instep("replay", TRACES / "several.jsonl", "--ops", "ledger", "--drafter", "external")
    assert told.code == Exit.AGREED, told.out + told.err


@pytest.mark.slow
@pytest.mark.parametrize("who", [{"ops": "support.wrong.subjects:right"}, {"engine": "support.wrong.engines:slipping"}])
def test_external_engine_receives_the_drafts(who: dict[str, str], handed: Trace) -> None:
    """Its model has no draft head then: one that has `eagle` alone would not serve three MTP layers."""
    verdict = Replay(handed, Setting(**who)).run(until=9).verdict  # a prompt, a decode, a window and its commit
    assert verdict.exit is Exit.AGREED, verdict.findings[:1]


CALLED = """
def last(tokens, count): return [tokens[-1]] * count
def few(tokens, count): return [1]
def falls(tokens, count): raise RuntimeError("no drafts today")
def wrong(tokens, count): return [99] * count
number = 3
"""


@pytest.mark.parametrize(("name", "says"), [
    ("few", "found 1 drafts by mine_drafter:few, expected 3, or none"), ("falls", "RuntimeError: no drafts today"),
    ("wrong", "token 99"), ("number", "a int, expected a callable"),
])  # fmt: skip
def test_invalid_proposer_is_refused_in_one_line(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_drafter.py").write_text(CALLED)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=says):
        make(HOME, PROMPTS, POLICY, tmp_path / "x.jsonl", Setting(dtype="float64", drafter=f"mine_drafter:{name}"))


@pytest.mark.slow
def test_any_callable_proposes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_drafter.py").write_text(CALLED)
    monkeypatch.syspath_prepend(tmp_path)
    plain = structs.replace(POLICY, deeds=(), steps=(), rounds=4)
    trace = make(HOME, PROMPTS, plain, tmp_path / "x.jsonl", Setting(dtype="float64", drafter="mine_drafter:last"))
    drafts = [picks for event in trace.events if isinstance(event, Draft) for picks in event.picks]
    assert drafts and all(len(set(picks)) == 1 for picks in drafts)
    assert Replay(trace, Setting("ledger")).run().verdict.exit is Exit.AGREED


@pytest.mark.parametrize(("words", "says"), [
    (("--drafter", "external"), "external without a proposer, expected ngram, or module:attribute"),
    (("--drafter", "medusa"), "eagle, vanilla, external, ngram, or module:attribute"),
])  # fmt: skip
def test_unrecordable_drafter_is_refused(words: tuple[str, ...], says: str, instep: Runner, tmp_path: Path) -> None:
    said = complaint(instep("record", "--checkpoint", HOME, "--prompts", HOME / "prompts.json",
                            "--policy", TRACES / "handed.policy.json", "--out", tmp_path / "x", *words))  # fmt: skip
    assert says in said


@pytest.mark.slow
def test_generated_and_read_again(instep: Runner, tmp_path: Path) -> None:
    """A model without a draft head speculates too; the trace of it agrees with another op set."""
    kept = tmp_path / "said.jsonl"
    ran = instep("generate", HOME, "--tokens", "12", "--drafter", "ngram", "--trace", kept)
    assert ran.code == Exit.AGREED, ran.out + ran.err
    assert any(isinstance(event, Draft) for event in read(kept).events)
    assert instep("replay", kept, "--ops", "ledger").code == Exit.AGREED


@pytest.mark.slow
def test_proposer_is_one_round_late_when_rounds_overlap(tmp_path: Path) -> None:
    """The proposer never sees the last forward's tokens, so drafts are right only if all in flight were accepted."""
    asked: list[tuple[int, ...]] = []

    def noted(text: tuple[int, ...], count: int) -> list[int]:
        asked.append(text)
        return ngram(text, count)

    setting = Setting(dtype="float64", drafter="ngram", overlap=True)
    plain = structs.replace(POLICY, deeds=(), steps=(), lag=1, overlap=True)
    trace = make(HOME, PROMPTS, plain, tmp_path / "late.jsonl", setting)
    taken = [len(path.nodes) for event in trace.events if isinstance(event, Commit) for path in event.accepted]
    assert max(taken) == 3 and min(taken) == 0
    assert Replay(trace, Setting("ledger", overlap=True)).run().verdict.exit is Exit.AGREED
    opened = Checkpoint.open(HOME)
    header, _ = header_of(plain, opened, recording=Recording("external", "float64", overlap=True))
    plan = Plan(opened, header.room(), header.num_steps, header.adaptive_file("policy"), setting)
    known: dict[str, tuple[int, ...]] = {}
    rules = EventRules(header, overlap=True)
    for step in drive(plain, PROMPTS, header, reference(plan, torch.float64), propose=noted):
        assert set(asked) <= set(known.values()), "the tokens of the last forward"
        asked.clear()
        if isinstance(step.event, Forward):
            known = {name: (*one.prompt, *one.said) for name, one in rules.table.live.items()}
        rules.apply(step.event)


def test_memory_counts_no_draft_kv(instep: Runner) -> None:
    """One attention layer and three MTP layers: a quarter of the KV is left."""
    from instep.subject.memory_per_request import need
    from instep_optimized import Options

    config = Checkpoint.open(HOME).config
    heads, none = (need(config, Options(drafter=mode), 4, 64).per_token for mode in ("vanilla", "external"))
    assert heads / none == pytest.approx(4, rel=0.05)


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAMILIES["drafters"], ids=lambda fault: fault.id)
def test_a_fault_of_a_drafter_is_found_where_it_is_and_named(fault: Fault, plant: Callable[..., None]) -> None:
    """The draft head's memory has its own valid range; several layers; supplied blocks.

    Run the tiers of all checks that see one of the faults.
    """
    plant(*fault.edits)
    trace = read(TRACES / f"{fault.trace}.jsonl")
    asked = (Tier.IDENTITY, Tier.BITWISE, Tier.DERIVED)
    ran = diagnose(Replay(trace, fault.how), until=fault.event, tiers=asked, judged_from=begun(trace, fault.event))
    found = ran.verdict.findings[0]
    assert (found.event, found.place) == (fault.event, fault.place)
    assert fault.says in found.diagnosis and found.check in fault.seen_by
