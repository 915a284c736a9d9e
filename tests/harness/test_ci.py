"""What CI reads: SARIF, annotations, tensors, the difference of two results, and a workflow that can be copied.

Leaves out: JUnit (`test_plugin.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from instep import kit
from instep.cli import app
from instep.report.difference import difference
from instep.report.notices import Notice, defined, notices, sarif, workflow_commands
from instep.report.result import Result
from instep.verdict import Exit
from support import kit_ops
from support.command import Ran, Runner, complaint

TOP = Path(__file__).resolve().parents[2]
WORKFLOW = TOP / "docs" / "ci" / "instep.yml"
SUBJECT = "support.kit_ops:FORGETFUL"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.small().write(tmp_path_factory.mktemp("small"))


@pytest.fixture
def found(small: Path, instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    monkeypatch.chdir(TOP)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)

    def run(*words: object) -> Ran:
        return instep("replay", small, "--until", 6, "--no-ladder", *words)

    return run


def required(log: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a log, which has what SARIF 2.1.0 requires."""
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "instep" and driver["version"]
    for result in run["results"]:
        assert result["message"]["text"] and result["level"] in ("none", "note", "warning", "error")
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        (place,) = result["locations"]
        physical = place["physicalLocation"]
        assert physical["region"]["startLine"] >= 1 and "\\" not in physical["artifactLocation"]["uri"]
    return list(run["results"])


@pytest.mark.slow
def test_a_finding_goes_to_sarif_to_annotations_and_to_tensors(
    found: Callable[..., Ran], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, folder = tmp_path / "log.sarif", tmp_path / "tensors" / "here"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    ran = found("--ops", SUBJECT, "--sarif", log, "--save-tensors", folder)
    assert ran.code == 1, ran
    first, *others = required(json.loads(log.read_text()))
    assert first["message"]["text"].startswith("DIVERGED  small") and others and first["ruleId"] == "poison"
    at = first["locations"][0]["physicalLocation"]
    line = defined(Path(kit_ops.__file__), "FORGETFUL")
    assert at == {"artifactLocation": {"uri": "tests/support/kit_ops.py"}, "region": {"startLine": line}}
    assert Path(kit_ops.__file__).read_text().splitlines()[line - 1].startswith("FORGETFUL = ")
    (told,) = [line for line in ran.out.splitlines() if line.startswith("::")]
    assert told.startswith(f"::error file=tests/support/kit_ops.py,line={line},title=event 6 commit%2C request ")
    assert "::DIVERGED  small, optimized[" in told and "%0A  event 6 commit, request" in told
    files = sorted(folder.iterdir())
    assert [re.sub(r"-\d-", "-#-", file.name) for file in files] == [
        f"small-{SUBJECT.replace(':', '-')}-#-state.safetensors"] * len(files)
    with safe_open(str(files[0]), framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
        assert stored.metadata()["where"].startswith('event 6 commit, request "')
    assert {*tensors} == {"found", "truth", "rounded"} and not tensors["found"].equal(tensors["truth"])
    silent = found("--ops", SUBJECT, "--no-annotate")
    assert "::error" not in silent.out and silent.code == 1


@pytest.mark.slow
def test_an_agreement_is_an_empty_log_and_ours_is_shown_at_the_trace(found: Callable[..., Ran], tmp_path: Path) -> None:
    log = tmp_path / "log.sarif"
    assert found("--ops", "plain", "--sarif", log, "--annotate", "--until", 3).code == 0
    assert required(json.loads(log.read_text())) == []
    assert "--save-tensors" in complaint(found("--ops", "plain", "--save-tensors", log))


def test_what_is_told_is_escaped_and_stands_where_it_was_raised() -> None:
    one = Notice("serves", "a: b, 100%", "two\nlines: 5%", "src/a, b.py", 7, True)
    assert workflow_commands([one, one.__class__(**{**vars(one), "first": False})]) == [
        "::error file=src/a%2C b.py,line=7,title=a%3A b%2C 100%25::two%0Alines: 5%25"]
    (result,) = required(json.loads(sarif([one])))
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "src/a%2C%20b.py"}, "region": {"startLine": 7}}


def test_a_result_without_runs_has_its_findings_too_and_they_stand_at_the_trace() -> None:
    """An audit's; of a trace the header is line 1, and event 0 line 2."""
    finding = {"check": "tokens", "where": "request a", "diagnosis": "says 5", "event": 3, "raised": None}
    found = {"findings": [finding, finding], "message": "DIVERGED  a recording"}
    assert [(one.rule, one.file, one.line, one.text) for one in notices(Result(1, "cpu", found), Path("t.jsonl"))] == [
        ("tokens", "t.jsonl", 5, "DIVERGED  a recording"), ("tokens", "t.jsonl", 5, "request a\nsays 5")]
    (one,) = notices(Result(1, "cpu", {"runs": [{"ops": "plain", "findings": [finding]}]}))
    assert (one.file, one.line) == ("instep", 1)


