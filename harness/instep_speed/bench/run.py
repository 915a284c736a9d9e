"""Run a grid: build each cell and measure it (`measure_arms.py`); each kind has a share of the time.

An arm with wrong answers has no time. Time that a kind does not need goes to the next one, and at the end to cells that
did not fit before. Cells that were left out are reported. Leaves out: tables and plots
(`result_document.py`).
"""

import gc
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from typing import Any

import msgspec
import torch

from instep.campaign.runner import TrialRunner
from instep.report.machine import fingerprint
from instep.report.result import Result
from instep.report.result import Session as Called
from instep.verdict import Exit
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.errors import BadInput, InstepError, OutOfCapacity, Unsupported

from . import KINDS, kind
from .answer_check import Judged, fallen
from .bench_types import SEED, At, Cell, Ground, Size
from .interleaved_timing import Rates, rates
from .measure_arms import Lost, gone, measured

Row = dict[str, Any]
Axes = Mapping[str, Sequence[str]]  # `--at`: axis -> printed values; empty: all cells
UNKNOWN = Rates(math.nan, math.nan, math.nan)  # until they are measured


class Session(Called):
    """One call of the command, with the rates of its machine, which define the floors of its rows.

    at     the cells that the user chose (`Asked.at`)
    peers  whether peers were requested; None: not known
    """

    rates: Rates | None = None
    at: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    peers: bool | None = None

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.date)  # refuses an invalid date, because the latest date counts


@dataclass
class Asked:
    """The request: kinds in order, the size of the grid, and the minutes (more than 0).

    at     axis -> printed values: only cells with one of these, none of kinds without the axis; empty: all cells
    peers  None: not known, for rows that were read from files
    ranks  as in `Ground`
    """

    sets: Mapping[str, Ops]
    device: str
    dtype: torch.dtype
    kinds: tuple[str, ...] = tuple(KINDS)
    size: Size = "default"
    minutes: float = 6.0
    peers: bool | None = True
    commit: str | None = None
    at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ranks: int = 1

    def __post_init__(self) -> None:
        for name, found, right, expected in (
            ("--kind", ", ".join(self.kinds), bool(self.kinds) and set(self.kinds) <= set(KINDS),
             f"some of {', '.join(KINDS)}"),
            ("--minutes", self.minutes, self.minutes > 0, "more than 0"),
        ):  # fmt: skip
            if not right:
                raise BadInput(name, found=found, expected=expected)
        if not self.device.startswith("cuda"):
            slow = [name for name, ops in self.sets.items() if ops.captures]
            if slow:
                raise Unsupported(f"timing {slow[0]!r} on a CPU: its kernels are interpreted there; --ops plain")

    def cells(self, name: str) -> list[At]:
        """All cells of a kind in this grid."""
        device = torch.device("cuda" if self.device.startswith("cuda") else "cpu")
        return list(kind(name).cells(Ground(device, self.dtype, self.sets, UNKNOWN, 0, ranks=self.ranks), self.size))


def matches(at: At, axes: Axes) -> bool:
    """Whether a cell has one of the values on each of these axes."""
    return all(axis in at and str(at[axis]) in values for axis, values in axes.items())


def chosen(at: Axes) -> str:
    """Format the chosen cells; empty if all are chosen."""
    return " ".join(f"{axis}={value}" for axis, values in sorted(at.items()) for value in values)


