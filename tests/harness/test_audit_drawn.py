"""`instep audit` of drawn text: the model draws it again with its own uniforms, and what it cannot draw is named.

Leaves out: greedy text (`test_audit.py`), and the bounds of a draw (`test_draws.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.audit import token_origins
from instep.audit.audit import audit
from instep.audit.token_origins import told
from instep.checks.sampling_bounds import Row, reachable, sure
from instep.trace.event_rules import EventRules
from instep.verdict import Exit
from instep_reference.acceptance import chain
from instep_reference.contract import engine as e
from instep_reference.contract.sampling import Sampling
from instep_reference.sampling import Drawing
from support.inputs.recordings import TINY, edited, lines, recorded, said
from support.inputs.traces import header
from support.running.command import complaint

pytestmark = pytest.mark.slow  # recordings of drawn tokens

HOW = Sampling(0.9, top_k=20)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("recordings") / "drawn", tokens=10, sampling=HOW)


@pytest.fixture
def copy(right: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(right, tmp_path / "copy"))


def test_drawn_text_is_drawn_again(right: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = audit(right, TINY, level=1)
    assert found.exit is Exit.AGREED, found.verdict.findings[:1]
    made = sum(len(text.said) for text in found.told.texts)
    assert found.tokens.ties.made == made > 25 and found.tokens.decided > 0.9 * made and found.told.windows > 3
    monkeypatch.setattr(token_origins, "drawn_at", lambda event, before, flying: ())
    greedy = audit(right, TINY, level=1)
    assert len(greedy.verdict.findings) > 3, "of the argmax it is not"


def test_rows_and_states_of_drawn_text_are_judged(tmp_path: Path) -> None:
    found = audit(recorded(tmp_path / "r", tokens=3, sampling=HOW, prompts={"a": tuple(b"Return the")}), TINY)
    assert found.exit is Exit.AGREED and found.replay is not None and found.replay.verdict.elements > 50_000


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
def test_a_token_that_is_not_drawn_is_named_at_its_commit(copy: Path, case: str, check: str, says: str) -> None:
    number = other_bonus(copy, case == "kept")
    found = audit(copy, TINY, level=1).verdict.findings
    assert (found[0].event, found[0].kind) == (number, "commit")
    assert any(one.check == check and says in one.diagnosis for one in found), found[0].diagnosis
    if check == "tokens":
        assert "with these uniforms the model's logits draw" in found[0].diagnosis


@pytest.mark.parametrize("sampling", [{"temperature": 3.0, "top_k": 20}, {"temperature": 0.9, "top_k": 1}])
def test_a_wrong_recorded_temperature_or_top_k_is_found(copy: Path, sampling: dict[str, Any]) -> None:
    edited(copy, 0, sampling=sampling)
    found = audit(copy, TINY, level=1)
    assert found.exit is Exit.DIVERGED and {one.request for one in found.verdict.findings} == {"a"}


def test_a_plain_file_has_a_uniform_per_token(tmp_path: Path, instep: Any) -> None:
    """The test draws from the model's own logits by the definition, token by token, without drafts."""
    plain = recorded(tmp_path / "plain", tokens=6, sampling=HOW, shows=False, prompts={"a": tuple(b"Return the")})
    found = audit(plain, TINY, level=1)
    (text,) = found.told.texts
    alone = [how[0].final for how in text.drawn if how is not None and len(how[0].tokens) == 1]
    one = {"prompt": text.prompt, "tokens": text.said[:1], "sampling": {"temperature": 0.9, "top_k": 20}}
    right = {**one, "uniforms": alone[:1]}
    assert audit(said(tmp_path / "a.jsonl", [right]), TINY, dtype="float32").exit is Exit.AGREED
    other = (text.said[0] + 1) % 256
    (first,) = audit(said(tmp_path / "b.jsonl", [{**right, "tokens": [other]}]), TINY, dtype="float32").verdict.findings
    assert first.diagnosis.startswith(f"token is {other}; with these uniforms the model's logits draw {text.said[0]}")
    for spoilt, says in ((one, "uniforms: found 0, expected 1, one per token"),
                         ({**right, "uniforms": [1.5]}, "uniforms[0]: found 1.5"),
                         ({**right, "sampling": {"temperature": -1}}, "sampling.temperature: found -1"),
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
