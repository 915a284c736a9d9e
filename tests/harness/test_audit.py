"""`instep audit`: right recordings agree at every level, errors of wrong ones are named, and bad ones are refused.

Leaves out: the page (`test_audit_steps.py`), and models that are larger than memory (`tests/perf/audit_large.py`).
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from instep.audit.audit import Audit, audit, opened
from instep.audit.token_origins import CUT, last_commits
from instep.audit.tokens import AtToken
from instep.checks import known_wrong_states
from instep.generate.decode import Ask, decode
from instep.generate.tokenizer import Bytes, prompts_from
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.file import decode as decoded
from instep.trace.header import Model, config_digest
from instep.verdict import TIES, Exit, Tier, Verdict
from instep_reference import trunk
from instep_reference.contract.checkpoint import Checkpoint, OnDisk
from instep_reference.contract.engine import AnyEvent
from instep_reference.contract.errors import BadInput
from instep_reference.weights import Weights
from support.inputs.checkpoints import write as write_checkpoint
from support.inputs.recordings import PROMPTS, TINY, edited, lines, recorded, recording, said, shown, stated, tensors
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # whole replays or commands

right = recording()


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two requests, of which the last draft has three tokens each, at event 8."""
    prompts = {name: PROMPTS[name] for name in "ab"}
    return recorded(tmp_path_factory.mktemp("recordings") / "brief", tokens=4, prompts=prompts)


@pytest.fixture(scope="module")
def spoken(right: Path) -> list[dict]:
    """The answers, in the form of a plain file."""
    told = audit(right, TINY, level=1).told
    return [{"request": text.request, "prompt": text.prompt, "tokens": text.said} for text in told.texts]


def first(found: Audit) -> tuple:
    """The first finding of tokens and counts."""
    one = found.verdict.findings[0]
    return one.check, one.event, one.kind, one.request


# right ones


def test_a_right_recording_agrees_at_every_level(right: Path) -> None:
    found = audit(right, TINY)
    assert found.exit is Exit.AGREED, found.verdict.findings
    assert found.tokens.decided == found.tokens.ties.made == sum(len(text.said) for text in found.told.texts) >= 36
    assert found.told.windows == len(found.told.counts) > 5 and 0 < found.told.accepted < found.told.drafts
    tiers = {one.tier for one in found.replay.verdict.compared}
    assert tiers >= {Tier.DECISIONS, Tier.PROPAGATED, Tier.DIRECTED}
    assert Tier.BITWISE not in tiers, "the harness keeps its own copy of earlier memory"
    assert found.replay.verdict.events == found.replay.of
    assert found.digest == found.recorded.weights is not None and not found.recorded.notes


def test_states_in_the_other_layout_are_read(tmp_path: Path) -> None:
    made = recorded(tmp_path / "vk", layout="VK", tokens=4, prompts={"a": PROMPTS["a"]})
    found = audit(made, TINY)
    assert found.exit is Exit.AGREED and Tier.DIRECTED in {one.tier for one in found.replay.verdict.compared}
    stated(made, layout="KV")
    with pytest.raises(Exception, match=r"state.a.0: found shape \[4, 64, 32\], expected shape \[4, 32, 64\]"):
        audit(made, TINY)


def test_a_plain_file_of_prompts_and_answers_is_audited(
    spoken: list[dict[str, Any]], tmp_path: Path, instep: Runner
) -> None:
    file = said(tmp_path / "said.jsonl", spoken)
    page = tmp_path / "page.html"
    ran = instep("audit", file, "--model", TINY, "--dtype", "float32", "--json", tmp_path / "r.json", "--html", page)
    assert ran.code == 0 and "agrees" in ran.out and "does not name its model" in ran.out, ran
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["tokens"] == result["decided"] > 30 and result["exit"] == 0 and result["peak_mib"] > 50
    assert result["used"] == 0 and result["walks"] == 1 and result["findings"] == []
    assert "Generated tokens" in page.read_text() and '"runs"' not in page.read_text(), "it has no events"
    assert sum(len(text["by"]) for text in result["texts"]) == result["tokens"]
    assert "not judged: logits, final rows" in ran.out and result["not_judged"][0]["what"].startswith("logits")


