"""The gate: is `after` slower than `before` by more than is allowed? Only arms that passed all checks are timed.

Three processes take turns, one at a time, in an order that changes from pair to pair: before, after, and `again`, which
is a second process of before. Two processes of one source differ by noise alone (the machine, the placement of memory).
This is the A/A run. As long as it does not resolve the allowed slow-down, more pairs are taken, up to a limit. Only A/A
decides this, so taking more favours neither side. Then *slower* is decided.

A case that is not slower is held only if its own interval is within what is allowed. As long as it is not, further
pairs are taken, up to the same limit. The change decides this, so these pairs cannot make a case slower: repeated
looks find a slow-down that does not exist. They can only make it held, at most three times. So the gate calls a
slow-down beyond what is allowed held by a clock in at most four runs of a hundred, as far as noise within pairs hides
it. In 200 runs with pairs drawn from those of one CPU (at bce7bc7a): without these pairs 28 runs of A/A and 166 of a
slow-down of 1% were inconclusive, with them 1 and 24. No run of 3% and more was held.
Leaves out: the statistics (`statistics.py`) and the words (`result_data.py`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from instep.run.build_compared_engines import Plan
from instep.setting import Setting
from instep.verdict import Exit, Verdict
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput

from .cases import NO_DRAG, Course, Shown, lay
from .clock import CLOCKS, ON_HOST
from .input_and_result import PLAIN, SAMPLES, Judged, Question, Report
from .process import Arm, ArmFailed, Source
from .reference_check import Yardstick
from .statistics import FEWEST_PAIRS, Samples, Say, Spread, ratio, resolves, say

ARMS = ("before", "after", "again")
NAMES = {"before": "BEFORE", "after": "AFTER", "again": "BEFORE"}  # names on the command line
# Before and after run AB, BA, AB, ...: each order is followed by its reverse, so every arm has every place equally
# often.
ORDERS = tuple(
    order
    for first in (("before", "after", "again"), ("before", "again", "after"), ("again", "before", "after"))
    for order in (first, first[::-1])
)
SAMPLE_S = 2e-3  # minimum length of a sample, so that reading the host's clocks takes under a thousandth of it
PROBES = 5  # samples of one lap, which set the length of a sample and warm the arms up
MOST_TIMES = 4  # maximum of pairs, as a multiple of the wanted number
TOO_LITTLE = ("  nothing wrong was found, but a batch this small separates too few wrong states from right ones; use a "
              "larger --batch, or store states wider")  # fmt: skip

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
Enough = Callable[[Question, Mapping[str, Any]], bool]


def gate(question: Question, folder: Path, progress: Progress = lambda what, done, of: None) -> Report:
    """Check both arms, then time them; `folder` is for files that the processes exchange."""
    report = Report(question)
    sources = dict(zip(ARMS, (question.before, question.after, question.before), strict=True))
    found = {name: Source.of(said, question.setting.ops, NAMES[name]) for name, said in sources.items()}
    samples = checked_before_and_after(
        report, found, folder, progress, lambda arms: _timed(arms, question, report, progress))
    if samples is not None:
        report.judged = judge(question, samples, report.laps * question.rounds, report.decided)
    return report


def checked_before_and_after(
    report: Report, sources: Mapping[str, Source], folder: Path, progress: Progress,
    work: Callable[[Mapping[str, Arm]], T],
) -> T | None:
    """The result of timing the arms, which are checked before and after; None: one is refused (`report.refused`)."""
    question, found = report.question, None
    progress("checking", 0, 0)
    course = lay(question.checkpoint, folder / "course.jsonl", batch=question.batch, rounds=question.rounds,
                 num_steps=question.num_steps, drafter=question.setting.mode)  # fmt: skip
    with ExitStack() as stack:
        # All start now and do the same work: a process that did less is faster by a percent or two.
        arms = started(stack, sources, course, report, folder)
        yardsticks = yardsticks_of(question, course, sources)
        report.reference_acceptance = yardsticks["before"].truth.acceptance
        report.refused = checked(arms, report) or agree_at_the_end(arms, yardsticks, folder, report)
        if not report.refused:
            try:
                found = work(arms)
            except ArmFailed as failed:
                report.refused = str(failed)
        report.refused = report.refused or agree_at_the_end(arms, yardsticks, folder, report)
    return None if report.refused else found


def judge(
    question: Question, samples: Mapping[str, Samples], events: int, decided: int | None = None
) -> list[Judged]:
    """Judge every case by every clock that counts on the device.

    decided: the pairs on which *slower* was decided, None: all. More pairs cannot make a case slower.
    Shapes: samples of each arm (pairs, cases of the question, clocks), seconds for `events` events; NaN: not read
    """
    generator = np.random.default_rng(question.seed)
    found = []
    for number, case in enumerate(question.cases):
        for clock in question.judged_by:
            before, after, again = (samples[arm][:, number, CLOCKS.index(clock)] / events for arm in ARMS)
            change, same = ratio(before, after, generator), ratio(before, again, generator)
            says = say(change, same, question.allowed)
            if says is Say.SLOWER and decided is not None and len(before) > decided:
                says = Say.NOISY
            every = np.stack((before, after, again), 1)[:: -(-len(before) // SAMPLES)]
            few = tuple(tuple(float(f"{one:.4g}") for one in pair) for pair in every[~np.isnan(every).any(1)].tolist())
            found.append(Judged(case, clock, Spread.of(before), Spread.of(after), change, same, says, few))
    return found


def started(
    stack: ExitStack, sources: Mapping[str, Source], course: Course, report: Report, folder: Path
) -> dict[str, Arm]:
    """Start the arms and build their engines, side by side, because nothing is timed yet."""
    question = report.question
    arms = {
        name: stack.enter_context(Arm(source, folder / f"{name}.log", question.patience_s))
        for name, source in sources.items()
    }
    for arm in arms.values():
        arm.tell(
            "build", trace=str(course.trace.path), checkpoint=str(question.checkpoint),
            setting=asked_of(question.setting, question.typed) | {"ops": arm.source.ops}, clocks=question.judged_by,
        )
    for name, arm in arms.items():
        try:
            report.served[name] = arm.built(arm.hear())
        except ArmFailed as failed:
            expected = "an op set, or a tree whose packages build an engine"
            raise BadInput(f"{name.upper()} {arm.source.said}", found=str(failed), expected=expected) from None
    return arms


def asked_of(setting: Setting, typed: Collection[str] = ()) -> dict[str, Any]:
    """The options that were typed or are not at their defaults, and the device.

    An older source tree does not know every option, and may have other defaults.
    """
    default = PLAIN.data()
    return {name: value for name, value in setting.data().items()
            if name == "device" or name in typed or value != default.get(name)}  # fmt: skip


def yardsticks_of(question: Question, course: Course, sources: Mapping[str, Source]) -> dict[str, Yardstick]:
    """Each arm's yardstick, which rounds as its op set declares; arms with one op set share it."""
    opened, header, made = (
        Checkpoint.open(question.checkpoint, question.setting.mode), course.trace.header, dict[str, Yardstick]())
    for ops in {source.ops for source in sources.values()}:
        plan = Plan(opened, header.room(), header.num_steps, replace(question.setting, ops=ops))
        made[ops] = Yardstick(plan, course)
    return {name: made[source.ops] for name, source in sources.items()}


