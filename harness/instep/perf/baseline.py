"""What is known of the gate: one file per fingerprint, op set and setting, with false alarms, power and times.

A machine is everything that changes a speed but how busy it is (`fingerprint.py`). Times of another day decide nothing:
they are told beside new ones. Leaves out: measuring (`power.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..carried import fixtures
from ..report.result import Result
from .arm import Source
from .fingerprint import fingerprint
from .power import Power
from .question import Question

LOAD = "load"  # of a fingerprint, what is no part of the machine
NOT_THE_MACHINE = (LOAD, "instep", "kernels_syntax")


def setting(question: Question) -> dict[str, Any]:
    """How BEFORE was set up and what it played: all that the gate's rates hang on, but for machine and model.

    Clocks are named only where some are left out, so files of all clocks keep their names.
    """
    ops = Source.of(question.before, question.setting.ops).ops
    return {"pairs": question.pairs, "allowed": question.allowed, "batch": question.batch, "rounds": question.rounds,
            "num_steps": question.num_steps, **question.setting.data(), "ops": ops,
            **({"clocks": list(question.clocks)} if question.clocks else {})}  # fmt: skip


def file_of(question: Question, folder: Path | None = None) -> Path:
    """Where this machine's baseline of BEFORE and this setting stands: nvidia-h100-80gb-hbm3-triton-1f2e3d4c.json"""
    name = named(fingerprint(question.setting.device), setting(question))
    return (fixtures() / "baselines" if folder is None else folder) / name


def named(machine: Mapping[str, str | None], asked: Mapping[str, Any]) -> str:
    """The name of the file of a fingerprint and a setting."""
    here = {name: value for name, value in machine.items() if name not in NOT_THE_MACHINE}
    device = here["device_name"] if asked["device"].startswith("cuda") else here["processor"]
    digest = hashlib.sha256(msgspec.json.encode([sorted(here.items()), sorted(asked.items())])).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", f"{device or 'unknown'} {asked['ops']}".lower()).strip("-")
    return f"{words}-{digest}.json"


def known(question: Question, folder: Path | None = None) -> dict[str, Any] | None:
    """What stands there; None: the gate was never calibrated on this machine."""
    try:
        found: dict[str, Any] = msgspec.json.decode(file_of(question, folder).read_bytes())
        return found if isinstance(found, dict) and {"says", "ratio"} <= found.keys() else None
    except (OSError, msgspec.DecodeError):
        return None


def result(found: Power, commit: str | None = None) -> Result:
    """The content of the file."""
    question = found.report.question
    asked = {"source": Path(question.before).name, "cases": list(question.cases), **setting(question)}
    told = {"refused": found.report.refused or None, "machine": fingerprint(question.setting.device),
            "setting": asked, "acceptance": found.report.acceptance, "elements": found.report.elements}  # fmt: skip
    return Result(found.exit, question.setting.device, told | found.data(), commit)
