"""How a command ends when the reader of its output has gone, and when the harness itself fails.

Leaves out: verdicts (`test_cli.py`) and bad input (`test_bad_input.py`).
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from instep.atomic_write import ReaderGone, write_atomically
from support.inputs.traces import policy, recorded
from support.running.command import Runner
from support.running.covering import WHOLE, few
from support.running.process import start

pytestmark = pytest.mark.slow  # processes of their own


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("endings"), policy(deeds=(), rounds=2)).path


def ended(*words: object, stream: str = "stdout", cold: bool = False) -> tuple[int, str]:
    """Exit status of a command whose reader had gone before it wrote, and its output on the other stream."""
    reading, writing = os.pipe()
    done = start(*words, cold=cold, **{stream: writing})
    os.close(reading)
    os.close(writing)
    out, err = done.communicate(timeout=120)
    return done.returncode, (out or "") + (err or "")


@few(2)
@pytest.mark.parametrize("words", [
    ("replay", "TRACE", "--ops", "support.wrong.subjects:LOUDER", "--until", "3"),
    pytest.param(("relations", "TRACE", "unseen", "--until", "3"), marks=WHOLE),
    ("memory", "qwen3.5-9b", "--json", "-"),
    ("doctor", "--json", "-"),
    ("--help",),
], ids=" ".join)  # fmt: skip
def test_command_dies_of_sigpipe_when_its_reader_has_gone(trace: Path, words: tuple[str, ...]) -> None:
    cold = words[0] in ("replay", "--help")
    code, said = ended(*(trace if word == "TRACE" else word for word in words), cold=cold)
    assert code == -signal.SIGPIPE, said
    assert "Traceback" not in said and "Exception ignored" not in said


def test_a_reader_that_goes_after_a_line() -> None:
    # A page of memory is all that this pipe holds: the rest of the list cannot be written before the reader goes.
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    tool = start("faults", "--list", stdout=writing, stderr=subprocess.DEVNULL)
    os.close(writing)
    assert os.read(reading, 100).strip()
    os.close(reading)
    assert tool.wait(timeout=120) == -signal.SIGPIPE, "a shell reports 141"


def test_a_reader_of_stderr_that_has_gone(trace: Path) -> None:
    code, _ = ended("replay", trace, "--until", "minus one", stream="stderr", cold=True)
    assert code == -signal.SIGPIPE


def test_result_written_to_a_pipe_that_closes_early(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def read_a_little() -> None:
        with pipe.open("rb", buffering=0) as opened:
            opened.read(1)

    reader = threading.Thread(target=read_a_little, daemon=True)
    reader.start()
    with pytest.raises(ReaderGone):
        write_atomically({pipe: bytes(10**6)})
    reader.join(timeout=10)


def test_command_with_a_patient_reader_prints_its_verdict(trace: Path) -> None:
    done = start("replay", trace, "--ops", "ledger")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0 and "ledger agrees" in out, err


def test_bad_input_keeps_its_exit_code_without_a_reader(tmp_path: Path) -> None:
    code, said = ended("replay", tmp_path / "none.jsonl")
    assert code == 2 and "No such file" in said


WRONG = [RuntimeError("a wheel came off"), EOFError("a wheel came off"), BrokenPipeError(32, "a wheel came off"),
         OSError(5, "a wheel came off"), SystemExit(0), SystemExit("a wheel came off"), KeyError("a wheel")]


@pytest.mark.parametrize("error", WRONG, ids=repr)
@pytest.mark.parametrize("asked", ["", "1"])
def test_a_harness_that_fails_never_ends_with_a_verdict(
    instep: Runner, trace: Path, monkeypatch: pytest.MonkeyPatch, error: Any, asked: str
) -> None:
    """Typer itself would end with 1 for some of them, and Python for all when the traceback is shown."""

    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("instep.run.replay.run", broken)
    monkeypatch.setenv("INSTEP_TRACEBACK", asked)
    ran = instep("replay", trace, "--ops", "ledger")
    assert ran.code == 4 and "the harness itself failed" in ran.err and type(error).__name__ in ran.err, ran
    assert ("Traceback" in ran.err and "in broken" in ran.err) is bool(asked)
    assert ("INSTEP_TRACEBACK=1 shows where" in ran.err) is not bool(asked)


EVERY = {
    "calibrate": ("instep_proof.calibrate.calibrate", ()), "faults": ("instep_proof.faults.campaign.campaign", ()),
    "fuzz": ("instep.campaign.fuzz.campaign.campaign", ()), "gate": ("instep_speed.gate.gate.gate", ("plain", "plain")),
    "generate": ("instep.generate.decode.decode", ("MODEL", "--prompt", "1 2")),
    "memory": ("instep.campaign.shapes.sized_like", ("qwen3.5-9b",)), "doctor": ("instep.cli.doctor.findings", ()),
    "record": ("instep.cli.record.make", ("--checkpoint", "MODEL", "--prompts", "P", "--policy", "O", "--out", "N")),
    "relations": ("instep.campaign.relations.hold", ("TRACE",)),
    "streams": ("instep.campaign.streams.run_stamped_trace.streamed", ("TRACE",)),
}


@pytest.mark.parametrize("command", EVERY)
def test_every_command_can_show_its_traceback(
    instep: Runner, trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    place, words = EVERY[command]

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a wheel came off")

    monkeypatch.setattr(place, broken)
    monkeypatch.setattr("instep_proof.faults.run_in_forks.warm", nullcontext)  # nothing is run
    if command == "record":
        for name in ("read_policy", "read_prompts"):
            monkeypatch.setattr(f"instep.trace.policy.{name}", lambda path: policy())
    monkeypatch.setenv("INSTEP_TRACEBACK", "1")
    named = {"TRACE": trace, "MODEL": trace.parent / "model", "N": tmp_path / "new.jsonl"}
    ran = instep(command, *(named.get(word, word) for word in words))
    assert ran.code == 4 and "in broken" in ran.err and ran.err.count("Traceback") == 1, ran
    assert ran.err.strip().splitlines()[-1] == "instep: the harness itself failed: RuntimeError: a wheel came off"


def test_the_stack_of_bad_input_is_shown_too(instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_TRACEBACK", "1")
    ran = instep("replay", tmp_path / "none.jsonl")
    assert ran.code == 2 and "Traceback" in ran.err
    assert ran.err.strip().splitlines()[-1].startswith("instep: ")
