"""A catalogue of faults outside the tree gets the verdicts of the built-in one, and errors that name what is wrong.

Leaves out: planting and judging of the project's own faults (`test_faults.py`).
"""

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaigns.switched_code import switched
from instep.tier_allowances import sums_error
from instep.trace.file import write
from instep.verdict import Exit
from instep_proof.faults import plant
from instep_proof.faults.catalogue import TRACES, by_id
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.compare_with_control import Result, judge
from instep_proof.faults.draw_mutants import Mutation, draw, exact_edit, mutations
from instep_proof.faults.fault_runs import Arm, replayed
from instep_proof.faults.outside_catalogue import families
from instep_proof.faults.result_data import data_of, of, said, surprises, word
from instep_reference.contract.errors import BadInput
from support.inputs.few_channels import few_channels
from support.running.command import Runner, complaint
from support.running.covering import WHOLE
from support.running.processes import ENVIRONMENT

INSIDE = by_id()["row-for-slot"]
FILE = "instep_optimized/draft_answers.py"
EDIT = {"file": FILE, "old": "NO_OPINION = -1", "new": "NO_OPINION = -2"}
FAULT: dict[str, Any] = {"id": "mine", "what": "Another number.", "edits": [EDIT], "trace": "accepted",
                         "options": {"ops": "ledger"}}  # fmt: skip


AT = {"file": "instep_optimized/engine.py", "line": 7, "function": "forward"}  # of an error in the engine


def catalogue(folder: Path, *faults: dict[str, Any], name: str = "drawn") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(faults))
    return folder


def exact(edit: Edit) -> dict[str, str]:
    """An edit of the built-in catalogue as one of an exact text: the whole file."""
    text = (plant.source(edit.file.partition("/")[0]).parent / edit.file).read_text()
    return {"file": edit.file, "old": text, "new": plant.edited(text, edit)}


def edit(**changes: str) -> dict[str, Any]:
    return {**FAULT, "edits": [{**EDIT, **changes}]}


