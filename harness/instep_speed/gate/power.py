"""How often the gate is wrong on this machine: trials of A/A, and of an arm that truly computes longer.

Four processes of one source take turns, as in the gate: before, after, `again`, and `slowed`, which computes after each
event until it takes 8% longer by each clock. The true slow-down is measured and is in the result (`ratio`).
A trial is a run of the gate up to where *slower* is decided, with more pairs while A/A does not resolve what is
allowed. The pairs that a run takes after these only separate held from inconclusive, so they do not affect false alarms
and power; and runs are inconclusive less often than trials. The pairs are judged twice, with `after` and with `slowed`
in its place. Every trial has separate pairs, so a disturbance of a pair is in one trial only, and trials are
independent. They still share everything that lasts longer than a trial: the four processes, which are started once, and
the load of the machine. Processes of one source differ by a little, so their roles are drawn again for every trial. The
trial at whose end the minutes are over is the last. It is not cut off, because the longest trials are the noisiest.
Leaves out: the gate's own run, and the bounds on rates (`statistics.py`).
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle, permutations
from math import ceil, isnan
from pathlib import Path
from typing import Any

import numpy as np

from instep.verdict import Exit

from .cases import NO_DRAG
from .clock import CLOCKS
from .gate import Progress, checked_before_and_after, judge, laps_of, sample, timed
from .input_and_result import Question, Report
from .process import Arm, Source
from .statistics import FEWEST_TRIALS, LEAST_POWER, MOST_ALARMS, Samples, Say, Spread, bounds

SLOWED = 0.08
ARMS = ("before", "after", "again", "slowed")
Trial = Mapping[str, Samples]  # arm -> pairs, cases, clocks


@dataclass
class Power:
    """The results of trials. says: "A/A" or "slowed" -> case -> verdict -> trials.

    pairs    of all trials together, which share none
    minutes  their duration
    drag     case -> part by which its events had to compute longer
    ratio    case -> clock -> slowed / before, the median over all pairs, without clocks that were never read
    spread   the same of before, in seconds per event
    clocks   like `says`, by one clock alone: "A/A" or "slowed" -> case -> clock -> verdict -> trials
    """

    report: Report
    pairs: int = 0
    trials: int = 0
    says: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    ratio: dict[str, dict[str, float]] = field(default_factory=dict)
    spread: dict[str, dict[str, Spread]] = field(default_factory=dict)
    clocks: dict[str, dict[str, dict[str, Counter[str]]]] = field(default_factory=dict)
    minutes: float = 0.0
    drag: dict[str, float] = field(default_factory=dict)

    def part(self, which: str, case: str, says: Say) -> float:
        return self.says[which][case][says.value] / max(1, self.trials)

    @property
    def exit(self) -> Exit:
        if self.report.refused:
            return self.report.exit
        cases = self.report.question.cases
        fit = self.trials >= FEWEST_TRIALS and all(
            self.part("A/A", case, Say.SLOWER) <= MOST_ALARMS and self.part("slowed", case, Say.SLOWER) >= LEAST_POWER
            for case in cases
        )
        return Exit.AGREED if fit else Exit.INCONCLUSIVE

    @property
    def wanted(self) -> int:
        """The minutes in which this machine has enough trials, with one trial to spare; 0: there are enough."""
        if self.trials >= FEWEST_TRIALS:
            return 0
        return max(1, ceil(self.minutes * (FEWEST_TRIALS + 1) / max(1, self.trials)))

    def data(self) -> dict[str, Any]:
        told = {"trials": self.trials, "independent": self.trials, "pairs": self.pairs, "minutes": self.minutes,
                "slowed": SLOWED, "wanted": self.wanted,
                "drag": self.drag, "says": self.says, "clocks": self.clocks, "ratio": self.ratio,
                "seconds": self.spread}  # fmt: skip
        return told | {"bounds": bounds(told)}


def measure(
    question: Question, folder: Path, minutes: float, progress: Progress = lambda what, done, of: None
) -> Power:
    """Check the arms, let them take turns for this many minutes, then judge the trials."""
    found = Power(Report(question))
    sources, laps = {name: Source.of(question.before, question.setting.ops, "BEFORE") for name in ARMS}, 1

    def taken(arms: Mapping[str, Arm]) -> list[Trial]:
        nonlocal laps
        begun, trials = time.monotonic(), list[Trial]()
        laps = laps_of(arms, question)
        found.drag = tuned(arms["before"], question, laps)
        for trial in trials_of([arms[name] for name in ARMS], question, laps, found.drag, progress):
            trials.append(trial)
            found.minutes = round((time.monotonic() - begun) / 60, 2)
            if found.minutes >= minutes:
                break
        return trials

    trials = checked_before_and_after(found.report, sources, folder, progress, taken)
    if trials is None:
        return found
    samples = {name: np.concatenate([trial[name] for trial in trials]) for name in ARMS}
    for number, case in enumerate(question.cases):
        clocks = {clock: samples["before"][:, number, CLOCKS.index(clock)] for clock in question.judged_by}
        slowed = {clock: samples["slowed"][:, number, CLOCKS.index(clock)] for clock in clocks}
        taken_longer = {clock: Spread.of(slowed[clock] / one).median for clock, one in clocks.items()}
        found.ratio[case] = {clock: value for clock, value in taken_longer.items() if not isnan(value)}
        found.spread[case] = {clock: Spread.of(one / (laps * question.rounds)) for clock, one in clocks.items()}
    return tried(found, trials, progress)


def tuned(arm: Arm, question: Question, laps: int) -> dict[str, float]:
    """Map each case to the drag that makes its events take SLOWED longer, by the clock that decides.

    A drag of SLOWED itself made some events take 13% longer on a CPU, and if only the events before them were dragged,
    3%: presumably the event's data is no longer in a near cache then. One process with and without drag measures the
    factor.
    """
    asked, clock = dict.fromkeys(question.cases, SLOWED), CLOCKS.index(question.judged_by[-1])
    taken: dict[bool, list[list[list[float]]]] = {False: [], True: []}
    for number in range(question.pairs):
        for slow in (False, True) if number % 2 else (True, False):
            taken[slow].append(sample(arm, laps, question.cases, asked if slow else NO_DRAG))
    plain, slowed = (np.array(taken[slow], np.float64)[..., clock] for slow in (False, True))
    ratios = np.median(slowed / plain, axis=0)  # NaN where the clock was not read
    return {case: SLOWED * float(np.clip(np.nan_to_num(SLOWED / max(ratio - 1, 1e-3), nan=1.0), 0.5, 2.0))
            for case, ratio in zip(question.cases, ratios, strict=True)}  # fmt: skip


def trials_of(
    processes: Sequence[Arm], question: Question, laps: int, drag: Mapping[str, float], progress: Progress
) -> Iterator[Trial]:
    """One trial after the other, without end."""
    generator, number = np.random.default_rng(question.seed), count(1)
    orders = [order for order in permutations(ARMS) if order <= order[::-1]]
    turns = cycle([order for one in orders for order in (one, one[::-1])])  # each is followed by its reverse
    while True:
        parts = {name: processes[which] for name, which in zip(ARMS, generator.permutation(len(ARMS)), strict=True)}
        told = partial(progress, f"trial {next(number)}")
        yield timed(parts, question, laps, turns, told, {"slowed": drag})


def tried(found: Power, trials: Sequence[Trial], progress: Progress = lambda what, done, of: None) -> Power:
    """Judge the trials, each as the gate judges its pairs."""
    question = found.report.question
    found.pairs, found.trials = sum(len(trial["before"]) for trial in trials), len(trials)
    found.says = {which: {case: Counter() for case in question.cases} for which in ("A/A", "slowed")}
    found.clocks = {which: {case: {} for case in question.cases} for which in found.says}
    for number, trial in enumerate(trials):
        for which, after in (("A/A", "after"), ("slowed", "slowed")):
            seen = {"before": trial["before"], "after": trial[after], "again": trial["again"]}
            report = Report(question, judged=judge(question, seen, 1))
            for case in question.cases:
                found.says[which][case][report.says(case).value] += 1
            for one in report.judged:
                found.clocks[which][one.case].setdefault(one.clock, Counter())[one.says.value] += 1
        progress("trials", number + 1, len(trials))
    return found
