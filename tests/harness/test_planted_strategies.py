"""Faults of the commit strategies, each planted in a copy of the packages: found at its first event, and named.

Leaves out: faults of `snapshot` (`test_planted.py`). One that cannot matter is not planted: a pending count that is
not clamped reads marks that are always written before, and the op clamps again (`test_ring_plan.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from instep.trace.file import Trace
from instep.trace.header import Room
from instep.trace.policy import Arrival, Deed, Steps
from instep.verdict import Exit
from instep_reference.contract import engine as e
from support.planting import Fault, planted, run
from support.traces import policy, recorded

pytestmark = pytest.mark.slow  # every case replays in a process of its own

Shows = Callable[[tuple[e.AnyEvent, ...]], int]
RERUN, COLUMNS = "instep_optimized/commit/rerun.py", "instep_optimized/commit/columns.py"


@dataclass(frozen=True)
class Case:
    """A fault under a pair of strategies; the first event that can show it, and what must be said of it there.

    component  of the first finding; says: in a finding of that event
    """

    name: str
    pair: tuple[str, str]
    fault: Fault
    shows: Shows
    component: str
    says: str
    ops: str = "ledger"


def first_forward(kind: str, after: type[e.Event] = e.Admit, rounds: int = 0) -> Shows:
    """The first forward with such a row once another kind of event was seen, and so many commits."""

    def find(events: tuple[e.AnyEvent, ...]) -> int:
        begun = next(number for number, event in enumerate(events) if isinstance(event, after))
        return next(
            number for number, event in enumerate(events)
            if number > begun and isinstance(event, e.Forward) and any(row.kind == kind for row in event.rows)
            and sum(isinstance(before, e.Commit) for before in events[:number]) >= rounds
        )

    return find


def the_commit(number: int) -> Shows:
    return lambda events: [at for at, event in enumerate(events) if isinstance(event, e.Commit)][number]


def the_resume(events: tuple[e.AnyEvent, ...]) -> int:
    return next(at for at, event in enumerate(events) if isinstance(event, e.Resume))


CASES = (
    Case(
        "a mark is not reset on reuse", ("columns", "windows"),
        Fault(COLUMNS, "    def claim(self, slot: int) -> None:\n        self._marks.put(slot, 0)",
              "    def claim(self, slot: int) -> None:\n        return"),
        first_forward("prefill"), "beta", "raised IndexError",
    ),
    Case(
        "a restored request has pending tokens", ("rerun", "windows"),
        Fault(RERUN, "self._marks.put(slot, length)", "self._marks.put(slot, 0)"),
        the_resume, "state", "bytes differ",
    ),
    Case(
        "ring entries by batch row", ("rerun", "windows"),
        Fault(RERUN, "ring=None if chunk else self._ring(layer, group.slots, plan),",
              "ring=None if chunk else self._ring(layer, group.rows, plan),"),
        first_forward("verify"), "state", "changed in ring_k slot 0, which this event may not write",
    ),
    Case(
        "the settled mark stays behind", ("rerun", "windows"),
        Fault(RERUN, "                self._marks.write(ops, group.slots, plan.after)",
              "                if group.kind != 'verify':\n"
              "                    self._marks.write(ops, group.slots, plan.after)"),
        the_commit(1), "state", "holds labels that nobody should hold here",
    ),
    Case(
        "a decode forgets what is pending", ("rerun", "windows"),
        Fault(RERUN, "ring=None if chunk else self._ring(layer, group.slots, plan),",
              "ring=self._ring(layer, group.slots, plan) if verify else None,"),
        first_forward("decode", rounds=1), "core", "lacks the tokens of the previous step", "plain",
    ),
    Case(
        "the ring is never settled", ("lazy_rerun", "windows"),
        Fault("instep_optimized/commit/lazy_rerun.py", "return size - width - widest", "return size"),
        # Two rounds, the second with four tokens, then the plain step; after four more rounds the ring overflows.
        first_forward("verify", rounds=7), "core", "row 0 is wrong",
    ),
    # Right while the widest window is in force, wrong from the first switch down on.
    Case(
        "columns with the stride of the width in force", ("columns", "windows"),
        Fault(COLUMNS, "            own,\n",
              "            Address(columns.as_strided(columns.shape, (columns.stride(0) - columns.stride(1)"
              " * (columns.shape[1] - self._width), *columns.stride()[1:])), group.slots, column),\n"),
        first_forward("verify", after=e.SetNumSteps), "core", "row 0 is wrong",
    ),
    Case(
        "an offset off by one", ("snapshot", "widened"),
        Fault(COLUMNS, "self._marks.write(ops, landing.slots, landing.nodes)",
              "self._marks.write(ops, landing.slots, landing.lens)"),
        the_commit(0), "conv", "holds the window after 4 tokens; 3 were accepted",
    ),
)

POLICY = policy(
    capacity=Room(slots=(3, 1), pages=tuple(range(16, 0, -1)), page_size=8, max_tokens=32), num_steps=3,
    steps=(Steps(3, 1), Steps(4, 0), Steps(5, 3)), accept=(2, 1, *[3] * 30), rounds=12,
    arrivals=(Arrival("a", "few", max_new=48), Arrival("b", "one", max_new=48)),
    deeds=(Deed(6, "preempt", "a"), Deed(7, "resume", "a")),
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The widest window first, then a narrow one, a plain step, and back to many of which most is accepted."""
    return recorded(tmp_path_factory.mktemp("strategies"), POLICY)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} [{', '.join(case.pair)}]")
def test_a_planted_fault_is_found_and_named_at_its_first_event(case: Case, trace: Trace, tmp_path: Path) -> None:
    result = replayed(planted(tmp_path, case.fault), trace, case.ops, case.pair, tmp_path)
    found = result["findings"]
    assert result["exit"] == Exit.DIVERGED
    assert (result["strategy"], result["conv"]) == case.pair
    assert (found[0]["event"], found[0]["component"]) == (case.shows(trace.events), case.component)
    assert any(case.says in finding["diagnosis"] for finding in found), found[:3]


@pytest.mark.parametrize("pair", [("columns", "widened"), ("lazy_rerun", "windows")], ids="-".join)
def test_the_copy_without_a_fault_is_clean(pair: tuple[str, str], trace: Trace, tmp_path: Path) -> None:
    result = replayed(planted(tmp_path), trace, "ledger", pair, tmp_path)
    assert result["exit"] == Exit.AGREED and result["elements"] > 0 and not result["findings"]


def replayed(folder: Path, trace: Trace, ops: str, pair: tuple[str, str], tmp_path: Path) -> dict[str, Any]:
    """Replay the trace with that folder's packages; its one run in the result file."""
    file, (strategy, conv) = tmp_path / "result.json", pair
    done = run(folder, "replay", str(trace.path), "--ops", ops, "--strategy", strategy, "--conv", conv,
               "--json", str(file))
    assert file.exists(), done.stdout + done.stderr
    result: dict[str, Any] = json.loads(file.read_text())["runs"][0]
    return result
