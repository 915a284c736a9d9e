"""Shrink a trace whose replay fails: cut it while the first finding stays the same, until no cut keeps it.

The finding stays the same if check, tier, kind of event, place and named mistake do. Requests, slots, heads, columns
and steps of a draft chain may be others. Leaves out: the cuts (`trace/cut_events.py`), recordings (`instep.audit`).
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec.structs import replace as with_fields

from instep_reference.contract.engine import Answer
from instep_reference.contract.errors import BadInput, InstepError

from ..diagnose import RunHistory, explain_outcome
from ..run.replay import Outcome, RecordedChoices, Replay
from ..run.run_variants import AS_IS, Variant
from ..trace.cut_events import CUTS, Cut, Events, legal_part
from ..trace.event_rules import verified
from ..trace.event_scheduler import Step, recorded
from ..trace.file import Trace, write
from ..trace.header import Part
from ..verdict import Comparison, Exit, Skipped, Tier
from ..watch.event_context import EventContext
from .runner import TrialRunner

T = TypeVar("T")
COUNTED = ("requests", "events", "drafts", "tokens")  # kinds of parts that the message counts
BEFORE_EXPLAINED = 6  # the fields of `same_finding` that no explanation changes


def same_finding(found: Comparison) -> tuple[Hashable, ...]:
    """The parts of a finding that stay equal while a trace shrinks.

    No request, slot, head, column, event or step of a chain is among them.
    """
    stage, dot, step = found.place.stage.partition(".")
    problem, mistake, raised = found.problem, found.explained, found.raised
    return (
        found.check, found.tier, found.kind, stage if stage == "chain" else f"{stage}{dot}{step}", found.place[1:],
        None if raised is None else (raised.error, raised.file, raised.function),
        None if problem is None else problem.code, None if mistake is None else (mistake.by, mistake.names[:1]),
    )  # fmt: skip


class Answers:
    """Compares nothing. It keeps the truth's answers, as a recording does."""

    name, tier = "answers", Tier.IDENTITY

    def __init__(self) -> None:
        self.said: dict[int, Answer | None] = {}

    def __call__(self, context: EventContext) -> Iterable[Comparison | Skipped]:
        self.said[context.index] = context.truth.answer
        return ()


@dataclass
class Shrunk:
    """A trace so far, and the outcome of its replay.

    before  the number of events before the first cut;  runs: how many smaller traces were replayed
    kinds   kind of part -> how many there were, and how many are left
    minimal whether no further cut keeps the finding;  interrupted: by Ctrl-C
    """

    trace: Trace
    outcome: Outcome
    answers: dict[int, Answer | None]
    runs: int = 0
    minimal: bool = False
    interrupted: bool = False
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def finding(self) -> Comparison:
        return self.outcome.verdict.findings[0]

    @property
    def sentence(self) -> str:
        """The cuts, and whether more are possible."""
        return counted_cuts(self.runs, {kind: self.kinds[kind] for kind in COUNTED}, self.minimal)

    def write(self, path: Path, model: Path, claim: str = "") -> Trace:
        """Write it as a trace. model: the folder of its model. claim: what it proves; empty: what failed"""
        header, setting = self.trace.header, self.outcome.plan.setting
        parts = header.replay if setting.led else (Part(setting.ops, strategy=setting.strategy, conv=setting.conv),)
        steps = [Step(event, self.answers.get(index)) for index, event in enumerate(self.trace.events)]
        changed = with_fields(header.near(model, path.parent), name=path.stem, replay=parts, claim=claim or (
            f"A part of {header.name} in which an engine failed the check {self.finding.check}."))
        return write(path, changed, self.trace.events, recorded(steps))


def counted_cuts(runs: int, kinds: Mapping[str, tuple[int, int]], minimal: bool) -> str:
    """The cuts, and whether more are possible. kinds: kind of part -> how many there were, and how many are left"""
    counts = ", ".join(f"{kind} {before} to {after}" for kind, (before, after) in kinds.items() if before)
    end = "no further cut keeps the finding" if minimal else "ended early, so more cuts may be possible"
    return f"shrunk in {runs} runs: {counts}; {end}"


