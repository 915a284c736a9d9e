"""Interpreted kernels in 16 bits agree without a fault, or are refused.

Leaves out: the fixes of the interpreter (`tests/optimized/test_kernels_runtime.py`).
"""

from pathlib import Path

import pytest
import torch

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from support.inputs.few_channels import few_channels
from support.inputs.traces import brief, recording
from support.running.command import Runner
from support.running.verdicts import agreed

GIVEN = {"drafter": "external"}  # with the drafts of the trace: the draft head calls kernels that the trunk calls
SHORT = Path(__file__).resolve().parents[2] / "fixtures" / "traces" / "faults" / "short.jsonl"


half = recording(brief(), dtype=torch.float16)


@pytest.mark.parametrize("ops", ["triton", pytest.param("invariant", marks=pytest.mark.whole)])
def test_interpreted_kernels_agree_in_bfloat16(ops: str) -> None:
    agreed(Replay(few_channels("short", 2), Setting(ops, dtype="bfloat16", **GIVEN)).run())


def test_interpreted_kernels_agree_in_float16(half: Trace) -> None:
    agreed(Replay(half, Setting("triton", dtype="float16", **GIVEN)).run(until=6))


def test_weights_that_float16_cannot_hold_are_refused_in_a_line(instep: Runner) -> None:
    ran = instep("replay", SHORT, "--ops", "triton", "--dtype", "float16")
    assert ran.code == 2 and "one that holds the weights" in ran.err, ran
