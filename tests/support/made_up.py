"""Judged faults and relations without a run, for tests of their output.

Leaves out: outcomes of replays (`outcomes.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import instep.campaign.relations as table
from instep.campaign.relations import Held
from instep.setting import Setting
from instep.verdict import Exit, Skipped, Verdict
from instep_proof.faults.catalogue.fault import Expected, Fault
from instep_proof.faults.compare_with_control import Judged, Session
from instep_proof.faults.fault_runs import Arm

RIGHT, PLANTED = {"instep": "right"}, {"instep": "planted"}
CONTROL = Arm(Exit.AGREED, 1.0, served=RIGHT, events=2, of=2)
FAULT = Fault(
    "made-up", "commit-index", "Nothing is wrong.", "", (), "accepted", Setting(), ("bytes",), ("tokens",),
    other=Expected(1, "trunk", 0, "conv", "holds the state after 2"),
)
PLANTING = Session("", None, {}, seconds=12.0, jobs=2, processor_seconds=20.0)


def judged(name: str, diagnosis: str = "holds the state after 2 tokens", void: str = "", **finding: Any) -> Judged:
    said = {"check": "bytes", "tier": "T1", "event": 1, "stage": "trunk", "layer": 0, "component": "conv",
            "where": "event 1 commit, conv window", "diagnosis": diagnosis, "explained": None, **finding}  # fmt: skip
    arm = Arm(Exit.DIVERGED, 1.0, (said,), {"bytes": "T1"}, PLANTED, events=2, of=2)
    return Judged(replace(FAULT, id=name), CONTROL, arm, void, session=PLANTING)


def held(name: str, *compared: Any, lacks: str | None = None) -> Held:
    [relation], verdict = table.relations([name]), Verdict()
    verdict.add(compared if lacks is None else [Skipped(name, 0, lacks)])
    return Held(relation, verdict, 0.25, lacks)
