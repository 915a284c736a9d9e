"""The statistics of the gate: ratios of medians, the verdict that two of them allow, and bounds on a rate of trials.

Sample i of every arm was taken on the same events, one right after the other.

Every pair is first divided by its own level, the geometric mean of its two samples. A disturbance that slows both
samples (another process, a falling clock rate) is the same within a pair, so it cancels there. Between medians it would
not. Measured on two busy cores (load 3), before against itself, 120 pairs: intervals of 0.87 to 1.16 (wall) and 0.96 to
1.10 (cpu) become 0.95 to 1.07 and 0.99 to 1.06. The ratio of medians is then the median of the pairs' ratios. It
favours no side: for one source, after / before and before / after have the same distribution, so its median is 1.
Leaves out: the source of the samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import ceil, comb, exp, lgamma, log, log1p
from typing import Any

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]
Places = NDArray[np.int64]

FEWEST_PAIRS = 60  # fewer do not resolve a few percent on a shared machine
DRAWS = 2000  # resamples; with this number a bound scatters by a tenth of the interval's width
CONFIDENCE = 0.98  # of the two-sided interval: each bound is wrong in one run of a hundred


@dataclass(frozen=True)
class Ratio:
    """after / before; above 1 means slower. `low`, `high`: bounds of the interval; `pairs`: the number of pairs."""

    value: float
    low: float
    high: float
    pairs: int


class Say(Enum):
    """The verdict of one clock on one case."""

    HELD = "held"
    SLOWER = "slower"
    NOISY = "inconclusive"


def ratio(before: Samples, after: Samples, generator: np.random.Generator) -> Ratio:
    """The ratio of medians and its interval. Pairs with a sample that could not be read (NaN) are dropped."""
    read = ~np.isnan(before + after)
    if not read.any():
        return Ratio(np.nan, np.nan, np.nan, 0)
    value, low, high = ratios(before[None, read], after[None, read], generator)
    return Ratio(float(value[0]), float(low[0]), float(high[0]), int(read.sum()))


def ratios(before: Samples, after: Samples, generator: np.random.Generator) -> tuple[Samples, Samples, Samples]:
    """`ratio` for many trials at once. Whole pairs are resampled, so that the two samples of a pair stay together.

    Shapes: before, after (trials, pairs) -> ratio, low, high (trials)
    """
    apart = np.sort(after / before, axis=1)
    lower, upper = middles(apart.shape[1], DRAWS, generator)
    sampled = (apart[:, lower] + apart[:, upper]) / 2
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(sampled, (tail, 1 - tail), axis=1)
    return np.median(apart, axis=1), low, high


def middles(pairs: int, draws: int, generator: np.random.Generator) -> tuple[Places, Places]:
    """The ranks of the two middle elements of a resample among the sorted pairs; for an odd number both are one.

    A resample chooses `pairs` ranks uniformly. The k-th smallest of `pairs` uniform numbers between 0 and 1 has the
    distribution Beta(k, pairs + 1 - k), and the next one divides the rest as Beta(1, pairs - k). So nothing else is
    drawn, which takes a hundredth of the time.
    """
    k = (pairs + 1) // 2
    lower = upper = generator.beta(k, pairs + 1 - k, draws)
    if pairs % 2 == 0:
        upper = lower + (1 - lower) * generator.beta(1, pairs - k, draws)
    first, second = (np.minimum((pairs * one).astype(np.int64), pairs - 1) for one in (lower, upper))
    return first, second


def resolves(same: Ratio, allowed: float) -> bool:
    """Whether the A/A run (one source in two processes) stays within the allowed slow-down in both directions."""
    return same.pairs >= FEWEST_PAIRS and same.high <= 1 + allowed and same.low >= 1 / (1 + allowed)


def say(change: Ratio, same: Ratio, allowed: float) -> Say:
    """Slower only if the change's lower bound is above the allowed slow-down, and above all that A/A shows.

    Held only if A/A resolves what is allowed, and the change's upper bound is within it. Each bound is wrong in one run
    of a hundred, so a slow-down beyond what is allowed is called held no more often than that, in one look at the
    pairs. An interval that contains the allowed slow-down gives neither. A disturbance that A/A shows in one direction
    may occur in the other. If A/A is resolved, this requires nothing more. So noise cannot fail a change; it can only
    leave it undecided. A change that is larger than the noise is found on a busy machine too. With a NaN on either side
    the result is undecided.
    """
    if change.pairs < FEWEST_PAIRS or same.pairs < FEWEST_PAIRS:
        return Say.NOISY
    if change.low > 1 + allowed and change.low > same.high and change.low * same.low > 1:
        return Say.SLOWER
    return Say.HELD if resolves(same, allowed) and change.high <= 1 + allowed else Say.NOISY


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it, in the units of the samples; of those that could be read."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, samples: Samples) -> "Spread":
        read = samples[~np.isnan(samples)]
        lower, median, upper = np.quantile(read, (0.25, 0.5, 0.75)) if read.size else 3 * (np.nan,)
        return cls(float(median), float(lower), float(upper))


# ---- bounds on how often the gate is wrong

SURE = 0.95  # of a bound
MOST_ALARMS, LEAST_POWER = 0.02, 0.87  # with these the gate is fit for the machine
FEWEST_TRIALS = ceil(log(1 - SURE) / log(LEAST_POWER))  # 22
STEPS = 60  # of a bisection: to the last digit
LARGEST = 1000  # with more trials a binomial coefficient may be larger than any float


def highest(seen: int, trials: int) -> float:
    """The highest probability at which `seen` of `trials` independent trials, or fewer, are not too rare.

    Trials are independent if they share no pair. Each of k trials ends in a certain way (is called slower, say) with
    the same unknown probability p. Then the number of those trials is binomial. The result is the p at which the
    observed number or fewer occur in 5% of calibrations. With a larger p they occur less often. So a calibration whose
    bound is below the true p is one of the rarest 5%, and the bound holds with 95% (Clopper and Pearson). If none was
    observed, (1 - p)^k = 5%, so the bound is 1 - 0.05^(1/k): about 3 / k. `lowest` is the same bound for the other
    trials.

    The number of trials that are needed follows. Even if all of k slowed arms are found, the power is only known to be
    above 0.05^(1/k). This reaches the required power from a certain k on (`FEWEST_TRIALS`). With fewer, a gate that
    finds too little could pass as fit.
    """
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
