"""Bounds on a rate from counts of trials, the number of trials that are needed, and how many are independent.

Trials are independent if they share no pair. Each of k trials ends in a certain way (is called slower, say) with the
same unknown probability p. Then the number of those trials is binomial. `highest` is the p at which the observed number
or fewer occur in 5% of calibrations. With a larger p they occur less often. So a calibration whose bound is below the
true p is one of the rarest 5%, and the bound holds with 95% (Clopper and Pearson). If none was observed,
(1 - p)^k = 5%, so the bound is 1 - 0.05^(1/k): about 3 / k. `lowest` is the same bound for the other trials.

The number of trials that are needed follows. Even if all of k slowed arms are found, the power is only known to be
above 0.05^(1/k). This reaches the required power from a certain k on (`FEWEST_TRIALS`). With fewer, a gate that finds
too little could pass as fit. Leaves out: the trials (`power.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, comb, exp, lgamma, log, log1p
from typing import Any

SURE = 0.95  # of a bound
MOST_ALARMS, LEAST_POWER = 0.02, 0.87  # with these the gate is fit for the machine
FEWEST_TRIALS = ceil(log(1 - SURE) / log(LEAST_POWER))  # 22
STEPS = 60  # of a bisection: to the last digit
LARGEST = 1000  # with more trials a binomial coefficient may be larger than any float


def highest(seen: int, trials: int) -> float:
    """The highest probability at which `seen` of `trials` independent trials, or fewer, are not too rare."""
    if seen >= trials:
        return 1.0
    low, high = seen / trials, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        some = sum(_chance(one, trials, middle) for one in range(seen + 1))
        low, high = (middle, high) if some > 1 - SURE else (low, middle)
    return high


def _chance(seen: int, trials: int, rate: float) -> float:
    """The probability of exactly `seen` of `trials` trials."""
    if trials <= LARGEST:
        return comb(trials, seen) * rate**seen * (1 - rate) ** (trials - seen)
    ways = lgamma(trials + 1) - lgamma(seen + 1) - lgamma(trials - seen + 1)
    return exp(ways + seen * log(rate) + (trials - seen) * log1p(-rate))


def lowest(seen: int, trials: int) -> float:
    """The lowest probability at which `seen` of `trials` independent trials, or more, are not too rare."""
    return 1 - highest(trials - seen, trials)


def independent(found: Mapping[str, Any]) -> int:
    """The number of trials of a calibration that share no pair.

    Older files have 200 trials each, which start at even distances in the samples.
    """
    if "independent" in found:
        return int(found["independent"])
    return min(int(found["trials"]), max(1, int(found["pairs"]) // int(found["setting"]["pairs"])))


def bounds(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Bounds of a calibration: "A/A" -> case -> maximum rate of false alarms; "slowed" -> case -> minimum power.

    If trials overlap, the observed share is applied to the independent ones, rounded to the unfavourable side.
    """
    if not found["trials"]:
        return {"A/A": {}, "slowed": {}}
    trials, alone = int(found["trials"]), independent(found)
    alarms, hits = (
        {case: counts.get("slower", 0) * alone for case, counts in found["says"][which].items()}
        for which in ("A/A", "slowed")
    )
    return {
        "A/A": {case: highest(-(-some // trials), alone) for case, some in alarms.items()},
        "slowed": {case: lowest(some // trials, alone) for case, some in hits.items()},
    }
