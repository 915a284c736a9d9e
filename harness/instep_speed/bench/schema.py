"""The schema of a benchmark file, checked field by field before the file is used.

Leaves out: joining files (`resume.py`), and writing a result (`report/result.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from instep.options import WIDTHS
from instep.report.result import read
from instep.trace.file import decode
from instep_reference.contract.errors import BadInput

from . import KINDS, kind
from .base import Size
from .clock import Rates
from .run import Row, Session, chosen

MOST = 2**63  # maximum of a number on an axis
WRITTEN = "a result of `instep bench`"
# Fields of an arm that are complete only together.
TOGETHER = (("us", "lower", "upper", "mean"), ("tokens_per_s", "latency_s", "accepted", "distribution", "steps"),
            ("work", "launches"))  # fmt: skip

Some = float | UnsetType
if TYPE_CHECKING:
    Name: TypeAlias = str
    Width: TypeAlias = str
else:  # a type checker does not turn values into a type
    Name, Width = Literal[tuple(KINDS)], Literal[WIDTHS]


class _Arm(msgspec.Struct):
    """The fields of an arm that tables, pages or plots use. An arm may have more."""

    peer: str
    finding: str
    us: Some = UNSET
    lower: Some = UNSET
    upper: Some = UNSET
    mean: Some = UNSET
    of_floor: Some = UNSET
    samples: int | UnsetType = UNSET
    how: str | UnsetType = UNSET
    above: str | UnsetType = UNSET
    errors: dict[str, float] | UnsetType = UNSET
    bytes: dict[str, float] | UnsetType = UNSET
    tokens_per_s: Some = UNSET
    latency_s: Some = UNSET
    accepted: Some = UNSET
    distribution: dict[str, int] | UnsetType = UNSET
    steps: dict[str, int] | UnsetType = UNSET
    work: dict[str, float] | UnsetType = UNSET
    launches: int | UnsetType = UNSET
    gap_us: Some = UNSET

    def __post_init__(self) -> None:
        for names in TOGETHER:
            absent = [name for name in names if getattr(self, name) is UNSET]
            if absent and len(absent) < len(names):
                raise ValueError(f"no `{absent[0]}` beside `{next(name for name in names if name not in absent)}`")
        if self.of_floor is not UNSET and self.us is UNSET:
            raise ValueError("`of_floor` without `us`")


class _Row(msgspec.Struct):
    kind: Name
    cell: dict[str, str | int | float]
    floor_us: float | None
    arms: dict[str, _Arm]
    absent: dict[str, str]
    session: int
    bytes: Some = UNSET
    flops: Some = UNSET
    seconds: Some = UNSET

    def __post_init__(self) -> None:
        if self.session < 0:
            raise ValueError(f"`session` {self.session}")
        x = self.cell.get(kind(self.kind).x, 0)
        if isinstance(x, str) or abs(x) > MOST:
            raise ValueError(f"`cell.{kind(self.kind).x}` {str(x)[:20]!r}, which is no number that can be drawn")
        if self.floor_us is None and any(arm.of_floor is not UNSET for arm in self.arms.values()):
            raise ValueError("no `floor_us`, and an arm with `of_floor`")


class _Setting(msgspec.Struct, forbid_unknown_fields=True):
    """The setting of a file. peers None: not recorded, in older files. minutes None: no limit."""

    ops: list[str]
    device: str
    dtype: Width
    grid: Size
    minutes: float | None
    at: dict[str, tuple[str, ...]] = {}
    peers: bool | None = None

    def __post_init__(self) -> None:
        if not self.ops:
            raise ValueError("no op set in `ops`")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"`minutes` {self.minutes:g}, which are not more than 0")


class Kept(msgspec.Struct):
    """A file. Its rows are checked against `_Row` and kept unchanged, with all their further fields."""

    date: str
    commit: str | None
    machine: dict[str, str | None]
    setting: _Setting
    rates: Rates
    left_out: dict[Name, int]
    sessions: list[Session]
    rows: list[Row]

    def __post_init__(self) -> None:
        try:
            datetime.fromisoformat(self.date)
        except ValueError:
            raise ValueError(f"`date` {self.date!r}, which is none") from None
        for name, count in self.left_out.items():
            if count < 0:
                raise ValueError(f"`left_out.{name}` {count}")
        for name, machine in self.machines.items():
            if machine.get("device_name") is None:
                raise ValueError(f"no `{name}.device_name`")
        for rates in filter(None, [self.rates, *(session.rates for session in self.sessions)]):
            if min(asdict(rates).values()) <= 0:
                raise ValueError(f"`rates` {asdict(rates)}, of which one is not above 0")

    @property
    def machines(self) -> dict[str, dict[str, str | None]]:
        return {"machine": self.machine} | {
            f"sessions[{number}].machine": session.machine for number, session in enumerate(self.sessions)}  # fmt: skip

    @property
    def begun(self) -> dict[str, object]:
        """The setting that all rows of one file share."""
        return {"op sets": self.setting.ops, "dtype": self.setting.dtype, "grid": self.setting.grid}

    def apart(self, at: Mapping[str, Sequence[str]]) -> set[str]:
        """The kinds of which the file has only cells chosen by another `--at`, and no information about the others."""
        if chosen(self.setting.at) != chosen(at):
            return {row["kind"] for row in self.rows} | self.left_out.keys()
        by = {row["kind"]: True for row in self.rows if row["kind"] not in self.left_out}
        for row in self.rows:
            if chosen(self.sessions[row["session"]].at) == chosen(at):
                by[row["kind"]] = False
        return {name for name, otherwise in by.items() if otherwise}


def read_file(file: Path) -> Kept:
    """Read a file of `instep bench`, or refuse it with the name of the field."""
    if not file.is_file():
        raise BadInput("--join", found=f"no file {file}", expected="a file that `instep bench` wrote")
    data: Kept = decode(msgspec.json.encode(read(file)), Kept, str(file), WRITTEN)
    for number, row in enumerate(data.rows):
        held: _Row = decode(msgspec.json.encode(row), _Row, f"{file}: rows[{number}]", WRITTEN)
        if held.session >= len(data.sessions):
            raise BadInput(f"{file}: rows[{number}]: session", found=held.session,
                           expected=f"one of {len(data.sessions)} sessions, from 0")  # fmt: skip
    for session in data.sessions:  # for files from before sessions recorded it
        session.at = session.at or data.setting.at
        session.peers = data.setting.peers if session.peers is None else session.peers
    return data
