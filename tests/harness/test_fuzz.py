"""The fuzzer finds a planted fault and writes a trace that shows it; without the fault it finds nothing.

Leaves out: whether the checks name the fault rightly (their own tests).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instep.fuzz.campaign import Settings, campaign
from instep.verdict import Exit
from support.checkpoints import write
from support.planting import Fault, planted, run

SEED = "1"

# The commit reads snapshots with a row stride of the current window instead of the pool's: right while the widest
# step count is in force, wrong from the first switch down on, for every row but the first.
CALLER_STRIDE = Fault(
    "instep_optimized/commit/snapshot.py",
    "source=Address(pair.snapshots, landing.rows, landing.nodes),",
    """source=Address(
                        pair.snapshots.as_strided(pair.snapshots.shape, (
                            pair.snapshots.stride(0) - pair.snapshots.stride(1)
                            * (pair.snapshots.stride(0) // pair.snapshots.stride(1) - pair.snapshots.shape[1]),
                            *pair.snapshots.stride()[1:],
                        )),
                        landing.rows, landing.nodes,
                    ),""",
)


def divergence(output: str) -> list[str]:
    """Where and what, as the message says it; the command below names another path."""
    lines = output.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("DIVERGED"))
    return lines[begin : begin + 3]


def test_the_caller_stride_is_found_and_its_trace_shows_it(tmp_path: Path) -> None:
    checkpoint, folder = write(tmp_path / "model"), planted(tmp_path, CALLER_STRIDE)
    found = run(folder, "fuzz", "--checkpoint", str(checkpoint), "--ops", "ledger", "--examples", "400",
                "--seed", SEED, "--out", str(tmp_path / "found"))
    assert found.returncode == Exit.DIVERGED, found.stdout + found.stderr
    trace = tmp_path / "found" / f"fuzz-ledger-{SEED}.jsonl"
    told = re.search(r"found in run (\d+), shrunk to (\d+) events", found.stdout)
    assert told is not None and int(told[1]) <= 400 and int(told[2]) <= 12, found.stdout
    assert str(trace) in found.stdout

    again = run(folder, "replay", str(trace))
    assert again.returncode == Exit.DIVERGED, again.stdout + again.stderr
    assert divergence(again.stdout) == divergence(found.stdout)
    assert "commit" in divergence(again.stdout)[1]

    clean = run(planted(tmp_path / "control"), "replay", str(trace))
    assert clean.returncode == Exit.AGREED, clean.stdout + clean.stderr


@pytest.mark.parametrize(("ops", "examples"), [("ledger", 45), ("plain", 15)])
def test_nothing_is_found_without_a_fault(ops: str, examples: int, tmp_path: Path) -> None:
    result = campaign(Settings(ops, write(tmp_path / "model"), examples, int(SEED), tmp_path / "found"))
    assert result.exit == Exit.AGREED and result.found is None
    assert result.examples >= examples and result.elements > 0
    assert not (tmp_path / "found").exists()
    for condition in ("several requests in one forward", "accepted: ragged", "a verify after a switch"):
        assert result.coverage.counts()[condition] > 0, condition


def test_no_time_is_inconclusive_and_bad_input_one_line(tmp_path: Path) -> None:
    checkpoint, folder = write(tmp_path / "model"), planted(tmp_path)
    none = run(folder, "fuzz", "--checkpoint", str(checkpoint), "--ops", "ledger", "--minutes", "0")
    assert none.returncode == Exit.INCONCLUSIVE, none.stdout + none.stderr
    assert "nothing was compared" in none.stdout
    wrong = run(folder, "fuzz", "--checkpoint", str(tmp_path / "nowhere"))
    assert wrong.returncode == Exit.BAD_INPUT
    assert len(wrong.stderr.splitlines()) == 1 and "nowhere" in wrong.stderr
