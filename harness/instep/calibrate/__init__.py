"""Calibration: does an allowance hold for engines that are right, and what does it let through? `instep calibrate`.

Leaves out: choosing constants. They are derived (`checks/allowance.py`), and here confirmed or refuted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from .graded import RUNS, SIZES, limits, names
from .tables import Calibration
from .variants import Stage, variants

__all__ = ["SIZES", "Calibration", "calibrate", "names"]

Advance = Callable[[str, int, int], None]  # what is done, how many of how many


def calibrate(
    count: int, *, device: str = "cpu", op_sets: Iterable[str] = (), seconds: float | None = None, runs: int = RUNS,
    advance: Advance = lambda what, done, of: None,
) -> Calibration:
    """So many correct variants, then graded injected errors in so many runs each.

    Where both are asked for, each ends with its half of `seconds`.
    """
    result, stage = Calibration(device), Stage(device)
    parts, begun = 2 if count and runs else 1, time.perf_counter()

    def late(since: float) -> bool:
        return seconds is not None and time.perf_counter() - since > seconds / parts

    for variant in variants(count, op_sets):
        if late(begun):
            break
        result.add(variant, stage.run(variant))
        result.pairs = stage.pairs
        advance("correct variants", len(result.ran), count)
    result.seconds["variants"] = time.perf_counter() - begun
    begun = time.perf_counter()
    for limit in limits(device, runs) if runs else ():
        result.limits.append(limit)
        advance("graded errors", len(result.limits), 2 * len(names()))
        if late(begun):
            break
    result.seconds["limits"] = time.perf_counter() - begun
    return result
