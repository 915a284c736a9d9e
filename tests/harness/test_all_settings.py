"""`instep replay --settings`: which rows run, what is reported as not run, and how a session goes on.

Leaves out: the rows of our own options (`test_combinations.py`).
"""

import json
from collections.abc import Callable, Hashable
from copy import deepcopy
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from instep.campaign.covering_array import CoveringArray, Row
from instep.trace.file import Trace
from instep_optimized.commit.snapshot import Snapshot
from instep_optimized.data_parallel.replica_engine import ReplicaEngine
from instep_reference.contract.errors import Unsupported
from support.inputs.traces import policy, recording
from support.running.command import Runner

trace = recording(policy(deeds=()))
FACTORS: dict[str, tuple[Hashable, ...]] = {
    "a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2), "d": (0, 1), "e": (0, 1, 2, 3), "f": (0, 1),
}  # fmt: skip


def refusal(row: Row) -> str:
    """b needs a; c 2 never stands with d 0 or e 3; e 2 is always refused."""
    if row["b"] and not row["a"]:
        return "b alone"
    if row["c"] == 2 and (row["d"] == 0 or row["e"] == 3):
        return "c 2"
    return "e 2" if row["e"] == 2 else ""


def served(array: CoveringArray, fails: Callable[[Row], bool]) -> list[Row]:
    """Run all rows, of which some fail only now; the rows that were served."""
    ran = list[Row]()
    for row in array:
        assert not refusal(row) and len(ran) < 99
        if fails(row):
            array.fail(row, "late")
        else:
            array.met(row)
            ran.append(row)
    return ran


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("fails", "late"), [
    (lambda row: False, set()),
    (lambda row: row["f"] == 1, {(("f", 1),)}),
    (lambda row: row["a"] == 2 and row["e"] == 1, {(("a", 2), ("e", 1))}),
    (lambda row: row["a"] == 2 and row["b"] == 1 and row["d"] == 1 and row["f"] == 1, set()),
    (lambda row: True, {()}),
], ids=["none", "value", "pair", "four", "all"])
def test_every_group_is_met_or_has_a_reason(fails: Callable[[Row], bool], late: set[Any], size: int) -> None:
    array = CoveringArray(FACTORS, refusal, size)
    rows = served(array, fails)
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    possible = {group for row in every if not refusal(row) and not fails(row) for group in array.groups(row)}
    assert {group for row in rows for group in array.groups(row)} == possible == set(array.rows) and not array.due
    assert set(array.failed) == {group for group in late if len(group) <= size}
    if late == {()}:
        return
    reasons = {why for group, why in array.refused.items() if group not in array.failed}
    assert reasons == ({"b alone", "c 2", "e 2"} if size == 2 else {"e 2"})
    for names in combinations(FACTORS, size):
        for values in product(*(FACTORS[name] for name in names)):
            group = tuple(zip(names, values, strict=True))
            assert (group in possible) != any(set(cells) <= set(group) for cells in array.refused)
    assert len(rows) <= len(every) // 8


OPTIONS = ("--ops", "ledger", "--dtype", "float32", "--layout", "VK", "--snapshot-layout", "VK", "--state-dtype",
           "float32", "--kv-dtype", "float8_e4m3fn", "--conv", "windows", "--no-overlap", "--guarded", "--no-graphs",
           "--stages", "1", "--micro-batches", "1", "--ranks", "1", "--until", "9")  # fmt: skip