def checked(arms: Mapping[str, Arm], report: Report) -> str:
    """Let the arms replay the course with every check after every event; return why one is refused, or an empty text.

    If nothing is wrong but too little could be judged, the report marks the arm as not judged.
    """
    unjudged = ""
    for arm in arms.values():
        arm.tell("check")
    for name, arm in arms.items():
        try:
            answer = arm.hear()
        except ArmFailed as failed:
            return f"{name} ({arm.source.said}) failed in its checks: {failed}"
        if answer["exit"] != Exit.AGREED:
            # Without the last line, the command: it would replay here, and the arm may be another source.
            message = answer["message"].rpartition("\n")[0] or "  nothing was compared"
            if not answer["undecided"]:
                return f"{name} ({arm.source.said}) does not pass\n{message}"
            found = message.partition("\n")[2]  # without the line of the verdict
            unjudged = unjudged or f"{name} ({arm.source.said}) cannot be judged\n{found}\n{TOO_LITTLE}"
    report.unjudged = bool(unjudged)
    return unjudged


def agree_at_the_end(arms: Mapping[str, Arm], yardsticks: Mapping[str, Yardstick], folder: Path, report: Report) -> str:
    """Compare every arm's states with the gate's own reference; return why one is refused, or an empty text."""
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
    arms: Mapping[str, Arm], question: Question, report: Report, progress: Progress
) -> dict[str, Samples]:
    """Take the samples of every arm for `judge`, and report the number of pairs on which *slower* is decided."""
    report.laps, orders, told = laps_of(arms, question), cycle(ORDERS), partial(progress, "timing")
    first = timed(arms, question, report.laps, orders, told)
    report.decided = len(first["before"])
    enough = partial(answered, decided=report.decided)
    return timed(arms, question, report.laps, orders, told, behind=first, enough=enough)


