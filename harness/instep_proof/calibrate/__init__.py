"""Calibration: do correct engines stay within the allowances, and which errors stay unseen? `instep calibrate`.

Leaves out: choosing constants. They are derived in `allowance.py`; here they are confirmed or refuted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from .graded import RUNS, SIZES, limits, names
from .tables import Calibration
from .variants import Stage, variants

__all__ = ["SIZES", "Calibration", "calibrate", "names"]

Advance = Callable[[str, int, int], None]  # progress: what is run, how many are done, of how many


def calibrate(
    count: int, *, device: str = "cpu", op_sets: Iterable[str] = (), seconds: float | None = None, runs: int = RUNS,
    advance: Advance = lambda what, done, of: None,
) -> Calibration:
    """Run this many correct variants, and then graded injected errors, each in this many runs.

    If both are wanted, each gets half of `seconds`.
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