@WHOLE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_correct_engine_is_not_accused_in_any_width(tmp_path: Path, dtype: str) -> None:
    prompts, tokens = dict([*prompts_from(TINY / "prompts.json", Bytes()).items()][:100]), 16
    ran = decode(Ask(Checkpoint.open(TINY), Setting(dtype=dtype), prompts, 3, tokens=tokens, batch=8))
    requests = [{"prompt": prompts[name], "tokens": ran.said(name)} for name in prompts]
    found = audit(said(tmp_path / "said.jsonl", requests), TINY, dtype=dtype)
    assert found.exit is Exit.AGREED and (made := found.tokens.ties.made) > 90, found.verdict.findings[:1]
    assert made == tokens * len(prompts) and found.tokens.decided > {"float32": 0.99, "bfloat16": 0.6}[dtype] * made


# what is wrong


def test_every_wrong_token_is_named(spoken: list[dict[str, Any]], tmp_path: Path, instep: Runner) -> None:
    tokens = list(spoken[1]["tokens"])
    tokens[2], tokens[-1] = (tokens[2] + 1) % 256, (tokens[-1] + 1) % 256
    file = said(tmp_path / "said.jsonl", [spoken[0], spoken[1] | {"tokens": tokens}])
    found = audit(file, TINY, dtype="float32")
    assert found.exit is Exit.DIVERGED and first(found) == ("tokens", 2, "line", spoken[1]["request"])
    wrong = [one for one in found.verdict.findings if isinstance(one, AtToken)]
    assert wrong[0].token == 2 and wrong[0].position == len(spoken[1]["prompt"]) + 2
    assert {2, len(tokens) - 1} <= {one.token for one in wrong}, "the later one is found as well"
    says = f"token is {tokens[2]}; the model says {spoken[1]['tokens'][2]} by a margin of"
    assert wrong[0].worst > 100 and wrong[0].diagnosis.startswith(says)
    words = ("--dtype", "float32", "--json", tmp_path / "r.json", "--sarif", tmp_path / "log", "--annotate")
    ran = instep("audit", file, "--model", TINY, *words)
    assert ran.code == 1 and "line 2, request" in ran.out and "margin" in ran.out, ran
    place = json.loads((tmp_path / "log").read_text())["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": str(file)}, "region": {"startLine": 2}}
    assert f"::error file={file},line=2,title=line 2%2C request" in ran.out
    findings = json.loads((tmp_path / "r.json").read_text())["findings"]
    assert findings[0]["token"] == 2 and findings[0]["position"] == wrong[0].position and findings[0]["tier"] == "T4"


def window(recording: Path, accepted: int) -> tuple[int, dict, list[int]]:
    """The first commit that accepts this many of request a's drafts: its number, the event, the drafts."""
    drafts: dict[str, list[int]] = {}
    for number, event in enumerate(lines(recording / "events.jsonl")):
        if event["event"] == "draft":
            drafts |= dict(zip(event["requests"], event["picks"], strict=True))
        mine = event["event"] == "commit" and event["requests"][0] == "a"
        if mine and len(event["accepted"][0]["nodes"]) == accepted:
            return number, event, drafts["a"]
    raise AssertionError("no such window")


@pytest.mark.parametrize(("accepted", "path", "check", "says"), [
    (3, lambda drafts, path: path | {"bonus": (path["bonus"] + 1) % 256}, "tokens", "bonus is"),
    (3, lambda drafts, path: {"nodes": [1], "bonus": drafts[1]}, "counts",
     "accepted 1 of 3 drafts, and refused one that is its own bonus"),
    (0, lambda drafts, path: {"nodes": [1], "bonus": path["bonus"]}, "tokens", "accepted draft 1 of 3 is"),
    (0, lambda drafts, path: {"nodes": [1], "bonus": drafts[1]}, "tokens", "accepted draft 1 of 3 is"),
], ids=["bonus", "one too few", "one too many", "a token before a count"])
def test_a_wrong_window_is_named_at_its_commit(copy: Path, accepted: int, path: Any, check: str, says: str) -> None:
    number, event, drafts = window(copy, accepted)
    changed = [path(drafts, event["accepted"][0]), *event["accepted"][1:]]
    found = audit(edited(copy, number, accepted=changed), TINY, level=1)
    assert first(found) == (check, number, "commit", "a")
    assert found.verdict.findings[0].diagnosis.startswith(says), found.verdict.findings[0].diagnosis
    assert found.exit is Exit.DIVERGED


