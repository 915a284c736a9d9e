"""All commands write the same head into a result file, print progress on stderr, and record a command to paste.

Leaves out: the findings of the commands.
"""

import ast
import json
import shlex
from datetime import datetime
from pathlib import Path

import pytest

import instep
from instep.cli.progress import progress
from instep.report.command_lines import command, typed
from instep.report.result import SCHEMA, Result, read
from instep.setting import Setting
from instep_reference.contract.errors import BadInput
from support.running.command import Runner

HEAD = ["schema", "exit", "command", "date", "commit", "machine"]


def test_a_result_begins_with_what_makes_it_credible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/instep", "replay", "a b.jsonl", "--json", "r.json", "--ops", "plain"])
    Result(3, "cpu", {"runs": [1]}, "abc").write(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert list(data) == [*HEAD, "runs"]
    assert (data["schema"], data["exit"], data["commit"], data["runs"]) == (SCHEMA, 3, "abc", [1])
    assert data["command"] == "instep replay 'a b.jsonl' --ops plain"
    assert datetime.fromisoformat(data["date"]).tzinfo is not None and data["machine"]["torch"]


def test_head_of_a_result_describes_the_machine() -> None:
    assert Result(0, "cpu", {"machine": {"cores": "2"}}).data()["machine"] == {"cores": "2"}


@pytest.mark.parametrize("words", [
    ["--json", "r.json"], ["--json=r.json"], ["--trail=t", "--json", "-"], ["--html", "p.html"], ["--json"],
    ["--picture", "p.svg"],
])
def test_command_in_a_result_omits_its_output_path(words: list[str]) -> None:
    assert typed(["x/instep/__main__.py", *words]) == "instep"
    assert typed(["x/peers/__main__.py", *words]) == "python -m peers"
    assert typed(["instep", "faults", *words[:2], "--commit", "a"]).startswith("instep faults")


def test_every_command_writes_results_in_one_way(instep: Runner, tmp_path: Path) -> None:
    ran = instep("memory", "qwen3.5-9b", "--json", tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert ran.code == 0 and list(data)[: len(HEAD)] == HEAD and data["widest"] == 4


@pytest.mark.slow
def test_json_is_written_in_one_place() -> None:
    """`write_atomically` is for what is no result: traces, pictures, trails."""
    root = Path(instep.__file__).parent
    writers = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if "format" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "format" and ast.unparse(node) == "msgspec.json.format"
    }  # fmt: skip
    assert writers == {"report/result.py"}


def test_command_lists_non_default_options_and_can_be_pasted() -> None:
    words = ["instep", "replay", "a trace.jsonl", "--ops", "plain", "--until", 4]
    assert command(words, Setting()) == "instep replay 'a trace.jsonl' --ops plain --until 4"
    setting = Setting(dtype="bfloat16", graphs=True)
    told = command(words, setting, always=["strategy"], more=["--checkpoint", "my model"])
    options = ["--dtype", "bfloat16", "--strategy", "rerun", "--graphs", "--checkpoint", "my model"]
    assert shlex.split(told)[7:] == options


def test_progress_bar_is_on_stderr_of_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def heard() -> tuple[str, str]:
        with progress("first [a]") as told:
            told("second [b]", 1, 4)
            told("third [c]", 0, None)
        return capsys.readouterr()

    assert heard() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, err = heard()
    assert not out and "first [a]" in err and "third [c]" in err and "0/?" in err


def test_bars_are_made_in_one_place() -> None:
    root = Path(instep.__file__).parent
    makers = {str(path.relative_to(root)) for path in root.rglob("*.py") if "rich.progress" in path.read_text()}
    assert makers == {"cli/progress.py"}
    assert not [path for path in root.rglob("*.py") if ".status(" in path.read_text()]


def test_schema_1_result_is_read_in_current_terms(tmp_path: Path) -> None:
    old = {"schema": 1, "exit": 0, "runs": [{"tiers": [{"tier": "T2", "headroom": 0.4}]}], "findings": []}
    file = tmp_path / "old.json"
    file.write_text(json.dumps(old))
    assert read(file) == {**old, "schema": SCHEMA, "runs": [{"tiers": [{"tier": "T2", "used": 0.4}]}]}
    for text, says in (('{"schema": 99, "exit": 0}', "newer"), ("[1]", "schema None"), ("{", "invalid JSON")):
        file.write_text(text)
        with pytest.raises(BadInput, match=says):
            read(file)
    with pytest.raises(BadInput, match="No such file"):
        read(tmp_path / "none")
