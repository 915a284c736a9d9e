"""One drawn run: a trace that grows event by event, while all sides serve it and all checks run.

Leaves out: what is drawn (`draw.py`), and who asks for it (`machine.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from instep_reference.contract.engine import Answer, AnyEvent

from ..explain import Older, explained
from ..observe.context import EventContext
from ..replay.guard import SubjectFailed
from ..replay.lockstep import Lockstep, run
from ..replay.participants import Plan, participants_of
from ..replay.patching import PatchedOracle
from ..replay.replay import checks_for, oracle_for
from ..trace.drive import Step, recorded
from ..trace.event_rules import EventRules
from ..trace.file import Trace
from ..trace.file import write as write_trace
from ..trace.header import Header
from ..verdict import Comparison, Skipped, Tier, Verdict


class Diverged(AssertionError):
    """The sides disagree about the last event."""


class Example:
    """Built per drawn run; `serve` takes one legal event.

    elements: numbers compared so far; verdict: the verdict of the event on which the sides differed
    """

    def __init__(self, plan: Plan, header: Header) -> None:
        self.header, self.setting, self.elements = header, plan.setting, 0
        self.events: tuple[AnyEvent, ...] = ()
        self.verdict = Verdict()
        self._answers = _Answers()
        self._lockstep: Lockstep | SubjectFailed
        try:
            participants = participants_of(plan)
        except SubjectFailed as failed:
            self._lockstep, self.rules = failed, EventRules(header)
            return
        self._oracle, self._older = oracle_for(plan, participants), Older(plan.adaptive, plan.num_steps)
        self._checks = (self._answers, *checks_for(self._oracle), self._older)
        self._lockstep = Lockstep(self._trace(), participants)
        self.rules = self._lockstep.rules

    def serve(self, event: AnyEvent) -> None:
        """Serve one more event on every side. Raises `Diverged` if they disagree about it."""
        self.events = (*self.events, event)
        if isinstance(self._lockstep, SubjectFailed):  # there is nobody to serve it: a replay says why
            raise Diverged(str(self._lockstep))
        self._lockstep.trace = self._trace()
        verdict = run(self._lockstep, self._checks)
        self.elements += verdict.elements
        if verdict.findings:
            pieces = self._oracle if isinstance(self._oracle, PatchedOracle) else None
            verdict.compared = explained(verdict.compared, self._lockstep.last, pieces, self._older)
            self.verdict = verdict
            raise Diverged(verdict.findings[0].diagnosis)

    @property
    def size(self) -> tuple[int, int]:
        """A smaller example is better: fewer events first, then a shorter trace."""
        return len(self.events), len(repr(self.events)) + len(repr(self.header.capacity))

    def write(self, path: Path, header: Header) -> None:
        """Write it as a trace. `header` has the model's place relative to the trace."""
        steps = [Step(event, self._answers.said.get(index)) for index, event in enumerate(self.events)]
        write_trace(path, header, self.events, recorded(steps))

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