@few(2)
@pytest.mark.parametrize(("event", "name", "change", "tier", "says"), [
    (9, "logits.a", lambda x, r: x.roll(1, 0), Tier.PROPAGATED, "relative error"),
    (9, "final.a", lambda x, r: x * 1.001, Tier.PROPAGATED, "relative error"),
    (10, "state.a.0", lambda x, r: shown(r, 7)["state.a.0"], Tier.DIRECTED, "holds the state from before the step"),
    (10, "state.b.2", lambda x, r: x.flip(0), Tier.DIRECTED, "unknown: close to none"),
    (10, "conv.b.1", lambda x, r: x.roll(1, 1), Tier.PROPAGATED, "is shifted by one to newer inputs"),
    (2, "conv.a.0", lambda x, r: x * 0, Tier.PROPAGATED, "the step; 6 tokens were given [equal bits: is all zero"),
], ids=["logits of another row", "rows", "a stale state", "heads", "conv", "equal windows"])  # fmt: skip
def test_a_wrong_recorded_tensor_is_named_at_its_event(
    brief: Path, tmp_path: Path, event: int, name: str, change: Callable[..., Any], tier: Tier, says: str
) -> None:
    made = Path(shutil.copytree(brief, tmp_path / "r"))
    tensors(made, event, name, lambda x: change(x, made))
    found = audit(made, TINY)
    assert found.exit is Exit.DIVERGED and not found.verdict.findings, "every token is right"
    one = next(one for one in found.replay.verdict.findings if one.tier is tier)
    component, request = name.split(".")[:2]
    assert (one.event, one.place.component, one.request) == (event, component, request)
    assert says in one.diagnosis, one.diagnosis


@few(1)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize(("event", "name"), [
    (3, "state.b.1"), (9, "logits.a"), (3, "logits.a"), (6, "final.a"), (7, "conv.a.2"), (2, "state.a.0")])
def test_numbers_that_are_not_finite_are_findings_and_stop_nothing(
    brief: Path, tmp_path: Path, event: int, name: str, value: float
) -> None:
    """The stale state of event 10 is found as well, and nothing else is accused."""
    made = Path(shutil.copytree(brief, tmp_path / "r"))
    tensors(made, event, name, lambda x: x.flatten().index_fill(0, torch.tensor([5]), value).view_as(x))
    tensors(made, 10, "state.b.0", lambda x: shown(made, 6)["state.b.0"])
    found = audit(made, TINY)
    component, request = name.split(".")[:2]
    first, *others = found.replay.verdict.findings
    assert found.exit is Exit.DIVERGED and first.lost and "not finite" in first.diagnosis
    assert (first.event, first.place.component, first.request) == (event, component, request)
    later = [one for one in others if not one.lost]
    assert {(one.event, one.place.component, one.request) for one in later} == {(10, "state", "b")}
    assert "holds the state from before the step" in later[0].diagnosis
    assert all((one.event, one.request) == (event, request) for one in others if one.lost)
    assert found.replay.verdict.events == 13 and audit(made, TINY, level=1).exit is Exit.AGREED


def cut_at_its_end(brief: Path, folder: Path) -> Path:
    """Request a ends at event 11, and its last window at event 10 lost two of four tokens."""
    made = Path(shutil.copytree(brief, folder))
    events = lines(made / "events.jsonl")
    draft = events[8]["picks"][0]
    return edited(made, 10, accepted=[{"nodes": [1], "bonus": draft[1]}, events[10]["accepted"][1]])


def _memory_of(recording: Path, event: int, layers: int) -> None:
    """Request a has at event 10 the memory of an earlier event in its first layers."""
    for name in (f"{kind}.a.{layer}" for kind in ("conv", "state") for layer in range(layers)):
        tensors(recording, 10, name, lambda x, name=name: shown(recording, event)[name])


