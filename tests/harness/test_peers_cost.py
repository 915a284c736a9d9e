"""`peers.live.cost`: the variants of the recorder, what makes a repetition count, and the result. Leaves out: a GPU."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from instep.campaign.shapes import shape
from instep_reference.contract.config import ModelConfig
from peers.live import cost
from peers.live.cost import NotRight, Repetition, checked
from support.inputs.recordings import TINY
from support.running.covering import WHOLE
from support.worlds import fake_sglang
from support.worlds.fake_sglang import Model, Served

RELEASE = "0.5.13"


@pytest.fixture(scope="module")
def model() -> fake_sglang.Model:
    return fake_sglang.Model(TINY)


@pytest.fixture
def served(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A function that serves two requests with a variant in one process: label -> what was served."""
    monkeypatch.setenv(cost.FOLDER, str(tmp_path))
    with fake_sglang.imported(fake_sglang.write(tmp_path, RELEASE)), torch.inference_mode():
        __import__("sglang.srt.managers.scheduler")
        registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
        cost.load()
        own = {target: hook for target, hook in registry.hooks if target in (cost.REQUEST, cost.SAMPLE)}
        assert own[cost.SAMPLE] is cost.accept_drafts and len(registry.hooks) == 7
        switch = own[cost.REQUEST].__self__
        registry.hooks = [one for one in registry.hooks if one[0] not in own]  # the engine lacks them
        engine = Served(model, RELEASE, TINY, overlap=True)

        def serve(label: str, rounds: int = 4) -> Repetition:
            first, second = names = f"{label}-0", f"{label}-1"
            for name in names:
                switch.request(lambda *_: None, None, SimpleNamespace(rid=name))
                engine.request(name, b"Return the", 1 + 3 * rounds)
            engine.prefill(*names)
            for _ in range(rounds):
                engine.verify(4, **{first: 2, second: 2})
            engine.settle()
            engine.free = list(range(8))
            said = {name: (engine.requests[name].output_ids[:-1], rounds) for name in names}
            return Repetition(label.partition("-")[0], 1.0, said)

        yield serve


@WHOLE
@pytest.mark.slow
def test_one_process_runs_all_variants_by_turns(served: Callable[..., Any], tmp_path: Path) -> None:
    for number in range(2):
        for variant in cost.order(number):
            label = f"{variant}-{number}"
            found = checked(served(label), tmp_path / label)
            assert (tmp_path / label).exists() == (variant in (cost.TOKENS, cost.DEFAULT))
            assert bool(found.events) == (tmp_path / label).exists() and found.written == 0


def test_states_are_counted(served: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost.VARIANTS, cost.DEFAULT, {"every": 2})
    found = checked(served("default-0", 5), tmp_path / "default-0")
    assert found.written == 3, "of the prefill and five rounds"
    next((tmp_path / "default-0" / "tensors").iterdir()).unlink()
    with pytest.raises(NotRight, match="2 events have states, 3 are stated, and 3 of 6 rounds were expected"):
        checked(found, tmp_path / "default-0")


@pytest.mark.parametrize(("damage", "message"), [
    (lambda text: text.replace('"nodes":[1,2]', '"nodes":[1]', 1), "8 windows|4 windows and 12 tokens.*equal: False"),
    (lambda text: "".join(text.splitlines(True)[:-1]), "events stated"),
])  # fmt: skip
def test_a_damaged_recording_does_not_count(served: Any, tmp_path: Path, damage: Any, message: str) -> None:
    one = served("tokens-0")
    events = tmp_path / "tokens-0" / "events.jsonl"
    events.write_text(damage(events.read_text()))
    with pytest.raises(NotRight, match=message):
        checked(one, tmp_path / "tokens-0")


