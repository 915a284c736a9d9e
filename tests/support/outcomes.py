"""Comparisons and outcomes without a run, for tests of their output.

Leaves out: verdicts of real runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from instep.finding_problem import Problem
from instep.report.document_choice import document_of
from instep.report.result import Result
from instep.report.terminal_tables import write
from instep.run.replay import Outcome
from instep.run.trace_history import History, Text
from instep.setting import Setting
from instep.subject.declared_rounding import Declared
from instep.verdict import Comparison, Tier, Verdict
from instep_reference.contract.place_names import Place

STATE = Place("trunk", 3, "state")


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
