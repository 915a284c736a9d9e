"""Recorded drafts and drawn text: the model drafts and draws again with its own uniforms, and differences are named.

Each draft is compared after the recorded draft before it. Leaves out: greedy text (`test_audit.py`), and the bounds of
a draw (`test_draws.py`).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from instep.audit import token_origins
from instep.audit.audit import audit
from instep.audit.token_origins import Text, Window, told
from instep.audit.tokens import Drafts, Measured, _count
from instep.checks.sampled_tokens import Row, reachable, sure
from instep.trace.event_rules import EventRules
from instep.verdict import Exit
from instep_reference.acceptance import chain
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.place_names import unseen
from instep_reference.contract.sampling import Sampling
from instep_reference.draft import drafter
from instep_reference.draft.drafter_protocol import Asked
from instep_reference.engine import TensorModel
from instep_reference.sampling import Drawing
from instep_reference.weights import Weights
from support.inputs.checkpoints import write as write_checkpoint
from support.inputs.recordings import PROMPTS, TINY, edited, lines, recorded, recording, said, shown
from support.inputs.traces import header
from support.running.command import Runner, complaint

pytestmark = pytest.mark.slow


right = recording(shows=False)


def refused(recording: Path) -> tuple[int, int, int]:
    """A window of three drafts whose last one was refused: event, request, the refused draft."""
    events = lines(recording / "events.jsonl")
    for number, event in enumerate(events[:-2]):
        if event["event"] == "draft":
            for at, (picks, path) in enumerate(zip(event["picks"], events[number + 2]["accepted"], strict=True)):
                if len(picks) == 3 and len(path["nodes"]) < 3:
                    return number, at, picks[2]
    raise AssertionError("no such window")


def test_drafts_of_a_right_recording_are_the_head_s_own(right: Path, tmp_path: Path, instep: Runner) -> None:
    result = tmp_path / "r.json"
    ran = instep("audit", right, "--model", TINY, "--json", result)
    found = json.loads(result.read_text())
    choices = found["draft_choices"]
    assert ran.code == 0 and choices == {"own": found["drafts"], "other": 0, "undecided": 0, "first": None}
    assert f"{found['drafts']} of {found['drafts']} are the draft head's own choice" in ran.out and found["drafts"] > 15


def test_another_draft_is_named_and_changes_no_verdict(copy: Path, instep: Runner) -> None:
    number, at, pick = refused(copy)
    event = lines(copy / "events.jsonl")[number]
    picks = event["picks"]
    picks[at][2] = (pick + 1) % 256
    found = audit(edited(copy, number, picks=picks), TINY)
    assert found.exit is Exit.AGREED and found.tokens.drafts.own == found.told.drafts - 1
    ((where, request, draft, says),) = found.tokens.drafts.others
    assert (where, request, draft) == (number, event["requests"][at], 3)
    assert says.startswith(f"draft 3 of 3 is {(pick + 1) % 256}; the model's head says {pick} by a margin of")
    ran = instep("audit", copy, "--model", TINY)
    assert f'1 others; first: event {number}, request "{request}", draft 3 of 3 is' in ran.out, ran


def test_a_wrong_first_draft_hides_no_later_one(right: Path, copy: Path) -> None:
    """The drafts after it are those that the head picks after the wrong draft, not those of the right chain."""
    events = lines(copy / "events.jsonl")
    number = next(n for n, one in enumerate(events) if one["event"] == "draft" and len(one["picks"][0]) == 3
                  and not events[n + 2]["accepted"][0]["nodes"])  # fmt: skip
    event = events[number]
    text = next(one for one in audit(right, TINY, level=1).told.texts if one.request == event["requests"][0])
    window = next(one for one in text.windows if one.event == number)
    wrong = (event["picks"][0][0] + 1) % 256
    first, chain = heads(text, window.at, (wrong,) * 3)
    chain = [wrong, heads(text, window.at, (wrong,) * 3)[1][1], 0]
    chain[2] = heads(text, window.at, tuple(chain))[1][2]
    picks = [chain, *event["picks"][1:]]
    found = audit(edited(copy, number, picks=picks), TINY, level=1).tokens.drafts
    assert first != wrong and [one[:3] for one in found.others] == [(number, text.request, 1)]


def heads(text: Text, at: int, picks: tuple[int, ...], parents: tuple[int, ...] | None = None) -> tuple[int, list[int]]:
    """The head's first pick at a length of the text, and its own picks in a window with these drafts."""
    model = TensorModel(Weights.of(Checkpoint.open(TINY)))
    tokens = [*text.prompt, *text.said][: at + 1]
    final, _ = model.advance(tokens[:-1], model.nothing(), 0, unseen)
    eagle = drafter(model.config, "eagle")
    proposed = eagle.extend(model, eagle.begin(model), final, at, tokens[1:], True, 0, 3, unseen)
    _, own = eagle.draft(model, proposed, tokens, Asked(len(picks), picks, parents), unseen)
    return own[0], own