def test_other_answers_and_windows_do_not_count(served: Callable[..., Any], tmp_path: Path) -> None:
    one = served("tokens-0")
    name, (tokens, windows) = next(iter(one.answers.items()))
    for wrong in (([*tokens[:-1], 0], windows), (tokens, windows + 1)):
        with pytest.raises(NotRight, match=f"{name}: {wrong[1]} windows"):
            checked(replace(one, answers={**one.answers, name: wrong}), tmp_path / "tokens-0")
    with pytest.raises(NotRight, match="but the recorder was off"):
        checked(replace(one, variant=cost.BARE), tmp_path / "tokens-0")
    with pytest.raises(NotRight, match="8 windows in 4 batches of 2"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(cost, "FULL", 1.1)
        checked(one, tmp_path / "tokens-0")
    with pytest.raises(NotRight, match="No such file"):
        checked(one, tmp_path / "elsewhere")


def test_simulated_acceptance_accepts_the_drafts() -> None:
    window = SimpleNamespace(draft_token_num=4, draft_token=torch.tensor([5, 6, 7, 8, 1, 2, 3, 4]))
    sampled = torch.full((8,), 100), torch.tensor([3, 3]), None
    predicted, lengths, _ = cost.accept_drafts(lambda *_: sampled, window)
    assert predicted.tolist() == [6, 7, 8, 100, 2, 3, 4, 100] and lengths is sampled[1]


def test_the_model_has_the_published_shape() -> None:
    wrapped = json.loads(cost.model_config())
    assert ModelConfig.from_dict(wrapped) == shape("qwen3.5-4b")
    assert sum(wrapped["text_config"]["rope_parameters"]["mrope_section"]) * 2 == 256 * 0.25


@pytest.mark.parametrize(("slow", "exit_code"), [(0.0, 0), (0.4, 1)])
def test_the_result_has_the_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slow: float, exit_code: int
) -> None:
    class Engine:
        def __init__(self, **_: Any) -> None:
            pass

        def generate(
            self, input_ids: list[list[int]], sampling_params: dict[str, int], rid: list[str]
        ) -> list[dict[str, dict[str, Any] | list[Any]]]:
            tokens, clock[0] = sampling_params["max_new_tokens"], clock[0] + 1 + slow * rid[0].startswith("default")
            return [{"output_ids": [1] * tokens, "meta_info": {"spec_verify_ct": 3}} for _ in input_ids]

        def shutdown(self) -> None:
            pass

    clock, sglang = [0.0], ModuleType("sglang")
    sglang.Engine, sglang.__version__ = Engine, RELEASE
    monkeypatch.setitem(sys.modules, "sglang", sglang)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(cost.time, "sleep", lambda _: None)
    monkeypatch.setattr(cost, "checked", lambda one, folder: one)
    monkeypatch.setattr(cost, "arguments", lambda *_: {})
    monkeypatch.setattr("instep.report.result.machine", lambda device: {"device": device, "device_name": "a card"})
    monkeypatch.setenv(cost.FOLDER, str(tmp_path))
    options = SimpleNamespace(port=1, repetitions=5, tokens=10, commit="abc")
    assert cost.measure(tmp_path, tmp_path / "cost.json", options) == exit_code
    found = json.loads((tmp_path / "cost.json").read_text())
    assert found["command"].startswith("python -m peers.live.cost")
    assert (found["exit"], found["commit"], found["machine"]["device"]) == (exit_code, "abc", "cuda")
    assert found["variants"]["bare"]["tokens_per_second"]["median"] == cost.BATCH * 10
    assert found["variants"]["default"]["loss"]["median"] == pytest.approx(1 - 1 / (1 + slow))
    said = capsys.readouterr().out
    assert f"| default selection | {80 / (1 + slow):,.0f} | {1 - 1 / (1 + slow):.1%} (" in said
    assert "a card, SGLang" in said and ("TOO SLOW" in said) == bool(exit_code)


def test_the_page_has_the_committed_result() -> None:
    top = TINY.absolute().parents[1]
    file = top / cost.RESULT
    found = json.loads(file.read_text()) if file.exists() else None
    assert cost.table(found) in (top / cost.PAGE).read_text()
    assert found is None or (found["exit"] == 0 and found["commit"] and found["date"] and found["repetitions"] >= 5)
