"""Calibration: do correct engines stay within the allowances, and which errors stay unseen? `instep calibrate`.

Leaves out: choosing constants. They are derived in `tier_allowances.py`; here they are confirmed or refuted.
"""

from collections.abc import Iterable

from instep.campaign.runner import TrialRunner

from .allowance_use import A_SCENE, Stage, Variant, variants
from .graded_errors import RUNS, STORAGES, limit, names
from .long_runs import LongRuns
from .tables import Calibration


def calibrate(
    result: Calibration, count: int, run: TrialRunner | None = None, *, op_sets: Iterable[str] = (), runs: int = RUNS,
    long: int = 0, part: tuple[int, int] = (1, 1),
) -> None:
    """Add this many correct variants to the result, then graded injected errors, each in this many runs, and then this
    many long runs of correct variants.

    All that are wanted get equal parts of the time. part: (3, 16) runs the third of 16 parts; a scene is in one part.
    """
    run, stage, stages = run or TrialRunner(), Stage(result.device), [Stage(result.device) for _ in range(runs)]
    number, parts = part
    errors = [(name, storage) for storage in STORAGES for name in names()][number - 1 :: parts]

    def several(count: int) -> list[Variant]:
        return [one for one in variants(count, op_sets) if one.number // A_SCENE % parts == number - 1]

    result.seconds |= {"variants": 0.0, "limits": 0.0}
    wanted = {"variants": count, "limits": runs, "long": long}
    for share in run.shares([name for name, trials in wanted.items() if trials]):
        if share == "variants":
            for variant in run.trials(several(count), lambda one: "correct variants"):
                result.add(variant, stage.run(variant))
                result.pairs, result.seconds[share] = stage.pairs, run.seconds
        elif share == "long":
            result.long = LongRuns()
            for variant in run.trials(several(long), lambda one: "long runs"):
                result.long.run(variant)
                result.seconds[share] = run.seconds
        else:
            for name, storage in run.trials(errors, lambda one: "graded errors"):
                result.limits.append(limit(name, storage, stages))
                result.seconds[share] = run.seconds
