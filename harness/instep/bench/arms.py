"""The arms of one cell: judged, timed beside each other, and judged once more behind that.

What is timed on a card is a captured graph, and not the call that was judged. So behind the timing the graph and the
call begin at the same memory, and must leave the same bits; and the call is judged again. What raises is a finding of
its arm, and the others are timed anew without it. What kills the device ends the cell, or all others would be blamed.
Leaves out: arms that keep time themselves, which compare what they timed on the way (`kinds/rounds.py`, `forced.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from instep_optimized.ops.around import tensors_of

from ..observe.to_host import alive
from .base import Arm, Cell
from .clock import SAMPLES, Fell, Times, Work, less, of_one, timed
from .right import Judged, fallen, first, same

LESS = "\nless"  # ends the name of what is taken off an arm


class Lost(Exception):
    """An arm has killed the device: no launch of this process works any more."""

    def __init__(self, arm: str, finding: str) -> None:
        super().__init__(arm, finding)
        self.arm, self.finding = arm, finding


def gone(device: torch.device) -> bool:
    """Whether the device works no longer."""
    return device.type == "cuda" and not alive(str(device))


@dataclass
class Measured:
    """What became of an arm: its judgement, its times if it has some, and what else it tells."""

    judged: Judged
    times: Times | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def fell(self, finding: str, timed: bool = False) -> None:
        """A finding that came later; the first one stays. timed: its time stands beside it all the same."""
        self.judged = replace(self.judged, finding=self.judged.finding or finding)
        self.times = self.times if timed else None


def measured(cell: Cell, device: torch.device) -> dict[str, Measured]:
    """Of every arm. A wrong peer is timed all the same, a wrong arm of ours is not. Raises `Lost`."""
    found = {arm.name: Measured(_judged(arm, device)) for arm in cell.arms}
    chosen = [arm for arm in cell.arms if not found[arm.name].judged.finding or (arm.peer and arm.work is not None)]
    for arm in chosen:
        own = found[arm.name]
        if arm.samples is not None and (taken := _or_finding(arm, own, partial(arm.samples, SAMPLES), device)):
            own.times = Times(tuple(taken), "rounds")
    _time([arm for arm in chosen if arm.work is not None], found, device)
    for arm in chosen:
        own = found[arm.name]
        if own.times is not None and not own.judged.finding and (said := _again(cell, arm, own.times, device)):
            own.fell(said, timed=bool(arm.peer))
    for arm in chosen:
        own = found[arm.name]
        if own.times is not None:
            own.times = replace(own.times, replay=None)
            own.more = _or_finding(arm, own, arm.more, device) or {}
    return found


def _said(arm: str, raised: Exception, device: torch.device) -> str:
    """What it raised, in words; or the end of the cell."""
    said = fallen(raised)
    if gone(device):
        raise Lost(arm, said) from raised
    return said


def _or_finding(arm: Arm, own: Measured, ask: Callable[[], Any], device: torch.device) -> Any:
    """None: it raised, which is a finding."""
    try:
        return ask()
    except Exception as raised:
        own.fell(_said(arm.name, raised, device))
        return None


def _judged(arm: Arm, device: torch.device) -> Judged:
    """What is wrong with its answers. Foreign code may raise anything; what ours raises is a finding, too."""
    try:
        return arm.judged()
    except Exception as raised:
        return Judged(_said(arm.name, raised, device))


def _time(arms: Sequence[Arm], found: Mapping[str, Measured], device: torch.device) -> None:
    """All that raise nothing. When one raises, the lap is broken: the others are timed from the beginning."""
    left = [arm for arm in arms if _called(arm, found[arm.name], device)]
    while left:
        try:
            every = timed(dict(work for arm in left for work in _works(arm)), device,
                          periods={name: arm.period for arm in left for name, _ in _works(arm)})  # fmt: skip
        except Fell as fell:
            name = fell.name.removesuffix(LESS)
            found[name].fell(_said(name, fell.raised, device))
            left = [arm for arm in left if arm.name != name]
            continue
        for arm in left:
            times, spare = every[arm.name], every.get(arm.name + LESS)
            found[arm.name].times = of_one(times, arm.units) if spare is None else less(times, spare, arm.units)
        return


def _called(arm: Arm, own: Measured, device: torch.device) -> bool:
    """Whether its work can be called at all: what raises at once is taken out before others are timed beside it."""
    try:
        for _, work in _works(arm):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as raised:
        own.fell(_said(arm.name, raised, device))
        return False
    return True


def _works(arm: Arm) -> list[tuple[str, Work]]:
    assert arm.work is not None
    return [(arm.name, arm.work), *([] if arm.less is None else [(arm.name + LESS, arm.less)])]


def _again(cell: Cell, arm: Arm, times: Times, device: torch.device) -> str:
    """What is wrong behind the timing: with the graph that was timed, or with the answers of a call."""
    if arm.work is None:
        return ""
    try:
        said = "" if times.replay is None else _differs(cell, arm, arm.work, times.replay)
        if not said:
            _anew(cell, arm)
            said = arm.judged().finding
    except Exception as raised:
        said = _said(arm.name, raised, device)
    return f"after it was timed: {said}" if said else ""


def _differs(cell: Cell, arm: Arm, work: Work, replay: Work) -> str:
    """What the graph leaves, against calls: numbers, and the same bits, unless calls differ among themselves.

    A period and two turns more: what is stored once in a period is then read in the last one.
    """

    def left(turn: Work) -> list[torch.Tensor]:
        _anew(cell, arm)
        found: object = None
        for _ in range(arm.period + 2):
            found = turn()
        return [x.clone() for x in tensors_of(found)]

    graph, called = left(replay), left(work)
    for number, (x, y) in enumerate(zip(graph, called, strict=True)):
        what = f"output {number + 1} of the timed graph"
        if not bool(torch.isfinite(x).all()):
            return f"{what} is not finite"
        if said := same(f"{what}, against a call", x, y):
            return "" if first(*(same("", *both) for both in zip(called, left(work), strict=True))) else said
    return ""


def _anew(cell: Cell, arm: Arm) -> None:
    """The memory that a turn changes is as at the beginning."""
    cell.anew()
    arm.anew()
