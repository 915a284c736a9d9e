"""Calibration: do correct engines stay within the allowances, and which errors stay unseen? `instep calibrate`.

Leaves out: choosing constants. They are derived in `tier_allowances.py`; here they are confirmed or refuted.
"""

from __future__ import annotations

from collections.abc import Iterable

from instep.campaign.runner import TrialRunner

from .allowance_use import Stage, variants
from .graded_errors import RUNS, STORAGES, limit, names
from .long_runs import LongRuns
from .tables import Calibration


def calibrate(
    result: Calibration, count: int, run: TrialRunner | None = None, *, op_sets: Iterable[str] = (), runs: int = RUNS,
    long: int = 0,
) -> None:
    """Add this many correct variants to the result, then graded injected errors, each in this many runs, and then this
    many long runs of correct variants.

    All that are wanted get equal parts of the time.
    """
    run, stage, stages = run or TrialRunner(), Stage(result.device), [Stage(result.device) for _ in range(runs)]
    errors = [(name, storage) for storage in STORAGES for name in names()]
    result.seconds |= {"variants": 0.0, "limits": 0.0}
    wanted = {"variants": count, "limits": runs, "long": long}
    for part in run.shares([name for name, number in wanted.items() if number]):
        if part == "variants":
            for variant in run.trials(list(variants(count, op_sets)), lambda one: "correct variants"):
                result.add(variant, stage.run(variant))
                result.pairs, result.seconds[part] = stage.pairs, run.seconds
        elif part == "long":
            result.long = LongRuns()
            for variant in run.trials(list(variants(long, op_sets)), lambda one: "long runs"):
                result.long.run(variant)
                result.seconds[part] = run.seconds
        else:
            for name, storage in run.trials(errors, lambda one: "graded errors"):
                result.limits.append(limit(name, storage, stages))
                result.seconds[part] = run.seconds