def test_a_tree_s_drafts_are_judged_after_their_parents(right: Path, copy: Path) -> None:
    events = lines(copy / "events.jsonl")
    number = next(n for n, one in enumerate(events) if one["event"] == "draft" and len(one["picks"][0]) == 3
                  and len(events[n + 2]["accepted"][0]["nodes"]) == 0)  # fmt: skip
    event, accepted = events[number], events[number + 2]["accepted"]
    names = event["requests"]
    text = next(one for one in audit(right, TINY, level=1).told.texts if one.request == names[0])
    window = next(one for one in text.windows if one.event == number)
    first, second, _ = event["picks"][0]
    sibling = next(token for token in range(256) if token not in (first, accepted[0]["bonus"]))
    own = heads(text, window.at, (first, sibling, second), (0, 0, 1))[1]
    assert own == [first, first, second], "both children of the root have the head's first pick"
    picks = [[first, sibling, second], *event["picks"][1:]]
    parents = [[0, 0, 1], *([*range(len(mine))] for mine in event["picks"][1:])]
    found = audit(edited(copy, number, picks=picks, parents=parents), TINY, level=1)
    assert [one[:3] for one in found.tokens.drafts.others] == [(number, names[0], 2)]


def test_drafts_after_the_judged_tokens_are_left_out(right: Path) -> None:
    whole, part = audit(right, TINY, level=1).tokens.drafts, audit(right, TINY, level=1, tokens=3).tokens.drafts
    assert 0 < part.own < whole.own and not part.others


def test_a_model_without_a_single_draft_head_judges_no_draft(tmp_path: Path, instep: Runner) -> None:
    prompts = {"a": PROMPTS["a"]}
    made = recorded(tmp_path / "r", shows=False, tokens=4, prompts=prompts)
    bare = write_checkpoint(tmp_path / "bare", vocab_size=256, mtp_num_hidden_layers=0)
    stated = json.loads((made / "recording.json").read_text())
    (made / "recording.json").write_text(json.dumps(stated | {"weights": None, "config": None}))
    ran = instep("audit", made, "--model", bare, "--level", 1)
    assert "drafts: not judged, because the model has no single MTP layer" in ran.out, ran


def test_a_draft_within_rounding_is_undecided() -> None:
    said, right = torch.tensor([5, 6, 7, 8]), torch.tensor([5, 1, 2, 3])
    margin, part = torch.tensor([0.0, 0.1, 2.0, 0.0]), torch.tensor([0.0, 0.9, 1.5, 0.0])
    one = Measured(said, right, margin, part, part, part, part)
    found = Drafts()
    text = Text("a", (1,), (2,), (), windows=(Window(4, 1, (5, 6), (0, 1)), Window(7, 2, (7, 8), (0, 1))))
    _count(text, [one], found)
    assert (found.own, found.undecided) == (2, 1), "two tokens of the same logit are both right"
    assert found.others == [(7, "a", 1, "draft 1 of 2 is 7; the model's head says 2 by a margin of 2 logits")]


HOW = Sampling(0.9, top_k=20)


drawn = recording(tokens=10, sampling=HOW)


@pytest.fixture
def drawn_copy(drawn: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(drawn, tmp_path / "copy"))