@pytest.mark.slow
def test_fault_of_one_strategy_is_found_in_its_settings_alone(
    instep: Runner, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Snapshot.commit  # of conv windows, too
    monkeypatch.setattr(Snapshot, "commit", lambda self, *given: self.component == "state" or commit(self, *given))

    def late(self: object, *given: object) -> None:
        raise Unsupported("no room for replicas")

    monkeypatch.setattr(ReplicaEngine, "_serve", late)  # refused only while it runs
    words, file = ("replay", trace.path, *OPTIONS, "--settings", "each", "--no-ladder", "--json"), tmp_path / "r.json"
    first = instep(*words, file, "--minutes", "0")
    assert first.code == 3 and "0 of " in first.out and "values left when the time was over" in first.out
    ran = instep(*words, file, "--html", tmp_path / "r.html")
    found = json.loads(file.read_text())
    (array,), (coverage,) = found["arrays"], found["coverage"]
    wrong = [one["row"] for one in array["ran"] if one["exit"] == 1]
    assert ran.code == 1 == coverage["exit"] and wrong and {row["strategy"] for row in wrong} == {"snapshot"}
    assert {one["exit"] for one in array["ran"] if one["row"].get("strategy") != "snapshot"} == {0, 2}
    assert "--strategy snapshot" in found["runs"][0]["findings"][0]["command"] and "DIVERGED  small" in ran.out
    assert coverage["left"] == [] and coverage["met"] == coverage["of"] == 10
    late_ones = [one for one in coverage["not_run"] if one["why"] == "no room for replicas"]
    assert late_ones == [{"values": [["dp", 2]], "why": "no room for replicas"}]
    assert "ledger, not run: --dp 2: no room for replicas" in ran.out
    assert "--ring-dtype" in ran.out and len(array["sessions"]) == 2
    again = instep(*words, file)
    assert again.code == 1 and json.loads(file.read_text())["arrays"][0]["ran"] == array["ran"], "nothing is left"
    other = instep(*words, file, "--layer", "1")
    assert other.code == 2 and "'layer 1'], expected ['T0', " in other.err


@pytest.mark.parametrize(("words", "says"), [
    (("--settings", "some"), "--settings: found some, expected all or each, or some of strategy, conv,"),
    (("--settings", "dp,graphs", "--graphs"), "--settings: found graphs, which has a value, expected all or each, or"),
    (("--settings", "all", "--swap", "gdn=plain"), "--swap: found --settings, too"),
    (("--minutes", "1"), "--minutes: found no --settings"),
    (("--settings", "all", "--ops", "support.wrong.subjects:right"), "--settings: found support.wrong.subjects:right"),
    (("--settings", "all", "--strategy", "lazy_rerun", "--state-dtype", "bfloat16"), "instep: lazy_rerun with a state"),
])
def test_settings_are_refused_with_options_of_one_run(
    instep: Runner, trace: Trace, words: tuple[str, ...], says: str
) -> None:
    ran = instep("replay", trace.path, *words)
    assert ran.code == 2 and says in ran.err



CHANGES: dict[str, tuple[tuple[str | int, ...], object]] = {
    "found `array`, expected `object`": ((), []),
    "coverage: found [], expected one of each of ['ledger']": (("coverage",), []),
    "coverage[0].exit": (("coverage", 0, "exit"), 77),
    "missing required field `rows`": (("coverage", 0), {"ops": "ledger", "exit": 0}),
    "runs[0]": (("runs",), [{"findings": 1}]),
    "setting: found no device": (("arrays", 0, "setting"), {"ops": "ledger"}),
    "a value of ranks that is not in factors": (("arrays", 0, "ran", 1, "row"), {"ranks": [2]}),
    "a value of none that is not in factors": (("arrays", 0, "ran", 1, "row"), {"none": 2}),
    "ran[0]: found exit 9 without a reason": (("arrays", 0, "ran", 0, "exit"), 9),
    "ran[1]: found a divergence without its outcome in runs": (("arrays", 0, "ran", 1, "exit"), 1),
    "ran[1]: found agreement in which nothing was compared": (("arrays", 0, "ran", 1, "elements"), 0),
    "trace of ledger": (("arrays", 0, "trace"), "of another"),
}


@pytest.mark.slow
def test_one_setting_has_its_values_and_wrong_files_are_named(instep: Runner, trace: Trace, tmp_path: Path) -> None:
    words, file = ("replay", trace.path, "--ops", "ledger", "--until", "9", "--settings"), tmp_path / "one.json"
    first = instep(*words, "ranks", "--json", file)
    assert first.code == 0 and "2 of 2 values of settings in 2 runs" in first.out
    assert "found experts, expected settings with several values" in instep(*words, "ranks,experts").err
    right = json.loads(file.read_text())
    for says, (path, value) in CHANGES.items():
        whole = {"": deepcopy(right)}
        at, last = whole, ""
        for name in path:
            at, last = at[last], name  # type: ignore[assignment]
        at[last] = value  # type: ignore[assignment]
        file.write_text(written := json.dumps(whole[""]))
        ran = instep(*words, "ranks", "--json", file)
        assert ran.code == 2 and says in ran.err and file.read_text() == written, says
