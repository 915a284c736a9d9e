"""The command line: output, files, exit codes, and how a command ends when its reader has gone or the harness fails.

Leaves out: bad input (`test_bad_input.py`).
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from instep.atomic_write import ReaderGone, write_atomically
from instep.cli import COMMANDS
from instep.trace.file import Trace, read
from instep.trace.policy import EXAMPLE, Policy, read_policy, usual
from instep_proof.faults.plant import environment, source
from instep_reference.contract.event_facts import kind_of
from support.inputs.checkpoints import write
from support.inputs.traces import brief, policy, recorded, recording
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few
from support.running.golden import COUNTED, Golden
from support.running.processes import TOP, start

pytestmark = pytest.mark.slow  # whole commands

trace = recording(policy(deeds=()))


short = recording(brief())


def test_replay_prints_verdict_evidence_and_texts(instep: Runner, trace: Trace, golden: Golden) -> None:
    ran = instep("replay", trace.path, "--ops", "ledger")
    assert ran.code == 0, ran
    golden("replay-command", ran.out, COUNTED)


def test_replay_runs_the_named_op_sets_or_the_plan_of_the_header(instep: Runner, short: Trace, tmp_path: Path) -> None:
    planned = instep("replay", short.path, "--until", "6", "--json", tmp_path / "r.json")
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert planned.code == 0 and [run["ops"] for run in runs] == ["ledger", "plain"]
    instep("replay", short.path, "--ops", "ledger", "--until", "3", "--json", tmp_path / "r.json")
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [(run["ops"], run["events"]) for run in runs] == [("ledger", 4)]


def test_divergence_exits_1_with_message_and_command(instep: Runner, trace: Trace) -> None:
    ran = instep("replay", trace.path, "--ops", "support.wrong.subjects:LOUDER")
    assert ran.code == 1
    message = ran.out[ran.out.index("DIVERGED  small") :].splitlines()
    assert message[0] == "DIVERGED  small, optimized[support.wrong.subjects:LOUDER] against reference"
    assert message[1].startswith("  event 2 forward, request") and "layer 0 gated" in message[1]
    assert "limit" in message[2]
    command = message[-1].strip()
    assert command.startswith("instep replay ") and command.endswith("--until 2 --layer 0")
    again = instep(*command.split()[1:])
    assert again.code == 1 and "layer 0 gated" in again.out


@pytest.mark.parametrize("words", [("--until", "0"), ("--until", "1")])
@pytest.mark.parametrize("ops", [(), ("--ops", "plain"), ("--ops", "ledger")])
def test_nothing_compared_or_computed_is_inconclusive(
    instep: Runner, trace: Trace, ops: tuple[str, ...], words: tuple[str, ...]
) -> None:
    ran = instep("replay", trace.path, *ops, *words)
    assert ran.code == 3 and "inconclusive" in ran.out
    assert ": nothing was compared" in ran.out or ": nothing was computed" in ran.out


def test_the_tool_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "instep", "--help"], capture_output=True, text=True, check=True)
    assert "replay" in done.stdout


def test_result_file_has_its_evidence(instep: Runner, trace: Trace, tmp_path: Path) -> None:
    words = ("--ops", "plain", "--until", "6", "--json", tmp_path / "r.json", "--commit", "abc123")
    instep("replay", trace.path, *words)
    result = json.loads((tmp_path / "r.json").read_text())
    run = result["runs"][0]
    assert result["command"].startswith("instep replay") and result["command"].endswith("--commit abc123")
    assert datetime.fromisoformat(result["date"]).tzinfo is not None
    assert result["machine"]["system"].split()[0] in ("Linux", "Darwin")
    assert "Linux-" not in result["machine"]["system"]
    assert result["commit"] == "abc123" and result["machine"]["torch"] and result["machine"]["device"] == "cpu"
    assert run["elements"] > 0 and run["calls"]["gdn"] > 0 and len(run["served"]["instep_optimized"]) == 64
    assert run["exit"] == result["exit"] == 0 and run["findings"] == []
    assert {tier["tier"] for tier in run["tiers"]} == {"T0", "T1", "T2", "T2d", "T3", "T4"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]


def test_record_writes_a_trace_that_replays(instep: Runner, trace: Trace, tmp_path: Path, golden: Golden) -> None:
    prompts = [{"name": "few", "tokens": [1, 2, 3, 4, 5]}, {"name": "one", "tokens": [7]}]
    told = policy(deeds=(), arrivals=tuple(a for a in policy().arrivals if a.prompt != "more"))
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "policy.json").write_bytes(msgspec.json.encode(told))
    model = trace.path.parent / "model"
    out = tmp_path / "own.jsonl"
    words = ("--checkpoint", model, "--prompts", tmp_path / "prompts.json", "--policy", tmp_path / "policy.json")
    ran = instep("record", *words, "--out", out, "--rounds", "4")
    assert ran.code == 0, ran
    golden("record", ran.out, OUT=out)
    assert read(out).header.claim == told.claim
    assert instep("replay", out, "--ops", "ledger").code == 0


@few(1)
@pytest.mark.parametrize("layers", [1, 0])
def test_record_works_without_a_policy(instep: Runner, tmp_path: Path, layers: int) -> None:
    """The usual policy does everything that it promises; without draft layers there are no drafts."""
    model = write(tmp_path / "model", num_hidden_layers=2, full_attention_interval=2, mtp_num_hidden_layers=layers)
    prompts = [{"name": name, "tokens": [1 + n % 9 for n in range(length)]}
               for name, length in (("a", 30), ("b", 3), ("c", 1), ("d", 20))]  # fmt: skip
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    out = tmp_path / "own.jsonl"
    ran = instep("record", "--model", model, "--prompts", tmp_path / "prompts.json", "--out", out)
    assert ran.code == 0, ran
    events = read(out).events
    said = {kind_of(event) for event in events}
    assert {"admit", "forward", "save", "preempt", "resume", "idle", "finish"} <= said
    assert ({"draft", "commit", "set_num_steps"} <= said) is bool(layers)
    if layers:
        lengths = {len(path.nodes) for event in events if kind_of(event) == "commit" for path in event.accepted}
        assert lengths == {0, 1, 2, 3}
    last = max(next(n for n, event in enumerate(events) if kind_of(event) == kind) for kind in said - {"finish"})
    assert instep("replay", out, "--ops", "ledger", "--until", last).code == 0, "every kind of event, but an end"
    few = instep("record", "--model", model, "--prompts", tmp_path / "prompts.json", "--out", out, "--rounds", "3")
    assert few.code == 0, few
    (tmp_path / "prompts.json").write_text("[]")
    assert "expected at least one" in complaint(
        instep("record", "--model", model, "--prompts", tmp_path / "prompts.json", "--out", out))


def test_example_policy_matches_the_page_and_can_be_recorded(instep: Runner, trace: Trace, tmp_path: Path) -> None:
    ran = instep("record", "--example-policy")
    assert ran.code == 0 and f"```json\n{ran.out.strip()}\n```" in Path("docs/policy.md").read_text()
    (tmp_path / "policy.json").write_text(ran.out)
    (tmp_path / "prompts.json").write_text(json.dumps([{"name": "a", "tokens": [1] * 5}, {"name": "b", "tokens": [2]}]))
    assert read_policy(tmp_path / "policy.json") == usual(EXAMPLE)
    words = ("--prompts", tmp_path / "prompts.json", "--policy", tmp_path / "policy.json")
    model, out = trace.path.parent / "model", tmp_path / "o.jsonl"
    assert instep("record", "--model", model, *words, "--out", out).code == 0
    told = set(re.findall(r"`(\w+)`", Path("docs/policy.md").read_text()))
    fields = {field.name for field in msgspec.structs.fields(Policy)}
    assert fields - told == {"name", "claim"}, "the page names every field"


def test_doctor_names_every_part(instep: Runner, tmp_path: Path) -> None:
    ran = instep("doctor", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert ran.code == 0 and found["torch"] and found["device"].startswith(("cpu", "1", "2"))
    assert {"python", "triton", "kernels", "transformers", "hypothesis", "fla"} <= found.keys()
    assert "interpreted" in instep("doctor").out or found["device"][0].isdigit()


def test_harness_failure_is_one_line_and_exit_4(instep: Runner, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a wheel\ncame off")

    monkeypatch.setattr("instep.run.replay.run", broken)
    ran = instep("replay", trace.path, "--ops", "ledger")
    assert ran.code == 4 and "RuntimeError: a wheel came off" in ran.err and "INSTEP_TRACEBACK=1" in ran.err
    assert "Traceback" not in ran.err


def test_wrong_usage_exits_2(instep: Runner) -> None:
    assert instep("streams").code == 2
    for words in (("--until", "minus one"), ("--layer", "-1")):
        assert instep("replay", "x.jsonl", *words).code == 2
    assert instep("fly").code == 2


def test_torch_is_loaded_only_when_needed() -> None:
    program = "import sys, instep.cli; print(sorted({'torch', 'triton', 'rich.table'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout and "triton" not in done.stdout


# Each command in a child of one process that has imported instep, and then the child's exit code on a line.
WITHOUT = """
import json, os, sys
sys.path[:] = [place for place in sys.path if not place.endswith("harness")]  # where an editable installation points
from instep.cli import main
for words in json.loads(sys.argv[1]):
    if not os.fork():
        sys.argv[1:] = words
        main()
    print("ENDED", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_core_runs_without_the_other_two_packages(short: Trace, tmp_path: Path) -> None:
    for package in ("instep", "instep_optimized", "instep_reference"):
        (tmp_path / package).symlink_to(source(package))

    elsewhere = sorted(name for name, at, _ in COMMANDS if not at.startswith("instep."))
    assert elsewhere == ["bench", "calibrate", "demo", "faults", "gate"]
    commands = [
        ("replay", str(short.path), "--ops", "ledger", "--json", "r.json"), ("--help",),
        ("page", str(TOP / "fixtures" / "results" / "faults.json"), "--html", "p.html"),
        *((name, "--json", "x.json") for name in elsewhere),
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT, json.dumps(commands)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=True, env=environment() | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
    )  # fmt: skip
    _, listing, page, *refused = re.split(r"ENDED \d\n", done.stdout)[:-1]
    codes = re.findall(r"ENDED (\d)", done.stdout)
    assert codes == ["0", "0", "2", *"2" * len(elsewhere)], done.stdout
    assert json.loads((tmp_path / "r.json").read_text())["runs"][0]["events"] > 1
    assert listing.count("(not installed)") == len(elsewhere)
    assert "expected the package instep_proof" in page
    for name, said in zip(elsewhere, refused, strict=True):
        package = "instep_speed" if name in ("bench", "gate") else "instep_proof"
        assert f"instep {name}: found no package {package}" in said


@pytest.fixture(scope="module")
def short_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def test_command_dies_of_sigpipe_when_its_reader_has_gone(short_trace: Path, words: tuple[str, ...]) -> None:
    cold = words[0] in ("replay", "--help")
    code, said = ended(*(short_trace if word == "TRACE" else word for word in words), cold=cold)
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


def test_a_reader_of_stderr_that_has_gone(short_trace: Path) -> None:
    code, _ = ended("replay", short_trace, "--until", "minus one", stream="stderr", cold=True)
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


def test_command_with_a_patient_reader_prints_its_verdict(short_trace: Path) -> None:
    done = start("replay", short_trace, "--ops", "ledger")
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
    instep: Runner, short_trace: Path, monkeypatch: pytest.MonkeyPatch, error: Any, asked: str
) -> None:
    """Typer itself would end with 1 for some of them, and Python for all when the traceback is shown."""

    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("instep.run.replay.run", broken)
    monkeypatch.setenv("INSTEP_TRACEBACK", asked)
    ran = instep("replay", short_trace, "--ops", "ledger")
    assert ran.code == 4 and "the harness itself failed" in ran.err and type(error).__name__ in ran.err, ran
    assert ("Traceback" in ran.err and "in broken" in ran.err) is bool(asked)
    assert ("INSTEP_TRACEBACK=1 shows where" in ran.err) is not bool(asked)