@dataclass
class Bench:
    """The results: rows by cell, and the rates of the machine.

    sessions  the calls that measured the rows; a row has the number of its call
    wanted    the kinds that the calls requested, each with its `--at`
    ended     why nothing more was measured
    """

    asked: Asked
    rates: Rates = UNKNOWN
    rows: list[Row] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    wanted: list[tuple[str, Axes]] = field(default_factory=list)
    ended: str = "for want of minutes"

    @property
    def exit(self) -> Exit:
        """The exit code. A peer's wrong answer is reported but does not count."""
        ours = [arm for row in self.rows for arm in row["arms"].values() if not arm["peer"]]
        if any(arm["finding"] for arm in ours):
            return Exit.DIVERGED
        return Exit.AGREED if any("us" in arm for arm in ours) else Exit.INCONCLUSIVE

    @property
    def left(self) -> dict[str, int]:
        """The number of requested cells without a row, by kind; all cells of a kind that has none of `--at`."""
        there, left = {key(row) for row in self.rows}, dict[str, int]()
        for name in dict.fromkeys(name for name, _ in self.wanted):
            cells = self.asked.cells(name)
            mine = [at for at in cells if any(matches(at, axes) for one, axes in self.wanted if one == name)]
            left[name] = sum(key({"kind": name, "cell": at}) not in there
                             for at in mine or (cells if self.asked.at else ()))  # fmt: skip
        return {name: count for name, count in left.items() if count}

    def _because(self, name: str) -> str:
        some = any(matches(at, self.asked.at) for at in self.asked.cells(name))
        return f", {self.ended if some else f'none has {chosen(self.asked.at)}'}"

    @property
    def last(self) -> Session | None:
        """The latest session."""
        return max(self.sessions, key=lambda one: one.date, default=None)

    def take_rates(self) -> None:
        """Use the rates of the latest session, which define its floors; old files may not have them."""
        if self.last is not None and self.last.rates is not None:
            self.rates = self.last.rates

    def result(self) -> Result:
        asked = self.asked
        setting = {"ops": list(asked.sets), "device": asked.device, "dtype": str(asked.dtype).removeprefix("torch."),
                   "grid": asked.size, "minutes": asked.minutes, "peers": asked.peers}  # fmt: skip
        setting |= {"at": {axis: list(values) for axis, values in asked.at.items()}} if asked.at else {}
        setting |= {"ranks": asked.ranks} if asked.ranks > 1 else {}
        machine = fingerprint(asked.device) if self.last is None else self.last.machine
        left = self.left
        found = {"machine": machine, "setting": setting, "rates": self.rates, "left_out": left,
                 "left_because": {name: self._because(name) for name in left},
                 "sessions": self.sessions, "rows": self.rows}  # fmt: skip
        return Result(self.exit, "cpu", found, asked.commit)  # the machine is in `found`


def bench(asked: Asked, run: TrialRunner | None = None, found: Bench | None = None) -> Bench:
    """Run the benchmark. found: the rows of an earlier call, which are not measured again."""
    device, run, found = torch.device(asked.device), run or TrialRunner(60 * asked.minutes), found or Bench(asked)
    torch.manual_seed(SEED)
    ground = Ground(device, asked.dtype, asked.sets, UNKNOWN, _past(device), bool(asked.peers), asked.ranks)
    if ground.card and torch.cuda.device_count() < asked.ranks:
        raise BadInput("--ranks", found=f"{asked.ranks}, and {torch.cuda.device_count()} GPUs",
                       expected="a GPU for each rank")  # fmt: skip
    grid, named = _grid(asked)  # refuse bad requests before measuring
    found.wanted += [(name, asked.at) for name in named]
    run.advance("measuring the machine", 0, None)
    found.rates = rates(device, asked.dtype)
    ground = replace(ground, rates=found.rates)
    there, begun = {key(row) for row in found.rows}, time.monotonic()
    session = Session.now(asked.device, asked.commit)
    session.machine, session.rates = fingerprint(asked.device), found.rates
    session.at, session.peers = dict(asked.at), asked.peers

    def absent(cells: Iterable[tuple[str, At]]) -> list[tuple[str, At]]:
        return [(name, at) for name, at in cells if key({"kind": name, "cell": at}) not in there]

    by_kind = [[(name, at) for at in every] for name, every in grid.items()]
    for share in chain(run.shares(by_kind), run.shares([[*chain(*by_kind)]])):  # the last share uses leftover time
        for name, at in run.trials(absent(share), lambda cell: cell[0]):
            row = _row(name, ground, at)
            if not found.sessions or found.sessions[-1] is not session:  # a session needs a row
                found.sessions.append(session)
            found.rows.append(row | {"session": len(found.sessions) - 1})
            session.seconds = round(time.monotonic() - begun, 1)
            there.add(key(row))
            if gone(device):  # an arm has killed it
                found.ended = "since the device works no longer"
                run.keep()
                return found
            if ground.card:  # the card's memory is short, and the next cell may need all of it
                gc.collect()
                torch.cuda.empty_cache()
    found.take_rates()  # if nothing was measured, the rates come from the file
    return found


def _grid(asked: Asked) -> tuple[dict[str, list[At]], list[str]]:
    """The requested cells by kind; and the requested kinds, which may have none.

    Every value of `--at` must be that of some cell, or else a requested cell would be missing without a message.
    """
    whole = {name: asked.cells(name) for name in asked.kinds}
    found = {name: [at for at in cells if matches(at, asked.at)] for name, cells in whole.items()}
    axes, taken = _values(whole), _values(found)
    if none := _unmet(asked.at, axes) or _unmet(asked.at, taken):
        there = "; ".join(f"{axis} {', '.join(sorted(values))}" for axis, values in axes.items())
        how = "" if _unmet(asked.at, axes) else " at once" if none == chosen(asked.at) else " with the other values"
        raise BadInput("--at", found=f"{none}, which no cell of this grid has{how}", expected=there)
    named = set(asked.kinds) != set(KINDS)  # all kinds means none was named
    grid = {name: cells for name, cells in found.items() if cells}
    return grid, [name for name in asked.kinds if named or name in grid]


