"""What counts of trials say of a rate: how high or low it may be, how many trials are asked, how many are independent.

Trials are independent if they share no pair. Of k of them each ends in one way (is called slower, say) with the same
unknown probability p. Then the number of those that end so is binomial. `highest` is the p at which so few as were
seen, or fewer, come in 5% of calibrations. With a larger p they come still less often. So a calibration whose bound is
below the true p is one of the rarest 5%, and the bound holds with 95% (Clopper and Pearson). Where none was seen,
(1 - p)^k = 5%, so the bound is 1 - 0.05^(1/k): about 3 / k. `lowest` is the same bound for the trials that ended
otherwise.

It follows how many trials are needed. Even if all of k slowed arms are found, the power is only known to be above
0.05^(1/k). This reaches the power that is asked from a certain k on (`FEWEST_TRIALS`). With fewer, a gate that finds
too little could pass as fit. Leaves out: which trials there are (`power.py`).
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
    """The highest probability at which `seen` of so many independent trials, or fewer, are not too rare."""
    if seen >= trials:
        return 1.0
    low, high = seen / trials, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        some = sum(_chance(one, trials, middle) for one in range(seen + 1))
        low, high = (middle, high) if some > 1 - SURE else (low, middle)
    return high


def _chance(seen: int, trials: int, rate: float) -> float:
    """How probable exactly `seen` of so many trials are."""
    if trials <= LARGEST:
        return comb(trials, seen) * rate**seen * (1 - rate) ** (trials - seen)
    ways = lgamma(trials + 1) - lgamma(seen + 1) - lgamma(trials - seen + 1)
    return exp(ways + seen * log(rate) + (trials - seen) * log1p(-rate))


def lowest(seen: int, trials: int) -> float:
    """The lowest probability at which `seen` of so many independent trials, or more, are not too rare."""
    return 1 - highest(trials - seen, trials)


def independent(found: Mapping[str, Any]) -> int:
    """How many trials of a calibration share no pair.

    Files from before they all did have 200 trials each, which began at even distances in what was sampled.
    """
    if "independent" in found:
        return int(found["independent"])
    return min(int(found["trials"]), max(1, int(found["pairs"]) // int(found["setting"]["pairs"])))


def bounds(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Of a calibration: "A/A" -> case -> at most so often a false alarm; "slowed" -> case -> found at least so often.

    Where trials overlap, the part that ended so counts as the same part of the independent ones, rounded for the worse.
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
