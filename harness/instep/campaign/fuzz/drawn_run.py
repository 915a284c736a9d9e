"""One drawn run: a trace that grows event by event, while all sides serve it and all checks run.

Leaves out: what is drawn (`draw_events.py`), and who asks for it (`hypothesis_machine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from instep_reference.contract.engine import Answer, AnyEvent

from ...checks.check_interface import Check
from ...diagnose import RunHistory, explained
from ...run.build_compared_engines import Plan, participants_of
from ...run.lockstep import Lockstep, run
from ...run.replay import checks_for, oracle_for
from ...run.tensor_patching import PatchedOracle
from ...subject.guarded_calls import SubjectFailed
from ...trace.event_rules import EventRules
from ...trace.event_scheduler import Step, recorded
from ...trace.file import Trace
from ...trace.file import write as write_trace
from ...trace.header import Header
from ...verdict import Comparison, Skipped, Tier, Verdict
from ...watch.event_context import EventContext

BY_ROUNDED = {Tier.PROPAGATED, Tier.DECISIONS}  # tiers that measure by the rounded run


class Diverged(AssertionError):
    """The sides disagree about the last event."""


class Example:
    """Built per drawn run; `serve` takes one legal event.

    chosen    the checks that run, of all that apply
    every     every op is recomputed at one of this many events, at the others the states alone (`Oracle`)
    refuses   whether the subject is offered illegal events
    elements  numbers compared so far; verdict: the verdict of the event at which the sides differed
    """

    def __init__(
        self, plan: Plan, header: Header, chosen: Callable[[Sequence[Check]], Sequence[Check]] = tuple, every: int = 1
    ) -> None:
        self.header, self.setting, self.elements = header, plan.setting, 0
        self.events: tuple[AnyEvent, ...] = ()
        self.verdict = Verdict()
        self._answers = _Answers()
        self._lockstep: Lockstep | SubjectFailed
        try:
            participants = participants_of(plan)
        except SubjectFailed as failed:
            self._lockstep, self.rules, self.refuses = failed, EventRules(header), False
            return
        # With overlapped rounds the room depends on how far the engine has waited, so the trace does not define
        # refusals.
        self.refuses = participants.shown.refuses and not participants.overlap
        self._oracle, self._history = oracle_for(plan, participants), RunHistory(plan.steps)
        if isinstance(self._oracle, PatchedOracle):
            self._oracle.every = every
        checks = checks_for(self._oracle, participants.repeated_runs, ranks=plan.setting.ranks,
                            stages=plan.setting.stages)  # fmt: skip
        self._checks = (self._answers, *chosen(checks), self._history)
        if not BY_ROUNDED & {check.tier for check in self._checks}:
            participants.rounded = participants.repeated_runs = None
        self._lockstep = Lockstep(self._trace(), participants)
        self.rules = self._lockstep.rules

    def serve(self, event: AnyEvent, *, last: bool = True) -> None:
        """Serve one more event on every side. Raises `Diverged` if they disagree about it.

        last: whether it may be the last one, so that every answer that was ever given is compared again
        """
        self.events = (*self.events, event)
        if isinstance(self._lockstep, SubjectFailed):  # no engine could be built: a replay explains why
            raise Diverged(str(self._lockstep))
        self._lockstep.trace, self._lockstep.goes_on = self._trace(), not last
        verdict = run(self._lockstep, self._checks)
        self.elements += verdict.elements
        if verdict.findings:
            at, oracle = self._lockstep.last, self._oracle
            whole = at is not None and isinstance(oracle, PatchedOracle) and oracle.whole(at)  # else replay shows more
            pieces = oracle if whole and isinstance(oracle, PatchedOracle) else None
            verdict.compared = explained(verdict.compared, at, pieces, self._history)
            self.verdict = verdict
            raise Diverged(verdict.findings[0].diagnosis)

    @property
    def size(self) -> tuple[int, int]:
        """A smaller example is better: fewer events first, then a shorter trace."""
        return len(self.events), len(repr(self.events)) + len(repr(self.header.capacity))

    def write(self, path: Path, header: Header, begin: int = 0) -> None:
        """Write it from event `begin` on as a trace. `header` has the model's place relative to the trace."""
        steps = [Step(event, self._answers.said.get(index)) for index, event in enumerate(self.events)][begin:]
        write_trace(path, header, self.events[begin:], recorded(steps))

    def _trace(self) -> Trace:
        return Trace(Path("fuzz.jsonl"), self.header, self.events, {}, "")


class _Answers:
    """Compares nothing. It keeps the truth's answers, as a recording does."""

    name, tier = "answers", Tier.IDENTITY

    def __init__(self) -> None:
        self.said: dict[int, Answer | None] = {}

    def __call__(self, context: EventContext) -> Iterable[Comparison | Skipped]:
        self.said[context.index] = context.truth.answer
        return ()
