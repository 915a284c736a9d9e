"""Engines driven through callbacks and drafts that are handed in: correct ones agree, and faults are named.

Engines with and without shown memory; drafts from the n-gram look-up or any callable, recorded, replayed and fuzzed.
Leaves out: engines of other projects (`tests/peers`), and the page (`test_your_engine.py`).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from instep.checks.unserved_events import NOT_OFFERED
from instep.cli.record import make
from instep.diagnose import diagnose, locate
from instep.run.build_compared_engines import Plan, reference
from instep.run.engine_without_comparison import header_of
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.subject.engines.callbacks import Asked
from instep.subject.engines.engine_from_verbs import DerivedEngine
from instep.subject.proposers import ngram
from instep.trace.event_rules import EventRules
from instep.trace.event_scheduler import drive
from instep.trace.file import Trace, read
from instep.trace.header import Recording
from instep.trace.policy import read_policy, read_prompts
from instep.verdict import Exit, Tier
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract import answers
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Capacity, Commit, Draft, Finish, Forward, Refused, Row
from instep_reference.contract.engine import Path as Path_
from instep_reference.contract.errors import BadInput
from support.inputs.few_channels import FIXTURES, few_channels
from support.running.command import Runner, complaint
from support.running.covering import BEGUN, WHOLE, few
from support.running.verdicts import agreed
from support.wrong import engines

pytestmark = pytest.mark.slow  # whole replays or commands

TRACES = Path(__file__).resolve().parents[2] / "fixtures" / "traces" / "faults"
SMALL = ("kept", "accepted", "short", "arriving", "drawn", "refused")


RESUMED = 16  # an event of `kept` after a save, a load and a preemption; later events add nothing new


def replayed(name: str, trace: str = "kept", layers: int = 2, *, until: int | None = None, **setting: str) -> Outcome:
    told = few_channels(trace, layers) if trace in SMALL else read(TRACES / f"{trace}.jsonl")
    return diagnose(Replay(told, Setting(engine=f"support.wrong.engines:{name}", **setting)), until=until)


@pytest.mark.parametrize("name", ["right", "keeping"])
def test_a_right_engine_agrees_in_every_tier_that_it_shows(name: str) -> None:
    verdict = agreed(replayed(name))
    judged = {tier: [c for c in verdict.compared if c.tier is tier] for tier in Tier}
    assert {tier for tier, mine in judged.items() if mine} == set(Tier) - {Tier.IDENTITY, Tier.DERIVED}, \
        "T2 needs `watch`; what the harness packed or keeps itself is no T0"
    assert {c.place.component for c in judged[Tier.PROPAGATED]} >= {"conv", "state", "final", "logits"}


def test_engine_without_refuses_gets_no_illegal_events() -> None:
    outcome = replayed("right", "refused")
    assert outcome.verdict.exit is Exit.AGREED
    illegal = {index for index, event in enumerate(read(outcome.trace).events) if isinstance(event, Refused)}
    told = {skip.event for skip in outcome.verdict.skipped if skip.reason == NOT_OFFERED}
    assert len(illegal) > 10 and told == illegal


@few(6)
@pytest.mark.parametrize(("name", "event", "kind", "place", "says"), [
    ("no_rollback", 6, "commit", "trunk layer 0 conv", "holds the window after 3 tokens; 2 tokens were accepted"),
    ("no_rollback", 6, "commit", "trunk layer 0 state", "holds the state after 3 tokens; 2 tokens were accepted"),
    ("one_more", 6, "commit", "trunk layer 0 state", "holds the state after 3 tokens; 2 tokens were accepted"),
    ("of_another", 6, "commit", "trunk layer 0 state", 'holds the state of request "a"'),
    ("stale_logits", 8, "forward", "trunk logits", 'each row is that of request "b" in the forward before'),
    ("no_drop", 16, "resume", "trunk layer 0 state", "relative error"),
    ("shifted_window", 6, "commit", "trunk layer 0 conv", "is shifted by one to newer inputs"),
    ("stale_tile", 6, "commit", "trunk layer 0 state",
     "holds the state from before the step; 2 tokens were accepted; 1 of "),
    ("neighbour", 12, "load", "trunk layer 0 state", "4 of 2048 bytes differ"),
    ("slightly", 5, "forward", "trunk final", "is 1.0001 times the right value"),
    ("hidden_rollback", 8, "forward", "trunk final", "relative error"),
])  # fmt: skip
def test_wrong_engine_is_named_where_it_errs(name: str, event: int, kind: str, place: str, says: str) -> None:
    findings = replayed(name).verdict.findings
    assert (findings[0].event, findings[0].kind) == (event, kind)
    assert any(str(found.place) == place and found.diagnosis.startswith(says) for found in findings), findings[:3]


HIDDEN = "were not compared, so an earlier event may have left them wrong"
TOO = "its memory too: what this event computed from it is wrong"


@pytest.mark.parametrize(("name", "event", "says"), [
    ("hidden_kv", 8, f"; keys and values {HIDDEN}"),
    ("hidden_rollback", 8, f"; conv windows, states, keys and values {HIDDEN}"),
    ("slightly_keeping", 5, TOO),
])  # fmt: skip
def test_memory_that_was_not_compared_is_not_called_right(name: str, event: int, says: str) -> None:
    replay = Replay(few_channels("kept", 2), Setting(engine=f"support.wrong.engines:{name}"))
    outcome = replay.run(until=event)
    located = locate(replay, outcome)
    assert (located.finding.event, str(located.finding.place)) == (event, "trunk final")
    assert located.says.endswith(says)


@pytest.mark.parametrize("name", ["drafting", "drafting_all"])
def test_windows_with_own_widths_are_served_by_verbs(name: str) -> None:
    """Until a round in which all windows are the root alone."""
    trace = few_channels("widths", 2)
    none = Draft(("b", "a"), ((), ()), ((), ()))
    trace = replace(trace, events=(*trace.events[:10], none, *trace.events[11:13]), recorded={})
    verdict = Replay(trace, Setting(engine=f"support.wrong.engines:{name}")).run().verdict
    assert verdict.exit is Exit.AGREED and verdict.events == 13, verdict.findings


def test_memory_added_to_the_contract_later_is_not_called_right(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(few_channels("kept", 2), Setting(engine="support.wrong.engines:slightly_keeping"))
    outcome = replay.run(until=5)
    monkeypatch.setattr(answers, "MEMORY", (*answers.MEMORY, "ring"))
    monkeypatch.setattr(answers.RequestState, "ring", {0: torch.ones(1)}, raising=False)
    assert locate(replay, outcome).says.endswith(f"; ring {HIDDEN}")


@pytest.mark.parametrize("name", ["mute", "junk"])
def test_engine_that_shows_nothing_is_inconclusive(name: str) -> None:
    verdict = replayed(name, until=RESUMED).verdict
    compared = {"remembered"} | ({"identity"} if name == "junk" else set())
    assert verdict.exit is Exit.INCONCLUSIVE and {c.check for c in verdict.compared} == compared


def test_callbacks_that_showed_no_place_are_reported_as_not_judged() -> None:
    found = replayed("silent_no_rollback")
    assert found.verdict.exit is Exit.DIVERGED and not found.shown.feeds & {"watch", "layers"}
    assert {"watch", "layers"} <= {feed for feed, _ in found.shown.not_judged()}


def test_watched_engine_reports_replaced_events() -> None:
    verdict = replayed("watching_no_copies", until=RESUMED).verdict
    assert verdict.exit is Exit.AGREED and any("without save and load" in one.reason for one in verdict.skipped)


@pytest.mark.parametrize(("name", "says"), [
    ("nothing", "makes NoneType, which has no step, keep, drop"), ("no_keep", "which has no keep"),
    ("no_verb", "kv of 'support.wrong.engines:no_verb', which cannot be called"),
    ("other_arguments", "a callable that takes other arguments"), ("absent", "has no attribute 'absent'"),
    ("misdeclares", "declares: found 'round'"), ("misrounds", "rounds: found 'everything'"),
    ("misspells", "products: found 'bfloat'"), ("products_5", "declares: products: found 5"),
    ("rounds_3", "declares: rounds: found 3"), ("shows_5", "declares: shows: found 5"),
    ("shows_lists", "declares: shows: found [['logits']]"), ("order_no", "declares: order: found 'no'"),
    ("misnames_once", "once: found 'norm', expected components: embedding, "),
])  # fmt: skip
def test_invalid_engine_is_refused_in_one_line(name: str, says: str, instep: Runner) -> None:
    assert says in complaint(instep("replay", TRACES / "short.jsonl", "--engine", f"support.wrong.engines:{name}"))


def test_a_name_of_an_op_set_is_no_engine(instep: Runner) -> None:
    said = complaint(instep("replay", "--engine", "fla"))
    assert "--engine: found 'fla' (no such name)" in said and "fla-core" not in said


def test_op_set_together_with_an_engine_is_refused(instep: Runner) -> None:
    ran = instep("replay", TRACES / "short.jsonl", "--ops", "plain", "--engine", "support.wrong.engines:right")
    assert "--engine: found --ops as well" in complaint(ran)


@pytest.mark.parametrize(("name", "says"), [
    ("raising", "the engine, while it was built, raised LookupError (nobody is at home)"),
    ("kv_raises", "the engine, while it was built, raised LookupError"),
    ("declares_raises", "the engine, while it was built, raised LookupError"), ("no_pages", "pages are ()"),
    ("raises_step", "step raised LookupError (nobody is at home); the event is legal"),
    ("raises_keep", "keep raised LookupError"), ("raises_drop", "drop raised LookupError"),
    ("raises_state", "`state` of the engine raised LookupError"),
    ("gives_none", "step returned None"), ("gives_list", "step returned a list"),
    ("gives_other_key", "step: keys returned a list"), ("leaves_out", 'step: logits of "b" returned None'),
    ("forgets", 'step left out "logits", which it has shown before'),
    ("gives_nan", "numbers are not finite (NaN)"), ("gives_narrow", "the contract expects a tensor ["),
    ("gives_flat", "the contract expects a tensor ["), ("gives_text", "returned a str"),
    ("gives_bf16", "relative error"),
    ("state_none", "state returned None"), ("state_some", "the contract expects the gdn layers [0, 1, 2]"),
])  # fmt: skip
def test_misbehaving_callback_is_the_engines_finding(name: str, says: str) -> None:
    verdict = replayed(name, layers=4 if name == "state_some" else 2).verdict
    assert verdict.exit is Exit.DIVERGED
    assert says in verdict.findings[0].diagnosis, verdict.findings[0].diagnosis


def test_answers_are_copied_before_the_engine_overwrites_them() -> None:
    assert replayed("views", until=RESUMED).verdict.exit is Exit.AGREED


@pytest.mark.parametrize(("name", "dtype"), [("reordered", "float32"), ("narrow", "bfloat16")])
@pytest.mark.parametrize("trace", ["kept", "arriving"])
def test_correct_engine_that_rounds_differently_is_not_accused(name: str, dtype: str, trace: str) -> None:
    verdict = agreed(replayed(name, trace, dtype=dtype, until=RESUMED))
    assert max(c.used for c in verdict.compared if c.tier is Tier.PROPAGATED) < 1


def test_components_that_are_not_shown_are_listed(instep: Runner, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    trace = few_channels("kept", 2).path
    ran = instep("replay", trace, "--engine", "support.wrong.engines:right", "--json", file)
    assert ran.code == 0 and "served 29 of 29 events" in ran.out and "[shows no kv]" in ran.out
    assert "1 time without save and load: drop, then a step over the tokens again" in ran.out
    run = json.loads(file.read_text())["runs"][0]
    assert run["engine"] == "support.wrong.engines:right" and run["shown"] == ["final", "logits", "state"]
    assert run["ops"] is run["graphs"] is run["strategy"] is None and run["device"] == "cpu"
    assert {each["shows_no"] for each in run["not_judged"]} >= {"kv", "draft", "watch", "regions"}
    assert [each["event"] for each in run["played"]] == [12, 16]


def test_save_that_does_not_copy_is_found() -> None:
    first = replayed("aliasing").verdict.findings[0]
    assert (first.event, first.kind, first.tier) == (12, "load", Tier.BITWISE)
    assert "comes back different from what was saved" in first.diagnosis


def test_fuzz_finds_what_is_wrong_and_writes_it(instep: Runner, tmp_path: Path) -> None:
    few_channels("short")
    words = ("fuzz", "--engine", "support.wrong.engines:no_rollback", "--examples", 20, "--seed", 1, "--shrink", 0.5,
             "--checkpoint", FIXTURES / "tiny", "--out", tmp_path)  # fmt: skip
    ran = instep(*words)
    assert ran.code == 1 and "tokens; " in ran.out, ran
    assert "--engine support.wrong.engines:no_rollback" in " ".join(ran.out.split())


@pytest.mark.parametrize(("name", "tier", "component"), [
    ("watching", Tier.DERIVED, "core"), ("layered", Tier.PROPAGATED, "hidden"), ("drafting", Tier.DECISIONS, "pick"),
])  # fmt: skip
def test_optional_callback_switches_on_its_checks(name: str, tier: Tier, component: str) -> None:
    judged, without = (replayed(one, "short" if name == "watching" else "accepted").verdict for one in (name, "right"))
    assert judged.exit is Exit.AGREED, judged.findings[:1]
    of = [[c for c in v.compared if c.tier is tier and c.place.component == component] for v in (judged, without)]
    assert len(of[0]) > len(of[1])


def test_an_own_draft_that_is_another_is_found() -> None:
    first = replayed("slipping", "accepted").verdict.findings[0]
    assert (first.kind, first.tier, str(first.place)) == ("draft", Tier.DECISIONS, "chain.1 pick")
    assert first.diagnosis.startswith("own draft 2 is")


def test_request_with_tree_drafts_leaves_the_run_alone() -> None:
    opened = Checkpoint.open(TRACES.parents[1] / "tiny")
    room = Capacity((1, 2), tuple(range(1, 9)), 8, 32)
    asked = Asked(engines.Right(TRACES.parents[1] / "tiny"), engines.right, opened.config)
    engine = DerivedEngine(asked, opened, room, num_steps=2, adaptive=None)
    rows = tuple(Row(name, "prefill", 2, root=7) for name in "ab")
    for event in (Admit("a", (1, 2)), Admit("b", (3, 4)), Forward(rows)):
        event.on(engine)
        assert not engine.shown().gone
    Draft(("a", "b"), ((5, 6), (5, 6)), ((0, 0), (0, 1))).on(engine)
    told = engine.shown()
    assert told.gone == {"a"} and not told.unserved
    assert told.said[0].startswith('request "a" leaves the run: its drafts form a tree')
    answer = Forward((Row("a", "verify"), Row("b", "verify"))).on(engine)
    assert set(answer.own) == {"b"} and not engine.shown().unserved
    Commit(("a", "b"), (Path_((1,), 8), Path_((1,), 8))).on(engine)
    assert not engine.shown().unserved and engine.state("a").state == {} and engine.state("b").length == 4
    Finish("a").on(engine)
    assert engine.shown().unserved and "a" not in asked.made.memory


def test_sampling_draws_from_the_engines_logits() -> None:
    verdict = agreed(replayed("right", "drawn"))
    assert not [c for c in verdict.compared if c.check == "draws"], "the harness drew them itself"
    assert [c for c in verdict.compared if c.tier is Tier.DECISIONS and c.request == "d"]


def pooled(name: str, trace: str = "kept") -> Outcome:
    return Replay(few_channels(trace, 2), Setting(engine=f"support.wrong.pooled_engines:{name}")).run()


@pytest.mark.parametrize(("name", "checks"), [
    ("slotted", {"identity", "bytes", "bounds", "aliasing", "capacity"}), ("numbered", {"identity"}),
    ("paged", {"identity"}),
])  # fmt: skip
@pytest.mark.parametrize("trace", ["kept", "arriving"])
def test_a_right_engine_that_shows_its_memory_agrees(name: str, checks: set[str], trace: str) -> None:
    found = pooled(name, trace)
    assert found.verdict.exit is Exit.AGREED, found.verdict.findings[:1]
    assert checks <= {one.check for one in found.verdict.compared} and found.served_events == found.of
    assert found.shown.has("regions") is (name == "slotted")


@pytest.mark.parametrize(("name", "check", "says"), [
    ("stray", "bytes", "changed in state slot"), ("neighbour", "bytes", "changed in state slot"),
    ("silent", "bytes", "changed in conv slot"), ("swapped", "identity", "slots are"),
    ("wide", "bounds", "the engine's table lets this forward write conv slot"),
    ("unnamed", "interface", "may_change names units of states; `regions` shows no such region"),
    ("shared_pool", "aliasing", "units of state (layer 0) share memory"),
    ("one_slot", "identity", "slots are {'a': 0, 'b': 0}"), ("no_slot", "identity", "slots are"),
    ("dead_slot", "identity", "slots are {'nobody': 0}"),
    ("shared_page", "identity", "pages are (5,)"), ("twice", "identity", "pages are ("),
    ("no_table", "identity", "pages are ()"), ("moved_pages", "identity", "a page moved in the table"),
])  # fmt: skip
def test_fault_in_shown_memory_is_found(name: str, check: str, says: str) -> None:
    findings = pooled(name).verdict.findings
    assert findings and any(one.check == check and says in one.diagnosis for one in findings), findings[:3]


HOME = Path(__file__).resolve().parents[2] / "fixtures" / "traces" / "drafters"
FAULTS = HOME.parent / "faults"
PROMPTS = read_prompts(HOME / "prompts.json")
POLICY = read_policy(FAULTS / "handed.policy.json")


@pytest.fixture(scope="module")
def handed() -> Trace:
    return read(FAULTS / "handed.jsonl")


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
    verdict = agreed(Replay(handed, Setting("plain")).run(until=BEGUN["handed"] - 1))
    stages = {one.place.stage for one in verdict.compared if one.check == "derived"}
    assert stages == {"trunk"}, "no head is computed again"
    reasons = {one.reason for one in verdict.skipped if one.check == "derived"}
    assert "no draft head is in use, as drafts come from outside" in reasons


RUNS = (Edit("instep_optimized/engine_from_checkpoint.py",
             "in_use(checkpoint.config, options.drafter)", "checkpoint.config"),
        Edit("instep_optimized/engine_from_checkpoint.py", "in_use(config, options.drafter)", "config"),
        Edit("instep_optimized/engine_from_checkpoint.py", "MODES[options.drafter]", 'MODES["vanilla"]'))  # fmt: skip
OPINION = (Edit("instep_optimized/draft_answers.py", "torch.full_like(drafts, NO_OPINION)", "drafts.clone()"),)


@pytest.mark.parametrize("edits", [RUNS, OPINION])
def test_engine_that_ignores_external_drafts_is_found(
    handed: Trace, plant: Callable[..., None], edits: tuple[Edit, ...]
) -> None:
    plant(*edits)
    found = Replay(handed, Setting("ledger")).run().verdict.findings[0]
    assert "own drafts are" in found.diagnosis, found


def test_one_trace_serves_both_ways(instep: Runner) -> None:
    """A trace of a head's drafts replayed with the drafts handed in; what the recorder chose is then not compared."""
    told = instep("replay", FAULTS / "several.jsonl", "--ops", "ledger", "--drafter", "external")
    assert told.code == Exit.AGREED, told.out + told.err


