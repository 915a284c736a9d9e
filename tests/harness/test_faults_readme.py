"""The README shows what the harness says of a planted fault, word for word, and docs/faults.md one of the catalogue.

Leaves out: the tables of the pages (`tests/support/readme.py`), and every other fault.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from instep.faults import by_id
from instep.faults.base import Edit, Fault
from instep_reference.contract.place import Place
from support.command import Runner
from support.planting import planted_here

TOP = Path(__file__).resolve().parents[2]
TRACE = TOP / "fixtures" / "traces" / "adaptive.jsonl"


@pytest.mark.slow
def test_the_readme_shows_what_a_stale_tile_gives(tmp_path: Path, instep: Runner) -> None:
    fault, file = by_id()["stale-tile"], tmp_path / "result.json"
    with planted_here(*fault.edits):
        done = instep("replay", TRACE, *fault.how.words(), "--json", file)
    assert file.exists(), done.err
    shown = json.loads(file.read_text())["runs"][0]["message"].replace(f"{TOP}/", "")
    assert shown in (TOP / "README.md").read_text(), shown


def test_the_page_on_faults_shows_one_of_the_catalogue() -> None:
    page = (TOP / "docs" / "faults.md").read_text()
    example = re.search(r"```python\n(Fault\(.*?\n\)),?\n```", page, re.DOTALL)
    right = by_id()["commit-index-minus-one"]
    assert example is not None
    shown = eval(example[1], {"Fault": Fault, "Edit": Edit, "Setting": type(right.how), "Place": Place})
    assert replace(shown, edits=(), blind=()) == replace(right, edits=(), blind=())
    (edit,) = shown.edits
    source = " ".join((TOP / "optimized" / edit.file).read_text().split())
    assert source.count(edit.old) == 1 and edit.new not in source