@few(2)
@pytest.mark.parametrize(("change", "says"), [
    (lambda r: None, ""), (lambda r: _memory_of(r, 7, 3), ""),
    (lambda r: tensors(r, 10, "state.a.1", lambda x: shown(r, 10)["state.b.1"]), 'holds the state of request "b"'),
    (lambda r: tensors(r, 10, "state.a.1", lambda x: x.flip(0)), "unknown: close to none"),
    (lambda r: _memory_of(r, 7, 1), "holds the state from before the step"),
], ids=["all four tokens", "none of them", "of another request", "unknown", "of several counts"])  # fmt: skip
def test_a_window_that_the_end_of_its_request_cut_raises_no_alarm(
    brief: Path, tmp_path: Path, change: Callable[..., Any], says: str
) -> None:
    """Its memory may be that of any count of the window, if it is of one count."""
    made = cut_at_its_end(brief, tmp_path / "r")
    change(made)
    found = audit(made, TINY)
    assert not found.verdict.findings and [one.where for one in found.verdict.skipped] == ["a"]
    wrong = [one for one in found.replay.verdict.findings if one.tier is Tier.DIRECTED]
    assert (found.exit, bool(wrong)) == ((Exit.DIVERGED, True) if says else (Exit.AGREED, False)), wrong[:1]
    assert not says or (wrong[0].request == "a" and says in wrong[0].diagnosis)
    cut = [one for one in found.replay.verdict.skipped if one.reason == CUT]
    assert says.startswith("holds the state from") or {one.check for one in cut} == {"directed", "propagated"}


def test_a_window_is_cut_only_where_its_request_ends(brief: Path, tmp_path: Path, instep: Runner) -> None:
    made = cut_at_its_end(brief, tmp_path / "r")
    out = " ".join(instep("audit", made, "--model", TINY, "--level", 1).out.split())
    assert f"1 count not judged: {CUT}" in out and "agrees" in out
    events = lines(made / "events.jsonl")
    prompt = [*PROMPTS["a"], 32]
    again = [{"event": "abort", "request": "a"}, {"event": "admit", "request": "a", "prompt": prompt}]
    for more, of in ((events[12:], {"a", "b"}), ([*again, *events[12:]], {"b"}), ([events[5]], {"b"})):
        read = [decoded(json.dumps(one).encode(), AnyEvent, "", "") for one in [*events[:11], *more]]
        assert last_commits(read)[10] == of
    said(made / "events.jsonl", [*events[:11], *again, events[12]])
    ((one,),) = [audit(made, TINY, level=1).verdict.findings]
    assert (one.check, one.event, one.request) == ("counts", 10, "a")


def test_the_first_located_finding_is_printed_first(brief: Path, tmp_path: Path, instep: Runner) -> None:
    """A wrong token at event 10 follows a wrong state at event 7, and too many ties have no place."""
    made = Path(shutil.copytree(brief, tmp_path / "r"))
    tensors(made, 7, "state.a.0", lambda x: x.flip(0))
    paths = lines(made / "events.jsonl")[10]["accepted"]
    edited(made, 10, accepted=[paths[0], paths[1] | {"bonus": 33}])
    out = instep("audit", made, "--model", TINY, "--json", tmp_path / "r.json").out
    words = ("tokens  ", "r, instep plain: DIVERGED", "event 7 commit", "event 10 commit")
    places = [out.index(one) for one in words]
    assert places == sorted(places)
    total = replace(audit(made, TINY, level=1).verdict.findings[0], check=TIES, event=0, kind="recording")
    found = Verdict()
    found.add([total, replace(total, check="tokens", event=10)])
    assert [one.check for one in found.findings] == ["tokens", TIES]


