"""Calibration: do correct engines stay within the allowances, and which errors stay unseen? `instep calibrate`.

Leaves out: choosing constants. They are derived in `tier_allowances.py`; here they are confirmed or refuted.
"""

from __future__ import annotations

from collections.abc import Iterable

from instep.campaign.runner import TrialRunner

from .allowance_use import Stage, variants
from .graded_errors import RUNS, STORAGES, limit, names
from .tables import Calibration


def calibrate(
    result: Calibration, count: int, run: TrialRunner | None = None, *, op_sets: Iterable[str] = (), runs: int = RUNS,
) -> None:
    """Add this many correct variants to the result, and then graded injected errors, each in this many runs.

    If both are wanted, each gets half of the time.
    """
    run, stage, stages = run or TrialRunner(), Stage(result.device), [Stage(result.device) for _ in range(runs)]
    errors = [(name, storage) for storage in STORAGES for name in names()]
    result.seconds |= {"variants": 0.0, "limits": 0.0}
    for part in run.shares([name for name, wanted in (("variants", count), ("limits", runs)) if wanted]):
        if part == "variants":
            for variant in run.trials(list(variants(count, op_sets)), lambda one: "correct variants"):
                result.add(variant, stage.run(variant))
                result.pairs, result.seconds[part] = stage.pairs, run.seconds
        else:
            for name, storage in run.trials(errors, lambda one: "graded errors"):
                result.limits.append(limit(name, storage, stages))
                result.seconds[part] = run.seconds