def test_drawn_text_is_drawn_again(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = audit(drawn, TINY, level=1)
    assert found.exit is Exit.AGREED, found.verdict.findings[:1]
    made = sum(len(text.said) for text in found.told.texts)
    assert found.tokens.ties.made == made > 25 and found.tokens.decided > 0.9 * made and found.told.windows > 3
    monkeypatch.setattr(token_origins, "drawn_at", lambda event, before, flying: ())
    greedy = audit(drawn, TINY, level=1)
    assert len(greedy.verdict.findings) > 3, "of the argmax it is not"


def test_rows_and_states_of_drawn_text_are_judged(tmp_path: Path) -> None:
    found = audit(recorded(tmp_path / "r", tokens=3, sampling=HOW, prompts={"a": tuple(b"Return the")}), TINY)
    assert found.exit is Exit.AGREED and found.replay is not None and found.replay.verdict.elements > 50_000


given = recording(tokens=6, sampling=HOW, prompts={"a": tuple(b"Return the")}, given=True)


@pytest.fixture
def given_copy(given: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(given, tmp_path / "copy"))


def test_all_but_the_tokens_of_drawn_text_without_uniforms_is_judged(
    given: Path, tmp_path: Path, instep: Runner
) -> None:
    ran = instep("audit", given, "--model", TINY, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    found = json.loads((tmp_path / "r.json").read_text())
    assert ran.code == Exit.AGREED and found["runs"][0]["elements"] > 50_000
    (text,) = found["texts"]
    assert (found["tokens"], found["requests"], text["by"]) == (0, 0, "u" * text["tokens"]) and found["windows"] > 1
    says = f"not judged: {text['tokens']} tokens of 1 request, because the recording does not have how they were chosen"
    assert says in ran.out and "fewer than half" not in ran.out
    assert "choice after the tokens before it" not in (tmp_path / "r.html").read_text()
    assert instep("audit", given, "--model", TINY, "--level", 1).code == Exit.INCONCLUSIVE, "only counts were compared"


@pytest.mark.parametrize(("level", "check"), [(3, "state"), (1, "counts")])
def test_wrong_states_and_counts_of_drawn_text_without_uniforms_are_found(
    given_copy: Path, level: int, check: str
) -> None:
    """One state is that after the step before; or a refused draft is the bonus."""
    if check == "counts":
        event = other_bonus(given_copy, kept=True)
    else:
        commits = [number for number, one in enumerate(lines(given_copy / "events.jsonl")) if one["event"] == "commit"]
        event, tensors = commits[1], shown(given_copy, commits[1])
        tensors["state.a.0"] = shown(given_copy, commits[0])["state.a.0"]
        save_file(tensors, given_copy / "tensors" / f"{event:06d}.safetensors")
    found = audit(given_copy, TINY, level=level)
    first = [*found.verdict.findings, *(found.replay.verdict.findings if found.replay else ())][0]
    assert found.exit is Exit.DIVERGED and (first.event, first.request) == (event, "a")
    assert check in (first.check, first.place.component)


def test_given_tokens_have_no_sampling(drawn_copy: Path, instep: Runner) -> None:
    edited(drawn_copy, 0, given=True)
    assert "given: found true, and a sampling" in complaint(instep("audit", drawn_copy, "--model", TINY))


def other_bonus(recording: Path, kept: bool) -> int:
    """A commit with another bonus: on a path without further nodes a refused draft (kept), or any token."""
    drafts: dict[str, list[int]] = {}
    for number, event in enumerate(lines(recording / "events.jsonl")):
        if event["event"] == "draft":
            drafts |= dict(zip(event["requests"], event["picks"], strict=True))
        for name, path in zip(event["requests"], event["accepted"], strict=True) if event["event"] == "commit" else ():
            picks, taken = drafts[name], len(path["nodes"])
            if taken < len(picks):
                path["bonus"] = picks[taken] if kept else (path["bonus"] + picks[taken] + 5) % 256
                edited(recording, number, accepted=event["accepted"])
                return number
    raise AssertionError("every draft was accepted")


@pytest.mark.parametrize(("case", "check", "says"), [
    ("bonus", "tokens", "bonus is"), ("kept", "counts", "is its own bonus"),
])
def test_a_token_that_is_not_drawn_is_named_at_its_commit(drawn_copy: Path, case: str, check: str, says: str) -> None:
    number = other_bonus(drawn_copy, case == "kept")
    found = audit(drawn_copy, TINY, level=1).verdict.findings
    assert (found[0].event, found[0].kind) == (number, "commit")
    assert any(one.check == check and says in one.diagnosis for one in found), found[0].diagnosis
    if check == "tokens":
        assert "with these uniforms the model's logits draw" in found[0].diagnosis


@pytest.mark.parametrize("sampling", [{"temperature": 3.0, "top_k": 20}, {"temperature": 0.9, "top_k": 1}])
def test_a_wrong_recorded_temperature_or_top_k_is_found(drawn_copy: Path, sampling: dict[str, Any]) -> None:
    edited(drawn_copy, 0, sampling=sampling)
    found = audit(drawn_copy, TINY, level=1)
    assert found.exit is Exit.DIVERGED and {one.request for one in found.verdict.findings} == {"a"}


def test_a_recorded_top_p_that_rounds_to_0_is_refused(drawn_copy: Path, instep: Any) -> None:
    edited(drawn_copy, 0, sampling={"temperature": 0.9, "top_p": 1e-46})
    assert "sampling.top_p: found 1e-46" in complaint(instep("audit", drawn_copy, "--model", TINY))


def test_a_plain_file_has_a_uniform_per_token(tmp_path: Path, instep: Any) -> None:
    """The test draws from the model's own logits by the definition, token by token, without drafts."""
    plain = recorded(tmp_path / "plain", tokens=6, sampling=HOW, shows=False, prompts={"a": tuple(b"Return the")})
    found = audit(plain, TINY, level=1)
    (text,) = found.told.texts
    alone = [how[0].final for how in text.drawn if how is not None and len(how[0].tokens) == 1]
    one = {"prompt": text.prompt, "tokens": text.said[:1], "sampling": {"temperature": 0.9, "top_k": 20}}
    drawn = {**one, "uniforms": alone[:1]}
    assert audit(said(tmp_path / "a.jsonl", [drawn]), TINY, dtype="float32").exit is Exit.AGREED
    other = (text.said[0] + 1) % 256
    (first,) = audit(said(tmp_path / "b.jsonl", [{**drawn, "tokens": [other]}]), TINY, dtype="float32").verdict.findings
    assert first.diagnosis.startswith(f"token is {other}; with these uniforms the model's logits draw {text.said[0]}")
    for spoilt, says in ((one, "uniforms: found 0, expected 1, one per token"),
                         ({**drawn, "uniforms": [1.5]}, "uniforms[0]: found 1.5"),
                         ({**drawn, "sampling": {"temperature": -1}}, "sampling.temperature: found -1"),
                         ({**drawn, "sampling": {"temperature": 1, "top_p": 1e-46}}, "sampling.top_p: found 1e-46"),
                         ({"prompt": [1], "tokens": [2], "uniforms": [0.5]}, "and no sampling")):  # fmt: skip
        file = said(tmp_path / "c.jsonl", [spoilt])
        assert says in complaint(instep("audit", file, "--model", TINY))


def test_text_loaded_from_a_greedy_request_is_not_drawn() -> None:
    events = (
        e.Admit("a", (1, 2)), e.Forward((e.Row("a", "prefill", 2, 7),)), e.Save("a", "k"),
        e.Admit("b", (1, 2), HOW), e.Load("b", "k"), e.Forward((e.Row("b", "decode", root=9, uniforms=(0.5,)),)),
    )
    text = told(EventRules(header()), events, "here").texts[-1]
    assert (text.request, text.said, text.known) == ("b", (7, 9), 1)
    assert text.drawn == (None, (Drawing.alone(HOW, (0.5,)), 0)) and text.up_to(1).drawn == (None,)


@pytest.mark.parametrize("parents", [chain(1), chain(3), (-1, 0, 0, 1)], ids=["alone", "chain", "tree"])
def test_a_draw_is_sure_if_only_one_token_is_reachable(parents: tuple[int, ...]) -> None:
    dice, seen = torch.Generator().manual_seed(2), set()
    for number in range(30):
        logits = torch.randn(12, generator=dice, dtype=torch.float64) * 2
        uniforms = torch.rand(len(parents) + 1 if len(parents) > 1 else 1, generator=dice).tolist()
        how = (Sampling(1.0), Sampling(0.7, top_k=4), Sampling(1.3, top_p=0.8))[number % 3]
        row = Row(logits, Drawing(how, logits.topk(len(parents)).indices.tolist(), parents, uniforms), 0)
        error = (1e-6, 0.4)[number % 2]
        can = [token for token in range(12) if reachable(row, token, error, torch.float32)]
        assert row.drawn in can and sure(row, error, torch.float32) == (len(can) == 1), (can, number)
        seen.add(len(can) == 1)
    assert seen == {True, False}
