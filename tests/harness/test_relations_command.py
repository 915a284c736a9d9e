"""`instep relations`: what it prints, what it writes, how it exits.

Leaves out: what the relations find (`test_relations.py`).
"""

import json
from collections import Counter
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
import torch

from instep.campaign.relations import Held, Relation, hold
from instep.campaign.relations.case import Case
from instep.campaign.relations.engine_modifications import row_by_row
from instep.trace.file import Trace
from instep.verdict import Exit
from instep_optimized import load
from instep_optimized.ops.rowwise_op_names import BY_ROW
from instep_optimized.ops.watch_op_calls import Op, around
from instep_reference.contract.place_names import Place, unseen
from support.inputs.traces import policy, recording
from support.running.command import Runner
from support.running.golden import Golden

pytestmark = pytest.mark.slow  # whole replays


trace = recording(policy(deeds=()))


def test_table_shows_verdicts_and_relations_that_do_not_apply(
    instep: Runner, trace: Trace, tmp_path: Path, golden: Golden
) -> None:
    words = ("slots", "later-rows", "drift", "--ops", "ledger", "--json", tmp_path / "r.json")
    ran = instep("relations", trace.path, *words)
    assert ran.code == 0, ran
    golden("relations-command", ran.out, r"\b\d+k", r"\d\.\d$")
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [run["relation"] for run in runs] == ["slots", "later_rows", "drift"]
    assert [run["exit"] for run in runs] == [0, 0, 3] and runs[2]["lacks"] == "labels have no error"
    assert runs[0]["elements"] > 0 and len(runs[0]["served"]["instep_optimized"]) == 64


def test_divergence_prints_the_command_that_reproduces_it(instep: Runner, trace: Trace, tmp_path: Path) -> None:
    ran = instep(
        "relations", trace.path, "poison", "--ops", "support.wrong.differing_ops:NEVER_FRESH",
        "--json", tmp_path / "r.json", "--html", tmp_path / "page.html",
    )  # fmt: skip
    assert ran.code == 1
    message = ran.out[ran.out.index("DIVERGED  small") :].splitlines()
    assert message[0].endswith("no output depends on the contents of free memory")
    assert message[1].startswith('  event 2 forward, request "') and "layer 0 conv output" in message[1]
    assert '"poisoned with NaN" and "poisoned with 12288"' in message[2]
    words = message[-1].split()
    assert words[:2] == ["instep", "relations"] and words[-2:] == ["--until", "2"]
    again = instep(*words[1:])
    assert again.code == 1 and "layer 0 conv output" in again.out
    found = json.loads((tmp_path / "r.json").read_text())["runs"][0]
    assert found["findings"][0]["component"] == "mixed" and found["message"].startswith("DIVERGED")
    wrong = {place["row"]: place["wrong"] for place in found["places"]}
    assert wrong["layer 0 GDN"] > 0 == wrong["embedding"] and sum(wrong.values()) >= len(found["findings"])
    page = (tmp_path / "page.html").read_text()
    assert "layer 0 GDN" in page and message[-1].strip() in page


@pytest.mark.parametrize("words", [("schedule", "--until", "1"), ("drift", "--ops", "ledger")])
def test_relation_is_inconclusive_when_nothing_is_compared(
    instep: Runner, trace: Trace, words: tuple[str, ...]
) -> None:
    assert instep("relations", trace.path, *words).code == 3


def test_row_by_row_splits_only_undeclared_ops() -> None:
    """As many calls as rows, the same numbers; what is declared is called as it was."""
    counted = Counter[str]()

    def counting(name: str, op: Op) -> Op:
        return lambda **given: (counted.update([name]), op(**given))[1]

    told = replace(load("plain"), row_invariant=frozenset({"add"}))
    ops = row_by_row(around(told, unseen, counting))
    x, weight = (torch.randint(-9, 9, (rows, 8)).float() for rows in (3, 8))  # every sum is exact, in any order
    place = Place("trunk", 0, "qkv")
    assert torch.equal(ops.linear(x=x, weight=weight, shape=(2, 4), to=place), (x @ weight.T).view(3, 2, 4))
    assert torch.equal(ops.add(x=x, y=x, to=place), 2 * x)
    assert ops.linear(x=x[:0], weight=weight, shape=(8,), to=place).shape == (0, 8)
    assert counted == {"linear": 4, "add": 1} and ops.row_invariant == BY_ROW.keys()
    for name, rows in BY_ROW.items():
        assert {*rows} <= signature(getattr(told, name)).parameters.keys()


def test_interrupted_command_writes_what_ran_and_is_inconclusive(
    instep: Runner, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed_at_the_second(case: Case, relation: Relation) -> Held:
        if relation.name != "poison":
            raise KeyboardInterrupt
        return hold(case, relation)

    monkeypatch.setattr("instep.campaign.relations.hold", pressed_at_the_second)
    words = ("poison", "slots", "--ops", "ledger", "--until", 3, "--json", tmp_path / "r.json")
    ran = instep("relations", trace.path, *words)
    found = json.loads((tmp_path / "r.json").read_text())
    assert ran.code == found["exit"] == Exit.INCONCLUSIVE and "interrupted: this is what ran" in ran.out, ran
    assert found["interrupted"] and [(run["relation"], run["exit"]) for run in found["runs"]] == [("poison", 0)]