def test_an_op_that_raises_is_shown_at_its_line(instep: Runner, tmp_path: Path) -> None:
    ran = instep("op", "support.kit_ops:RAISING", "gdn", "--drawn", 0, "--sarif", tmp_path / "log")
    first = required(json.loads((tmp_path / "log").read_text()))[0]
    line = first["locations"][0]["physicalLocation"]["region"]["startLine"]
    assert ran.code == 1 and "1 / 0" in Path(kit_ops.__file__).read_text().splitlines()[line - 1]


# ---- the difference of two results -----------------------------------------------------------------------------


def result(*findings: str, used: float = 0.4, elements: int = 100, events: int = 9, **setting: Any) -> dict[str, Any]:
    tiers = [{"tier": "T1", "elements": 50, "used": None}, {"tier": "T2", "elements": elements, "used": used}]
    told = [{"check": "derived", "where": where, "diagnosis": "is wrong"} for where in findings]
    return {"schema": 2, "exit": int(bool(findings)), "runs": [
        {"name": "small", "ops": "mine:OPS", "strategy": "rerun", "events": events, "tiers": tiers, "findings": told,
         **setting}]}


@pytest.mark.parametrize(("before", "after", "exit", "says"), [
    (result(), result(), 0, "no new finding, and nothing less was compared"),
    (result(), result("event 5"), 1, "new: event 5: is wrong"),
    (result("event 5"), result("event 5"), 0, "no new finding"),
    (result("event 5"), result(), 0, "gone: event 5"),
    (result("event 5"), result("event 6"), 1, "new findings: 1"),
    (result(), result(elements=99), 3, "less compared"),
    (result(), result(elements=101), 0, "no new finding"),
    (result(), result(events=8), 3, "events: 9, now 8"),
    (result(used=0.4), result(used=0.6), 0, "0.6  moved"),
    (result(used=0.4), result(used=0.45), 0, "0.45 "),
    (result(), result(strategy="snapshot"), 0, "strategy: rerun, now snapshot"),
    (result(), result("event 5", elements=1), 1, "new findings: 1"),
    (result(), result(name="other"), 3, "only before: small mine:OPS"),
    (result(), {**result(), "runs": [*result()["runs"], *result(ops="x:OPS")["runs"]]}, 0, "only after: small x:OPS"),
    ({**result(), "runs": [*result()["runs"], *result(ops="x:OPS")["runs"]]}, result(), 3, "only before: small x:OPS"),
    (result(), {**result(), "runs": [*result()["runs"], *result("e", ops="x")["runs"]]}, 1, "new findings: 1"),
])  # fmt: skip
def test_two_results_differ_by_what_is_new_and_what_is_missing(
    before: Any, after: Any, exit: int, says: str, instep: Runner, tmp_path: Path
) -> None:
    for name, content in (("a.json", before), ("b.json", after)):
        (tmp_path / name).write_text(json.dumps(content))
    ran = instep("diff", tmp_path / "a.json", tmp_path / "b.json", "--json", tmp_path / "d.json")
    assert ran.code == exit and says in ran.out, ran
    assert json.loads((tmp_path / "d.json").read_text())["exit"] == exit


def test_results_of_every_command_can_be_held_against_each_other(instep: Runner, tmp_path: Path) -> None:
    """Also old ones, as they are kept in the repository; what has no findings is refused."""
    results = TOP / "fixtures" / "results"
    for name in ("replay-cpu", "replay-native-bf16", "shapes-native", "streams-native", "audit-4b"):
        ran = instep("diff", results / f"{name}.json", results / f"{name}.json")
        assert ran.code == 0 and "no new finding" in ran.out, ran
    same = results / "replay-cpu.json"
    assert instep("op", "plain", "pick", "norm", "--json", tmp_path / "o.json").code == 0
    assert "norm" in instep("diff", tmp_path / "o.json", tmp_path / "o.json").out
    assert "a file with runs" in complaint(instep("diff", results / "faults.json", same))
    assert "schema None" in complaint(instep("diff", TOP / "fixtures" / "tiny" / "config.json", same))
    assert difference(result(), result("x", name="other")).exit is Exit.DIVERGED


# ---- the workflow ----------------------------------------------------------------------------------------------


def test_the_workflow_is_valid_and_its_commands_and_options_exist() -> None:
    flow = yaml.safe_load(WORKFLOW.read_text())
    assert flow["name"] and flow[True] == ["push", "pull_request"]  # YAML 1.1 reads the key `on` as true
    (job,) = flow["jobs"].values()
    assert job["runs-on"] and all(step["name"] and ("run" in step) != ("uses" in step) for step in job["steps"])
    assert all(re.fullmatch(r"[\w-]+/[\w/-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    lines = [line.strip() for step in job["steps"] for line in step.get("run", "").splitlines()]
    known = {str(one.name): one.callback for one in app.registered_commands}
    ours = [line.split() for line in lines if line.startswith("instep ")]
    assert [words[1] for words in ours] == ["op", "replay", "diff"]
    for words in ours:
        fields = known[words[1]].__annotations__  # type: ignore[union-attr]
        for option in (word for word in words if word.startswith("--")):
            assert option.removeprefix("--").replace("-", "_") in fields, option
    assert (TOP / "docs" / "ci.md").read_text().count("ci/instep.yml") == 2
