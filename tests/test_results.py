"""The committed results of a GPU are still valid for the committed code.

Leaves out: making them (`tests/on_gpu.sh`).
"""

import json
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from documentation.kernel_history import changed, digest_at, has
from instep.cli import app
from instep.report.machine import digest, kernels_syntax
from instep_reference.contract.adaptive_controller_file import RELEASES
from peers.live.cases import CASES

TOP = Path(__file__).resolve().parents[1]
RESULTS = sorted((TOP / "fixtures" / "results").glob("replay-*.json"))
NATIVE = [path for path in RESULTS if "native" in path.name]

# A result of other kernels may be this much older than the newest change to their syntax trees: CI has no GPU.
OLDEST = timedelta(days=14)
SHARE, BOUND = 0.95, 0.92  # of the mutants that are killed


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
    assert not too_old(result), "the kernels have changed: run tests/on_gpu.sh again"


def test_every_setting_of_the_main_traces_was_run_and_agreed() -> None:
    result: dict[str, Any] = json.loads((TOP / "fixtures" / "results" / "settings-cpu.json").read_text())
    assert result["exit"] == 0 and result["commit"] and result["machine"]
    met = defaultdict[tuple[str, str], set[tuple[bool, str]]](set)
    for array in result["arrays"]:
        assert array["exit"] == 0 and array["met"] == array["of"] > 0 and array["command"]
        assert all(one["why"] and one["values"] for one in array["not_run"])
        for row, exit, events, elements, *_ in array["ran"]:
            assert exit == 0 and events > 0 and elements > 0
            one = next((f"{name} {row[name]}" for name in ("ranks", "stages", "dp") if name in row), "alone")
            met[array["trace"], array["ops"]].add((row.get("graphs", False), one + ", 2 at a time" * (
                "micro_batches" in row)))  # fmt: skip
    for trace, ops in product(("adaptive", "trees", "slots", "slots-overlapped"), ("ledger", "plain")):
        assert met[trace, ops] >= {*product((False, True), ("ranks 2", "stages 3, 2 at a time", "dp 2"))}, (trace, ops)


def test_mutants_of_the_harness_are_killed_or_have_a_reason() -> None:
    """All mutants that can be drawn of the checks, the explanations, the verdict and the rules of the trace."""
    result: dict[str, Any] = json.loads((TOP / "fixtures" / "results" / "harness-mutants.json").read_text())
    killed, survived = result["killed"], result["survivors"]
    assert result["commit"] and "campaigns.harness_mutants" in result["command"] and result["of"] > 6000
    assert result["of"] == killed + len({row["id"] for row in survived}) == killed + len(survived)
    assert [killed, result["of"]] == [sum(each) for each in zip(*result["code"].values(), strict=True)]
    assert killed == sum(result["tests"].values()) >= SHARE * result["of"] and result["lower"] >= BOUND
    assert not any(row["killed_by"] for row in survived)
    assert all(row.get("reason") or row["files"] < result["files"] for row in survived), "it met every test"
    for file in result["tests"]:
        assert (TOP / file).is_file(), file


def test_released_controllers_agree_with_both_sides_in_every_run() -> None:
    result: dict[str, Any] = json.loads((TOP / "fixtures" / "results" / "controllers.json").read_text())
    assert result["exit"] == 0 and result["commit"]
    assert {row["release"] for row in result["rows"] if row["package"] == "sglang"} == {*RELEASES}
    for row in result["rows"]:
        assert row["right"] and row["runs"] == 400 and row["differ"] == {"reference": 0, "optimized": 0}, row
        if row["package"] == "sglang":
            assert (row["dialect"], row["default file of"]) == RELEASES[row["release"]]


def test_every_configuration_of_a_whole_engine_has_the_expected_verdict() -> None:
    result: dict[str, Any] = json.loads((TOP / "fixtures" / "results" / "live.json").read_text())
    assert result["exit"] == 0 and len(result["rows"]) >= 20
    assert [row["name"] for row in result["rows"]] == [case.name for case in CASES if case.name in {
        row["name"] for row in result["rows"]}]  # fmt: skip
    for row in result["rows"]:
        assert row["met"] and row["commit"] and (row["elements"] > 0 or row["verdict"] == "died"), row["name"]


def too_old(result: dict[str, Any]) -> bool:
    """A result of the committed kernels is never too old; otherwise the newest change to the kernels decides."""
    if result["machine"]["kernels_syntax"] == kernels_syntax():
        return False
    measured = datetime.fromisoformat(result["date"])
    measured = measured if measured.tzinfo else measured.replace(tzinfo=UTC)
    return changed() - measured >= OLDEST


@pytest.mark.parametrize(("syntax", "age", "old"), [("same", 400, False), ("other", 13, False), ("other", 15, True)])
def test_age_matters_only_where_the_kernels_are_others(syntax: str, age: int, old: bool) -> None:
    told = kernels_syntax() if syntax == "same" else "0" * 64
    date = (changed() - timedelta(days=age)).isoformat()
    assert too_old({"machine": {"kernels_syntax": told}, "date": date}) is old


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: path.name)
def test_a_native_result_names_the_kernels_of_its_commit(path: Path) -> None:
    result: dict[str, Any] = json.loads(path.read_text())
    if not has(result["commit"]):
        pytest.skip("a clone without that commit")
    assert result["machine"]["kernels_syntax"] == digest_at(result["commit"])


SOURCE = '''
"""A file."""

class Window:
    """A class."""
    size: int = 1

def run(keys, count=None):
    """A function."""
    return f"{keys}" if count is None else keys[:count]  # why
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [('"""A file."""', ""), ("A function.", "Else."), ("# why", ""), ("\n    size: int", "\n\n    size: (int)")],
)
def test_words_and_line_breaks_do_not_change_the_digest(old: str, new: str) -> None:
    assert old in SOURCE and digest({"a.py": SOURCE.replace(old, new)}) == digest({"a.py": SOURCE})


@pytest.mark.parametrize(
    ("old", "new"),
    [("size: int = 1", "size: int = 2"), ("= 1", "= True"), ("=None", "=0"), ("[:count]", "[count:]"),
     ("(keys, count=None)", "(keys, *, count=None)"), (" is None", " == None"), ("keys", "key"), ("{keys}", "keys")],
)  # fmt: skip
def test_a_change_of_the_computation_changes_the_digest(old: str, new: str) -> None:
    assert old in SOURCE and digest({"a.py": SOURCE.replace(old, new)}) != digest({"a.py": SOURCE})


def test_every_file_of_the_kernels_counts() -> None:
    assert digest({"a.py": SOURCE, "b.py": ""}) != digest({"a.py": SOURCE}) != digest({"c.py": SOURCE})


HEAD = {"schema", "exit", "command", "date", "commit", "machine"}  # of every result file


def test_there_are_native_results() -> None:
    assert NATIVE


def test_the_memory_in_the_readme_is_that_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    done = CliRunner().invoke(app, ["memory", "qwen3.5-9b", "--candidates", "1,3", "--json", str(file)])
    assert done.exit_code == 0, done.output
    stored = json.loads((TOP / "fixtures" / "results" / "memory-9b.json").read_text())
    made = json.loads(file.read_text())  # on another machine and day
    assert {name: made[name] for name in stored if name not in HEAD} == {
        name: value for name, value in stored.items() if name not in HEAD
    }
    assert made["strategies"]
