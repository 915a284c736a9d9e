"""The committed results of a GPU still speak for the code beside them.

Leaves out: making them (`tests/on_gpu.sh`).
"""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instep.cli import app

TOP = Path(__file__).resolve().parents[1]
RESULTS = sorted((TOP / "fixtures" / "results").glob("replay-*.json"))
NATIVE = [path for path in RESULTS if "h200" in path.name]

# What runs natively. A result may be this much older than the newest change to it: CI has no GPU.
SPOKEN_FOR = ("optimized/instep_optimized/kernels", "optimized/instep_optimized/ops/triton.py")
OLDEST = timedelta(days=14)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_committed_result_is_a_whole_run_that_agreed(path: Path) -> None:
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["exit"] == 0 and result["commit"] and result["command"] and result["date"]
    trace = (TOP / "fixtures" / "traces" / result["trace"]).read_text().splitlines()
    for run in result["runs"]:
        assert run["of"] == len(trace) - 2, "the trace has been recorded again since"
        assert run["elements"] > 0 and not run["findings"]


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: path.name)
def test_a_native_result_is_not_older_than_the_kernels_allow(path: Path) -> None:
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["machine"]["device"] == "cuda" and result["runs"][0]["ops"] == "triton"
    assert result["runs"][0]["events"] == result["runs"][0]["of"], "not the whole trace"
    done = subprocess.run(
        ["git", "log", "-1", "--format=%ct", "--", *SPOKEN_FOR], cwd=TOP, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.strip(), f"no history to tell the kernels' age by: {done.stderr}"
    changed = datetime.fromtimestamp(int(done.stdout), UTC)
    measured = datetime.fromisoformat(result["date"])
    measured = measured if measured.tzinfo else measured.replace(tzinfo=UTC)
    assert changed - measured < OLDEST, "the kernels have changed: run tests/on_gpu.sh again"


HEAD = {"schema", "exit", "command", "date", "commit", "machine"}  # of every result file


def test_there_are_native_results() -> None:
    assert NATIVE


def test_the_memory_in_the_readme_is_what_the_command_says(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    done = CliRunner().invoke(app, ["memory", "qwen3.5-9b", "--candidates", "1,3", "--json", str(file)])
    assert done.exit_code == 0, done.output
    stored = json.loads((TOP / "fixtures" / "results" / "memory-9b.json").read_text())
    made = json.loads(file.read_text())  # on another machine and day
    assert {name: made[name] for name in stored if name not in HEAD} == {
        name: value for name, value in stored.items() if name not in HEAD
    }
    assert made["strategies"]
