"""Faults of graphs, each planted in a copy of the packages: the replay in graphs finds it, and the eager one agrees.

Leaves out: graphs by themselves (`tests/optimized/test_graphs.py`). Here the emulator holds them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from instep.trace.file import Trace
from instep.trace.header import Room
from instep.trace.policy import Arrival, Steps
from instep.verdict import Exit
from support.planting import Fault, planted, run
from support.traces import policy, recorded

pytestmark = pytest.mark.slow  # every case replays in processes of its own

RUNNER, ROUND = "instep_optimized/graphs/runner.py", "instep_optimized/round.py"


@dataclass(frozen=True)
class Case:
    """A fault that only a replay shows; how it is found, and what is said."""

    name: str
    fault: Fault
    check: str
    says: str


CASES = (
    # A batch that shrinks leaves its last request in the padding: it is run once more, and its memory moves.
    Case("padding rows are not refreshed", Fault(
        RUNNER, "    own[len(given) :].fill_(value)\n", "",
    ), "labels", "row 1 is wrong"),
    # The step count of the capture stays in the graph that another count replays.
    Case("graphs are kept by kind alone", Fault(
        "instep_optimized/engine.py", "key, seen = (kind, self._round.num_steps),", "key, seen = (kind, 0),",
    ), "serves", "as it was recorded"),
    # The chain goes on from the head's own drafts.
    Case("forced choices are not copied in", Fault(
        RUNNER, "    own[: len(given)].copy_(given, non_blocking=True)\n",
        "    own[: len(given)].copy_(given if given.dim() == 1 else own[: len(given)])\n",
    ), "labels", "row 0 is wrong"),
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Four requests in buckets of 1, 2 and 4, coming and going, at 3, 1 and 0 drafts."""
    told = policy(
        num_steps=3, capacity=Room(slots=(3, 1, 4, 2), pages=tuple(range(1, 33)), page_size=8, max_tokens=32),
        arrivals=(
            Arrival("a", "few", max_new=18), Arrival("b", "one", max_new=14), Arrival("c", "few", max_new=3),
            Arrival("d", "one", max_new=16),
        ),
        steps=(Steps(5, 1), Steps(6, 0), Steps(7, 3)), deeds=(), accept=(1, 0, 2),
    )
    return recorded(tmp_path_factory.mktemp("graphs"), told)


def replayed(folder: Path, trace: Trace, *args: str) -> tuple[int, list[dict[str, object]]]:
    file = folder / f"result{len(args)}.json"
    done = run(folder, "replay", str(trace.path), "--ops", "ledger", "--json", str(file), *args)
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(file.read_text())["runs"][0]["findings"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_replay_in_graphs_finds_what_an_eager_one_cannot(case: Case, trace: Trace, tmp_path: Path) -> None:
    folder = planted(tmp_path, case.fault)
    assert replayed(folder, trace) == (Exit.AGREED, [])
    code, findings = replayed(folder, trace, "--graphs")
    assert code == Exit.DIVERGED
    assert findings[0]["check"] == case.check and case.says in str(findings[0]["diagnosis"]), findings[0]


def test_without_a_fault_it_agrees_in_graphs(trace: Trace, tmp_path: Path) -> None:
    folder = planted(tmp_path)
    for strategy in ("rerun", "snapshot"):
        assert replayed(folder, trace, "--graphs", "--strategy", strategy) == (Exit.AGREED, [])
