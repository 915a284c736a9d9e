"""The schema of a result file that can be compared with another: runs, each with findings.

Leaves out: which schemas there are (`result.py`), and all fields that are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from instep_reference.contract.errors import BadInput

from ..options import OPTIONS
from ..trace.file import decode
from .result import runs_of

# Fields of a run that identify it: its trace, relation or recording, and its setting.
SETTING = ("name", "relation", "recording", *OPTIONS, "model")
Count = Annotated[int, msgspec.Meta(ge=0)]
Used = float | Annotated[str, msgspec.Meta(pattern="^(-?inf|nan)$")] | None


class Finding(msgspec.Struct):
    check: str
    where: str
    diagnosis: str
    event: Count | None = None


class TierLine(msgspec.Struct):
    tier: str
    elements: Count
    used: Used = None


class OpLine(msgspec.Struct):
    op: str
    elements: Count
    used: Used = None


class Run(msgspec.Struct):
    """One run. tiers: for relations only their names."""

    exit: int
    findings: list[Finding]
    findings_in_all: Count | None = None
    events: Count | None = None
    elements: Count | None = None
    used: Used = None
    tiers: list[TierLine | str] | None = None
    by_op: list[OpLine] | None = None
    lacks: str | None = None


FIELDS = [(name, OPTIONS[name][0] | None if name in OPTIONS else str | None, None) for name in SETTING]
File = msgspec.defstruct("File", [("exit", int), ("runs", list[msgspec.defstruct("Whole", FIELDS, bases=(Run,))])])  # type: ignore[misc]


def readable(result: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The runs of a result. name: the file, for errors."""
    runs = result.get("runs", [])
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise BadInput(f"{name}: runs", found=type(runs).__name__, expected="a list of objects")
    found = runs_of(result)
    if not found or not all("findings" in run for run in found):
        raise BadInput(name, found=f"the result of `{result.get('command')}`", expected="a result with runs and "
                       "findings, from replay, op, relations, shapes, streams or audit")  # fmt: skip
    decode(msgspec.json.encode({"exit": result.get("exit"), "runs": found}), File, name)
    return found
