"""The README shows what the harness says of a planted fault: word for word what it says.

Leaves out: the README's commands (`tests/support/readme.py`), and every other fault.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instep.faults import by_id, plant

TOP = Path(__file__).resolve().parents[2]
TRACE = TOP / "fixtures" / "traces" / "adaptive.jsonl"


@pytest.mark.slow
def test_the_readme_shows_what_a_stale_tile_gives(tmp_path: Path) -> None:
    fault, file = by_id()["stale-tile"], tmp_path / "result.json"
    folder = plant.planted(tmp_path / "planted", *fault.edits)
    done = plant.run(folder, "replay", str(TRACE), *fault.how.words(), "--json", str(file))
    assert file.exists(), done.stderr
    shown = json.loads(file.read_text())["runs"][0]["message"].replace(f"{TOP}/", "")
    assert shown in (TOP / "README.md").read_text(), shown
