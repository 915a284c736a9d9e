"""What is known of the gate on a machine: one file per fingerprint, with its false alarms, its power, and its times.

A machine is everything that changes a speed but how busy it is (`fingerprint.py`). Times of another day decide nothing:
they are told beside new ones. Leaves out: measuring (`power.py`).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from ..carried import fixtures
from ..report.result import Result
from .fingerprint import fingerprint
from .power import Power
from .question import Question

LOAD = "load"  # of a fingerprint, what is no part of the machine
NOT_THE_MACHINE = (LOAD, "instep", "kernels_syntax")


def machine(device: str) -> dict[str, str | None]:
    return {name: value for name, value in fingerprint(device).items() if name not in NOT_THE_MACHINE}


def file_of(question: Question, folder: Path | None = None) -> Path:
    """Where this machine's baseline of the op set stands: nvidia-h100-80gb-hbm3-triton-1f2e3d4c.json"""
    here = machine(question.setting.device)
    name = here["device_name"] if question.setting.device.startswith("cuda") else here["processor"]
    digest = hashlib.sha256(msgspec.json.encode(sorted((key, value) for key, value in here.items()))).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", f"{name or 'unknown'} {question.setting.ops}".lower()).strip("-")
    return (fixtures() / "baselines" if folder is None else folder) / f"{words}-{digest}.json"


def known(question: Question, folder: Path | None = None) -> dict[str, Any] | None:
    """What stands there; None: the gate was never calibrated on this machine."""
    try:
        found: dict[str, Any] = msgspec.json.decode(file_of(question, folder).read_bytes())
        return found if isinstance(found, dict) and "says" in found else None
    except (OSError, msgspec.DecodeError):
        return None


def result(found: Power, commit: str | None = None) -> Result:
    """The content of the file."""
    question = found.report.question
    setting = {"source": Path(question.before).name, "cases": list(question.cases), "pairs": question.pairs,
               "allowed": question.allowed, "batch": question.batch, "rounds": question.rounds,
               "num_steps": question.num_steps, **question.setting.data()}  # fmt: skip
    told = {"refused": found.report.refused or None, "machine": fingerprint(question.setting.device),
            "setting": setting, "acceptance": found.report.acceptance, "elements": found.report.elements}  # fmt: skip
    return Result(found.exit, question.setting.device, told | found.data(), commit)
