"""The pytest plugin: every trace is an item, a failure is the message, and what compares nothing is no pass.

Leaves out: what replaying finds (its own tests). Each test is a pytest session in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from instep.cli.record import make
from instep.faults.base import Edit
from instep.faults.plant import planted
from instep.trace.header import Room
from instep.trace.policy import Arrival, Policy
from support.checkpoints import write
from support.golden import Golden

TOP = Path(__file__).resolve().parents[2]
ROOTS = ":".join(str(TOP / root) for root in ("reference", "optimized", "harness"))

OFF_BY_ONE = Edit(
    "instep_optimized/commit/snapshot.py",
    "source=Address(pair.snapshots, accepted.rows, accepted.nodes),",
    "source=Address(pair.snapshots, accepted.rows, (accepted.nodes - 1).clamp(min=0)),",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of somebody: a model, a folder of traces and a test of their own."""
    folder = tmp_path_factory.mktemp("home")
    traces = folder / "traces"
    traces.mkdir()
    policy = Policy(
        name="short", claim="two requests, ragged acceptance", capacity=Room((2, 1), tuple(range(1, 20)), 4, 32),
        arrivals=(Arrival("a", "p", max_new=8), Arrival("b", "q", chunks=(1,), max_new=6)), num_steps=2,
        accept=(2, 0, 1), rounds=4,
    )
    make(write(folder / "model"), {"p": (1, 2, 3, 4, 5), "q": (6, 7)}, policy, traces / "short.jsonl")
    (folder / "test_own.py").write_text("def test_own():\n    pass\n")
    return folder


