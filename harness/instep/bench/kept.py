"""The file of a benchmark, read again: a grid that goes on, and results of several calls that become one.

Leaves out: measuring (`run.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.errors import BadInput

from ..perf.fingerprint import fingerprint
from ..report.result import read
from . import KINDS
from .clock import Rates
from .run import Asked, Bench, Row, Session, key

LOAD = "load"  # of the fingerprint, what changes from minute to minute


def going_on(file: Path, asked: Asked) -> tuple[list[Row], list[Session], dict[str, int]]:
    """The rows of a file that was begun with the same op sets, dtype, grid, cells, revision and machine.

    With them come the calls that measured them, and how many cells of each kind it lacks.
    """
    data = _read(file)
    begun = {**_setting(data), "--at": _cells(data["setting"].get("at", {})), "commit": data["commit"],
             "machine": _still(data["machine"])}  # fmt: skip
    now = {"op sets": list(asked.sets), "dtype": str(asked.dtype).removeprefix("torch."), "grid": asked.size,
           "--at": _cells(asked.at), "commit": asked.commit, "machine": _still(fingerprint(asked.device))}  # fmt: skip
    _same(file, begun, now, "another --json file begins anew")
    return data["rows"], msgspec.convert(data["sessions"], list[Session]), dict(data["left_out"])


def _cells(at: Mapping[str, Sequence[str]]) -> str:
    """In words, which cells are asked for."""
    return " ".join(f"{axis}={value}" for axis, values in sorted(at.items()) for value in values) or "all cells"


def joined(files: Sequence[Path], commit: str | None) -> Bench:
    """All rows; of a cell that several files have, the latest. Op sets, dtype, grid and card are the same in all."""
    every = [_read(file) for file in files]
    last = max(every, key=lambda data: str(data["date"]))
    for file, data in zip(files, every, strict=True):
        here, there = ({**_setting(one), "machine": {"device_name": one["machine"]["device_name"]}}
                       for one in (data, every[0]))  # fmt: skip
        _same(file, here, there, "it has a file of its own")
    found, left = dict[Any, tuple[Session, Row]](), dict[str, int]()
    for data in sorted(every, key=lambda data: str(data["date"])):
        sessions = msgspec.convert(data["sessions"], list[Session])
        own = {key(row): (sessions[row["session"]], row) for row in data["rows"]}
        left = _left(left, data, *(Counter(kind for kind, _ in one.keys() - other.keys())
                                   for one, other in ((own, found), (found, own))))  # fmt: skip
        # A file that was joined is younger than what it holds.
        found |= {cell: one for cell, one in own.items() if cell not in found or one[0].date >= found[cell][0].date}
    chosen = sorted(found.values(), key=lambda one: list(KINDS).index(one[1]["kind"]))
    numbers = {msgspec.json.encode(session): session for session, _ in chosen}
    setting, order = last["setting"], list(numbers)
    asked = Asked(dict.fromkeys(setting["ops"], PLAIN), setting["device"], getattr(torch, setting["dtype"]),  # by name
                  tuple(name for name in KINDS if name in left or any(row["kind"] == name for _, row in chosen)),
                  setting["grid"], setting["minutes"], commit=commit)  # fmt: skip
    rows = [row | {"session": order.index(msgspec.json.encode(session))} for session, row in chosen]
    return Bench(asked, Rates(**last["rates"]), rows, left, list(numbers.values()))


def _left(left: dict[str, int], data: dict[str, Any], new: Counter[str], stay: Counter[str]) -> dict[str, int]:
    """How many cells are left out once a further file came in, by kind.

    new, stay: how many cells it has that no earlier file has, and earlier files have that it has not.
    A file of chosen cells (`--at`) says nothing of the others. What it left out itself an earlier file may have.
    """
    if data["setting"].get("at"):
        return {name: count - new[name] for name, count in left.items() if count > new[name]}
    kinds, told = {row["kind"] for row in data["rows"]}, dict[str, int](data["left_out"])
    told = {name: count - stay[name] for name, count in told.items() if count > stay[name]}
    return {name: count for name, count in left.items() if name not in kinds and name not in data["left_out"]} | told


def _read(file: Path) -> dict[str, Any]:
    wrong = BadInput(str(file), found="no result of `instep bench`", expected="one, or no file")
    if not file.is_file():
        raise BadInput("--join", found=f"no file {file}", expected="a file that `instep bench` wrote")
    data = read(file)
    try:
        sessions = msgspec.convert(data["sessions"], list[Session])
        _ = _setting(data), data["commit"], data["machine"]["device_name"], dict(data["left_out"]), data["date"]
        _ = [(key(row), sessions[row["session"]]) for row in data["rows"]]
    except (IndexError, KeyError, TypeError, AttributeError, msgspec.ValidationError):
        raise wrong from None
    return data


def _setting(data: dict[str, Any]) -> dict[str, Any]:
    setting = data["setting"]
    return {"op sets": setting["ops"], "dtype": setting["dtype"], "grid": setting["grid"]}


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
