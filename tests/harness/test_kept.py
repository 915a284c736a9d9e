"""What is kept goes to the host, comes back and is evicted: by events that every engine serves alike, bit by bit.

Leaves out: how prefixes are tracked and given on (`test_prefixes.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.faults import FAMILIES, TRACES
from instep.faults.base import Fault
from instep.observe.event_log import Copies
from instep.observe.remembered import KeptCopies
from instep.replay.replay import Replay
from instep.replay.setting import Setting
from instep.trace.file import Trace, read
from instep.verdict import Exit
from instep_optimized import OptimizedEngine, tiers
from support.planting import planted_here


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read(TRACES / "tiers.jsonl")


@pytest.mark.parametrize("fault", FAMILIES["tiers"], ids=lambda fault: fault.id)
def test_a_fault_of_tiers_is_found_located_and_named(fault: Fault, trace: Trace) -> None:
    with planted_here(*fault.edits):
        findings = Replay(trace, fault.how).run(until=fault.event).verdict.findings
    assert findings, "not found"
    first = findings[0]
    assert (first.event, first.place) == (fault.event, fault.place), first
    said = first.explained.says if first.explained is not None else ""
    assert {one.check for one in findings} & {*fault.seen_by} and fault.says in first.diagnosis + said, (
        first.diagnosis, said)