@pytest.mark.parametrize(("fault", "says"), [
    (edit(old="NO_OPINION = 7"), "edits[0].old: found 'NO_OPINION = 7', which is nowhere"),
    (edit(old="NO_OPINION"), "times, in lines"),
    (edit(new="NO_OPINION = ("), "edits[0].new: found no Python in line"),
    (edit(new="NO_OPINION = -1  # the same"), "edits[0].new: found the same program"),
    (edit(file="instep_optimized/nothing.py"), "edits[0].file: found 'instep_optimized/nothing.py'"),
    (edit(file="instep_optimized/../../setup.py"), "edits[0].file: found"),
    (edit(file="instep_proof/faults/plant.py"), "edits[0].file: found"),
    ({**FAULT, "edits": []}, "drawn.json[0]: found no edit"),
    ({**FAULT, "run": "rm"}, "unknown field `run`"),
    ({**FAULT, "trace": "elsewhere"}, "drawn.json[0]: trace: found 'elsewhere'"),
    ({**FAULT, "trace": "../other.jsonl"}, "drawn.json[0]: trace: found '../other.jsonl'"),
    ({**FAULT, "options": {"ops": "mine:OPS"}}, "options.ops: found 'mine:OPS', expected a name of instep"),
    ({**FAULT, "options": {"engine": "mine:make"}}, "options.engine: found an option"),
    ({**FAULT, "options": {"graphs": 1}}, "options.graphs: found 1, expected a bool"),
    ({**FAULT, "trace": "/dev/null.jsonl"}, "drawn.json[0]: trace: found '/dev/null.jsonl'"),
    ({**FAULT, "trace": str(TRACES / "accepted.jsonl")}, "drawn.json[0]: trace: found '/"),
    (edit(file=f"instep_optimized/{plant.source('instep')}/verdict.py"), "edits[0].file: found 'instep_optimized//"),
    ({**FAULT, "id": "../mine"}, "drawn.json[0]: id: found '../mine'"),
    ({**FAULT, "id": "/tmp/mine"}, "drawn.json[0]: id: found '/tmp/mine'"),
    ({**FAULT, "id": "a\nb"}, "drawn.json[0]: id: found 'a\\nb'"),
    ({**FAULT, "id": "control"}, "control, as in the run without a fault"),
    ({**FAULT, "options": {"dtype": "int4"}}, "drawn.json[0]: options.dtype: --dtype: found int4"),
    ({**FAULT, "options": {"strategy": "none"}}, "drawn.json[0]: options: --strategy: found 'none'"),
    ({**FAULT, "mistake": "no-such"}, "mistake: found 'no-such'"),
    ({**FAULT, "expected": {"event": 1, "stage": "trunk", "layer": 0, "component": "conv", "says": "is wrong"}},
     "describes the effect, not the mistake"),
    ({**FAULT, "expected": {"event": 1, "stage": "trunk", "layer": 0, "component": "mine"}}, "event 1, trunk mine"),
    ({**FAULT, "id": INSIDE.id}, "as in the project's catalogue"),
])  # fmt: skip
def test_mistakes_in_a_catalogue_are_named(fault: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("")
    with pytest.raises(BadInput) as raised:
        families(catalogue(tmp_path / "there", fault))
    assert says in str(raised.value)


def test_command_refuses_a_folder_without_faults(instep: Runner, tmp_path: Path) -> None:
    assert "without a JSON file" in complaint(instep("faults", "--catalogue", tmp_path))
    there = catalogue(tmp_path, FAULT)
    assert "drawn.json[1]" not in complaint(instep("faults", "nobody", "--catalogue", there))
    assert "--checkpoint or --update" in complaint(instep("faults", "--catalogue", there, "--update"))
    listed = instep("faults", "--catalogue", there, "--list")
    assert listed.code == 0 and "mine  drawn  Another number." in listed.out and INSIDE.id not in listed.out


def test_fault_without_an_expected_finding_is_found_by_any_check_and_not_located(tmp_path: Path) -> None:
    (fault,) = families(catalogue(tmp_path, FAULT))["drawn"]
    first = {"check": "bytes", "tier": "T1", "event": 1, "stage": "trunk", "layer": 0, "component": "conv",
             "where": "there", "code": "identified", "diagnosis": "holds the state after 2 tokens",
             "explained": None}  # fmt: skip
    control = Arm(Exit.AGREED, 1.0, served={"instep": "right"}, trail=("0 a",), events=1, of=1)
    size = {**first, "diagnosis": "relative error 0.1"}
    broken = {**size, "code": "broken_contract", "diagnosis": "op attend: row 0 sees positions 1, 5"}
    for more, named in ((broken, "check"), ({**broken, "layer": 1}, ""), (size, "")):
        arm = Arm(Exit.DIVERGED, 1.0, (size, more), {"bytes": "T1"}, {"instep": "planted"}, ("0 b",), events=1, of=1)
        assert judge(fault, control, arm, {"instep": "right"}, {"instep": "planted"}).named_by == named
    for changes, named in ((first, "check"), ({**first, "diagnosis": "relative error 0.1"}, ""),
                           ({**first, "code": "failed", "diagnosis": "commit returned a list"}, "check"),
                           ({**first, "code": "failed", "raised": {**AT, "file": "instep/run/replay.py"}}, ""),
                           ({**first, "code": "failed", "raised": AT}, "check"),
                           ({**first, "code": "poison"}, ""),
                           ({**first, "explained": {"says": "is poison: memory", "by": "bank"}}, ""),
                           ({**first, "explained": {"says": "is all", "by": "bank", "names": ["a", "b"]}}, ""),
                           ({**first, "explained": {"says": "is all zero", "by": "bank"}}, "bank")):  # fmt: skip
        arm = Arm(Exit.DIVERGED, 1.0, (changes,), {"bytes": "T1"}, {"instep": "planted"}, ("0 b",), events=1, of=1)
        one = judge(fault, control, arm, {"instep": "right"}, {"instep": "planted"})
        assert one.found and not one.located and one.unknown and one.named_by == named
        row = data_of(one)
        assert (word(row, "located"), word(row, "named")) == ("-", named or "NO") and row["family"] == "drawn"
        assert list(surprises(row)) == [f"mine: there: {changes['diagnosis']}"]
        campaign = Result((one,))
        assert campaign.exit is Exit.AGREED and "0 located (1 expect no place)" in said(of(campaign).data())
        strict = replace(one, fault=replace(fault, seen_by=("poison",)))
        assert not strict.found and Result((strict,)).failures == ("not found: mine",)


@WHOLE
@pytest.mark.usefixtures("warm")
def test_catalogue_has_the_verdicts_of_the_built_in_one(instep: Runner, tmp_path: Path) -> None:
    """The same fault, on a trace of the folder; the same one without an expected finding; and one that cannot fire."""
    there = tmp_path / "there"
    expected = {"event": INSIDE.event, "stage": INSIDE.place.stage, "layer": INSIDE.place.layer,
                "component": INSIDE.place.component, "says": INSIDE.says}  # fmt: skip
    edits = [exact(one) for one in INSIDE.edits if isinstance(one, Edit)]
    small = few_channels(INSIDE.trace, 2)
    there.mkdir()
    header = small.header.near(small.path.parent / small.header.checkpoint.near, there)
    write(there / "mine.jsonl", header, small.events, small.recorded)
    mine = {**FAULT, "edits": edits, "trace": "mine.jsonl", "seen_by": list(INSIDE.seen_by), "expected": expected}
    free = {**FAULT, "id": "free", "edits": edits}
    idle, broken = edit(new="NO_OPINION = 0 - 1") | {"id": "idle"}, edit(new="NO_OPINION = -1 // 0") | {"id": "broken"}
    out, every = tmp_path / "out.json", catalogue(there, mine, free, idle, broken)
    ran = instep("faults", "--catalogue", every, "--no-text", "--jobs", 2, "--json", out)
    rows = {row["id"]: row for row in json.loads(out.read_text())["results"]}
    assert ran.code == Exit.INCONCLUSIVE, ran
    assert rows["mine"]["found"] and rows["mine"]["located"] and rows["mine"]["named"] == bool(INSIDE.says)
    assert rows["free"]["found"] and not rows["free"]["place_judged"] and "never fired" in rows["idle"]["void"]
    says = "the engine cannot be imported: ZeroDivisionError (integer division or modulo by zero) at "
    assert rows["broken"]["found"] and rows["broken"]["named"]
    assert f"broken: before the first event: {says}{FILE} line " in " ".join(ran.out.split())
    assert TRACES.is_dir()


IMPORTED = '''Traceback (most recent call last):
  File "DIR/instep/run/replay.py", line 3, in _made
    module = import_module(name)
  File "DIR/instep_optimized/engine.py", line 7, in <module>
    LIMIT = limit(0)
  File "DIR/instep_optimized/options.py", line 5, in limit
    return 1 // most
ZeroDivisionError: {0}
instep: the harness itself failed: ZeroDivisionError: {0}
'''


@pytest.mark.parametrize(("told", "says"), [
    (IMPORTED, "the engine cannot be imported: ZeroDivisionError ({0}) at instep_optimized/options.py line 5"),
    (IMPORTED.replace("<module>", "served"), None),  # an error that the harness should have caught
    (IMPORTED.replace("instep_optimized/", "instep/"), None),
    ("instep: --conv windows: may: found {0}\n", "the engine is refused: --conv windows: may: found {0}"),
])  # fmt: skip
def test_an_engine_that_does_not_start_is_found_and_a_failing_harness_is_not(
    told: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, told = (2 if says and "refused" in says else 4), told.replace("DIR", str(tmp_path))
    monkeypatch.setattr(plant, "run", lambda *_, **__: subprocess.CompletedProcess([], code, "", told))
    arm = replayed(tmp_path, TRACES / "accepted.jsonl", INSIDE.how, tmp_path / "out.json")
    assert [one["diagnosis"] for one in arm.findings] == [] if says is None else [says]
    (fault,) = families(catalogue(tmp_path / "there", FAULT))["drawn"]
    control = Arm(Exit.AGREED, 1.0, served={"instep": "right"}, trail=("0 a",), events=1, of=1)
    one = judge(fault, control, arm, {"instep": "right"}, {"instep": "planted"})
    assert (one.found, one.named_by, one.void) == (says is not None, "check" if says else "", "")


def test_a_process_that_dies_with_exit_code_1_is_no_conclusion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python itself ends with 1, which is the code of a divergence, too."""
    monkeypatch.setattr(plant, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", "NameError: no LIMIT\n"))
    arm = replayed(tmp_path, TRACES / "accepted.jsonl", INSIDE.how, tmp_path / "out.json")
    control = Arm(Exit.AGREED, 1.0, served={"instep": "right"}, trail=("0 a",), events=1, of=1)
    one = judge(INSIDE, control, arm, {"instep": "right"}, {"instep": "planted"})
    assert not one.found and one.void == "it ended with exit code 1 and without a result: NameError: no LIMIT"
    assert Result((one,)).exit is Exit.INCONCLUSIVE


def test_an_engine_on_which_no_command_can_be_imported_is_found(tmp_path: Path) -> None:
    line = 'MLPS = ("mlp", "moe")'
    copy = plant.planted(tmp_path / "copy", Edit("instep_reference/contract/config.py", line, "MLPS = UNKNOWN"))
    (found,) = replayed(copy, TRACES / "accepted.jsonl", INSIDE.how, tmp_path / "out.json").findings
    assert found["diagnosis"].startswith("the engine cannot be imported: NameError (name 'UNKNOWN' is not defined) at "
                                         "instep_reference/contract/config.py line ")
    shown = plant.run(copy, "--help")
    assert shown.returncode == 0 and "(cannot be imported)" in " ".join(shown.stdout.split())


TEXT = '''"""A module."""

LIMIT = 3


def pick(rows, at, limit: int = 2):
    """Take 1 row, or 2."""
    if not rows or at >= limit:
        raise ValueError(f"{at + 1} of {len(rows)}")
    first = max(rows[at - 1], 0)  # the 1 before
    return first + 1 if at in (1, 2) else first
'''


def test_small_edits_change_what_is_computed_and_no_text() -> None:
    drawn = [(one.line, one.what) for one in mutations(TEXT)]
    assert {line for line, _ in drawn} == {8, 10, 11}, "no docstring, limit, error or constant of the module"
    assert {"`not rows` is `rows`", "`or` is `and`", "`>=` is `>`", "`-` is `+`", "`max` is `min`", "`in` is `not in`",
            "`+` is `-`", "`1` is `2`", "`1` is `0`"} <= {what for _, what in drawn}  # fmt: skip
    assert {one.kind for one in mutations(TEXT)} == {"condition", "comparison", "operator", "call", "index", "constant"}
    assert exact_edit("a.py", "def f(x):\n    return x\n", Mutation("operator", 0, 3, "def", 1, "")) is None
    twice = "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x + 1\n"
    last = [one for one in mutations(twice) if one.line == 6 and one.kind == "operator"]
    edit = exact_edit("a.py", twice, last[0])
    assert edit is not None and edit.old == "def g(x):\n    return x + 1\n" == edit.new.replace("-", "+")


@WHOLE
def test_drawn_faults_are_a_catalogue_and_follow_from_the_seed(instep: Runner, tmp_path: Path) -> None:
    assert "no --catalogue" in complaint(instep("faults", "--draw", 3))
    assert instep("faults", "--catalogue", tmp_path, "--draw", 12, "--seed", 5).code == 0
    faults = families(tmp_path)["drawn-5"]
    assert len({fault.edits for fault in faults}) == len(faults) == 12 and len({fault.trace for fault in faults}) > 3
    assert {fault.how.ops for fault in faults} == {"ledger", "plain"}
    first = [fault.what for fault in faults[:2]]
    assert first == [one.what for one in draw(2, 5)] != [one.what for one in draw(2, 6)]
    assert instep("faults", "--catalogue", tmp_path, "--draw", 2, "--seed", 6).code == 0
    assert set(families(tmp_path)) == {"drawn-5", "drawn-6"}, "the files of two seeds are one catalogue"
    assert "options of a campaign" in complaint(instep("faults", "--catalogue", tmp_path, "--draw", 2, "--list"))
    (tmp_path / "file").touch()
    assert "expected a folder" in complaint(instep("faults", "--catalogue", tmp_path / "file", "--draw", 2))


TESTED = """
import pytest
from instep.tier_allowances import sums_error

@pytest.fixture(scope="module")
def of_nine():
    return sums_error(9, 0.5)

def test_weak(of_nine):
    assert of_nine > 0

def test_strong(of_nine):
    assert sums_error(1, 0.5) > 0, "a tenth test would be killed by it"
    assert of_nine == sums_error(9, 0.25) * 2, "the same"
"""


@WHOLE
def test_mutants_are_killed_by_tests_in_which_they_differ_or_listed(tmp_path: Path) -> None:
    """Edits of a line that tests reach in a fixture, too, and edits of lines that they do not reach.

    A later call reads only the changed file of tests, and runs only what survived with them.
    """
    words = ["--only", "tier_allowances", "--mutants", "400", "--tests", tmp_path, "--json", tmp_path / "out.json",
             "--seen", tmp_path / "seen.json"]  # fmt: skip
    several = []
    (tmp_path / "test_others.py").write_text("def test_nothing():\n    assert True\n")
    for tested, files, killed, runs in ((TESTED, 2, 2, 4), (TESTED.replace("> 0", "== 3"), 1, 2, 2)):
        (tmp_path / "test_sums.py").write_text(tested)
        ran = subprocess.run([sys.executable, "-m", "campaigns.harness_mutants", *map(str, words)], text=True,
                             capture_output=True, env={**os.environ, **ENVIRONMENT})  # fmt: skip
        found = json.loads((tmp_path / "out.json").read_text())
        rows = json.loads((tmp_path / "seen.json").read_text())["rows"]
        assert found["of"] == len(rows) > 20, ran.stderr
        assert found["killed"] + len(found["survivors"]) == found["of"]
        assert found["seeds"] == {"1": [2 if tested == TESTED else 4, found["of"]]}
        assert sum(found["tests"].values()) == sum(killed for killed, _ in found["code"].values()) == found["killed"]
        assert "survived 0 tests (0 reach it, 0 left) of 2 files" in ran.stdout
        assert ran.stdout.count("tests compute mutants") == files, ran.stdout
        assert f"test_sums.py: {killed} of {runs} mutants killed" in ran.stdout, ran.stdout
        rows = [row for row in rows if row["reached"]]
        assert {row["line"] for row in rows} == {inspect.getsourcelines(sums_error)[1] + 6}
        several.append({(row["what"], row["killed_by"].rpartition("::")[2], row["says"][:24]) for row in rows})
    same = ("`*` is `+`", "test_strong", "AssertionError: the same")
    assert several[0] == {same, ("`2` is `1`", "", ""), ("`2` is `3`", "", "")}
    noticed = {(f"`2` is `{to}`", "test_weak", f"assert {says} == 3") for to, says in ((1, 1.5), (3, 4.5))}
    assert several[1] == {same, *noticed}


COMPUTED = """
def computed(x, names):
    last = names.pop() + (x < 3 + 1)
    return last, any(each + 2 > x for each in (0, 1)), "abc"[1:]
"""


def test_code_with_switches_computes_what_each_mutant_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits of expressions within each other, in a comprehension, and of one that cannot be computed twice."""
    edits = ("<", "<="), ("3 +", "3 -"), ("() +", "() -"), ("any", "all"), ("+ 2", "+ 3"), ("[1", "[2")
    mutants = [COMPUTED.replace(*edit) for edit in edits]
    code = switched({Path("mine.py"): COMPUTED}, [(Path("mine.py"), text) for text in mutants])["mine.py"]

    def switch(number: int, value: object = None, other: Any = None) -> object:
        return (number == on) if other is None else other() if number == on else value

    def results(code: Any) -> list[object]:
        exec(code, space := dict[str, Any]())
        return [space["computed"](x, [5]) for x in range(5)]

    monkeypatch.setattr("builtins.__switch__", switch, raising=False)
    for number, text in enumerate([*mutants, COMPUTED]):
        on = number
        assert results(code) == results(text)
    assert len({str(results(text)) for text in [*mutants, COMPUTED]}) == 7