EVERY = {
    "calibrate": ("instep_proof.calibrate.calibrate", ()), "faults": ("instep_proof.faults.campaign.campaign", ()),
    "fuzz": ("instep.campaign.soak.soak.campaign", ()), "gate": ("instep_speed.gate.gate.gate", ("plain", "plain")),
    "generate": ("instep.generate.decode.decode", ("MODEL", "--prompt", "1 2")),
    "memory": ("instep.campaign.shapes.sized_like", ("qwen3.5-9b",)), "doctor": ("instep.cli.doctor.findings", ()),
    "record": ("instep.cli.record.make", ("--checkpoint", "MODEL", "--prompts", "P", "--policy", "O", "--out", "N")),
    "relations": ("instep.campaign.relations.hold", ("TRACE",)),
    "streams": ("instep.campaign.streams.run_stamped_trace.streamed", ("TRACE",)),
}


@pytest.mark.parametrize("command", EVERY)
def test_every_command_can_show_its_traceback(
    instep: Runner, short_trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    place, words = EVERY[command]

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a wheel came off")

    monkeypatch.setattr(place, broken)
    monkeypatch.setattr("instep_proof.faults.plant.warm", nullcontext)  # nothing is run
    if command == "record":
        for name in ("read_policy", "read_prompts"):
            monkeypatch.setattr(f"instep.trace.policy.{name}", lambda path: policy())
    monkeypatch.setenv("INSTEP_TRACEBACK", "1")
    named = {"TRACE": short_trace, "MODEL": short_trace.parent / "model", "N": tmp_path / "new.jsonl"}
    ran = instep(command, *(named.get(word, word) for word in words))
    assert ran.code == 4 and "in broken" in ran.err and ran.err.count("Traceback") == 1, ran
    assert ran.err.strip().splitlines()[-1] == "instep: the harness itself failed: RuntimeError: a wheel came off"


def test_the_stack_of_bad_input_is_shown_too(instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_TRACEBACK", "1")
    ran = instep("replay", tmp_path / "none.jsonl")
    assert ran.code == 2 and "Traceback" in ran.err
    assert ran.err.strip().splitlines()[-1].startswith("instep: ")