def session(home: Path, *args: str, roots: str = ROOTS) -> subprocess.CompletedProcess[str]:
    """pytest with this plugin and no other, whether or not the project is installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    words = [sys.executable, "-P", "-m", "pytest", "-p", "instep.plugin", "-p", "no:cacheprovider", *args]
    there = kept | alone | {"PYTHONPATH": roots}
    return subprocess.run(words, cwd=home, env=there, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_each_trace_is_an_item_per_op_set(home: Path) -> None:
    done = session(home, "--instep-traces=traces", "--instep-ops=ledger", "--instep-ops=plain", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "short.jsonl::ledger PASSED" in done.stdout and "short.jsonl::plain PASSED" in done.stdout
    assert "2 passed" in done.stdout and "test_own" not in done.stdout


@pytest.mark.slow
def test_other_paths_and_settings_add_to_each_other(home: Path) -> None:
    both = session(home, "test_own.py", "--instep-traces=traces/short.jsonl", "--instep-ops", "ledger", "-v")
    assert "2 passed" in both.stdout and "test_own.py::test_own" in both.stdout, both.stdout + both.stderr
    (home / "set.ini").write_text("[pytest]\naddopts = --instep-traces traces --instep-ops ledger\n")
    kept = session(home, "-c", "set.ini", "--rootdir", ".", "-v")
    assert "2 passed" in kept.stdout and "test_own.py::test_own" in kept.stdout, kept.stdout + kept.stderr
    assert "1 passed" in session(home).stdout


@pytest.mark.slow
def test_without_op_sets_the_trace_decides(home: Path) -> None:
    done = session(home, "--instep-traces", "traces", "-v")
    assert "short.jsonl::plan PASSED" in done.stdout and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_failure_is_the_message_and_no_stack(home: Path, tmp_path: Path, golden: Golden) -> None:
    folder = planted(tmp_path / "planted", OFF_BY_ONE)
    done = session(home, "--instep-traces", "traces", "--instep-ops", "ledger", "-q", "-rN", roots=str(folder))
    assert done.returncode == 1, done.stdout + done.stderr
    assert " commit, request " in done.stdout and "Traceback" not in done.stdout
    golden("plugin-failure", done.stdout, r"\d+\.\d+s")


@pytest.mark.slow
def test_what_the_subject_raises_is_told_with_its_line_and_traceback(home: Path) -> None:
    roots = f"{ROOTS}:{Path(__file__).resolve().parents[1]}"
    done = session(home, "--instep-traces", "traces", "--instep-ops", "support.fallen:IN_AN_OP", roots=roots)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "op attend (trunk." in done.stdout and "raised IndexError" in done.stdout
    assert "support/fallen.py" in done.stdout and 'given["query"][:, 99]' in done.stdout
    assert "guard.py" not in done.stdout


@pytest.mark.slow
def test_what_compares_nothing_fails(home: Path, tmp_path: Path) -> None:
    blind = Edit("instep/checks/__init__.py", "return (Identity(), Labels(), Bytes(), *structure())", "return ()")
    folder = planted(tmp_path / "planted", blind)
    done = session(home, "--instep-traces", "traces", "--instep-ops", "ledger", roots=str(folder))
    assert done.returncode == 1 and "INCONCLUSIVE" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_bad_input_is_one_line(home: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join((home / "traces" / "short.jsonl").read_bytes().splitlines(keepends=True)[:3]))
    done = session(home, "--instep-traces", str(cut), "--instep-traces", "traces", "--instep-checkpoint", str(tmp_path))
    assert done.returncode == 1 and "2 failed" in done.stdout and "Traceback" not in done.stdout, done.stdout
    assert "the trace was cut" in done.stdout and "config.json" in done.stdout, done.stdout
    empty = session(home, "--instep-traces", str(home / "model"))
    assert empty.returncode == 4 and "no trace (*.jsonl)" in empty.stderr
    nowhere = session(home, "--instep-traces", "elsewhere")
    assert nowhere.returncode == 4 and "is not there" in nowhere.stderr and "Traceback" not in nowhere.stderr


@pytest.mark.slow
def test_ini_options_say_the_same_and_stand_back_where_a_path_is_named(home: Path) -> None:
    (home / "set.ini").write_text("[pytest]\ninstep_traces = traces\ninstep_ops = ledger\ninstep_checkpoint = model\n")
    (home / "set.toml").write_text('[tool.pytest.ini_options]\ninstep_traces = ["traces"]\ninstep_ops = ["ledger"]\n')
    for file in ("set.ini", "set.toml"):
        both = session(home, "-c", file, "--rootdir", ".", "-v")
        assert "2 passed" in both.stdout and "short.jsonl::ledger PASSED" in both.stdout, both.stdout + both.stderr
    own = session(home, "-c", "set.ini", "--rootdir", ".", "test_own.py::test_own")
    assert "1 passed" in own.stdout and "jsonl" not in own.stdout
    (home / "set.ini").write_text("[pytest]\ninstep_traces = elsewhere\n")
    nowhere = session(home, "-c", "set.ini", "--rootdir", ".")
    assert nowhere.returncode == 4 and "elsewhere is not there" in nowhere.stderr


@pytest.mark.slow
def test_what_pytest_prints_as_an_items_name_runs_that_item(home: Path) -> None:
    named = "instep_optimized.ops.ledger:LEDGER"
    root = "--rootdir=."  # names are seen from there
    options = (root, "--instep-traces=traces", "--instep-ops=ledger", f"--instep-ops={named}")
    listed = session(home, *options, "--collect-only", "-q").stdout.splitlines()
    ids = [line for line in listed if "::" in line]
    assert ids == ["traces/short.jsonl::ledger", f"traces/short.jsonl::{named}"]
    for node in ids:
        for given in ((root,), options):
            again = session(home, node, *given, "-v")
            assert "1 passed" in again.stdout and f"{node} PASSED" in again.stdout, again.stdout + again.stderr
    plan = session(home, "traces/short.jsonl", root, "-v")
    assert "1 passed" in plan.stdout and "short.jsonl::plan PASSED" in plan.stdout, plan.stdout + plan.stderr


@pytest.mark.slow
def test_a_trace_outside_the_root_folder_has_a_name_that_runs_it(home: Path) -> None:
    (home / "root").mkdir()
    listed = session(home / "root", "--rootdir=.", "--instep-traces=../traces", "--instep-ops=ledger", "-q", "--co")
    (node,) = [line for line in listed.stdout.splitlines() if "::" in line]
    again = session(home / "root", "--rootdir=.", node, "-v")
    assert "1 passed" in again.stdout and f"{node} PASSED" in again.stdout, again.stdout + again.stderr


@pytest.mark.slow
def test_a_file_of_somebody_elses_is_no_trace(home: Path, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"schema": 1, "level": "info"}\n')
    done = session(home, str(tmp_path / "log.jsonl"), "test_own.py")
    assert "instep" not in done.stdout + done.stderr and "1 failed" not in done.stdout, done.stdout


@pytest.mark.slow
def test_a_root_folder_that_does_not_hold_the_folder_of_the_call_is_told(home: Path, tmp_path: Path) -> None:
    """pytest's own rule: of all words of the command line, the folder above them with an ini file is the root."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
    shutil.copytree(home / "traces", theirs / "traces")
    words = ("--instep-ops=ledger", f"--instep-checkpoint={home / 'model'}")
    wrong = session(mine, "--instep-traces", str(theirs / "traces"), *words)
    assert f"rootdir: {theirs}" in wrong.stdout and "1 passed" in wrong.stdout, wrong.stdout + wrong.stderr
    assert "PytestConfigWarning" in wrong.stdout and "--instep-traces=PATH" in wrong.stdout
    right = session(mine, f"--instep-traces={theirs / 'traces'}", *words)
    assert f"rootdir: {mine}" in right.stdout and "1 passed" in right.stdout and "Warning" not in right.stdout
    (theirs / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    strict = session(mine, "--instep-traces", str(theirs / "traces"), *words)
    assert strict.returncode == 4 and "--instep-traces=PATH" in strict.stderr and "Traceback" not in strict.stderr


@pytest.mark.slow
def test_what_cannot_be_run_here_is_skipped_with_its_reason(home: Path) -> None:
    roots = f"{ROOTS}:{TOP / 'tests'}"
    done = session(home, "--instep-traces=traces", "--instep-ops=support.subjects:declining", "--instep-ops=ledger",
                   "-rs", roots=roots)
    assert done.returncode == 0 and "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "declining: state layout VK" in done.stdout
    none = session(home, "--instep-traces=traces", "--instep-ops=ledger", "--instep-device=cuda:64", "-rs")
    assert none.returncode == 0 and "1 skipped" in none.stdout and "no CUDA device 64 is here" in none.stdout
    wrong = session(home, "--instep-traces=traces", "--instep-ops=ledger", "--instep-device=tpu")
    assert wrong.returncode == 1 and "expected cpu or cuda" in wrong.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["leger", "test_own:NOTHING"])
def test_an_op_set_that_there_is_not_is_one_usage_error_before_anything_runs(home: Path, ops: str) -> None:
    shutil.copy(home / "traces" / "short.jsonl", home / "traces" / "second.jsonl")
    shutil.copy(home / "traces" / "short.safetensors", home / "traces" / "second.safetensors")
    try:
        for words in (("--instep-traces=traces", f"--instep-ops={ops}"), (f"traces/short.jsonl::{ops}",)):
            done = session(home, "test_own.py", *words)
            assert done.returncode == 4 and "passed" not in done.stdout and "failed" not in done.stdout, done.stdout
            assert done.stderr.count("ERROR: --instep-ops: ops: found") == 1 and ops in done.stderr, done.stderr
            assert "module:attribute" in done.stderr and "Traceback" not in done.stderr
    finally:
        for file in ("second.jsonl", "second.safetensors"):
            (home / "traces" / file).unlink()
