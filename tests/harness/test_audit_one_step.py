"""Audits of a part of a recording: ranges of events, states judged one step from the recorded one, and early ends.

Recordings of two released SGLangs (`fixtures/live`) are judged, and cut to shorter ones. Leaves out: findings of whole
recordings (`test_audit.py`).
"""

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from instep.audit import recorded_engine
from instep.audit.audit import Audit, audit, opened
from instep.audit.recording import read, read_plain, with_short_names
from instep.audit.result import charts_of, of
from instep.audit.round_of_finding import changed
from instep.audit.token_origins import Told
from instep.audit.write import Recording
from instep.checks import known_wrong_states
from instep.lru_cache import EVENTS, closed, forget
from instep.report.document import document_of
from instep.report.html.write_page import page_of
from instep.run import compared_engine
from instep.run.compared_engine import AcceptedPath, RepeatedRuns, of_one
from instep.tier_allowances import DITHERED
from instep.verdict import Exit, Tier
from instep_reference import trunk
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput
from instep_reference.gdn import GdnMemory
from instep_reference.weights import Weights
from peers.live import TOP
from peers.live.cut import cut
from support.inputs.outcomes import shown as shown_result
from support.inputs.recordings import PROMPTS, TINY, edited, lines, recorded, said, shown, stated, tensors
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few

pytestmark = pytest.mark.slow  # audits of whole recordings

# Events of the recording: commits of a and b are 10, 13 and 16; a ends at 17; the next commit, of b alone, is 20.
BOTH, LAST = (10, 13, 16), 20


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = {name: PROMPTS[name] for name in "ab"}
    made = recorded(tmp_path_factory.mktemp("recordings") / "right", tokens=14, prompts=prompts)
    kinds = {number: one["event"] for number, one in enumerate(lines(made / "events.jsonl"))}
    assert all(kinds[event] == "commit" for event in (*BOTH, LAST)) and kinds[17] == "finish", kinds
    return made


def events_of(found: Audit) -> set[int]:
    assert found.replay is not None
    return {one.event for one in found.replay.verdict.findings}


def directed(found: Audit) -> list:
    assert found.replay is not None
    return [one for one in found.replay.verdict.findings if one.tier is Tier.DIRECTED]


class Texts:
    """The reference in fp64 over the texts of a recording, from which tests make wrong tensors."""

    def __init__(self, recording: Path) -> None:
        self.weights, self.text, self.length = Weights.of(Checkpoint.open(TINY)), {}, {}
        roots: dict[str, int] = {}
        self.tokens: dict[tuple[str, int], tuple[int, list[int], list[int]]] = {}  # -> length before, path, window
        drafts: dict[str, list[int]] = {}
        for index, event in enumerate(lines(recording / "events.jsonl")):
            if event["event"] == "admit":
                self.text[event["request"]], self.length[event["request"]] = list(event["prompt"]), 0
            elif event["event"] == "draft":
                drafts |= dict(zip(event["requests"], event["picks"], strict=True))
            for row in event.get("rows", ()):
                name = row["request"]
                self.length[name] += row.get("tokens", 0)
                if "root" in row:
                    roots[name] = row["root"]
            for name, path in zip(event.get("requests", ()), event.get("accepted", ()), strict=False):
                run = [roots[name], *(drafts[name][node - 1] for node in path["nodes"])]
                self.tokens[name, index] = self.length[name], run, [roots[name], *drafts[name]]
                self.text[name] += run
                self.length[name] += len(run)
                roots[name] = path["bonus"]

    def memory(self, request: str, length: int) -> tuple:
        """The memory after the first tokens of a text."""
        _, memory = trunk.advance(self.weights, self.text[request][:length], trunk.empty_memories(self.weights), 0)
        return memory

    def state(self, request: str, event: int, after: int, layer: int = 0) -> torch.Tensor:
        """The state of a layer after some tokens of the window that ends at a commit."""
        length, _, window = self.tokens[request, event]
        _, memory = trunk.advance(self.weights, window[:after], self.memory(request, length), length)
        return memory[layer].state.float()


# one step


def test_a_right_recording_agrees_one_step_at_a_time(right: Path) -> None:
    found = audit(right, TINY)
    assert found.exit is Exit.AGREED and found.one_step and found.replay.verdict.events == found.replay.of
    assert {Tier.DIRECTED, Tier.PROPAGATED, Tier.DECISIONS} <= {one.tier for one in found.replay.verdict.compared}