def drafted_otherwise(
    brief: Path, folder: Path, widths: tuple[int, int], accepted: tuple[int, int], **draft: Any
) -> Path:
    """The last windows with these widths, or of another shape; only final rows and logits are recorded."""
    made = Path(shutil.copytree(brief, folder))
    events = lines(made / "events.jsonl")
    picks = [mine[:width] for mine, width in zip(events[8]["picks"], widths, strict=True)]
    windows = [[*mine, path["bonus"]] for mine, path in zip(events[8]["picks"], events[10]["accepted"], strict=True)]
    paths = [{"nodes": [*range(1, n + 1)], "bonus": mine[n]} for mine, n in zip(windows, accepted, strict=True)]
    edited(made, 8, picks=picks, parents=draft.get("parents", [[*range(width)] for width in widths]))
    edited(made, 10, accepted=paths)
    stated(made, shows=["final", "logits"])
    for name, width in zip("ab", widths, strict=True):
        for key in ("final", "logits"):
            tensors(made, 9, f"{key}.{name}", lambda x, rows=width + 1: x[:rows])
    return made


@few(2)
@pytest.mark.parametrize(("engine", "exit", "place"), [
    (None, Exit.AGREED, ""), ("drafting", Exit.AGREED, ""), ("slipping", Exit.DIVERGED, "chain.1 pick"),
    ("watching_no_copies", Exit.AGREED, ""),
])
def test_windows_of_different_widths_are_judged(
    brief: Path, tmp_path: Path, engine: str | None, exit: Exit, place: str
) -> None:
    made = drafted_otherwise(brief, tmp_path / "r", (3, 1), (3, 1))
    found = audit(made, TINY) if engine is None else led(made, engine)
    first = next(iter(getattr(found, "verdict", found).findings), None)
    assert found.exit is exit and (not place or str(first.place) == place), first


def test_a_watched_request_that_left_raises_no_alarm(brief: Path, tmp_path: Path) -> None:
    made = drafted_otherwise(brief, tmp_path / "r", (3, 3), (1, 3), parents=[[0, 0, 1], [0, 1, 2]])
    verdict = agreed(led(made, "watching_no_copies"))
    assert any("leaves the run" in one.reason for one in verdict.skipped)


def led(recording: Path, engine: str) -> Verdict:
    """The events of a recording, replayed by a live engine."""
    disk, found = OnDisk.open(TINY), opened(recording)
    model = Model("", disk.digest(), config_digest(TINY), disk.config.vocab, disk.config.mtp_layers)
    trace = Trace(recording / "events.jsonl", found.header(model), found.events, {}, "")
    return Replay(trace, Setting(engine=f"support.wrong.engines:{engine}"), checkpoint=TINY).run().verdict


@pytest.mark.parametrize(("last", "left_out"), [(10, True), (12, False)])
def test_events_before_missing_states_are_audited(brief: Path, tmp_path: Path, last: int, left_out: bool) -> None:
    made = Path(shutil.copytree(brief, tmp_path / "r"))
    said(made / "events.jsonl", lines(made / "events.jsonl")[: last + 1])
    stated(made, events=None, sha256=None)
    if left_out:
        (made / "tensors" / f"{last:06d}.safetensors").unlink()
    found = audit(made, TINY)
    assert found.exit is Exit.AGREED and len(found.recorded.events) == last + 1 - left_out
    assert any("its states come after it" in note for note in found.recorded.notes) == left_out


def test_states_of_layers_without_states_are_ignored(brief: Path, tmp_path: Path) -> None:
    made = Path(shutil.copytree(brief, tmp_path / "r"))
    more = {f"{name}.a.3": torch.zeros(2) for name in ("conv", "state")}
    save_file(shown(made, 10) | more, made / "tensors" / "000010.safetensors")
    assert audit(made, TINY).exit is Exit.AGREED


def test_level_2_reports_that_states_are_not_judged(brief: Path, tmp_path: Path, instep: Runner) -> None:
    made = Path(shutil.copytree(brief, tmp_path / "r"))
    stated(made, shows=["states"])
    ran = instep("audit", made, "--model", TINY, "--level", 2)
    assert ran.code == 0 and "not judged: logits, final rows" in ran.out and "fewer than half" not in ran.out, ran


def test_a_tie_is_counted_and_is_no_finding(spoken: list[dict[str, Any]], tmp_path: Path) -> None:
    """In bf16 some margins are within the derived error, so the other token is right as well."""
    found = audit(said(tmp_path / "said.jsonl", spoken), TINY)
    assert found.assumed and str(found.precision.activation) == "torch.bfloat16"
    assert found.tokens.decided < found.tokens.ties.made
    text, number, other = undecided(found)
    tokens = list(text.said)[: number + 1]
    tokens[number] = other
    tied = audit(said(tmp_path / "tied.jsonl", [{"prompt": text.prompt, "tokens": tokens}]), TINY)
    assert not tied.verdict.findings and tied.tokens.ties.ties == 1


