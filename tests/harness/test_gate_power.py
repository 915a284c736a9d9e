"""How sure the gate is of itself: trials on known samples, a true slow-down, baselines; faults that look like gains.

Leaves out: this machine's own figures (`instep gate BEFORE --calibrate`, `fixtures/baselines/`).
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from instep.faults.base import Edit
from instep.perf import baseline, pairs, power, render
from instep.perf.cases import Walk
from instep.perf.clock import CLOCKS, Clock, judged
from instep.perf.course import Course, lay
from instep.perf.power import ARMS, Power, tried
from instep.perf.question import Question, Report
from instep.perf.yardstick import Yardstick
from instep.replay.participants import bare
from instep.replay.replay import Replay
from instep.replay.setting import Setting
from instep.verdict import Exit
from instep_optimized.commit.snapshot import Snapshot
from support.checkpoints import write
from support.command import Runner, complaint
from support.planting import planted_here

QUESTION = Question("plain", "plain", Path("model"), ("commit",))
TRIALS = 30


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "TRIALS", TRIALS)
    monkeypatch.setattr(pairs, "DRAWS", 300)


def sampled(slowed: float, noise: float, count: int = 300) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    drawn = {arm: 5e-3 * np.exp(noise * generator.standard_normal((count, 1, len(CLOCKS)))) for arm in ARMS}
    drawn["slowed"] *= 1 + slowed
    return drawn


@pytest.mark.parametrize(("slowed", "noise", "found", "says"), [
    (0.08, 0.03, (0.87, 1.0), Exit.AGREED), (0.03, 0.03, (0.0, 0.1), Exit.INCONCLUSIVE),
    (0.08, 0.5, (0.0, 0.1), Exit.INCONCLUSIVE), (0.0, 0.03, (0.0, 0.0), Exit.INCONCLUSIVE),
])  # fmt: skip
def test_trials_count_what_the_gate_says(
    slowed: float, noise: float, found: tuple[float, float], says: Exit, tmp_path: Path
) -> None:
    known = Power(Report(QUESTION), ratio={"commit": {"wall": 1 + slowed}})
    tried(known, sampled(slowed, noise), lambda what, done, of: None)
    assert found[0] <= known.part("slowed", "commit", pairs.Say.SLOWER) <= found[1] and known.exit is says
    assert known.says["A/A"]["commit"]["slower"] == 0 and sum(known.says["A/A"]["commit"].values()) == TRIALS
    console = Console(width=160)
    with console.capture() as said:
        render.show_power(known, console)
    told = said.get()
    assert f"commit: false alarms 0.0%, a true {slowed:.1%} (wall) is found in" in told
    alone = known.clocks["slowed"]["commit"]
    assert set(alone) == {"wall", "cpu"} and all(sum(counts.values()) == TRIALS for counts in alone.values())
    assert all(f"{counts['slower'] / TRIALS:.1%} by {clock}" in told for clock, counts in alone.items())
    file = baseline.file_of(QUESTION, tmp_path)
    baseline.result(known).write(file)
    kept = baseline.known(QUESTION, tmp_path)
    assert kept is not None and kept["trials"] == TRIALS and kept["pairs"] == 300 and file.name.endswith(".json")
    assert kept["clocks"]["slowed"]["commit"] == {clock: dict(counts) for clock, counts in alone.items()}
    file.write_text("{}")
    assert baseline.known(QUESTION, tmp_path) is None


def test_a_refused_arm_has_no_power() -> None:
    assert Power(Report(QUESTION, refused="it does not pass")).exit is Exit.DIVERGED


def test_another_machine_has_another_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, real = baseline.file_of(QUESTION, tmp_path), baseline.fingerprint
    monkeypatch.setattr(baseline, "fingerprint", lambda device: real(device) | {"load": "9.9 in the last minute"})
    assert baseline.file_of(QUESTION, tmp_path) == here
    monkeypatch.setattr(baseline, "fingerprint", lambda device: real(device) | {"torch": "1.0"})
    assert baseline.file_of(QUESTION, tmp_path) != here


@pytest.mark.parametrize("other", [
    {"before": "invariant"}, {"batch": 8}, {"rounds": 1}, {"num_steps": 1}, {"allowed": 0.1}, {"pairs": 120},
    {"setting": Setting(dtype="bfloat16")}, {"setting": Setting(graphs=True)},
], ids=str)  # fmt: skip
def test_another_question_has_another_baseline(other: dict[str, Any], tmp_path: Path) -> None:
    """The op set of BEFORE is calibrated, whatever a tree would run and whatever AFTER is."""
    asked = replace(QUESTION, **other)
    file = baseline.file_of(asked, tmp_path)
    assert file != baseline.file_of(QUESTION, tmp_path)
    assert file == baseline.file_of(replace(asked, after="triton"), tmp_path)
    ops = other.get("before", "plain")
    assert f"-{ops}-" in file.name and baseline.result(Power(Report(asked))).data()["setting"]["ops"] == ops


def test_what_is_slowed_takes_so_much_longer() -> None:
    (timed,) = Clock("cpu").ways

    def work() -> None:
        begun = time.process_time()
        while time.process_time() - begun < 0.02:
            pass

    found = timed(work, 0.5)
    assert 0.028 < found.cpu < 0.05 and found.wall >= 0.028 and found.device == 0


def test_what_stands_in_the_repository_is_of_a_gate_that_is_fit() -> None:
    """Few false alarms; and what was slowed is found as often as is asked, or the file says: the machine is too noisy.

    An arm is asked to take 8% longer. It came to between 6% and 12%, as the file tells: that much is shown to be found.
    On a GPU by one clock at least, which finds it alone: processes of one source differ by some percent on the host.
    """
    files = list(Path("fixtures/baselines").glob("*.json"))
    assert files
    for file in files:
        told = json.loads(file.read_text())
        assert (told["trials"], told["slowed"]) == (200, 0.08) and told["elements"] > 10_000
        asked = {name: value for name, value in told["setting"].items() if name not in ("source", "cases")}
        assert baseline.named(told["machine"], asked) == file.name
        assert told["ratio"].keys() == set(told["setting"]["cases"])
        for case, counts in told["says"]["A/A"].items():
            assert told["ratio"][case].keys() == set(judged(told["setting"]["device"]))
            so_much = {clock for clock, ratio in told["ratio"][case].items() if 0.06 <= ratio - 1 <= 0.12}
            alone = told.get("clocks", {}).get("slowed", {}).get(case, {})
            sure = alone.get("device", {}).get("slower", 0) >= power.LEAST_POWER * 200 and "device" in so_much
            assert so_much == told["ratio"][case].keys() or sure, f"{file.name}: {case}"
            assert counts.get("slower", 0) <= power.MOST_ALARMS * 200, f"{file.name}: {case}"
            enough = told["says"]["slowed"][case].get("slower", 0) >= power.LEAST_POWER * 200
            assert enough or told["exit"] == Exit.INCONCLUSIVE, f"{file.name}: {case}"


# Faults that look like gains


ACCEPTS_MORE = Edit(
    "instep_optimized/ops/plain/pick.py", "own = right.long().cumprod(dim=1).sum(dim=1)\n",
    "own = right.long().cumprod(dim=1).sum(dim=1).clamp_min(1)\n",
)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("course")
    model = write(folder / "model", num_hidden_layers=2, full_attention_interval=2)
    return lay(model, folder / "course.jsonl", batch=2, rounds=2, num_steps=3)


@pytest.mark.parametrize(("fault", "says"), [("none", ""), ("a commit is skipped", "conv"), ("accepts", "accepts")])
def test_a_gain_that_is_a_fault_is_refused(
    fault: str, says: str, course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that is skipped is faster, and an acceptance that is counted too high looks better."""
    plan = Replay(course.trace, Setting("plain", strategy="snapshot")).plan
    yardstick = Yardstick(plan, course)
    if fault == "a commit is skipped":
        monkeypatch.setattr(Snapshot, "commit", lambda self, ops, accepted: None)
    with planted_here(*([ACCEPTS_MORE] if fault == "accepts" else [])):
        verdict = yardstick.judge(Walk(bare(plan), course).show())
    assert verdict.exit is (Exit.DIVERGED if says else Exit.AGREED)
    assert not says or any(says in f"{found.place} {found.diagnosis}" for found in verdict.findings)


@pytest.mark.parametrize(("words", "says"), [
    (["plain"], "no AFTER"), (["plain", "plain", "--calibrate"], "AFTER beside --calibrate"),
    (["plain", "--calibrate", "--minutes", "0"], "--minutes"),
    (["plain", "--calibrate", "--baselines", "nowhere/there"], "no such folder"),
])  # fmt: skip
def test_what_cannot_be_asked_is_told_in_a_line(instep: Runner, words: list[str], says: str) -> None:
    assert says in complaint(instep("gate", *words))