def test_right_steps_from_a_wrong_state_are_not_accused(copy: Path) -> None:
    """A wrong state at event 10; the engine then computes on from it, rightly."""
    texts, memory = Texts(copy), None
    for event in BOTH:
        length, run, window = texts.tokens["a", event]
        if memory is None:
            memory = list(texts.memory("a", length + len(run)))
            memory[1] = GdnMemory(memory[1].window, memory[1].state.flip(0))
            tensors(copy, event, "state.a.1", lambda x: x.flip(0))
            continue
        final, _ = trunk.advance(texts.weights, window, tuple(memory), length)
        logits = trunk.logits(texts.weights, final)
        tensors(copy, event - 1, "final.a", lambda x, final=final: final.float())
        tensors(copy, event - 1, "logits.a", lambda x, logits=logits: logits.float())
        _, memory = trunk.advance(texts.weights, run, tuple(memory), length)
        for layer, kept in enumerate(memory):
            if isinstance(kept, GdnMemory):
                tensors(copy, event, f"conv.a.{layer}", lambda x, kept=kept: kept.window.float())
                tensors(copy, event, f"state.a.{layer}", lambda x, kept=kept: kept.state.float())
    found = audit(copy, TINY, events="8:17")
    assert events_of(found) == {10} and {one.request for one in found.replay.verdict.findings} == {"a"}
    whole = audit(copy, TINY, from_start=True, events="8:17")
    assert events_of(whole) == {10} and not whole.one_step and whole.replay.verdict.events == 3, "it stops there"
    after = audit(copy, TINY, from_start=True, events="11:12", level=2)
    assert events_of(after) == {12}, "judged from the text, the wrong rows that follow from that state are found"


def test_all_wrong_events_are_listed_unless_the_first_is_asked_for(copy: Path) -> None:
    for event, request in ((10, "a"), (16, "b")):
        tensors(copy, event, f"state.{request}.0", lambda x: x.flip(0))
    assert {10, 16} <= events_of(audit(copy, TINY, events="9:16"))
    assert events_of(audit(copy, TINY, events="9:16", first=True)) == {10}


# ranges and early ends


