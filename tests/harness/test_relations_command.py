"""`instep relations`: what it prints, what it writes, how it exits.

Leaves out: what the relations find (`test_relations.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instep.trace.file import Trace
from support.command import Runner
from support.golden import COUNTED, Golden
from support.traces import policy, recorded

pytestmark = pytest.mark.slow  # whole replays


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("relations"), policy(deeds=()))


def test_a_table_of_what_holds_and_what_has_no_meaning(
    instep: Runner, trace: Trace, tmp_path: Path, golden: Golden
) -> None:
    words = ("slots", "later-rows", "drift", "--ops", "ledger", "--json", tmp_path / "r.json")
    ran = instep("relations", trace.path, *words)
    assert ran.code == 0, ran
    golden("relations-command", ran.out, COUNTED)
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [run["relation"] for run in runs] == ["slots", "later_rows", "drift"]
    assert [run["exit"] for run in runs] == [0, 0, 3] and runs[2]["lacks"] == "labels have no error"
    assert runs[0]["elements"] > 0 and len(runs[0]["served"]["instep_optimized"]) == 64


def test_a_divergence_is_told_with_the_command_that_shows_it(instep: Runner, trace: Trace, tmp_path: Path) -> None:
    ran = instep(
        "relations", trace.path, "poison", "--ops", "support.parting:NEVER_FRESH", "--json", tmp_path / "r.json"
    )
    assert ran.code == 1
    message = ran.out[ran.out.index("DIVERGED  small") :].splitlines()
    assert message[0].endswith("no output hangs on what free memory holds")
    assert message[1].startswith('  event 2 forward, request "') and "layer 0 conv output" in message[1]
    assert '"poisoned with NaN" and "poisoned with 12288"' in message[2]
    words = message[-1].split()
    assert words[:2] == ["instep", "relations"] and words[-2:] == ["--until", "2"]
    again = instep(*words[1:])
    assert again.code == 1 and "layer 0 conv output" in again.out
    found = json.loads((tmp_path / "r.json").read_text())["runs"][0]
    assert found["findings"][0]["component"] == "mixed" and found["message"].startswith("DIVERGED")


@pytest.mark.parametrize("words", [("schedule", "--until", "1"), ("drift", "--ops", "ledger")])
def test_what_compared_nothing_is_inconclusive(instep: Runner, trace: Trace, words: tuple[str, ...]) -> None:
    assert instep("relations", trace.path, *words).code == 3
