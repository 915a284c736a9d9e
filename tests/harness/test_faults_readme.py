"""docs/faults-adding.md shows a fault as it is in the catalogue, and the recorded faults are named as it has it.

Leaves out: the message of a fault in the README (`test_blocks.py`), and tables of pages (`documentation/tables.py`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from instep.diagnose.mistakes import CATALOGUE
from instep.report.result import read
from instep_proof.faults.catalogue import by_id
from instep_proof.faults.catalogue.fault import Edit, Fault, recorded
from instep_proof.faults.compare_with_control import HYPOTHESIS, Judged
from instep_proof.faults.fault_runs import Arm
from instep_proof.faults.result_data import data_of
from instep_proof.faults.result_document import surprises
from support.running.command import Runner

TOP = Path(__file__).resolve().parents[2]


def test_fault_on_the_page_is_one_of_the_catalogue() -> None:
    page = (TOP / "docs" / "faults-adding.md").read_text()
    example = re.search(r"```python\n(Fault\(.*?\n\)),?\n```", page, re.DOTALL)
    right = by_id()["commit-index-minus-one"]
    assert example is not None
    shown = eval(example[1], {"Fault": Fault, "Edit": Edit, "Setting": type(right.how)})
    assert replace(shown, edits=(), blind=()) == replace(right, edits=(), blind=())
    (edit,) = shown.edits
    source = " ".join((TOP / "optimized" / edit.file).read_text().split())
    assert source.count(edit.old) == 1 and edit.new not in source


def test_faults_with_a_mistake_are_those_that_a_hypothesis_named() -> None:
    recorded = read(TOP / "fixtures" / "results" / "faults.json")["results"]
    named = {row["id"]: row["named_by"] for row in recorded if row["named_by"]}
    written = {fault.id for fault in by_id().values() if fault.mistake and fault.says}
    assert written and {one for one, by in named.items() if by == HYPOTHESIS} == written


def test_every_fault_has_an_expected_finding_and_every_mistake_is_in_the_catalogue() -> None:
    assert recorded().keys() == by_id().keys()
    assert {fault.mistake for fault in by_id().values()} - {""} <= CATALOGUE.keys()


def test_list_of_faults_has_both_gaps(instep: Runner) -> None:
    done = instep("faults", "--list")
    faults, out = by_id().values(), done.out
    planted = {fault.mistake for fault in faults}
    unnamed, unplanted = out.partition("Planted and not named:")[2].split("Named and not planted")
    assert re.findall("^  ([a-z0-9-]+)  ", unnamed, re.M) == [fault.id for fault in faults if not fault.says]
    assert re.findall("^  ([a-z0-9-]+)  ", unplanted, re.M) == [name for name in CATALOGUE if name not in planted]
    named, written = (sum(bool(fault.says and has) for fault, has in zip(faults, of, strict=True))
                      for of in ([True] * len(faults), [fault.mistake for fault in faults]))  # fmt: skip
    assert done.code == 0 and (
        f"{len(faults)} faults: {written} named by a mistake of the catalogue, {named - written} by a general "
        f"explanation, {len(faults) - named} not named") in " ".join(out.split())


def test_a_fault_named_by_another_part_is_reported() -> None:
    fault = by_id()["row-before-decays"]
    found = {"check": "derived", "tier": "T2", "diagnosis": "", "event": fault.event, "stage": fault.place.stage,
             "layer": fault.place.layer, "component": fault.place.component}  # fmt: skip
    for by, reported in (("hypothesis", False), ("bank", True)):
        finding = {**found, "explained": {"by": by, "says": fault.says, "names": [fault.mistake]}}
        arm = Arm(1, 0.0, findings=(finding,), looked={"derived": "T2"})
        one = Judged(fault, Arm(0, 0.0), arm, "")
        assert any("named by bank" in line for line in surprises(data_of(one))) is reported