def _values(grid: Mapping[str, list[At]]) -> dict[str, set[str]]:
    """Map each axis to its printed values."""
    found: dict[str, set[str]] = {}
    for axis, value in (one for cells in grid.values() for at in cells for one in at.items()):
        found.setdefault(axis, set()).add(str(value))
    return found


def _unmet(at: Axes, axes: Mapping[str, Collection[str]]) -> str:
    """Format the part of `at` that is not among the values."""
    return chosen({axis: [value for value in values if value not in axes.get(axis, ())] for axis, values in at.items()})


def key(row: Row) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The key of a row: its kind and its cell."""
    return row["kind"], tuple(sorted(row["cell"].items()))


def _row(name: str, ground: Ground, at: At) -> Row:
    begun = time.monotonic()
    row: Row = {"kind": name, "cell": dict(at), "floor_us": None, "arms": {}, "absent": {}}
    try:
        cell, fell = _built(name, ground, at)
    except (Unsupported, OutOfCapacity, torch.OutOfMemoryError) as refused:
        return row | {"absent": dict.fromkeys(ground.sets, " ".join(str(refused).split()))}
    if gone(ground.device):  # the culprit is unknown
        others = dict.fromkeys((arm.name for arm in cell.arms), "the device was killed while the cell was built")
        return row | {"absent": cell.absent | others, "arms": _fallen(fell)}
    floor = ground.rates.floor(cell.read, cell.written, cell.flops)
    row |= {"floor_us": 1e6 * floor, "bytes": cell.read + cell.written, "flops": cell.flops, "absent": cell.absent}
    try:
        arms = measured(cell, ground.device)
    except Lost as lost:
        rest = [arm.name for arm in cell.arms if arm.name != lost.arm]
        peer = next(arm.peer for arm in cell.arms if arm.name == lost.arm)
        said = f"it has killed the device: {lost.finding}"
        return row | {"arms": {lost.arm: {"peer": peer, "finding": said}},
                      "absent": cell.absent | dict.fromkeys(rest, f"{lost.arm} has killed the device")}  # fmt: skip
    floor += cell.waits()
    row["floor_us"] = 1e6 * floor
    bar = arms[kind(name).bar].judged if kind(name).bar in arms else Judged("")
    for arm in cell.arms:
        own = arms[arm.name]
        told: dict[str, Any] = {"peer": arm.peer, "finding": own.judged.finding}
        told |= {"errors": dict(own.judged.errors)} if own.judged.errors else {}
        if not arm.peer and (above := own.judged.above(bar)):
            told["above"] = f"errs more than {kind(name).bar}: {above}"
        if own.times is not None:
            data = own.times.data()
            told |= data | {"of_floor": float(str(data["mean"])) / row["floor_us"]} if floor and "us" in data else data
            told |= own.more
        row["arms"][arm.name] = told
    row["arms"] |= _fallen(fell)
    return row | {"seconds": time.monotonic() - begun}


def _fallen(fell: Mapping[str, str]) -> dict[str, Any]:
    """Findings of op sets whose code raised while the cell was built."""
    return {one: {"peer": "", "finding": said} for one, said in fell.items()}


def _built(name: str, ground: Ground, at: At) -> tuple[Cell, dict[str, str]]:
    """The cell, and the exceptions of op sets that could not be built.

    An exception that `plain` raises as well is the harness's own.
    """
    make = kind(name).make
    try:
        return make(ground, at), {}
    except (InstepError, torch.OutOfMemoryError):
        raise
    except Exception as raised:
        make(replace(ground, sets={PLAIN.name: PLAIN}, peers=False), at)
        fell = dict[str, str]()
        for one, ops in ground.sets.items():
            try:
                make(replace(ground, sets={one: ops}, peers=False), at)
            except Exception as own:
                fell[one] = fallen(own)
        rest = {one: ops for one, ops in ground.sets.items() if one not in fell}
        if not fell:
            raise raised from None
        return make(replace(ground, sets=rest), at) if rest else Cell([]), fell


def _past(device: torch.device) -> int:
    """Twice the size of the card's last-level cache."""
    return 2 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