def timed(
    arms: Mapping[str, Arm], question: Question, laps: int, orders: Iterator[Sequence[str]],
    told: Callable[[int, int], None], drags: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    behind: Mapping[str, Samples] = MappingProxyType({}), enough: Enough | None = None,
) -> dict[str, Samples]:
    """Take pairs until they are enough, or up to the limit; return the samples of every arm for `judge`.

    drags   arm -> case -> part by which its events compute longer
    behind  samples that were taken before
    enough  by default: A/A resolves what is allowed
    """
    taken: dict[str, list[Any]] = {name: list(behind.get(name, ())) for name in arms}
    most, pairs, enough = MOST_TIMES * question.pairs, len(taken["before"]), enough or resolved
    while not pairs or (pairs < most and (pairs % question.pairs or not enough(question, taken))):
        for name in next(orders):
            taken[name].append(sample(arms[name], laps, question.cases, drags.get(name, NO_DRAG)))
        pairs += 1
        told(pairs, most)
    return as_samples(taken)


def answered(question: Question, taken: Mapping[str, Any], decided: int) -> bool:
    """Whether a case is slower or all are held, or no case is open by the pairs on which slower is decided."""
    samples = as_samples(taken)
    report = Report(question, judged=judge(question, samples, 1, decided))
    first = len(samples["before"]) == decided
    return report.exit is not Exit.INCONCLUSIVE or (first and not any(map(report.open, question.cases)))


def as_samples(taken: Mapping[str, Any]) -> dict[str, Samples]:
    """Turn the results of `sample` into pairs, cases, clocks by arm. A number that no arm could read is NaN."""
    return {name: np.array(samples, np.float64) for name, samples in taken.items()}


def laps_of(arms: Mapping[str, Arm], question: Question) -> int:
    """Laps per sample, the same for all arms: as many as the shortest case needs to last SAMPLE_S in every arm.

    Without a clock of the host it is one: the device times every event separately.
    """
    taken = [sample(arm, 1, question.cases) for _ in range(PROBES) for arm in arms.values()]
    if not set(question.judged_by) & set(ON_HOST):
        return 1
    shortest = float(np.array(taken, np.float64)[..., : len(ON_HOST)].min())
    return max(1, ceil(SAMPLE_S / max(shortest, 1e-6)))


def sample(arm: Arm, laps: int, cases: Sequence[str], drag: Mapping[str, float] = NO_DRAG) -> list[list[float]]:
    try:
        seconds = arm.ask("time", laps=laps, drag=dict(drag))["seconds"]
    except ArmFailed as failed:
        raise ArmFailed(f"{arm.source.said} failed while it was timed: {failed}") from None
    return [seconds[case] for case in cases]


def resolved(question: Question, taken: Mapping[str, Any]) -> bool:
    """Whether in every case A/A resolves the allowed slow-down by wall, or by all others that are judged: no more pairs
    are needed.

    Wall sees everything. The others see all computing together: on a GPU one sees the host, another the device.
    A clock that some pairs of another arm could not read needs more of them, or it would have no say.
    """
    generator = np.random.default_rng(question.seed)
    samples = as_samples(taken)
    before, again = samples["before"], samples["again"]
    wall, others = CLOCKS.index("wall"), [CLOCKS.index(clock) for clock in question.judged_by if clock != "wall"]

    def by(number: int, clock: int) -> bool:
        read = [int((~np.isnan(before[:, number, clock] + one[:, number, clock])).sum()) for one in samples.values()]
        enough = all(pairs >= FEWEST_PAIRS or not pairs for pairs in read)
        same = ratio(before[:, number, clock], again[:, number, clock], generator)
        return enough and resolves(same, question.allowed)

    return all(
        ("wall" in question.judged_by and by(number, wall)) or (others and all(by(number, clock) for clock in others))
        for number in range(len(question.cases))
    )