def undecided(found: Audit) -> tuple:
    """A token whose runner-up is within the error, and that runner-up, by the whole model in fp64."""
    weights = Weights.of(Checkpoint.open(TINY))
    best = None
    for text in found.told.texts:
        final, _ = trunk.advance(weights, text.run, trunk.empty_memories(weights), 0)
        top = trunk.logits(weights, final[len(text.prompt) - 1 :]).topk(2)
        gaps = top.values[:, 0] - top.values[:, 1]
        number = int(gaps.argmin())
        if best is None or gaps[number] < best[0]:
            best = gaps[number], text, number, int(top.indices[number, 1])
    return best[1:]


def test_fewer_than_half_decidable_tokens_are_inconclusive(tmp_path: Path, instep: Runner) -> None:
    """A random model hardly prefers any token, so in bf16 nearly none can be decided."""
    model = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16, mtp_num_hidden_layers=0)
    prompts = [[3, 9, 27, 17, 51], [1, 2, 3, 4], [60, 5, 40]]
    weights, requests = Weights.of(Checkpoint.open(model)), []
    for prompt in prompts:
        tokens = []
        for _ in range(4):
            final, _ = trunk.advance(weights, [*prompt, *tokens], trunk.empty_memories(weights), 0)
            tokens.append(int(trunk.logits(weights, final[-1:]).argmax()))
        requests.append({"prompt": prompt, "tokens": tokens})
    file = said(tmp_path / "said.jsonl", requests)
    ran = instep("audit", file, "--model", model)
    assert ran.code == 3 and "fewer than half of the tokens could be decided" in ran.out, ran
    assert instep("audit", file, "--model", model, "--dtype", "float32").code == 0


# bad input


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda r: edited(r, 3, rows=[{"request": "z", "kind": "decode"}]), "events.jsonl line 4: rows[0].request: found"),
    (lambda r: edited(r, 0, prompt=[999]), "events.jsonl line 1: prompt[0]: found token 999"),
    (lambda r: (r / "events.jsonl").write_text(""), "events.jsonl: found no event"),
    (lambda r: (r / "events.jsonl").write_text('{"event": "dream"}\n' * 40), "events.jsonl: found other lines"),
    (lambda r: (r / "recording.json").write_text("{}"), "recording.json: found"),
    (lambda r: (r / "recording.json").unlink(), "found no recording.json, and no file of SGLang's dumper"),
    (lambda r: (r / "tensors" / "000003.safetensors").unlink(), 'event 3: logits.a: found nothing'),
    (lambda r: tensors(r, 3, "logits.a", lambda x: x[:, :7]), "event 3: logits.a: found shape [1, 7]"),
    (lambda r: tensors(r, 3, "logits.a", torch.Tensor.long), "000003.safetensors: logits.a: found torch.int64"),
    (lambda r: (r / "tensors" / "000003.safetensors").write_bytes(b"cut"), "000003.safetensors: found unreadable"),
    (lambda r: stated(r, weights="0" * 64), "--model: found "),
    (lambda r: stated(r, dtype="fp8"), "recording.json: dtype: found 'fp8'"),
    (lambda r: stated(r, products={"gdn.chunk": {"format": "bf16"}}), "products['gdn.chunk']: found"),
    (lambda r: stated(r, shows=["thoughts"]), "recording.json: shows: found 'thoughts'"),
])  # fmt: skip
def test_a_bad_recording_is_refused_in_one_line(copy: Path, instep: Runner, spoil: Any, says: str) -> None:
    spoil(copy)
    assert says in complaint(instep("audit", copy, "--model", TINY, "--json", copy / "r.json"))
    assert not (copy / "r.json").exists()


def test_a_recording_one_folder_below_is_named(copy: Path, instep: Runner) -> None:
    said = complaint(instep("audit", copy.parent, "--model", TINY))
    assert "found no recording.json" in said and f"it has {copy}" in said


