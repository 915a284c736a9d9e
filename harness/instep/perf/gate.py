"""The gate: is `after` slower than `before` by more than is allowed? Only asked of arms that passed.

Leaves out: the statistics (`pairs.py`) and the words (`told.py`). Three processes take turns, one at a time, in an
order that changes from pair to pair: before, after, and `again`, which is before a second time. Two processes of one
source differ by what differs anyway (the machine, where memory came to lie); that is the A/A run, and as long as it
does not resolve the allowed slow-down more pairs are taken, up to a limit. Only A/A decides this, so looking again
favours neither side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np
import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput

from ..rig.sides import Plan
from ..verdict import Exit, Verdict
from .arm import Arm, ArmFailed, Source
from .cases import CASES, Shown
from .clock import CLOCKS, judged
from .course import Course, lay
from .pairs import FEWEST_PAIRS, Ratio, Samples, Say, Spread, ratio, resolves, say
from .yardstick import Yardstick

ARMS = ("before", "after", "again")
# Before and after run AB, BA, AB, ...: each order is followed by its reverse, and every arm stands everywhere as often.
ORDERS = tuple(
    order
    for first in (("before", "after", "again"), ("before", "again", "after"), ("again", "before", "after"))
    for order in (first, first[::-1])
)
SAMPLE_S = 2e-3  # a sample is at least so long, so that reading the clocks is under a thousandth of it
PROBES = 5  # samples of one lap from which the length of a sample is set, and which warm the arms up
MOST_TIMES = 4  # so many times the wanted pairs are taken at most

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Setting:
    """What is asked. `pairs`: how many at least; `allowed`: 0.03 is 3%; `course`: batch, rounds, drafts a round."""

    before: str
    after: str
    checkpoint: Path
    cases: tuple[str, ...] = tuple(CASES)
    pairs: int = FEWEST_PAIRS
    allowed: float = 0.03
    ops: str = "plain"
    device: str = "cpu"
    dtype: str = "float32"
    batch: int = 4
    rounds: int = 2
    num_steps: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, found, right, expected in (
            ("--case", self.cases, bool(self.cases) and set(self.cases) <= set(CASES), f"some of {', '.join(CASES)}"),
            ("--pairs", self.pairs, self.pairs > 0, "at least 1"),
            ("--allowed", self.allowed, 0 < self.allowed < 1, "a part between 0 and 1, as 0.03"),
            ("--batch", self.batch, self.batch > 0, "at least 1"),
            ("--device", self.device, _there(self.device), "cpu, or cuda where `instep doctor` shows a device"),
            ("--rounds", self.rounds, self.rounds > 0, "at least 1"),
        ):
            if not right:
                raise BadInput(name, found=found, expected=expected)


@dataclass(frozen=True)
class Judged:
    """One case by one clock. Spreads in seconds per event."""

    case: str
    clock: str
    before: Spread
    after: Spread
    change: Ratio
    same: Ratio
    says: Say


@dataclass
class Report:
    """What came of it. `refused`: why an arm was not timed; then nothing was.

    served      arm -> package -> digest of the source;  acceptance: arm -> accepted drafts a window as it says itself
    elements    numbers compared with the gate's own reference, before and after timing;  laps: of the course a sample
    """

    setting: Setting
    refused: str = ""
    judged: list[Judged] = field(default_factory=list)
    served: dict[str, dict[str, str]] = field(default_factory=dict)
    acceptance: dict[str, float] = field(default_factory=dict)
    reference_acceptance: float = 0.0
    elements: int = 0
    laps: int = 0

    def says(self, case: str) -> Say:
        """Either clock may find a case slower; it has held if one that resolves the allowed slow-down says so."""
        found = {one.says for one in self.judged if one.case == case}
        return next((word for word in (Say.SLOWER, Say.HELD) if word in found), Say.NOISY)

    @property
    def exit(self) -> Exit:
        found = {self.says(case) for case in self.setting.cases}
        if self.refused or Say.SLOWER in found:
            return Exit.DIVERGED
        return Exit.INCONCLUSIVE if Say.NOISY in found else Exit.AGREED


def gate(setting: Setting, folder: Path, progress: Progress = lambda what, done, of: None) -> Report:
    """Check both arms, then time them; `folder` is for what passes between the processes."""
    report = Report(setting)
    sources = dict(zip(ARMS, (setting.before, setting.after, setting.before), strict=True))
    found = {name: Source.of(said, setting.ops) for name, said in sources.items()}
    progress("checking", 0, 0)
    course = lay(
        setting.checkpoint, folder / "course.jsonl",
        batch=setting.batch, rounds=setting.rounds, num_steps=setting.num_steps,
    )
    with ExitStack() as stack:
        arms = _started(stack, {name: found[name] for name in ("before", "after")}, course, report, folder)
        yardsticks = _yardsticks(setting, course, found)
        report.reference_acceptance = yardsticks["before"].truth.acceptance
        report.refused = _checked(arms) or _shown(arms, yardsticks, folder, report)
        if report.refused:
            return report
        arms |= _started(stack, {"again": found["again"]}, course, report, folder)
        samples = _timed(arms, setting, report, progress)
        report.refused = _shown(arms, yardsticks, folder, report)
    if not report.refused:
        report.judged = judge(setting, samples, report.laps * setting.rounds)
    return report


def judge(setting: Setting, samples: Mapping[str, Samples], events: int) -> list[Judged]:
    """Every case by every clock that counts on the device.

    Shapes: samples of each arm (pairs, cases of the setting, clocks), seconds for so many `events`
    """
    generator = np.random.default_rng(setting.seed)
    found = []
    for number, case in enumerate(setting.cases):
        for clock in judged(setting.device):
            before, after, again = (samples[arm][:, number, CLOCKS.index(clock)] / events for arm in ARMS)
            change, same = ratio(before, after, generator), ratio(before, again, generator)
            says = say(change, same, setting.allowed)
            found.append(Judged(case, clock, Spread.of(before), Spread.of(after), change, same, says))
    return found


def _there(device: str) -> bool:
    kind = device.partition(":")[0]
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def _started(
    stack: ExitStack, sources: Mapping[str, Source], course: Course, report: Report, folder: Path
) -> dict[str, Arm]:
    """Arms, each with its engine built; side by side, for nothing is timed yet."""
    setting = report.setting
    arms = {name: stack.enter_context(Arm(source, folder / f"{name}.log")) for name, source in sources.items()}
    for arm in arms.values():
        arm.tell(
            "build", trace=str(course.trace.path), checkpoint=str(setting.checkpoint), ops=arm.source.ops,
            device=setting.device, dtype=setting.dtype,
        )
    for name, arm in arms.items():
        try:
            report.served[name] = arm.built(arm.hear())
        except ArmFailed as failed:
            expected = "an op set, or a tree whose packages build an engine"
            raise BadInput(f"{name.upper()} {arm.source.said}", found=str(failed), expected=expected) from None
    return arms


def _yardsticks(setting: Setting, course: Course, sources: Mapping[str, Source]) -> dict[str, Yardstick]:
    """Per arm, as its op set declares its rounding; made once per op set."""
    opened, header, made = Checkpoint.open(setting.checkpoint), course.trace.header, dict[str, Yardstick]()
    for ops in {source.ops for source in sources.values()}:
        plan = Plan(opened, header.room(), header.num_steps, None, ops, setting.device, setting.dtype)
        made[ops] = Yardstick(plan, course)
    return {name: made[source.ops] for name, source in sources.items()}


def _checked(arms: Mapping[str, Arm]) -> str:
    """Both arms replay the course with every check after every event; why one is refused, or nothing."""
    for arm in arms.values():
        arm.tell("check")
    for name, arm in arms.items():
        try:
            answer = arm.hear()
        except ArmFailed as failed:
            return f"{name} ({arm.source.said}) failed in its checks: {failed}"
        if answer["exit"] != Exit.AGREED:
            return f"{name} ({arm.source.said}) does not pass\n{answer['message'] or 'nothing was compared'}"
    return ""


def _shown(arms: Mapping[str, Arm], yardsticks: Mapping[str, Yardstick], folder: Path, report: Report) -> str:
    """Every arm's states after the course against the gate's own reference; why one is refused, or nothing."""
    for name, arm in arms.items():
        try:
            shown: Shown = arm.show(folder / f"{name}.safetensors")
        except ArmFailed as failed:
            return f"{name} ({arm.source.said}) failed on the course: {failed}"
        verdict = yardsticks[name].judge(shown)
        report.acceptance[name] = shown.acceptance
        report.elements += verdict.elements
        if verdict.exit is not Exit.AGREED:
            return f"{name} ({arm.source.said}) does not pass\n  {_first(verdict)}"
    return ""


def _first(verdict: Verdict) -> str:
    if not verdict.findings:
        return "nothing was compared"
    found = verdict.findings[0]
    return f'after the course, request "{found.request}", {found.place}: {found.diagnosis}'


def _timed(
    arms: Mapping[str, Arm], setting: Setting, report: Report, progress: Progress
) -> dict[str, Samples]:
    """Samples of every arm, as `judge` takes them."""
    laps = report.laps = _calibrated(arms, setting)
    taken: dict[str, list[list[list[float]]]] = {name: [] for name in ARMS}
    most = MOST_TIMES * setting.pairs
    for number, order in _orders(most):
        for name in order:
            taken[name].append(_sample(arms[name], laps, setting.cases))
        progress("timing", number, most)
        if number % setting.pairs == 0 and _resolved(setting, taken):
            break
    return {name: np.array(samples) for name, samples in taken.items()}


def _calibrated(arms: Mapping[str, Arm], setting: Setting) -> int:
    """How many laps a sample takes until its shortest case lasts `SAMPLE_S` in every arm; the same for all."""
    shortest = min(
        min(min(reading) for reading in _sample(arm, 1, setting.cases)) for _ in range(PROBES) for arm in arms.values()
    )
    return max(1, ceil(SAMPLE_S / max(shortest, 1e-6)))


def _sample(arm: Arm, laps: int, cases: Sequence[str]) -> list[list[float]]:
    seconds = arm.ask("time", laps=laps)["seconds"]
    return [seconds[case] for case in cases]


def _orders(most: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    for number in range(1, most + 1):
        yield number, ORDERS[number % len(ORDERS)]


def _resolved(setting: Setting, taken: Mapping[str, list[list[list[float]]]]) -> bool:
    """Whether A/A resolves the allowed slow-down in every case by some clock, so that no more pairs are needed."""
    generator = np.random.default_rng(setting.seed)
    before, again = np.array(taken["before"]), np.array(taken["again"])
    return all(
        any(
            resolves(ratio(before[:, number, clock], again[:, number, clock], generator), setting.allowed)
            for clock in map(CLOCKS.index, judged(setting.device))
        )
        for number in range(len(setting.cases))
    )
