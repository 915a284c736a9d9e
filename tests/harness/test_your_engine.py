"""The page about your own engine, word by word: its file agrees, and its breaks are found where it says.

Leaves out: the tests' other engines (`test_engines.py`).
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.running.command import Runner
from support.running.covering import few

pytestmark = [  # imports transformers
    pytest.mark.slow, pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

TOP = Path(__file__).resolve().parents[2]
PAGE = (TOP / "docs" / "your-engine.md").read_text()
COMMAND = (TOP / "fixtures" / "traces" / "faults" / "kept.jsonl", "--model", TOP / "fixtures" / "tiny", "--engine")
FILE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
BROKEN = [
    tuple(re.findall(r"`([^`]+)`", line)) for line in PAGE.splitlines() if re.match(r"\| `.+` \| `.+` \| `event", line)
]


def test_the_file_of_the_page_agrees_and_is_short(mine: Callable[..., None], instep: Runner) -> None:
    mine(FILE)
    assert len(FILE.splitlines()) <= 66 and "import instep" not in PAGE
    ran = instep("replay", *COMMAND, "mine:make")
    assert ran.code == 0 and "mine:make agrees" in ran.out and "served 29 of 29 events" in ran.out, ran


@few(2)
@pytest.mark.parametrize("edit", BROKEN, ids=[edit[2] for edit in BROKEN])
def test_every_break_on_the_page_is_found_where_it_says(
    edit: tuple[str, ...], mine: Callable[..., None], instep: Runner
) -> None:
    old, new, *says = edit
    mine(FILE, old, new)
    ran = instep("replay", *COMMAND, "mine:make", "--no-ladder")
    assert ran.code == 1 and all(part in ran.out for part in says), ran.out


def test_the_page_breaks_three_things() -> None:
    assert len(BROKEN) == 3 and any("2 tokens were accepted" in part for part in BROKEN[0])
