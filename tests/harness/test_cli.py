"""The command line: output, files and exit codes.

Leaves out: bad input (`test_bad_input.py`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from instep.cli import COMMANDS
from instep.trace.default_policy import EXAMPLE, usual
from instep.trace.file import Trace, read
from instep.trace.policy import Policy, read_policy
from instep_proof.faults.plant import environment, source
from instep_reference.contract.event_facts import kind_of
from support.inputs.checkpoints import write
from support.inputs.traces import brief, policy, recorded
from support.running.command import Runner, complaint
from support.running.covering import few
from support.running.golden import COUNTED, Golden
from support.running.process import TOP

pytestmark = pytest.mark.slow  # whole commands

@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("cli"), policy(deeds=()))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("short"), brief())


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


WITHOUT = """
import sys
sys.path[:] = [place for place in sys.path if not place.endswith("harness")]  # where an editable installation points
from instep.cli import main
main()
"""


def test_core_runs_without_the_other_two_packages(short: Trace, tmp_path: Path) -> None:
    for package in ("instep", "instep_optimized", "instep_reference"):
        (tmp_path / package).symlink_to(source(package))

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        env = environment() | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-P", "-c", WITHOUT, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)

    ran, listing = run("replay", short.path, "--ops", "ledger", "--json", tmp_path / "r.json"), run("--help").stdout
    assert ran.returncode == 0 and json.loads((tmp_path / "r.json").read_text())["runs"][0]["events"] > 1, ran
    elsewhere = {name for name, at, _ in COMMANDS if not at.startswith("instep.")}
    assert elsewhere == {"bench", "calibrate", "demo", "faults", "gate"}
    assert listing.count("(not installed)") == len(elsewhere)
    for name in sorted(elsewhere):
        refused = run(name, "--json", tmp_path / "x.json")
        package = "instep_speed" if name in ("bench", "gate") else "instep_proof"
        assert refused.returncode == 2 and f"instep {name}: found no package {package}" in refused.stderr, refused
    page = run("page", TOP / "fixtures" / "results" / "faults.json", "--html", tmp_path / "p.html")
    assert page.returncode == 2 and "expected the package instep_proof" in page.stderr, page