def test_a_range_reads_and_runs_nothing_before_its_rounds(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rounds earlier name findings, and the reference runs each text before them once, as a prompt."""
    monkeypatch.setattr(recorded_engine, "IN_A_RING", 8)
    forget()  # other tests may have served these texts
    ran, real = [], trunk.advance
    monkeypatch.setattr(trunk, "advance", lambda weights, tokens, *rest: (
        ran.append(len(tokens)), real(weights, tokens, *rest))[1])  # fmt: skip
    texts, states = Texts(copy), shown(copy, 3)
    (copy / "tensors" / "000002.safetensors").unlink()
    save_file({name: one for name, one in states.items() if name[:4] in ("conv", "stat")},
              copy / "tensors" / "000003.safetensors")
    ran.clear()
    found = audit(copy, TINY, events="20:")
    assert found.exit is Exit.AGREED and found.replay.verdict.events == len(lines(copy / "events.jsonl")) - 20
    assert {one.event for one in found.replay.verdict.compared} <= {20, 21}
    assert [text.request for text in found.texts] == ["b"], "a has no token there"
    assert found.tokens.ties.made == len(texts.tokens["b", LAST][1])
    assert sorted(ran)[-4:] == [10, 10, 12, 12], "the texts after event 3, in fp64 and rounded; then windows"


def test_a_range_keeps_only_its_own_findings(copy: Path) -> None:
    tensors(copy, 16, "state.a.0", lambda x: x.flip(0))
    assert not events_of(audit(copy, TINY, events="13:15"))
    assert events_of(audit(copy, TINY, events="16")) == {16}
    number, wrong = 13, lines(copy / "events.jsonl")[13]["accepted"]
    wrong[1]["bonus"] = (wrong[1]["bonus"] + 1) % 256
    edited(copy, number, accepted=wrong)
    assert {one.event for one in audit(copy, TINY, level=1, events="13:13").verdict.findings} == {13}
    assert not audit(copy, TINY, level=1, events="8:12").verdict.findings


@pytest.mark.parametrize(("given", "says"), [
    ("5:2", "--events: found 5:2, expected events of copy as A:B, 0:"), ("x:", "--events: found x:"),
    ("3:999", "--events: found 3:999"), ("-1:3", "--events: found -1:3"), ("", "--events: found ")])
def test_a_range_outside_the_recording_is_refused(copy: Path, instep: Runner, given: str, says: str) -> None:
    assert says in complaint(instep("audit", copy, "--model", TINY, f"--events={given}"))


def test_a_range_of_texts_without_events_is_refused(tmp_path: Path, instep: Runner) -> None:
    file = said(tmp_path / "said.jsonl", [{"prompt": [1], "tokens": [2]}])
    assert "this recording has texts and no events" in complaint(
        instep("audit", file, "--model", TINY, "--events", "0:1"))


@few(1)
@pytest.mark.parametrize(("wrong", "exit"), [(True, Exit.DIVERGED), (False, Exit.INCONCLUSIVE)])
def test_an_interrupted_audit_reports_the_events_so_far(copy: Path, wrong: bool, exit: Exit) -> None:
    if wrong:
        tensors(copy, 10, "state.a.0", lambda x: x.flip(0))

    def progress(what: str, done: int, of: int | None) -> None:
        if what == "events" and done == 12:
            raise KeyboardInterrupt

    found = audit(copy, TINY, progress=progress)
    assert "nothing was compared" not in shown_result(of(found))
    assert found.exit is exit and found.replay.verdict.events == 12
    assert found.stopped == "it was interrupted, after 12 events"


def test_a_time_limit_ends_an_audit_with_a_partial_verdict(right: Path, instep: Runner, tmp_path: Path) -> None:
    ran = instep("audit", right, "--model", TINY, "--minutes", 0, "--json", tmp_path / "r.json")
    assert ran.code == 3 and "the limit of 0 minutes is over, before the tokens were judged" in ran.out, ran
    assert "the rest of the recording is not judged" in ran.out
    assert json.loads((tmp_path / "r.json").read_text())["judged"]["stopped"].startswith("the limit of 0 minutes")


# further draws


def test_further_draws_run_only_the_window_of_their_request(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 without rounding a draw of the accepted path alone equals the run of the whole event."""
    ran, off, real = [], [], RepeatedRuns.side_of

    def reduced(request: str, event: Any, one: Any) -> Any:
        found = of_one(request, event, one)
        if found is not None:
            ran.append(found)
        return found

    def side_of(self: RepeatedRuns, index: int, draw: int, request: str) -> Any:
        assert self._first > index - 4, "draws begin at the round"
        known = (index, draw, request) in self._sides
        ran.clear()
        found = real(self, index, draw, request)
        assert known or [type(one) for one in ran] == [AcceptedPath], "one path, and no verify"
        if draw == 1:
            alone, whole = found.after[request].state, self.side(index, draw).after[request].state
            off.extend(float((alone[layer] - whole[layer]).norm() / whole[layer].norm()) for layer in whole)
        return found

    monkeypatch.setattr(RepeatedRuns, "side_of", side_of)
    monkeypatch.setattr(compared_engine, "of_one", reduced)
    stated(copy, dtype="float64", state="float64")
    for event in BOTH:
        for name in list(shown(copy, event)):
            tensors(copy, event, name, torch.Tensor.double)
    tensors(copy, 16, "state.b.0", lambda x: x.flip(0))
    found = audit(copy, TINY, events="16:16")
    assert events_of(found) == {16} and len(off) > 2 and max(off) < 1e-12


@pytest.mark.parametrize("hidden", ["events", pytest.param("a layer", marks=WHOLE)])
def test_draws_share_no_rounding_if_states_were_not_recorded(
    copy: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """The error of one draw says nothing about another one, although states of the last rounds are not there."""
    layers = [0, 1, 2] if hidden == "events" else [0, 2]
    stated(copy, dtype="bfloat16", attached={"layers": layers})
    for event in range(len(lines(copy / "events.jsonl"))):
        file = copy / "tensors" / f"{event:06d}.safetensors"
        if file.exists() and hidden == "events" and event in (10, 13):
            file.unlink()
        elif file.exists():
            save_file({name: one for name, one in shown(copy, event).items() if not name.endswith(".1")
                       or hidden == "events"}, file)  # fmt: skip
    cosines, real = [], known_wrong_states.look

    def look(found: torch.Tensor, scene: Any, yardsticks: torch.Tensor, again: Any | None = None, **given: Any) -> Any:
        draws = torch.cat([yardsticks, again(DITHERED)]) if again is not None else yardsticks
        errors = (draws - scene.right).flatten(1)
        cosines.append(torch.nn.functional.cosine_similarity(errors[:1], errors[1:]).abs().max())
        return real(found, scene, yardsticks, None, **given)

    monkeypatch.setattr(known_wrong_states, "look", look)
    audit(copy, TINY, events="16:16")
    assert len(cosines) > 2 and max(cosines) < 0.5


# names of wrong states


def test_a_state_of_another_request_two_rounds_ago_is_named(copy: Path) -> None:
    tensors(copy, 16, "state.b.0", lambda x: shown(copy, 10)["state.a.0"])
    (found,) = directed(audit(copy, TINY, events="16:16"))
    assert found.diagnosis == 'holds the state of request "a", 2 rounds ago'
    assert found.worst == pytest.approx(1, abs=1e-3)


@few(1)
@pytest.mark.parametrize(("event", "says", "wrong"), [
    (16, 'holds the state of request "a" after 2 of 4 tokens of its window, 1 round ago',
     lambda t: t.state("a", 13, 2)),
    (16, "holds its own state after 3 of 4 tokens of its window, 2 rounds ago", lambda t: t.state("b", 10, 3)),
    (20, 'holds the state of request "a", 1 round ago', lambda t: t.state("a", 16, 4)),
], ids=["inside a window", "its own", "of a request that ended"])
def test_states_of_earlier_windows_are_named(copy: Path, event: int, says: str, wrong: Callable[..., Any]) -> None:
    texts = Texts(copy)
    assert len(texts.tokens["a", 13][2]) == len(texts.tokens["a", 16][1]) == 4
    tensors(copy, event, "state.b.0", lambda x: wrong(texts))
    (found,) = directed(audit(copy, TINY, events=f"{event}:{event}"))
    assert found.diagnosis == says


def test_a_step_from_the_state_of_another_request_is_named(copy: Path) -> None:
    texts = Texts(copy)
    length, run, _ = texts.tokens["b", 16]
    memory = list(texts.memory("b", length))
    memory[0] = GdnMemory(memory[0].window, texts.state("a", 10, 4).double())
    _, memory = trunk.advance(texts.weights, run, tuple(memory), length)
    tensors(copy, 16, "state.b.0", lambda x: memory[0].state.float())
    (found,) = directed(audit(copy, TINY, events="16:16"))
    assert found.diagnosis == 'was continued from the state of request "a", 2 rounds ago'


@few(1)
@pytest.mark.parametrize(("says", "window", "state"), [
    ("was continued from the state of 8 tokens before", 36, 28),
    ("was continued with the conv window of 2 tokens later", 38, 36),
    ("", 36, 36),
], ids=["state", "conv window", "right"])
def test_a_prefix_with_parts_of_different_lengths_is_named(tmp_path: Path, says: Any, window: Any, state: Any) -> None:
    """36 tokens of a prompt come from a cache, whose conv window and state need not be those after 36 tokens."""
    weights, text = Weights.of(Checkpoint.open(TINY)), [*PROMPTS["b"], *PROMPTS["c"], *PROMPTS["a"], *PROMPTS["c"][:5]]

    def after(length: int) -> list:
        return list(trunk.advance(weights, text[:length], trunk.empty_memories(weights), 0)[1])

    memory, parts = after(36), zip(after(window), after(state), strict=True)
    for layer, (windows, states) in enumerate(parts):
        if isinstance(windows, GdnMemory):
            memory[layer] = GdnMemory(windows.window, states.state)
    final, memory = trunk.advance(weights, text[36:], tuple(memory), 36)
    root = int(trunk.logits(weights, final[-1:]).argmax())
    made = Recording(tmp_path / "r", engine="by hand", model=TINY, selected=True)
    made.admit("a", text)
    made.forward("a", [len(text) - 36], range(36, len(text)), text[36:], [[root]])
    made.states("a", {layer: (one.window.float(), one.state.float())
                      for layer, one in enumerate(memory) if isinstance(one, GdnMemory)})  # fmt: skip
    made.close()
    stated(tmp_path / "r", attached={"layers": [0, 1, 2]})
    found = directed(audit(tmp_path / "r", TINY))
    assert [one.diagnosis.partition(";")[0] for one in found if one.place.layer == 0] == [says] * bool(says)


# names, slots and rows


def test_a_finding_names_slot_batch_row_and_the_last_change(copy: Path, instep: Runner, tmp_path: Path) -> None:
    """Slots of the engine are recorded with the states; a wrong state comes first after request a ended."""
    file = copy / "tensors" / f"{LAST:06d}.safetensors"
    found = load_file(file)
    save_file(found | {"state.b.0": found["state.b.0"].flip(0).contiguous(), "slot.b": torch.tensor([41])}, file)
    ran = instep("audit", copy, "--model", TINY, "--events", f"{LAST}:", "--json", tmp_path / "r.json")
    text = " ".join(ran.out.split())
    assert ran.code == 1 and 'request "b", layer 0 recurrent state, slot 41, head' in text, ran.out
    assert "first commit after request a ended (event 17); batch row 0 of 1, counted from 0" in text
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["remarks"] == ["first commit after request a ended (event 17); batch row 0 of 1, counted from 0"]
    assert result["judged"]["events"][0] == LAST and result["judged"]["one_step"]


def test_batch_rows_and_slots_of_the_engine_are_read(copy: Path, tmp_path: Path) -> None:
    """Only two of its nine rows were recorded; the rows and slots are in `batches.jsonl`."""
    tensors(copy, 16, "state.a.0", lambda x: x.flip(0))
    batches = [{"event": event, "batch": 9, "rows": {"a": 7, "b": 2}, "slots": {"a": 40 + event, "b": 12}}
               for event in (12, 15, 18)]
    said(copy / "batches.jsonl", batches)
    with open(copy / "batches.jsonl", "a") as file:
        file.write('{"event": 19')
    judged = audit(copy, TINY, events="16")
    found, data = judged.replay, of(judged).data()
    assert found.remarks == ("batch row 7 of 9, counted from 0",)
    assert {one.slot for one in found.verdict.findings} == {55}
    assert [data["round"][name] for name in ("event", "kind", "size")] == [16, "commit", 9]
    second, first = data["round"]["rows"]
    assert (second["row"], second["request"], second["slot"], second["wrong"]) == (2, "b", 12, "")
    assert (first["row"], first["request"], first["slot"]) == (7, "a", 55) and first["wrong"]
    charts = charts_of(judged)
    slots = [slot for _, slot, _, _ in charts["stays"]]
    assert 12 in slots and slots[0] in (52, 55, 58), "the engine's"
    assert {(one["event"], one["request"]) for one in charts["runs"][0]["findings"]} == {(16, "a")}
    text = page_of(data, charts).decode()
    assert "<h2>Event 16 commit, a batch of 9</h2>" in text
    assert f"<td>7</td><td>a</td><td>{escape(first['wrong'])}</td><td>55</td>" in text
    assert "<td>2</td><td>b</td><td>no finding</td><td>12</td>" in text
    said(copy / "batches.jsonl", [{"event": 12, "row": 3}])
    with pytest.raises(BadInput, match=r"batches.jsonl line 1"):
        read(copy)


def test_long_names_of_requests_are_replaced_and_listed_once(copy: Path, instep: Runner, tmp_path: Path) -> None:
    own = {"a": "100f09a5.afbe4b9c.884e", "b": "4e3481df4df949e09f1a"}
    events = json.dumps(lines(copy / "events.jsonl"))
    for name, long in own.items():
        events = events.replace(f'"request": "{name}"', f'"request": "{long}"').replace(f'"{name}"]', f'"{long}"]')
        events = events.replace(f'["{name}",', f'["{long}",')
    said(copy / "events.jsonl", json.loads(events))
    stated(copy, events=None, sha256=None)
    for file in (copy / "tensors").iterdir():
        renamed = {}
        for name, tensor in load_file(file).items():
            kind, request, *layer = name.split(".")
            renamed[".".join((kind, own[request], *layer))] = tensor
        save_file(renamed, file)
    tensors(copy, 16, f"state.{own['b']}.0", lambda x: x.flip(0))
    ran = instep("audit", copy, "--model", TINY, "--events", "16:16", "--json", tmp_path / "r.json")
    assert ran.code == 1 and 'event 16 commit, request "b", layer 0 recurrent state, head' in " ".join(ran.out.split())
    assert all(ran.out.count(long) == 1 for long in own.values()), ran.out
    assert json.loads((tmp_path / "r.json").read_text())["names"] == own


def test_short_names_of_requests_stay(right: Path) -> None:
    found = read(right)
    assert with_short_names(found, Told())[0] is found


def test_many_requests_are_numbered_in_the_order_of_admission(tmp_path: Path) -> None:
    own = [f"a-long-request-{number}" for number in range(27)]
    file = said(tmp_path / "said.jsonl", [{"request": name, "prompt": [1], "tokens": [2]} for name in own])
    found = read_plain(file)
    renamed, words = with_short_names(found, found.told)
    assert renamed.names == {f"r{number + 1}": name for number, name in enumerate(own)}
    assert [text.request for text in words.texts] == [*renamed.names]


def test_the_writer_records_the_slot_of_a_state(tmp_path: Path) -> None:
    made = Recording(tmp_path / "r", engine="mine")
    made.admit("a", [1, 2])
    made.forward(["a"], [2], [0, 1], [1, 2], [[3]])
    made.states("a", {0: (torch.zeros(2, 3), torch.zeros(1, 2, 2))}, slot=7)
    made.close()
    found = read(tmp_path / "r")
    assert found.shows == ("states",) and found.slot(1, "a") == 7 and found.slot(0, "a") is None


def test_changes_before_a_round_are_named() -> None:
    """Steps from 0 and to 0 have no event of their own: such a round is a forward of decode rows."""
    def round_of(*drafts: int) -> list:
        names = tuple("ab"[: len(drafts)])
        return [
            e.Draft(names, tuple((1,) * count for count in drafts)),
            e.Forward(tuple(e.Row(name, "verify") for name in names)),
            e.Commit(names, tuple(e.Path((), 1) for _ in names)),
        ]

    decode = e.Forward((e.Row("a", "decode", root=1), e.Row("b", "decode", root=1)))
    prefill = e.Forward((e.Row("b", "prefill", 3, 5),))
    events = [
        e.Admit("a", (1,)), e.Forward((e.Row("a", "prefill", 1, 4),)), *round_of(3), e.Admit("b", (1, 2, 3)), prefill,
        e.SetNumSteps(1), *round_of(1, 1), *round_of(1, 1), decode, e.Abort("b"), e.Admit("b", (1, 2, 3)), prefill,
        e.SetNumSteps(3), *round_of(3, 3)]
    assert [changed(events, at) for at in (4, 9, 13)] == [
        "", "first forward after steps 3 -> 1 (event 7) and request b joined (event 6)", ""]
    assert changed(events, 14) == "first forward after steps 1 -> 0 (event 14)"
    assert changed(events, 21) == (
        "first commit after steps 0 -> 3 (event 18), request b was preempted and admitted again (event 15) "
        "and request b joined (event 17)")


LIVE = TOP / "fixtures" / "live"


def judged(recording: Path, events: str, **options: Any) -> Audit:
    with closed(EVENTS):
        return audit(recording, TINY, events=events, **options)


def test_sglang_0_5_12_continues_a_request_from_the_state_of_another_one() -> None:
    found = judged(LIVE / "sglang-0.5.12", "24:26", first=True)
    assert found.exit is Exit.DIVERGED and found.replay is not None
    lines = document_of(of(found).data()).messages[0].splitlines()
    assert "event 26 commit" in lines[1] and "layer 0 recurrent state, slot 2" in lines[1]
    assert lines[2].strip().startswith('holds the state of request "c"')
    assert "first commit after steps 3 -> 1" in found.replay.remarks[0]
    assert "batch rows 1 and 2 of 6" in found.replay.remarks[0]


@WHOLE
def test_sglang_0_5_13_is_right_after_the_same_change_of_steps() -> None:
    found = judged(LIVE / "sglang-0.5.13", "30:35")
    assert found.exit is Exit.AGREED and found.replay is not None and not found.verdict.findings
    assert found.verdict.elements + found.replay.verdict.elements > 200_000


def test_a_cut_recording_has_only_the_chosen_requests(tmp_path: Path) -> None:
    whole = LIVE / "sglang-0.5.12"
    names = [json.loads(line)["request"] for line in (whole / "events.jsonl").read_text().splitlines()[:3]]
    count = cut(whole, tmp_path / "short", names[1:])
    read = opened(tmp_path / "short")
    assert len(read.events) == count == len(opened(whole).events) - 1  # without one admission
    assert {one.request for one in read.events if hasattr(one, "request")} == set(names[1:])
    tensors = {event: set(read.tensors(event)) for event in range(count) if read.tensors(event)}
    assert list(tensors) == [21, 25, 28] and not any(names[0] in name for found in tensors.values() for name in found)
    assert len(tensors[25]) == 2 * (3 + 3 + 1)  # conv windows and states of three layers, and slots
    assert all(one.rows.keys() == one.slots.keys() == set(names[1:]) and one.batch == 6 for one in read.batches)
    with pytest.raises(SystemExit, match="no request z"):
        cut(whole, tmp_path / "other", ["z"])
