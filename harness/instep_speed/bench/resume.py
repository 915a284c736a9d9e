"""Read the file of a benchmark again: resume a grid, or join the results of several calls.

Leaves out: the schema of a file (`schema.py`), and measuring (`run.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.errors import BadInput

from ..gate.fingerprint import fingerprint
from . import KINDS
from .run import Asked, Bench, Row, Session, chosen, key
from .schema import Kept, read_file

LOAD = "load"  # the field of the fingerprint that changes from minute to minute
PEERS = {True: "included", False: "left out", None: "not known"}


def going_on(file: Path, asked: Asked) -> tuple[list[Row], list[Session], dict[str, int]]:
    """The rows of a file with the same op sets, dtype, grid, cells, peers, revision and machine.

    Also returns the calls that measured them, and the number of missing cells of each kind.
    """
    data = read_file(file)
    begun = {**data.begun, "--at": chosen(data.setting.at) or "all cells", "peers": PEERS[data.setting.peers],
             "commit": data.commit, "machine": _still(data.machine)}  # fmt: skip
    now = {"op sets": list(asked.sets), "dtype": str(asked.dtype).removeprefix("torch."), "grid": asked.size,
           "--at": chosen(asked.at) or "all cells", "peers": PEERS[asked.peers], "commit": asked.commit,
           "machine": _still(fingerprint(asked.device))}  # fmt: skip
    _same(file, begun, now, "name another --json file to start again")
    return data.rows, data.sessions, data.left_out


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
    found, left = dict[Any, tuple[Session, Row]](), dict[str, int]()
    for data in sorted(every, key=lambda data: data.date):
        own = {key(row): (data.sessions[row["session"]], row) for row in data.rows}
        left = _left(left, data, data.apart(at), *(Counter(kind for kind, _ in one.keys() - other.keys())
                                                   for one, other in ((own, found), (found, own))))  # fmt: skip
        # A joined file is younger than its rows.
        found |= {cell: one for cell, one in own.items() if cell not in found or one[0].date >= found[cell][0].date}
    rows = sorted(found.values(), key=lambda one: list(KINDS).index(one[1]["kind"]))
    numbers = {msgspec.json.encode(session): session for session, _ in rows}
    last, order, peers = max(every, key=lambda data: data.date), list(numbers), {one.peers for one, _ in rows}
    asked = Asked(dict.fromkeys(last.setting.ops, PLAIN), last.setting.device, getattr(torch, last.setting.dtype),
                  tuple(name for name in KINDS if name in left or any(row["kind"] == name for _, row in rows)),
                  last.setting.grid, math.inf if last.setting.minutes is None else last.setting.minutes,
                  peers.pop() if len(peers) == 1 else None, commit, at)  # fmt: skip
    numbered = [row | {"session": order.index(msgspec.json.encode(session))} for session, row in rows]
    made = Bench(asked, last.rates, numbered, left, list(numbers.values()))
    made.take_rates()
    return made


def _left(
    left: Mapping[str, int], data: Kept, apart: set[str], new: Counter[str], stay: Counter[str]
) -> dict[str, int]:
    """The number of missing cells by kind, after one more file was joined.

    new, stay: the cells of this file that no earlier one has, and the cells of earlier ones that it lacks.
    apart: kinds of which this file has chosen cells only (`--at`), with no information about the others.
    An earlier file may have the cells that this file lacks.
    """
    told = {row["kind"] for row in data.rows}.union(data.left_out) - apart
    found = {name: count - new[name] for name, count in left.items() if name not in told}
    found |= {name: count - stay[name] for name, count in data.left_out.items() if name in told}
    return {name: count for name, count in found.items() if count > 0}


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
