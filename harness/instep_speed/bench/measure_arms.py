"""Measure the arms of one cell: judge them, time them interleaved, and judge them again.

On a card the timed object is a captured graph and not the call that was judged. So after the timing the graph and the
call start from the same memory and must leave the same bits, and the call is judged again. An exception is a finding of
its arm, and the other arms are timed again without it. An arm that kills the device ends the cell, or else all other
arms would be blamed. Leaves out: arms that time themselves and compare on the way (`kinds/rounds.py`,
`replayed_acceptance.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from instep.watch.batched_host_copies import alive
from instep_optimized.ops.watch_op_calls import tensors_of
from instep_optimized.ranks.lockstep import RankKilled

from .answer_check import Judged, fallen, first, same
from .bench_types import Arm, Cell
from .interleaved_timing import SAMPLES, Fell, Times, Work, less, of_one, timed

LESS = "\nless"  # suffix of the function whose time is subtracted from an arm


class Lost(Exception):
    """An arm has killed the device: no further launch of this process works."""

    def __init__(self, arm: str, finding: str) -> None:
        super().__init__(arm, finding)
        self.arm, self.finding = arm, finding


def gone(device: torch.device) -> bool:
    """Whether the device has stopped working."""
    return device.type == "cuda" and not alive(str(device))


@dataclass
class Measured:
    """The result of one arm: its judgement, its times if there are any, and its further fields."""

    judged: Judged
    times: Times | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def fell(self, finding: str, timed: bool = False) -> None:
        """Record a later finding; the first one stays. With `timed` the time is kept next to it."""
        self.judged = replace(self.judged, finding=self.judged.finding or finding)
        self.times = self.times if timed else None


def measured(cell: Cell, device: torch.device) -> dict[str, Measured]:
    """Measure every arm. A wrong peer is still timed, a wrong arm of ours is not. Raises `Lost`."""
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
    """Describe an exception; raise `Lost` if the device is gone."""
    said = fallen(raised)
    if gone(device):
        raise Lost(arm, said) from raised
    return said


def _or_finding(arm: Arm, own: Measured, ask: Callable[[], Any], device: torch.device) -> Any:
    """Call `ask`; an exception becomes a finding, and the result is None."""
    try:
        return ask()
    except Exception as raised:
        own.fell(_said(arm.name, raised, device))
        return None


def _judged(arm: Arm, device: torch.device) -> Judged:
    """Judge the answers. Foreign code may raise anything, and an exception of ours is a finding as well."""
    try:
        return arm.judged()
    except RankKilled:  # nothing is known about the arm
        raise
    except Exception as raised:
        return Judged(_said(arm.name, raised, device))


def _time(arms: Sequence[Arm], found: Mapping[str, Measured], device: torch.device) -> None:
    """Time all arms that raise nothing. If one raises, the others are timed again from the start."""
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
    """Call the work once, and drop an arm that raises before others are timed next to it."""
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
    """Compare again after the timing: the timed graph with a call, and a call with the right answer."""
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
    """Compare the results of the timed graph with calls: finite, and equal bits if calls are reproducible.

    Runs one period and two calls more, so that a store that happens once in a period is read by the last call.
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
    """Reset the memory that a call changes."""
    cell.anew()
    arm.anew()
