"""Recordings of tests/peers: the output of a fake engine is judged, with the verdict in the last line.

Leaves out: the engines themselves, which `make peers` runs.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import peers.__main__ as program
from instep.verdict import Exit
from peers.entry import Entry
from peers.environment import TOP
from peers.recordings import judged, llamacpp_server, vllm_cpu
from peers.recordings.judged import Asked

TINY = TOP / "fixtures" / "tiny"
PROMPT, RIGHT = [*b"Return the"], [*b" result"]
WANTED = [Asked([*b"0, 1, 2, 3"], 2), Asked(PROMPT, 7)]


@pytest.mark.slow
@pytest.mark.parametrize(("second", "code", "last"), [
    (RIGHT, Exit.AGREED, "0 of 2 recordings are not right"),
    ([*RIGHT[:3], 5, *RIGHT[4:]], Exit.DIVERGED, 'line 2, request "line 2", token 3 at position 13: token is 5; '),
    (RIGHT[:6], Exit.DIVERGED, "line 2 has 6 of 7 tokens; 1 of 2 recordings are not right"),
], ids=["right", "a wrong token", "a token too few"])  # fmt: skip
def test_last_line_names_the_fault_of_a_recording(
    second: list[int], code: Exit, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judged, "asked", lambda seed: WANTED)
    answers = iter([[[*b", "], RIGHT], [[*b", "], second]])
    assert judged.judged(lambda wanted: next(answers), 2, TINY, "float32") is code
    told = capsys.readouterr().out.splitlines()
    assert judged.counted("\n".join(told))[0] > 0 and judged.counted("a page of logs") == (0, 0)
    assert told[-1].startswith(last) and told[0] == "recording 0: 9 tokens, 9 could be decided, 0 tied"
    assert told[-1].endswith(f"{int(code is not Exit.AGREED)} of 2 recordings are not right")


def test_requests_are_drawn_from_the_seed() -> None:
    assert judged.asked(1) == judged.asked(1) != judged.asked(2)
    assert all(64 <= len(one.prompt) < 300 and 8 <= one.count < 24 for one in judged.asked(1))


class Answers(BaseHTTPRequestHandler):
    """A server that repeats the prompt's first tokens; a count above 8 had drafts."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        greedy = (body["temperature"], body["top_k"], body["return_tokens"], self.path) == (0, 1, True, "/completion")
        count = body["n_predict"] if greedy else 0
        timings = {"draft_n": 7, "draft_n_accepted": 3} if count > 8 else {}
        said = json.dumps({"tokens": body["prompt"][:count], "timings": timings}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The parameters with which the servers were built."""
    http, made = ThreadingHTTPServer(("127.0.0.1", 0), Answers), list[Any]()
    Thread(target=http.serve_forever, daemon=True).start()

    def params() -> Any:
        empty = {name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")}
        return SimpleNamespace(**empty, speculative=SimpleNamespace(draft=SimpleNamespace()))

    def server(given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(listening_address=f"http://127.0.0.1:{http.server_port}")

    kinds = SimpleNamespace(COMMON_SPECULATIVE_TYPE_DRAFT_MTP="mtp")
    package = SimpleNamespace(CommonParams=params, Server=server, common_speculative_type=kinds,
                              ggml_type=SimpleNamespace(GGML_TYPE_F32=0))  # fmt: skip
    monkeypatch.setitem(sys.modules, "xllamacpp", package)  # type: ignore[arg-type]
    monkeypatch.setattr(llamacpp_server.gguf_writer, "write", lambda directory, file: None)
    yield made
    http.shutdown()
    http.server_close()


@pytest.mark.slow
@pytest.mark.parametrize(("words", "count", "code", "drafts", "checkpoints"), [
    ([], 9, Exit.AGREED, None, None),
    (["--drafts", "7"], 9, Exit.AGREED, 7, None),
    (["--drafts", "7", "--checkpoints", "0"], 9, Exit.AGREED, 7, 0),
    (["--drafts", "7"], 8, Exit.INCONCLUSIVE, 7, None),
], ids=["plain", "drafts", "no checkpoints", "drafts nothing"])  # fmt: skip
def test_server_gets_the_given_parameters(
    words: list[str], count: int, code: Exit, drafts: int | None, checkpoints: int | None, llama: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    wanted = [Asked([first, *range(20)], count) for first in range(12)]

    def judge(record: Any, times: int, model: Path, dtype: str) -> Exit:
        assert record(wanted) == [one.prompt[:count] for one in wanted] and (times, dtype) == (3, "float32")
        return Exit.AGREED

    monkeypatch.setattr(llamacpp_server, "judged", judge)
    assert llamacpp_server.main([str(TINY), "--times", "3", *words]) == code
    (made,) = llama
    assert made.n_parallel == 4 and made.cache_type_k == made.cache_type_v == 0
    assert getattr(made.speculative.draft, "n_max", None) == drafts
    assert getattr(made.speculative, "types", None) == (None if drafts is None else ["mtp"])
    assert getattr(made, "n_ctx_checkpoints", None) == checkpoints


@pytest.mark.parametrize("raised", [None, RuntimeError("it broke")])
def test_vllm_gets_tokens_and_what_it_raises_is_a_finding(
    raised: Exception | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def generate(prompts: Sequence[Any], how: Sequence[Any], use_tqdm: bool) -> list[Any]:
        if raised:
            raise raised
        said = [one["prompt_token_ids"][: each["max_tokens"]] for one, each in zip(prompts, how, strict=True)]
        assert all(each["temperature"] == 0 and each["ignore_eos"] for each in how)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(one))]) for one in said]

    def engine(model: Path, ngram: int) -> Any:
        assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"] and ngram == 4
        return SimpleNamespace(generate=generate)

    def judge(record: Any, times: int, model: Path, dtype: str) -> Exit:
        assert record(WANTED) == [one.prompt[: one.count] for one in WANTED] and dtype == "bfloat16"
        return Exit.AGREED

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))  # type: ignore[arg-type]
    monkeypatch.setattr(vllm_cpu, "engine", engine)
    monkeypatch.setattr(vllm_cpu, "judged", judge)
    assert vllm_cpu.main([str(TINY), "--ngram", "4"]) == (1 if raised else 0)
    assert capsys.readouterr().out == ("vLLM raises RuntimeError: it broke\n" if raised else "")


def test_a_torchvision_of_another_torch_gets_its_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_C.so").write_text("no library")
    spec = ModuleSpec("torchvision", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(vllm_cpu, "find_spec", lambda name: spec)
    declared = vllm_cpu.torch_vision()
    try:
        assert torch.ops.torchvision.nms.default and torch.ops.torchvision.qnms.default
    finally:
        declared._destroy()
    (tmp_path / "_C.so").unlink()
    assert vllm_cpu.torch_vision() is None


def test_separate_entry_runs_in_a_separate_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"package": "p", "version": "1", "door": "recording", "command": "python"}
    mine = Entry.of({**given, "name": "mine", "needs": ["a==1"]})
    other = Entry.of({**given, "name": "other", "needs": ["a==2"], "apart": "other"})
    installed, ran = dict[str, list[str]](), dict[str, str]()

    def served(one: Entry, variables: Any, unpacked: Path, python: str) -> dict[str, Any]:
        ran[one.name] = python
        return {"met": True, "events": 0, "of": 0, "seconds": 0, "verdict": "agree", "finding": ""}

    monkeypatch.setattr(program, "python_of", lambda folder: folder / "python")
    monkeypatch.setattr(program, "install", lambda python, needs: installed.update({str(python): [*needs]}))
    monkeypatch.setattr(program, "served", served)
    program.run([mine, other], tmp_path, 1)
    assert installed == {str(tmp_path / "python"): ["a==1"], str(tmp_path / "other" / "python"): ["a==2"]}
    assert ran == {"mine": str(tmp_path / "python"), "other": str(tmp_path / "other" / "python")}
