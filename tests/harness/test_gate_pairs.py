"""The gate's statistics on synthetic samples, where the truth is known: false alarms, power, and what is undecided.

Leaves out: engines and processes (`test_gate.py`).
"""

from __future__ import annotations

import numpy as np
import pytest

from instep_speed.gate.statistics import FEWEST_PAIRS, Ratio, Samples, Say, Spread, middles, ratio, ratios, say

ALLOWED = 0.03
TRIALS = 200


def samples(
    generator: np.random.Generator, slowdown: float, *, noise: float = 0.03, trials: int = TRIALS, shared: float = 0.1
) -> tuple[Samples, Samples]:
    """Pairs as a shared machine gives them: every tenth sample is interrupted, and both arms drift together."""
    drift = np.exp(shared * generator.standard_normal((trials, FEWEST_PAIRS)))

    def arm(factor: float) -> Samples:
        own = np.exp(noise * generator.standard_normal(drift.shape))
        interrupted = np.where(generator.random(drift.shape) < 0.1, 2.0, 1.0)
        return np.asarray(5e-3 * factor * drift * own * interrupted)

    return arm(1.0), arm(1.0 + slowdown)


def lower_bounds(slowdown: float, **how: float) -> Samples:
    generator = np.random.default_rng(1)
    before, after = samples(generator, slowdown, **how)  # type: ignore[arg-type]
    return ratios(before, after, generator)[1]


def test_a_against_a_never_fails() -> None:
    assert (lower_bounds(0.0) > 1 + ALLOWED).sum() == 0


@pytest.mark.slow
def test_barely_allowed_slow_down_fails_no_more_often_than_the_bound() -> None:
    assert (lower_bounds(ALLOWED) > 1 + ALLOWED).mean() <= 0.04  # 1% is promised; of 200 trials, 8 are 4 deviations


@pytest.mark.slow
@pytest.mark.parametrize(("slowdown", "power"), [(0.08, 0.9), (0.2, 1.0)])
def test_a_real_slowdown_is_found(slowdown: float, power: float) -> None:
    assert (lower_bounds(slowdown) > 1 + ALLOWED).mean() >= power


@pytest.mark.slow
def test_common_disturbance_cancels() -> None:
    """The machine drifts by a factor of 1.5 between pairs; 8% within them is still seen."""
    assert (lower_bounds(0.08, shared=0.4) > 1 + ALLOWED).mean() >= 0.9


@pytest.mark.slow
def test_the_interval_covers_the_truth() -> None:
    generator = np.random.default_rng(2)
    before, after = samples(generator, 0.1)
    value, low, high = ratios(before, after, generator)
    assert abs(float(np.median(value)) - 1.1) < 0.01
    assert ((low <= 1.1) & (high >= 1.1)).mean() >= 0.94


@pytest.mark.parametrize("pairs", [1, 2, 3, 60, 61])
def test_middle_of_a_resample_has_the_rank_of_resampling(pairs: int) -> None:
    """Against resamples that are drawn in full: how often each pair of places is the middle, within 5 deviations."""
    generator, draws = np.random.default_rng(5), 40_000
    drawn = np.sort(generator.integers(pairs, size=(draws, pairs)), axis=1)[:, [(pairs - 1) // 2, pairs // 2]]
    placed = np.stack(middles(pairs, draws, generator), axis=1)
    assert (placed[:, 0] <= placed[:, 1]).all() and (pairs % 2 == 0 or (placed[:, 0] == placed[:, 1]).all())
    counts = [np.bincount(one @ [pairs, 1], minlength=pairs * pairs) for one in (drawn, placed)]
    assert (np.abs(counts[0] - counts[1]) <= 5 * np.sqrt(1 + counts[0] + counts[1])).all()


def test_the_same_seed_gives_the_same_interval() -> None:
    before, after = (arm[0] for arm in samples(np.random.default_rng(3), 0.05, trials=1))
    first, second = (ratio(before, after, np.random.default_rng(7)) for _ in range(2))
    assert first == second
    assert first.low < first.value < first.high


def quiet(low: float = 0.99, high: float = 1.01, pairs: int = FEWEST_PAIRS) -> Ratio:
    return Ratio((low + high) / 2, low, high, pairs)


@pytest.mark.parametrize(("change", "same", "expected"), [
    (quiet(), quiet(), Say.HELD),
    (quiet(1.02, 1.09), quiet(), Say.NOISY),  # what is allowed lies inside: neither is shown
    (quiet(1.029, 1.4), quiet(), Say.NOISY),
    (quiet(0.9, 1.031), quiet(), Say.NOISY),
    (quiet(0.9, 1.029), quiet(), Say.HELD),
    (quiet(1.05, 1.09), quiet(), Say.SLOWER),
    (quiet(0.8, 0.9), quiet(), Say.HELD),  # faster
    (quiet(), quiet(0.95, 1.05), Say.NOISY),  # A/A is too wide
    (quiet(), quiet(1.04, 1.05), Say.NOISY),  # A/A is off to one side
    (quiet(1.05, 1.09), quiet(0.92, 1.06), Say.NOISY),  # as far out as A/A itself
    (quiet(1.07, 1.09), quiet(0.92, 1.02), Say.NOISY),  # as far out as A/A in the other direction
    (quiet(1.035, 1.09), quiet(0.971, 1.02), Say.SLOWER),  # A/A is resolved: what is allowed decides
    (quiet(1.15, 1.25), quiet(0.92, 1.06), Say.SLOWER),  # exceeds the noise
    (quiet(pairs=FEWEST_PAIRS - 1), quiet(pairs=FEWEST_PAIRS - 1), Say.NOISY),
    (quiet(1.5, 1.6, FEWEST_PAIRS - 1), quiet(), Say.NOISY),
    (quiet(float("nan"), float("nan")), quiet(), Say.NOISY),
    (quiet(), quiet(float("nan"), float("nan")), Say.NOISY),
    (quiet(1.5, 1.6), quiet(float("nan"), float("nan")), Say.NOISY),
])  # fmt: skip
def test_verdict_of_two_ratios(change: Ratio, same: Ratio, expected: Say) -> None:
    assert say(change, same, ALLOWED) is expected


def test_a_noisy_machine_is_undecided_not_failed() -> None:
    generator = np.random.default_rng(4)
    before, after = samples(generator, 0.0, noise=0.5, trials=20)
    again, _ = samples(generator, 0.0, noise=0.5, trials=20)
    for one in range(20):
        change, same = (ratio(before[one], other[one], generator) for other in (after, again))
        assert say(change, same, ALLOWED) is Say.NOISY


def test_a_spread_is_median_and_quartiles() -> None:
    assert Spread.of(np.array([4.0, 1.0, 2.0, 3.0, 5.0])) == Spread(3.0, 2.0, 4.0)
