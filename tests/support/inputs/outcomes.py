"""Comparisons, outcomes, judged faults and relations without a run, for tests of their output.

Leaves out: verdicts of real runs.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

import instep.campaign.relations as table
from instep.campaign.relations import Held
from instep.finding_problem import Problem
from instep.report.document import document_of
from instep.report.result import Result
from instep.report.terminal_tables import write
from instep.run.replay import Outcome
from instep.run.trace_history import History, Text
from instep.setting import Setting
from instep.subject.declared_rounding import Declared
from instep.verdict import Comparison, Exit, Skipped, Tier, Verdict
from instep_proof.faults.catalogue.fault import Expected, Fault
from instep_proof.faults.compare_with_control import Judged, Session
from instep_proof.faults.fault_runs import Arm
from instep_reference.contract.place_names import Place

STATE = Place("trunk", 3, "state")
RIGHT, PLANTED = {"instep": "right"}, {"instep": "planted"}
CONTROL = Arm(Exit.AGREED, 1.0, served=RIGHT, events=2, of=2)
FAULT = Fault(
    "made-up", "commit-index", "Nothing is wrong.", (), "accepted", Setting(), ("bytes",), ("tokens",),
    other=Expected(1, "trunk", 0, "conv", "holds the state after 2"),
)
PLANTING = Session("", None, {}, seconds=12.0, jobs=2, processor_seconds=20.0)


def comparison(diagnosis: str = "", **changes: Any) -> Comparison:
    fields: dict[str, Any] = {
        "check": "directed", "tier": Tier.DIRECTED, "event": 41, "kind": "commit", "place": STATE, "elements": 64,
        "worst": 0.1, "allowed": 0.5, "blocks": 8, "problem": Problem.of(diagnosis),
    }
    return Comparison(**{**fields, **changes})


def outcome(*compared: Comparison, **changes: Any) -> Outcome:
    plan = SimpleNamespace(setting=Setting("triton"), checkpoint=SimpleNamespace(digest="d" * 64))
    texts = (Text("b", (104, 105), (33, 10, 255), 256),)
    fields: dict[str, Any] = {
        "name": "tiny-hybrid", "trace": Path("fixtures/traces/adaptive.jsonl"), "plan": plan, "of": 60,
        "verdict": Verdict(list(compared), events=42), "seconds": {"reference": 1.0, "subject": 0.5}, "calls": {},
        "elsewhere": None, "located": None, "again": ("instep", "replay"),
        "history": History(((5, {"b": 3}), (9, {"b": 1})), ((-1, 1), (4, 3)), texts), "served": {},
        "declared": Declared({"q": torch.float32}, {}),
    }
    return Outcome(**{**fields, **changes})


def printed(show: Callable[..., None], *shown: Any, width: int = 100) -> str:
    """The output of `show(*shown, console)`."""
    console = Console(width=width)
    with console.capture() as captured:
        show(*shown, console)
    return captured.get()


def shown(result: Result, width: int = 100) -> str:
    """The document of a result on the terminal."""
    return printed(write, document_of(result.data()), width=width)


def judged(name: str, diagnosis: str = "holds the state after 2 tokens", void: str = "", **finding: Any) -> Judged:
    said = {"check": "bytes", "tier": "T1", "event": 1, "stage": "trunk", "layer": 0, "component": "conv",
            "where": "event 1 commit, conv window", "diagnosis": diagnosis, "explained": None, **finding}  # fmt: skip
    arm = Arm(Exit.DIVERGED, 1.0, (said,), {"bytes": "T1"}, PLANTED, events=2, of=2)
    return Judged(replace(FAULT, id=name), CONTROL, arm, void, session=PLANTING)


def held(name: str, *compared: Any, lacks: str | None = None) -> Held:
    [relation], verdict = table.relations([name]), Verdict()
    verdict.add(compared if lacks is None else [Skipped(name, 0, lacks)])
    return Held(relation, verdict, 0.25, lacks)
