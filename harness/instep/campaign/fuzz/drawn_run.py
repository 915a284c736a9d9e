"""One drawn run: a trace that grows event by event, while all sides serve it and all checks run.

Leaves out: what is drawn (`draw_events.py`), and who asks for it (`hypothesis_machine.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from instep_reference.contract.engine import AnyEvent

from ...checks.check_interface import Check
from ...diagnose import RunHistory, explained
from ...oracle.state_oracle import FreeOracle
from ...run.build_compared_engines import Participants, Plan, participants_of
from ...run.lockstep import Lockstep, run
from ...run.patched_tensors import PatchedOracle
from ...run.replay import checks_for, oracle_for
from ...subject.guarded_calls import SubjectFailed
from ...trace.event_rules import EventRules
from ...trace.event_scheduler import Step, recorded
from ...trace.file import Trace
from ...trace.file import write as write_trace
from ...trace.header import Header
from ...verdict import Tier, Verdict
from ..shrink import Answers

BY_ROUNDED = {Tier.PROPAGATED, Tier.DECISIONS}  # tiers that measure by the rounded run


class Diverged(AssertionError):
    """The sides disagree about the last event."""


class Example:
    """Built per drawn run; `serve` takes one legal event.

    chosen    the checks that run, of all that apply
    every     every op is recomputed at one of this many events, at the others the states alone (`Oracle`)
    refuses   whether the subject is offered illegal events
    elements  numbers compared so far; verdict: the verdict of the event at which the sides differed
    served    the verdict of the last event
    """

    def __init__(
        self, plan: Plan, header: Header, chosen: Callable[[Sequence[Check]], Sequence[Check]] = tuple, every: int = 1
    ) -> None:
        self.header, self.setting, self.elements = header, plan.setting, 0
        self.events: tuple[AnyEvent, ...] = ()
        self.verdict = self.served = Verdict()
        self._answers = Answers()
        self._oracles = list[PatchedOracle | FreeOracle | None]()
        self._lockstep: Lockstep | SubjectFailed
        plans = (plan,) if header.receiver is None else plan.of_receiver(header, "the drawn header")
        try:
            sides = [participants_of(one) for one in plans]
        except SubjectFailed as failed:
            self._lockstep, self.rules, self.refuses = failed, EventRules(header), False
            return
        participants = sides[0]
        # With overlapped rounds the room depends on how far the engine has waited, so the trace does not define
        # refusals. Nor does one engine know which names the other one uses.
        self.refuses = participants.shown.refuses and not participants.overlap and header.receiver is None
        self._history = RunHistory(plan.steps)
        judges = [self._judged(one, side, chosen, every) for one, side in zip(plans, sides, strict=True)]
        self._checks = judges[0]
        second = Lockstep(self._trace(), sides[1]) if len(sides) > 1 else None
        self._lockstep = Lockstep(self._trace(), participants, receiver=second)
        if second is not None:
            second.checks = judges[1]
        self.rules = self._lockstep.rules

    def _judged(
        self, plan: Plan, participants: Participants, chosen: Callable[[Sequence[Check]], Sequence[Check]], every: int
    ) -> list[Check]:
        """The checks of one engine."""
        oracle = oracle_for(plan, participants)
        self._oracles.append(oracle)
        if isinstance(oracle, PatchedOracle):
            oracle.every = every
        found = checks_for(oracle, participants.repeated_runs, ranks=plan.setting.ranks, stages=plan.setting.stages,
                           replicas=plan.setting.dp)  # fmt: skip
        checks = [self._answers, *chosen(found), self._history]
        if not BY_ROUNDED & {check.tier for check in checks}:
            participants.rounded = participants.repeated_runs = None
        return checks

    def serve(self, event: AnyEvent, *, last: bool = True) -> None:
        """Serve one more event on every side. Raises `Diverged` if they disagree about it.

        last: whether it may be the last one, so that every answer that was ever given is compared again
        """
        self.events = (*self.events, event)
        if isinstance(self._lockstep, SubjectFailed):  # no engine could be built: a replay explains why
            raise Diverged(str(self._lockstep))
        self._lockstep.trace, self._lockstep.goes_on = self._trace(), not last
        if self._lockstep.receiver is not None:
            self._lockstep.receiver.trace = self._lockstep.trace
        verdict = self.served = run(self._lockstep, self._checks)
        self.elements += verdict.elements
        if verdict.findings:
            engine = self._lockstep.at_last
            at, oracle = engine.last, self._oracles[0 if engine is self._lockstep else 1]
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
