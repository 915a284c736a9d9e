"""The statistics of the gate: a bootstrapped ratio of medians, and the verdict that two such ratios allow.

Sample i of every arm was taken on the same events, one right after the other.

Every pair is first divided by its own level, the geometric mean of its two samples. What slows both samples (another
process, a falling clock rate) is the same within a pair, so it cancels there. Between medians it would not.
Measured on two busy cores (load 3), before against itself, 120 pairs: intervals of 0.87 to 1.16 (wall) and 0.96 to 1.10
(cpu) become 0.95 to 1.07 and 0.99 to 1.06. The ratio of medians is then the median of the pairs' ratios. It favours no
side: for one source, after / before and before / after have the same distribution, so its median is 1. Leaves out:
where samples come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]

FEWEST_PAIRS = 60  # fewer do not resolve a few percent on a shared machine
DRAWS = 2000  # resamples; with so many a bound scatters by a tenth of the interval's width
CONFIDENCE = 0.98  # of the two-sided interval: each bound is wrong in one run of a hundred


@dataclass(frozen=True)
class Ratio:
    """after / before; above 1 means slower. `low`, `high`: bounds of the interval; `pairs`: how many it is made of."""

    value: float
    low: float
    high: float
    pairs: int


class Say(Enum):
    """What one clock says about one case."""

    HELD = "held"
    SLOWER = "slower"
    NOISY = "inconclusive"


def ratio(before: Samples, after: Samples, generator: np.random.Generator) -> Ratio:
    """The ratio of medians and its interval."""
    value, low, high = ratios(before[None], after[None], generator)
    return Ratio(float(value[0]), float(low[0]), float(high[0]), before.shape[-1])


def ratios(before: Samples, after: Samples, generator: np.random.Generator) -> tuple[Samples, Samples, Samples]:
    """`ratio` for many trials at once. Whole pairs are resampled, so that the two samples of a pair stay together.

    Shapes: before, after (trials, pairs) -> ratio, low, high (trials)
    """
    apart = after / before
    trials, pairs = apart.shape
    chosen = generator.integers(pairs, size=(DRAWS, pairs))
    sampled = np.stack([np.median(apart[trial][chosen], axis=1) for trial in range(trials)])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(sampled, (tail, 1 - tail), axis=1)
    return np.median(apart, axis=1), low, high


def resolves(same: Ratio, allowed: float) -> bool:
    """Whether the A/A run (one source in two processes) stays within the allowed slow-down in both directions."""
    return same.pairs >= FEWEST_PAIRS and same.high <= 1 + allowed and same.low >= 1 / (1 + allowed)


def say(change: Ratio, same: Ratio, allowed: float) -> Say:
    """Slower only if the change's lower bound lies above the allowed slow-down, and above all that A/A shows.

    So noise cannot fail a change; it can only leave it undecided. And a change that is larger than the noise is seen on
    a busy machine too. With a NaN on either side the answer is undecided.
    """
    if change.pairs < FEWEST_PAIRS or same.pairs < FEWEST_PAIRS:
        return Say.NOISY
    if change.low > 1 + allowed and change.low > same.high:
        return Say.SLOWER
    return Say.HELD if resolves(same, allowed) and change.low <= 1 + allowed else Say.NOISY


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it, in the units of the samples."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, samples: Samples) -> Spread:
        lower, median, upper = np.quantile(samples, (0.25, 0.5, 0.75))
        return cls(float(median), float(lower), float(upper))
