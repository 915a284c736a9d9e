"""The statistics of the gate: a bootstrapped ratio of medians, and the verdict that two such ratios allow.

Sample i of every arm was taken on the same events, one right after the other.

Every pair is first divided by its own level, the geometric mean of its two samples. A disturbance that slows both
samples (another process, a falling clock rate) is the same within a pair, so it cancels there. Between medians it would
not. Measured on two busy cores (load 3), before against itself, 120 pairs: intervals of 0.87 to 1.16 (wall) and 0.96 to
1.10 (cpu) become 0.95 to 1.07 and 0.99 to 1.06. The ratio of medians is then the median of the pairs' ratios. It
favours no side: for one source, after / before and before / after have the same distribution, so its median is 1.
Leaves out: the source of the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
    def of(cls, samples: Samples) -> Spread:
        read = samples[~np.isnan(samples)]
        lower, median, upper = np.quantile(read, (0.25, 0.5, 0.75)) if read.size else 3 * (np.nan,)
        return cls(float(median), float(lower), float(upper))
