"""Six faults that engines have had, each planted in a copy of the packages: found, and named at its first event.

Leaves out: faults of the fuzzer and the gate (their own tests). The product contains no fault and no switch for one.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from instep.verdict import Exit
from support.planting import TOP, Fault, planted, run

pytestmark = pytest.mark.slow  # every case replays in a process of its own

TRACE = TOP / "fixtures" / "traces" / "adaptive.jsonl"


@dataclass(frozen=True)
class Case:
    """A fault with what must be said of it.

    shows      which event of the trace is the first that can show it
    component  of the first finding; stage likewise
    says       what the first finding, or a later one of that event, must say
    """

    name: str
    ops: str
    fault: Fault
    shows: Callable[[Mapping[str, Any], int], bool]
    component: str
    says: str
    stage: str = "trunk"
    head: int | None = None
    columns: list[int] | None = None


def a_draft_is_accepted(event: Mapping[str, Any], num_steps: int) -> bool:
    return event["event"] == "commit" and any(path["nodes"] for path in event["accepted"])


def a_window_behind_the_first_row(event: Mapping[str, Any], num_steps: int) -> bool:
    return event["event"] == "forward" and any(row["kind"] == "verify" for row in event["rows"][1:])


def a_chain_of_three(event: Mapping[str, Any], num_steps: int) -> bool:
    return event["event"] == "draft" and num_steps > 2


def a_prefill(event: Mapping[str, Any], num_steps: int) -> bool:
    return event["event"] == "forward" and any(row["kind"] == "prefill" for row in event["rows"])


OFF_BY_ONE = Fault(
    "instep_optimized/round.py",
    "inputs.rows, inputs.slots, landed.last_correct_step_indices,",
    "inputs.rows, inputs.slots, (landed.last_correct_step_indices - 1).clamp(min=0),",
)
# The write path takes its row stride from the width in force; the read path has the pool's own.
CALLER_STRIDE = Fault(
    "instep_optimized/commit/snapshot.py",
    "each=Address(self.snapshots, group.rows) if verify else None,",
    "each=Address(self.snapshots.as_strided(self.snapshots.shape, (self.snapshots.shape[1] * self.snapshots.stride(1),"
    " *self.snapshots.stride()[1:])), group.rows) if verify else None,",
)
FIRST_STEPS_POOL = Fault(
    "instep_optimized/build.py", "max(candidates) + 1", "candidates[1] + 1",
)
NOT_CHAINED = Fault(
    "instep_optimized/draft/eagle.py",
    "hidden = self.mtp.rows(ops, hidden, batch, stage)\n            own.append(self.mtp.pick(ops, hidden,",
    "y = self.mtp.rows(ops, hidden, batch, stage)\n            own.append(self.mtp.pick(ops, y,",
)
# Prefill stores [K, V] rows where every other path reads [V, K].
TRANSPOSED = Fault(
    "instep_optimized/commit/snapshot.py",
    "store=None if verify else own,",
    "store=None if verify else own if group.kind != 'prefill' or self.slots.ndim != 4 else Address("
    "self.slots.as_strided(self.slots.shape, (*self.slots.stride()[:2], self.slots.shape[3], 1)), group.slots),",
)
STALE_TILE = Fault(
    "instep_optimized/ops/plain/move.py",
    "target.pool[_spots(target, wanted)] = source.pool[_spots(source, wanted)]",
    "block, old = source.pool[_spots(source, wanted)], target.pool[_spots(target, wanted)]\n"
    "    if block.ndim == 4:\n"
    "        block[:, 1, :, 8:16] = old[:, 1, :, 8:16]\n"
    "    target.pool[_spots(target, wanted)] = block",
)

CASES = (
    Case("off-by-one commit", "plain", OFF_BY_ONE, a_draft_is_accepted, "conv",
         "holds the state after 1 token; 2 were accepted"),
    Case("off-by-one commit", "ledger", OFF_BY_ONE, a_draft_is_accepted, "conv",
         "holds the state after 1 token; 2 were accepted"),
    Case("stride from the current step count", "plain", CALLER_STRIDE, a_window_behind_the_first_row, "conv",
         "changed in snapshot_conv row 0, which this event may not write"),
    Case("stride from the current step count", "ledger", CALLER_STRIDE, a_window_behind_the_first_row, "conv",
         "changed in snapshot_conv row 0, which this event may not write"),
    Case("pool sized for the first step count", "plain", FIRST_STEPS_POOL, a_chain_of_three, "pick",
         "raised", "chain.1"),
    Case("hidden state not chained", "plain", NOT_CHAINED, a_chain_of_three, "joined",
         "reads the head's row of step 0, not of step 1", "chain.2"),
    Case("hidden state not chained", "ledger", NOT_CHAINED, a_chain_of_three, "joined", "row 0 is wrong", "chain.2"),
    Case("transposed state on one path", "plain", TRANSPOSED, a_prefill, "state", "is transposed"),
    Case("stale tile of 8 columns in one head", "plain", STALE_TILE, a_draft_is_accepted, "state",
         "holds the state from before the step; 2 were accepted, in 1 of 32 blocks", head=1, columns=[8, 15]),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} [{case.ops}]")
def test_a_planted_fault_is_found_and_named_at_its_first_event(case: Case, tmp_path: Path) -> None:
    done, result = replayed(planted(tmp_path, case.fault), case.ops, tmp_path)
    assert done.returncode == Exit.DIVERGED, done.stderr
    found = result["findings"]
    assert (found[0]["event"], found[0]["stage"], found[0]["component"]) == (first(case), case.stage, case.component)
    assert any(case.says in finding["diagnosis"] for finding in found)
    assert (found[0]["head"], found[0]["columns"]) == (case.head, case.columns) or case.head is None
    assert "DIVERGED" in done.stdout and f"--until {first(case)}" in done.stdout
    assert result["served"] != replayed_source(), "the planted source must have served"


def test_the_readme_shows_what_a_stale_tile_gives(tmp_path: Path) -> None:
    _, result = replayed(planted(tmp_path, STALE_TILE), "plain", tmp_path)
    shown = result["message"].replace(f"{TOP}/", "")
    assert shown in (TOP / "README.md").read_text()


def test_the_copy_without_a_fault_is_clean(tmp_path: Path) -> None:
    done, result = replayed(planted(tmp_path), "ledger", tmp_path)
    assert done.returncode == Exit.AGREED, done.stdout + done.stderr
    assert result["elements"] > 0 and not result["findings"]
    assert result["served"] == replayed_source()


def replayed(folder: Path, ops: str, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Replay the trace with that folder's packages; the process, and its one run in the result file.

    Under `snapshot`, against which these faults were written; those of other strategies have tests of their own.
    """
    file = tmp_path / "result.json"
    done = run(folder, "replay", str(TRACE), "--ops", ops, "--strategy", "snapshot", "--json", str(file))
    assert file.exists(), done.stderr
    return done, json.loads(file.read_text())["runs"][0]


def first(case: Case) -> int:
    """The number of the first event that can show the fault, read off the trace."""
    lines = [json.loads(line) for line in TRACE.read_text().splitlines()]
    num_steps = lines[0]["num_steps"]
    for number, event in enumerate(lines[1:-1]):
        num_steps = event.get("num_steps", num_steps)
        if case.shows(event, num_steps):
            return number
    raise AssertionError(f"the trace cannot show {case.name!r}")


def replayed_source() -> dict[str, str]:
    """The digests of the product's own source, as a result file gives them."""
    from instep.rig import rig

    return rig.served()
