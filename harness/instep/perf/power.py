"""How often the gate is wrong on this machine: trials of A/A, and of an arm that truly computes longer.

Four processes of one source take turns, as in the gate: before, after, `again`, and `slowed`, which goes on computing
for 8% of the time that each event took, by each clock. How much slower that made it is measured, and stands in the
result (`ratio`).
Trials are runs of consecutive pairs, each judged as the gate judges its own, with more pairs while A/A does not resolve
what is allowed. They begin at even distances in what was sampled within the minutes, so with few minutes they overlap;
the result says how many pairs there were. Leaves out: the gate's own run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle, permutations
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from ..verdict import Exit
from .arm import Source
from .clock import CLOCKS, judged
from .course import lay
from .gate import (
    MOST_TIMES,
    Progress,
    agree_at_the_end,
    as_samples,
    checked,
    judge,
    laps_of,
    resolved,
    sample,
    started,
    yardsticks_of,
)
from .pairs import Samples, Say, Spread
from .question import Question, Report

TRIALS, SLOWED = 200, 0.08
ARMS = ("before", "after", "again", "slowed")
MOST_ALARMS, LEAST_POWER = 0.02, 0.87  # with these the gate is fit for the machine


@dataclass
class Power:
    """What trials came to. says: "A/A" or "slowed" -> case -> verdict -> trials; pairs: that were sampled in all.

    ratio   case -> clock -> slowed / before, the median over all pairs;  spread: the same of before, seconds an event;
            without a clock that was never read
    clocks  says, by one clock alone: "A/A" or "slowed" -> case -> clock -> verdict -> trials
    """

    report: Report
    pairs: int = 0
    trials: int = 0
    says: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    ratio: dict[str, dict[str, float]] = field(default_factory=dict)
    spread: dict[str, dict[str, Spread]] = field(default_factory=dict)
    clocks: dict[str, dict[str, dict[str, Counter[str]]]] = field(default_factory=dict)

    def part(self, which: str, case: str, says: Say) -> float:
        return self.says[which][case][says.value] / max(1, self.trials)

    @property
    def exit(self) -> Exit:
        if self.report.refused:
            return Exit.DIVERGED
        cases = self.report.question.cases
        fit = self.trials and all(
            self.part("A/A", case, Say.SLOWER) <= MOST_ALARMS and self.part("slowed", case, Say.SLOWER) >= LEAST_POWER
            for case in cases
        )
        return Exit.AGREED if fit else Exit.INCONCLUSIVE

    def data(self) -> dict[str, Any]:
        spread = {case: {clock: asdict(one) for clock, one in clocks.items()} for case, clocks in self.spread.items()}
        return {"trials": self.trials, "pairs": self.pairs, "slowed": SLOWED, "says": self.says,
                "clocks": self.clocks, "ratio": self.ratio, "seconds": spread}  # fmt: skip


def measure(
    question: Question, folder: Path, minutes: float, progress: Progress = lambda what, done, of: None
) -> Power:
    """Check and sample the arms for so many minutes, then judge TRIALS trials of either kind."""
    found = Power(Report(question))
    sources = {name: Source.of(question.before, question.setting.ops) for name in ARMS}
    progress("checking", 0, 0)
    course = lay(question.checkpoint, folder / "course.jsonl", batch=question.batch, rounds=question.rounds,
                 num_steps=question.num_steps)  # fmt: skip
    with ExitStack() as stack:
        arms = started(stack, sources, course, found.report, folder)
        yardsticks = yardsticks_of(question, course, sources)
        found.report.refused = checked(arms) or agree_at_the_end(arms, yardsticks, folder, found.report)
        if found.report.refused:
            return found
        laps, until = laps_of(arms, question), time.monotonic() + 60 * minutes
        taken: dict[str, list[list[list[float]]]] = {name: [] for name in ARMS}
        orders = [order for order in permutations(ARMS) if order <= order[::-1]]
        turns = cycle([order for one in orders for order in (one, one[::-1])])  # each is followed by its reverse
        while time.monotonic() < until or len(taken["before"]) < question.pairs:
            for name in next(turns):
                taken[name].append(sample(arms[name], laps, question.cases, SLOWED if name == "slowed" else 0.0))
            progress("sampling", len(taken["before"]), 0)
        found.report.refused = agree_at_the_end(arms, yardsticks, folder, found.report)
        if found.report.refused:
            return found
    samples = as_samples(taken)
    for number, case in enumerate(question.cases):
        clocks = {clock: samples["before"][:, number, CLOCKS.index(clock)] for clock in judged(question.setting.device)}
        slowed = {clock: samples["slowed"][:, number, CLOCKS.index(clock)] for clock in clocks}
        taken_longer = {clock: Spread.of(slowed[clock] / one).median for clock, one in clocks.items()}
        found.ratio[case] = {clock: value for clock, value in taken_longer.items() if not isnan(value)}
        found.spread[case] = {clock: Spread.of(one / (laps * question.rounds)) for clock, one in clocks.items()}
    return tried(found, samples, progress)


def tried(found: Power, samples: Mapping[str, Samples], progress: Progress = lambda what, done, of: None) -> Power:
    """Judge the trials. Shapes: samples of each arm (pairs, cases, clocks)."""
    question, pairs = found.report.question, len(samples["before"])
    found.pairs, found.trials = pairs, TRIALS
    found.says = {which: {case: Counter() for case in question.cases} for which in ("A/A", "slowed")}
    found.clocks = {which: {case: {} for case in question.cases} for which in found.says}
    begins = np.linspace(0, pairs - question.pairs, TRIALS).astype(int)
    for number, begin in enumerate(begins):
        count = _pairs_of(question, samples, int(begin))
        window = {name: one[begin : begin + count] for name, one in samples.items()}
        for which, after in (("A/A", "after"), ("slowed", "slowed")):
            seen = {"before": window["before"], "after": window[after], "again": window["again"]}
            report = Report(question, judged=judge(question, seen, 1))
            for case in question.cases:
                found.says[which][case][report.says(case).value] += 1
            for one in report.judged:
                found.clocks[which][one.case].setdefault(one.clock, Counter())[one.says.value] += 1
        progress("trials", number + 1, TRIALS)
    return found


def _pairs_of(question: Question, samples: Mapping[str, Samples], begin: int) -> int:
    """How many pairs the gate would take from here on."""
    most = len(samples["before"]) - begin
    for times in range(1, MOST_TIMES + 1):
        count = times * question.pairs
        if count >= most or resolved(question, {name: one[begin : begin + count] for name, one in samples.items()}):
            return min(count, most)
    return min(MOST_TIMES * question.pairs, most)