def shrink(
    replay: Replay, run: TrialRunner, *, until: int | None = None, layers: Collection[int] | None = None,
    tiers: Collection[Tier] = frozenset(Tier), variant: Variant = AS_IS,
    keep: Callable[[Shrunk], object] = lambda shrunk: None,
) -> Shrunk | None:
    """Shrink the trace of a replay; None: the replay has no finding. keep: writes each smaller trace at once.

    Ctrl-C and the end of the runner's time limit end it with the smallest trace so far. The other parameters are those
    of `Replay.run`.
    """
    header, first = replay.trace.header, replay.trace
    again = partial(_outcome, replay, layers=layers, tiers=tiers, variant=variant)
    if until is not None:
        first = replace(first, events=first.events[: until + 1])
    run.advance(header.name, 0, None)
    found = again(first)
    if found is None:
        return None
    best = Shrunk(first, *found)
    if best.finding.check == RecordedChoices.name:
        raise BadInput(f"event {best.finding.event}", found="a reference that chooses differently from the recording",
                       expected="a finding about an engine", hint="record the trace again")
    wanted = same_finding(best.finding)

    def shows(events: Events) -> bool:
        best.runs += 1
        run.advance(f"{header.name}: {len(best.trace.events)} events, smaller traces tried", best.runs, None)
        smaller = replace(first, events=events, recorded={})  # the recorded choices were those of the whole trace
        try:
            found = again(verified(smaller), wanted)
        except InstepError:  # this engine, or this setting, refuses the smaller trace
            return False
        if found is not None:
            best.trace, (best.outcome, best.answers) = smaller, found
            keep(best)
        return found is not None

    keep(best)

    def cut_by(cut: Cut, events: Events, gone: Sequence[Any]) -> Events:
        return legal_part(header, cut.without(header, events, gone), overlap=replay.plan.setting.overlap)

    cuts = {kind: Cuts(cut.parts, partial(cut_by, cut)) for kind, cut in CUTS.items()}
    try:
        tail = first.events[: best.finding.event + 1]
        if len(tail) < len(first.events) and not run.over:
            shows(tail)
        best.minimal = reduce(best.trace.events, cuts.values(), shows, lambda: run.over)
    except KeyboardInterrupt as error:
        run.stop(error)
        best.interrupted = True
    best.kinds = {kind: (len(cut.parts(first.events)), len(cut.parts(best.trace.events))) for kind, cut in cuts.items()}
    return best


def _outcome(
    replay: Replay, trace: Trace, wanted: tuple[Hashable, ...] | None = None, *, layers: Collection[int] | None,
    tiers: Collection[Tier], variant: Variant,
) -> tuple[Outcome, dict[int, Answer | None]] | None:
    """Replay a trace -> the outcome, explained, and the truth's answers. None: it has no, or not the wanted finding."""
    smaller, history, answers = copy(replay), RunHistory(replay.plan.steps), Answers()
    smaller.trace = trace
    outcome = smaller.run(layers=layers, tiers=tiers, variant=variant, also=(answers, history))
    if outcome.verdict.exit is not Exit.DIVERGED:
        return None
    if wanted is not None and same_finding(outcome.verdict.findings[0])[:BEFORE_EXPLAINED] != wanted[:BEFORE_EXPLAINED]:
        return None  # a search for its explanation takes as long as the run
    outcome = explain_outcome(outcome, history)
    return None if wanted not in (None, same_finding(outcome.verdict.findings[0])) else (outcome, answers.said)


@dataclass(frozen=True)
class Cuts(Generic[T]):
    """One kind of cut. parts: of the present case. without: a smaller case, or None if these parts cannot be cut."""

    parts: Callable[[T], Sequence[Any]]
    without: Callable[[T, Sequence[Any]], T | None]


def reduce(best: T, kinds: Iterable[Cuts[T]], shows: Callable[[T], bool], over: Callable[[], bool]) -> bool:
    """Cut large groups of parts first, until no single part can be cut -> whether it came that far.

    shows: whether a smaller case still has the finding; then it is the present one. over: whether to stop
    """
    kinds, tried = [*kinds], {best}
    while True:
        before = best
        for kind in kinds:
            size = len(kind.parts(best))
            while size:
                end = len(kind.parts(best))
                while end > 0:
                    if over():
                        return False
                    smaller = kind.without(best, kind.parts(best)[max(end - size, 0) : end])
                    if smaller and smaller not in tried:
                        tried.add(smaller)
                        best = smaller if shows(smaller) else best
                    end = min(end - size, len(kind.parts(best)))
                size //= 2
        if best == before:
            return True
