"""The gate's calibrations: one file per fingerprint, op set and setting, with false alarms, power and times.

Model and cases are in a file's name if they are not the usual ones, so no other calibration replaces it.

A machine is everything that affects a speed, except for its load (`report/machine.py`). Times of another day decide
nothing: they are printed next to new ones. Leaves out: measuring (`power.py`).
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from instep.bundled import fixtures, model
from instep.report.machine import fingerprint
from instep.report.result import Result, read
from instep.trace.file import decode
from instep.trace.header import config_digest

from .cases import CASES, USUAL
from .input_and_result import Question
from .power import Power
from .process import Source

LOAD = "load"  # the field of a fingerprint that is not part of the machine
NOT_THE_MACHINE = (LOAD, "instep", "kernels_syntax")


Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]


class _Says(msgspec.Struct):
    same: dict[str, dict[str, Count]] = msgspec.field(name="A/A")
    slowed: dict[str, dict[str, Count]]


class _Setting(msgspec.Struct):
    pairs: Annotated[int, msgspec.Meta(ge=1)]


class _Kept(msgspec.Struct):
    """The fields that a run reads of a file; other fields may be missing, as in older files."""

    date: str
    setting: _Setting
    trials: Count
    pairs: Annotated[int, msgspec.Meta(ge=0)]
    says: _Says
    ratio: dict[str, dict[str, float]]
    independent: Count = 0


def setting(question: Question) -> dict[str, Any]:
    """The setting and the events of BEFORE: everything except the machine on which the gate's rates depend.

    Clocks and cases are in it only if they are not the usual ones, and a model only if its configuration differs from
    that of the shipped one. So files of the usual setting keep their names.
    """
    asked = {"pairs": question.pairs, "allowed": question.allowed, "batch": question.batch, "rounds": question.rounds,
             "num_steps": question.num_steps, **question.setting.data(), "ops": ops_of(question)}  # fmt: skip
    for name, value, usual in (
        ("clocks", list(question.clocks), []),
        ("cases", [case for case in CASES if case in question.cases], list(USUAL)),
        ("model", _digest(question.checkpoint), _digest(model())),
    ):
        if value != usual:
            asked[name] = value
    return asked


def _digest(checkpoint: Path) -> str | None:
    """The digest of a model; None if it has been removed since it was timed, and the result is still printed."""
    try:
        return config_digest(checkpoint)
    except OSError:
        return None


def ops_of(question: Question) -> str:
    """The op set that BEFORE runs."""
    return Source.of(question.before, question.setting.ops, "BEFORE").ops


def file_of(question: Question, folder: Path | None = None) -> Path:
    """The path of BEFORE's baseline on this machine, as in nvidia-h100-80gb-hbm3-triton-1f2e3d4c.json."""
    name = named(fingerprint(question.setting.device), setting(question))
    return (fixtures() / "baselines" if folder is None else folder) / name


def named(machine: Mapping[str, str | None], asked: Mapping[str, Any]) -> str:
    """The file name for a fingerprint and a setting."""
    here = {name: value for name, value in machine.items() if name not in NOT_THE_MACHINE}
    device = here["device_name"] if asked["device"].startswith("cuda") else here["processor"]
    digest = hashlib.sha256(msgspec.json.encode([sorted(here.items()), sorted(asked.items())])).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", f"{device or 'unknown'} {asked['ops']}".lower()).strip("-")
    return f"{words}-{digest}.json"


def known(question: Question, folder: Path | None = None) -> dict[str, Any] | None:
    """Read the calibration; None if the gate was never calibrated on this machine. Any other file is refused."""
    file = file_of(question, folder)
    if not file.exists():
        return None
    found = read(file)
    decode(msgspec.json.encode(found), _Kept, str(file), "a calibration, as --baselines keeps it")
    return found


def result(found: Power, commit: str | None = None) -> Result:
    """The content of the file."""
    question = found.report.question
    asked = {"source": Path(question.before).name, "cases": list(question.cases), **setting(question)}
    told = {"refused": found.report.refused or None, "machine": fingerprint(question.setting.device),
            "setting": asked, "acceptance": found.report.acceptance, "elements": found.report.elements}  # fmt: skip
    return Result(found.exit, question.setting.device, told | found.data(), commit)