@pytest.mark.parametrize("who", [{"ops": "support.wrong.subjects:right"}, {"engine": "support.wrong.engines:slipping"}])
def test_external_engine_receives_the_drafts(who: dict[str, str], handed: Trace) -> None:
    """Its model has no draft head then: one that has `eagle` alone would not serve three MTP layers."""
    agreed(Replay(handed, Setting(**who)).run(until=9))  # a prompt, a decode, a window and its commit


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
    (("--drafter", "medusa"), "eagle, vanilla, external, block, ngram, or module:attribute"),
])  # fmt: skip
def test_unrecordable_drafter_is_refused(words: tuple[str, ...], says: str, instep: Runner, tmp_path: Path) -> None:
    said = complaint(instep("record", "--checkpoint", HOME, "--prompts", HOME / "prompts.json",
                            "--policy", FAULTS / "handed.policy.json", "--out", tmp_path / "x", *words))  # fmt: skip
    assert says in said


def test_generated_and_read_again(instep: Runner, tmp_path: Path) -> None:
    """A model without a draft head speculates too; the trace of it agrees with another op set."""
    kept = tmp_path / "said.jsonl"
    ran = instep("generate", HOME, "--tokens", "12", "--drafter", "ngram", "--trace", kept)
    assert ran.code == Exit.AGREED, ran.out + ran.err
    assert any(isinstance(event, Draft) for event in read(kept).events)
    assert instep("replay", kept, "--ops", "ledger").code == Exit.AGREED


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
    plan = Plan.of(header, opened, setting, "policy")
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
