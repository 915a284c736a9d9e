"""docs/faults-adding.md shows a fault as it is in the catalogue.

Leaves out: the message of a fault in the README (`test_blocks.py`), and the tables of the pages (`support/readme.py`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from instep.faults import by_id
from instep.faults.base import Edit, Fault
from instep_reference.contract.place import Place

TOP = Path(__file__).resolve().parents[2]


def test_fault_on_the_page_is_one_of_the_catalogue() -> None:
    page = (TOP / "docs" / "faults-adding.md").read_text()
    example = re.search(r"```python\n(Fault\(.*?\n\)),?\n```", page, re.DOTALL)
    right = by_id()["commit-index-minus-one"]
    assert example is not None
    shown = eval(example[1], {"Fault": Fault, "Edit": Edit, "Setting": type(right.how), "Place": Place})
    assert replace(shown, edits=(), blind=()) == replace(right, edits=(), blind=())
    (edit,) = shown.edits
    source = " ".join((TOP / "optimized" / edit.file).read_text().split())
    assert source.count(edit.old) == 1 and edit.new not in source