@pytest.mark.parametrize(("content", "says"), [
    ("", "said.jsonl: found no request"),
    ('{"prompt": [1], "tokens": ["x"]}\n', "said.jsonl line 1: tokens[0]: found"),
    ('{"prompt": [], "tokens": [1]}\n', 'request "line 1": prompt: found no token'),
    ('{"prompt": [1], "tokens": [2]}\n{"prompt": [999], "tokens": []}\n', '"line 2": prompt[0]: found token 999'),
    ('{"prompt": [1], "tokens": [256]}\n', 'request "line 1": tokens[0]: found token 256'),
    ('{"prompt": "hello", "tokens": [1]}\n', "said.jsonl line 1: prompt: found")])
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, instep: Runner, content: str, says: str) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text(content)
    assert says in complaint(instep("audit", file, "--model", TINY))


def test_a_model_too_large_for_levels_2_and_3_is_refused_at_once(
    copy: Path, monkeypatch: pytest.MonkeyPatch, instep: Runner
) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    with monkeypatch.context() as nothing:
        for read in ("read", "rows", "digest"):
            nothing.setattr(OnDisk, read, lambda *given: pytest.fail("it was read"))
        said = complaint(instep("audit", copy, "--model", TINY))
    assert "--level: found a model of" in said and "expected at most 0.75 of the 16.00 MiB of memory" in said
    assert "--level 1 judges tokens, windows and counts layer by layer" in said
    assert instep("audit", copy, "--model", TINY, "--level", 1).code == 0


def test_checks_that_compared_nothing_are_listed_by_reason(
    brief: Path, instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, file = known_wrong_states.look, tmp_path / "r.json"
    nothing = {"blocks": 0, "undecided": 0}
    monkeypatch.setattr(known_wrong_states, "look", lambda *given, **named: replace(look(*given, **named), **nothing))
    short = " ".join(instep("audit", brief, "--model", TINY).out.split())
    assert "not judged: 9 kinds of results and memory that the engine does not show; " in short
    assert short.count("not judged: ") == 1 and "did not compare" not in short
    out = " ".join(instep("audit", brief, "--model", TINY, "--verbose", "--json", file).out.split())
    assert "not judged: op contracts, graphs and host reads (T0)" in out
    found = [one for one in json.loads(file.read_text())["not_compared"] if one["check"] == "directed"]
    assert len({one["where"] for one in found}) > 3 and len(found) > 20
    first = f"first at event {found[0]['event']}, {found[0]['where']}"
    assert f"directed did not compare {len(found)} times: {known_wrong_states.INDISTINCT}, {first}" in out
    assert out.count("directed did not compare") == 1 and "left out: T1" in out and "--tiers" not in out


def test_events_that_cannot_be_replayed_are_refused_at_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.audit.audit.judged", lambda *given: pytest.fail("the layers were walked"))
    written = lines(copy / "events.jsonl")
    end = next(number for number, event in enumerate(written) if event["event"] == "commit") + 1
    said(copy / "events.jsonl", [*written[:end], {"event": "save", "request": "a", "name": "k"}])
    stated(copy, events=None, sha256=None)
    with pytest.raises(BadInput, match="a save, load, preempt or resume, and tensors"):
        audit(copy, TINY)


def test_a_cut_recording_is_read_up_to_the_cut(copy: Path, instep: Runner) -> None:
    text = (copy / "events.jsonl").read_bytes()
    (copy / "events.jsonl").write_bytes(text[: text.index(b"\n", len(text) // 2) + 9])
    found = audit(copy, TINY)
    assert found.exit is Exit.AGREED and 0 < found.tokens.ties.made < 40
    ran = instep("audit", copy, "--model", TINY, "--level", 1)
    assert "was cut within line" in ran.out and "events are there" in ran.out, ran


def test_the_recording_of_an_engine_that_died_is_audited(tmp_path: Path) -> None:
    died = recorded(tmp_path / "died", closed=False, tokens=6, shows=False, prompts={"a": PROMPTS["a"]})
    found = audit(died, TINY)
    assert found.exit is Exit.AGREED and found.replay is None
    assert found.recorded.notes == ("the recording was not closed: the engine did not end normally",)
