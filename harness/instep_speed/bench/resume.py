"""Read the file of a benchmark again: check its schema, resume a grid, or join the results of several calls.

Leaves out: measuring (`run.py`), and writing a result (`report/result.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import torch
from msgspec import UNSET, UnsetType

from instep.options import WIDTHS
from instep.report.machine import fingerprint
from instep.report.result import read
from instep.trace.file import decode
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.errors import BadInput

from . import KINDS, kind
from .bench_types import Size
from .interleaved_timing import Rates
from .run import Asked, Axes, Bench, Row, Session, chosen, key

LOAD = "load"  # the field of the fingerprint that changes from minute to minute
PEERS = {True: "included", False: "left out", None: "not known"}
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


def going_on(file: Path, asked: Asked) -> Bench:
    """The result in a file with the same op sets, dtype, grid, cells, peers, revision and machine."""
    data = read_file(file)
    begun = {**data.begun, "--at": chosen(data.setting.at) or "all cells", "peers": PEERS[data.setting.peers],
             "commit": data.commit, "machine": _still(data.machine)}  # fmt: skip
    now = {"op sets": list(asked.sets), "dtype": str(asked.dtype).removeprefix("torch."), "grid": asked.size,
           "ranks": asked.ranks, "--at": chosen(asked.at) or "all cells", "peers": PEERS[asked.peers],
           "commit": asked.commit, "machine": _still(fingerprint(asked.device))}  # fmt: skip
    _same(file, begun, now, "name another --json file to start again")
    return Bench(asked, rows=data.rows, sessions=data.sessions, wanted=data.wanted)


def joined(files: Sequence[Path], commit: str | None) -> Bench:
    """Join all rows; the latest row of a cell counts. All files must share op sets, dtype, grid and machine."""
    every = [read_file(file) for file in files]
    for file, data in zip(files, every, strict=True):
        for machine in data.machines.values():
            here, there = (one.begun | {"machine": _judged_by(one.setting.device, its)}
                           for one, its in ((data, machine), (every[0], every[0].machine)))  # fmt: skip
            _same(file, here, there, "keep its results in a separate file")
    if not any(data.rows for data in every):
        raise BadInput(f"{files[0]}: rows", found="none", expected="a cell that was measured")
    at = every[0].setting.at if len({chosen(data.setting.at) for data in every}) == 1 else {}
    found, wanted = dict[Any, tuple[Session, Row]](), [one for data in every for one in data.wanted]
    for data in sorted(every, key=lambda data: data.date):
        own = {key(row): (data.sessions[row["session"]], row) for row in data.rows}
        # A joined file is younger than its rows.
        found |= {cell: one for cell, one in own.items() if cell not in found or one[0].date >= found[cell][0].date}
    rows = sorted(found.values(), key=lambda one: list(KINDS).index(one[1]["kind"]))
    numbers = {msgspec.json.encode(session): session for session, _ in rows}
    last, order, peers = max(every, key=lambda data: data.date), list(numbers), {one.peers for one, _ in rows}
    asked = Asked(dict.fromkeys(last.setting.ops, PLAIN), last.setting.device, getattr(torch, last.setting.dtype),
                  tuple(name for name in KINDS if any(name == one for one, _ in wanted)),
                  last.setting.grid, math.inf if last.setting.minutes is None else last.setting.minutes,
                  peers.pop() if len(peers) == 1 else None, commit, at, last.setting.ranks)  # fmt: skip
    numbered = [row | {"session": order.index(msgspec.json.encode(session))} for session, row in rows]
    made = Bench(asked, last.rates, numbered, list(numbers.values()), wanted)
    made.take_rates()
    return made


def _judged_by(device: str, machine: Mapping[str, str | None]) -> dict[str, str | None]:
    """The part of a machine's description that must be the same. A CPU's device name gives its architecture alone."""
    return {name: machine.get(name) for name in ("device_name", *["processor"] * (not device.startswith("cuda")))}


def _still(machine: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in machine.items() if name != LOAD}


def _same(file: Path, begun: dict[str, Any], now: dict[str, Any], hint: str) -> None:
    for what, was in begun.items():
        if was != now[what]:
            found = f"begun with {what} {_told(was, now[what])}"
            raise BadInput(str(file), found=found, expected=_told(now[what], was), hint=hint)


def _told(one: Any, other: Any) -> str:
    if not isinstance(one, dict):
        return str(one)
    return ", ".join(f"{name} {value}" for name, value in one.items() if other.get(name) != value)


# ---- the schema of a file, checked field by field before the file is used


class _Collectives(msgspec.Struct):
    """The collectives of a round over ranks, as `profile.Collectives` has them."""

    calls: float
    bytes: float
    floor_us: float
    ranks_us: list[float]
    us: list[float] = []
    moving_us: float | None = None


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
    proposals_us: float | UnsetType = UNSET
    launches: int | UnsetType = UNSET
    gap_us: Some = UNSET
    collectives: _Collectives | UnsetType = UNSET

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
    ranks: int = 1

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
        return {"op sets": self.setting.ops, "dtype": self.setting.dtype, "grid": self.setting.grid,
                "ranks": self.setting.ranks}  # fmt: skip

    @property
    def wanted(self) -> list[tuple[str, Axes]]:
        """The kinds that the calls requested, each with its `--at`. Of a kind without rows, every call's is taken."""
        every = [session.at for session in self.sessions] or [self.setting.at]
        found = [(row["kind"], self.sessions[row["session"]].at) for row in self.rows]
        found += [(name, at) for name in self.left_out for at in every]
        return list({(name, chosen(at)): (name, at) for name, at in found}.values())


def read_file(file: Path) -> Kept:
    """Read a file of `instep bench`, or refuse it with the name of the field."""
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
