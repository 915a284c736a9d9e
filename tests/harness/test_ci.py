"""Output for CI: SARIF, annotations, tensors, the difference of two results, and a workflow to copy.

Leaves out: JUnit (`test_plugin.py`).
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from instep import kit
from instep.report.result import Result
from instep.report.result_difference import difference
from instep.report.sarif import Notice, defined, notices, sarif, workflow_commands
from instep.verdict import Exit
from support.running.command import Ran, Runner, complaint
from support.running.covering import WHOLE
from support.running.processes import install, warm_shell
from support.wrong import kit_ops

TOP = Path(__file__).resolve().parents[2]
WORKFLOW = TOP / "docs" / "ci" / "instep.yml"
SUBJECT = "support.wrong.kit_ops:FORGETFUL"


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
def test_finding_is_written_to_sarif_annotations_and_tensors(
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
    assert at == {"artifactLocation": {"uri": "tests/support/wrong/kit_ops.py"}, "region": {"startLine": line}}
    assert Path(kit_ops.__file__).read_text().splitlines()[line - 1].startswith("FORGETFUL = ")
    (told,) = [line for line in ran.out.splitlines() if line.startswith("::")]
    assert told.startswith(f"::error file=tests/support/wrong/kit_ops.py,line={line},title=event 6 commit%2C request ")
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
def test_agreement_writes_an_empty_sarif_log(found: Callable[..., Ran], tmp_path: Path) -> None:
    log = tmp_path / "log.sarif"
    assert found("--ops", "plain", "--sarif", log, "--annotate", "--until", 3).code == 0
    assert required(json.loads(log.read_text())) == []
    assert "--save-tensors" in complaint(found("--ops", "plain", "--save-tensors", log))


def test_sarif_escapes_messages_and_names_the_raising_line() -> None:
    one = Notice("serves", "a: b, 100%", "two\nlines: 5%", "src/a, b.py", 7, True)
    assert workflow_commands([one, one.__class__(**{**vars(one), "first": False})]) == [
        "::error file=src/a%2C b.py,line=7,title=a%3A b%2C 100%25::two%0Alines: 5%25"]
    (result,) = required(json.loads(sarif([one])))
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "src/a%2C%20b.py"}, "region": {"startLine": 7}}


def test_findings_outside_runs_are_reported_in_the_input_file(tmp_path: Path) -> None:
    """An audit's findings of tokens come before those of rows. A trace's header is line 1; answer n is on line n."""
    (tmp_path / "recording.json").touch()
    finding = {"check": "tokens", "where": "request a", "diagnosis": "says 5", "event": 3, "raised": None}
    run = {"findings": [{**finding, "check": "derived"}]}
    found = {"engine": "json:loads", "recording": "r", "findings": [finding], "message": "DIVERGED  r", "runs": [run]}
    for given, line in ((Path("t.jsonl"), 5), (tmp_path / "events.jsonl", 4), (Path("step=3.pt"), 1)):
        told = [(one.rule, one.file, one.line, one.text) for one in notices(Result(1, "cpu", found), given)]
        assert told == [("tokens", str(given), line, "DIVERGED  r"), ("derived", str(given), line, "request a\nsays 5")]
    for kind, event, line in (("line", 3, 3), ("recording", 0, 1)):
        of_line = {"findings": [{**finding, "event": event, "kind": kind}]}
        assert notices(Result(1, "cpu", of_line), Path("said.jsonl"))[0].line == line


def test_finding_without_a_file_is_shown_at_the_definition() -> None:
    finding = {"check": "tokens", "where": "request a", "diagnosis": "says 5", "event": 3, "raised": None}
    (one,) = notices(Result(1, "cpu", {"runs": [{"ops": "plain", "findings": [finding]}]}))
    assert one.file.endswith("instep_optimized/ops/plain/__init__.py") and Path(one.file).is_file()
    assert Path(one.file).read_text().splitlines()[one.line - 1].startswith("PLAIN = ")
    (none,) = notices(Result(1, "cpu", {"runs": [{"ops": "handed", "findings": [finding]}]}))
    assert workflow_commands([none]) == ["::error title=request a::request a%0Asays 5"]
    (place,) = json.loads(sarif([none]))["runs"][0]["results"]
    assert place["locations"] == []


def test_error_of_an_op_is_shown_at_its_line(instep: Runner, tmp_path: Path) -> None:
    ran = instep("op", "support.wrong.kit_ops:RAISING", "gdn", "--drawn", 0, "--sarif", tmp_path / "log")
    first = required(json.loads((tmp_path / "log").read_text()))[0]
    line = first["locations"][0]["physicalLocation"]["region"]["startLine"]
    assert ran.code == 1 and "1 / 0" in Path(kit_ops.__file__).read_text().splitlines()[line - 1]


# ---- the difference of two results -----------------------------------------------------------------------------


def told(*findings: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"check": "derived", "where": where, "diagnosis": "is wrong", **fields} for where in findings]


def result(*findings: str, used: float = 0.4, elements: int = 100, events: int = 9, **setting: Any) -> dict[str, Any]:
    tiers = [{"tier": "T1", "elements": elements // 2, "used": None},
             {"tier": "T2", "elements": elements, "used": used}]
    return {"schema": 2, "exit": int(bool(findings)), "runs": [
        {"name": "small", "ops": "mine:OPS", "strategy": "rerun", "events": events, "tiers": tiers,
         "findings": told(*findings), **setting}]}


def both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**one, "runs": [*one["runs"], *other["runs"]]}


def cut(first: int, last: int, in_all: int | None = 300, **fields: Any) -> dict[str, Any]:
    """A result whose list of findings ends at the 100th."""
    findings = [one for event in range(first, last) for one in told(f"event {event}", event=event, **fields)]
    return {"schema": 2, "exit": 1, "runs": [
        {**result()["runs"][0], "findings": findings} | ({"findings_in_all": in_all} if in_all else {})]}


def audited(where: str = "", runs: bool = True, elements: int = 8) -> dict[str, Any]:
    """Findings of tokens in addition to those of a run."""
    beside = {"recording": "said", "engine": "e", "elements": elements, "findings": told(*filter(None, [where]))}
    return {**result(), **beside, "exit": int(bool(where))} if runs else {"schema": 2, "exit": 0, **beside}


NONE, OP = result(elements=0), {"op": "gdn", "elements": 0, "used": None}
UNSERVED = {"schema": 2, "exit": 3, "runs": [{"exit": 3, "elements": 0, "by_op": [OP], "findings": []}]}
LACKS = result(exit=3, lacks="it has no state", elements=0, relation="states")
PLACED = [{"findings": told("request 0", case="gdn-a", columns=columns, event=event)}
          for columns, event in (([0, 7], 3), ([8, 15], 3), ([0, 7], 9))]


@pytest.mark.parametrize(("before", "after", "exit", "says"), [
    (result(), result(), 0, "no new finding, and nothing less was compared"),
    (result(), result("event 5"), 1, "new: event 5: is wrong"),
    (result("event 5"), result("event 5"), 0, "no new finding"),
    (result("event 5"), result(), 0, "gone: event 5"),
    (result("event 5"), result("event 6"), 1, "new findings: 1"),
    (result("e", "f"), result("e", "e", "f"), 1, "new findings: 1"),
    (result(), result(elements=99), 3, "less compared"),
    (result(), result(elements=101), 0, "no new finding"),
    (result(), result(events=8), 3, "events: 9, now 8"),
    (result(used=0.4), result(used=0.6), 0, "0.6  moved"),
    (result(used=0.4), result(used=0.45), 0, "0.45 "),
    (result(), result(strategy="snapshot"), 0, "strategy: rerun, now snapshot"),
    (result(), result("event 5", elements=1), 1, "new findings: 1"),
    (result(), result(name="other"), 3, "only before: small mine:OPS"),
    (result(), both(result(), result(ops="x:OPS")), 0, "only after: small x:OPS"),
    (both(result(), result(ops="x:OPS")), result(), 3, "only before: small x:OPS"),
    (result(), both(result(), result("e", ops="x")), 1, "new findings: 1"),
    (both(result(), result("e")), both(result(), result("e", "f")), 1, "new: f"),
    # nothing was compared, or there is no verdict
    (NONE, NONE, 3, "no verdict now: small mine:OPS rerun"),
    (UNSERVED, UNSERVED, 3, "no verdict now: "),
    (result(), result(exit=4), 3, "no verdict now: small mine:OPS rerun"),
    (result(), {**result(), "exit": 4}, 3, "no verdict now: small"),
    ({**result(), "exit": 3}, result(), 0, "no new finding"),
    (result(), both(result(), result(ops="x", elements=0)), 3, "no verdict now: small x"),
    (both(result(), LACKS), both(result(), LACKS), 0, "no new finding"),
    (LACKS, {**LACKS, "exit": 3}, 3, "no verdict now: exit code 3"),
    # findings outside runs
    (audited(), audited("line 3"), 1, "new: line 3"),
    (audited(), audited(elements=7), 3, "less was compared"),
    (audited(), audited(runs=False), 3, "only before: small said mine:OPS rerun"),
    (audited(runs=False), audited(), 0, "only after: small said mine:OPS rerun"),
    # places of findings, and lists that are cut
    (result(**PLACED[0]), result(**PLACED[1]), 1, "new findings: 1"),
    (result(**PLACED[0]), result(**PLACED[2]), 0, "no new finding"),
    (cut(0, 100), cut(0, 100), 0, "list cut off: of 300 findings, now 300"),
    (cut(0, 100), cut(1, 101), 3, "new, or not listed before: event 100: is wrong"),
    (cut(0, 100), cut(0, 100, 301), 1, "new findings: 1"),
    (cut(1, 101), cut(0, 100), 1, "new: event 0: is wrong"),
    (cut(0, 100, None), cut(1, 101, None), 3, "a list of findings is shortened"),
    (cut(0, 100, None), cut(0, 100), 0, "list cut off: of more findings, now 300"),
    (cut(0, 100, case="c"), cut(1, 100, 99, case="c"), 0, "gone: event 0"),
])  # fmt: skip
def test_diff_reports_new_and_missing_findings(
    before: Any, after: Any, exit: int, says: str, instep: Runner, tmp_path: Path
) -> None:
    for name, content in (("a.json", before), ("b.json", after)):
        (tmp_path / name).write_text(json.dumps(content))
    ran = instep("diff", tmp_path / "a.json", tmp_path / "b.json", "--json", tmp_path / "d.json")
    assert ran.code == exit and says in ran.out, ran
    assert "gone: event 100" not in ran.out, "a finding after the end of a cut list may still exist"
    assert json.loads((tmp_path / "d.json").read_text())["exit"] == exit


FULL = result("e")
MALFORMED = {
    "{": "invalid JSON (", "[" * 200_000: "invalid JSON (", '{"schema": 2, "exit": 0, "runs": [{"fin': "invalid JSON (",
    '{"schema": true, "exit": 0, "runs": []}': "schema True", '{"schema": 99}': "a newer instep wrote it",
    '{"schema": 2, "exit": 0, "runs": 5}': "runs: found int, expected a list of objects",
    '{"schema": 2, "exit": 0, "runs": [[]]}': "expected a list of objects",
    '{"schema": 2, "exit": 0, "runs": [{"ops": "plain", "exit": 0}]}': "expected a result with runs",
    '{"schema": 2, "exit": 0, "findings": ["a: b"]}': "runs[0].findings[0]: found str, expected object",
    json.dumps(result(findings={})): "runs[0].findings: found object, expected array",
    json.dumps(result(findings=told("e", check=5))): "runs[0].findings[0].check: found int, expected str",
    json.dumps(result(findings=[{"check": "x", "where": "y"}])): "diagnosis",
    json.dumps(result(ops=5)): "runs[0].ops: found int, expected str | null",
    json.dumps(result(tiers=[{"tier": "T1", "elements": "9"}])): "runs[0].tiers[0].elements: found str, expected int",
    json.dumps(result(tiers=[{"tier": "T1", "elements": 9, "used": "much"}])): "runs[0].tiers[0].used",
    json.dumps(result(tiers=[{"elements": 9}])): "tier", json.dumps(result(by_op=[{"op": "gdn"}])): "elements",
    json.dumps(result(events=-1)): "runs[0].events", json.dumps({**FULL, "exit": "1"}): "exit",
    json.dumps(FULL).replace("100", "1e999"): "",
}


@pytest.mark.parametrize(("text", "says"), MALFORMED.items(), ids=[text[:40] for text in MALFORMED])
def test_file_that_is_no_result_is_refused_with_its_field(text: str, says: str, instep: Runner, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(result()))
    (tmp_path / "bad.json").write_text(text)
    for files in (("bad.json", "good.json"), ("good.json", "bad.json")):
        line = complaint(instep("diff", *(tmp_path / file for file in files)))
        assert "bad.json" in line and says in line.replace("`", ""), line


def test_diff_reads_results_of_every_command(instep: Runner, tmp_path: Path) -> None:
    """Also old ones, as they are kept in the repository; what has no findings is refused, and nothing fails."""
    results = TOP / "fixtures" / "results"
    same, held = results / "replay-cpu.json", set[str]()
    for file in results.glob("*.json"):
        ran = instep("diff", file, file)
        if ran.code == 2:
            assert re.search("expected a result (with runs|file)", complaint(ran)), ran
            continue
        assert ran.code == 0 and "no new finding" in ran.out, ran
        held.add(file.stem)
    assert held >= {"replay-cpu", "replay-native-bf16", "shapes-native", "streams-native", "audit-4b"}, held
    assert held.isdisjoint({"faults", "bench-native", "soak", "memory-9b", "calibration"}), held
    assert instep("op", "plain", "pick", "norm", "--json", tmp_path / "o.json").code == 0
    assert "norm" in instep("diff", tmp_path / "o.json", tmp_path / "o.json").out
    assert "schema None" in complaint(instep("diff", TOP / "fixtures" / "tiny" / "config.json", same))
    assert difference(result(), result("x", name="other")).exit is Exit.DIVERGED


# ---- the workflow ----------------------------------------------------------------------------------------------


@pytest.fixture
def flow() -> dict[Any, Any]:
    read: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return read


def test_workflow_is_valid_and_its_steps_have_names(flow: dict[Any, Any]) -> None:
    assert flow["name"] and flow[True] == ["push", "pull_request"]  # YAML 1.1 reads the key `on` as true
    (job,) = flow["jobs"].values()
    assert job["runs-on"] and all(step["name"] and ("run" in step) != ("uses" in step) for step in job["steps"])
    assert all(re.fullmatch(r"[\w-]+/[\w/-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    assert (TOP / "docs" / "ci.md").read_text().count("ci/instep.yml") == 2


def steps_run(flow: dict[Any, Any], home: Path, shell: dict[str, str]) -> list[tuple[str, int]]:
    """Run the steps -> their names and exit codes."""
    (job,) = flow["jobs"].values()
    codes = list[tuple[str, int]]()
    for step in job["steps"]:
        if "run" in step:
            assert "${{" not in step["run"]
            done = subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], cwd=home, env={**shell, **job["env"]},
                                  capture_output=True, text=True, check=False, timeout=240)  # fmt: skip
            codes.append((step["name"], done.returncode))
    return codes


@WHOLE
@pytest.mark.interpreted
@pytest.mark.parametrize("wrong", [False, True])
def test_workflow_runs_with_a_triton_kernel_and_a_wrong_one(flow: dict[Any, Any], wrong: bool, tmp_path: Path) -> None:
    """Run every `run:` of the workflow, in order, without the steps that have `uses:`. pip only notes its arguments.

    The wrong kernel is in torch, which is quicker. Its failure is not shrunk.
    """
    home, shell = tmp_path / "home", install(tmp_path / "installed")
    home.mkdir()
    kernel = TOP / "tests" / "support" / "kernels" / "delta_rule_triton.py"
    if wrong:
        kernel = TOP / "fixtures" / "example" / "mine.py"
        assert "log_decay[row].exp()" in kernel.read_text()
    (home / "mine.py").write_text(kernel.read_text().replace("log_decay[row].exp()", "log_decay[row].exp2()"))
    test = (TOP / "fixtures" / "example" / "test_mine.py").read_text()
    for old, new in (("import given", "import Phase, given"), ("examples=10", "examples=1, phases=[Phase.generate]")):
        assert test.count(old) == 1
        test = test.replace(old, new)
    (home / "test_mine.py").write_text(test)
    (home / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p no:benchmark\n")
    with warm_shell(tmp_path / "installed" / "bin") as commands:
        first = tmp_path / "first"
        first.mkdir()
        (first / "python").write_text(
            f'#!/bin/sh\n[ "$2" != pip ] || {{ echo "$@" >> {home}/pip; exit; }}\nexec {commands}/python "$@"\n')
        (first / "python").chmod(0o755)
        shell["PATH"] = os.pathsep.join(map(str, (first, commands, shell["PATH"])))
        codes = steps_run(flow, home, shell)
    assert [code for _, code in codes] == [0, *[int(wrong)] * 3], codes
    assert (home / "pip").read_text().splitlines()[1] == "-m pip install ci/instep-0.1.0-py3-none-any.whl"
    kept = {path.name for path in (home / "instep-out").iterdir()}
    assert kept >= {"junit.xml", "result.json", "page.html", "findings.sarif"}, kept
    assert bool(required(json.loads((home / "instep-out" / "findings.sarif").read_text()))) is wrong
