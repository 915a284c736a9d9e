"""One drawn run: a trace that grows event by event while all sides serve it and every check looks on.

Leaves out: what is drawn (`draw.py`), and who asks for it (`machine.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from instep_reference.contract.engine import AnyEvent, Answer

from ..checks import Check, for_labels, for_numbers
from ..observe.moment import Moment
from ..observe.oracle import Oracle
from ..rig.lockstep import Lockstep, run
from ..rig.sides import Plan, Sides, moves_labels, rounds, seat, wide
from ..trace.drive import Step, recorded
from ..trace.file import Trace
from ..trace.file import write as write_trace
from ..trace.header import Header
from ..trace.legal import Law
from ..verdict import Comparison, Skipped, Tier

# T3's yardstick is one run, so one draw: among the hundred thousands of comparisons of a campaign some honest error is
# a few times the allowance of 3 yardsticks (3.4 was seen). Where every layer agrees on the subject's own bits (T2), an
# error that was merely carried along counts from this many allowances on; what ran away exceeds it by far.
CARRIED = 10.0


class Diverged(AssertionError):
    """The sides disagree about the last event."""


class Example:
    """Built per drawn run; `serve` takes one legal event.

    elements: numbers compared; carried: comparisons of T3 alone that were a little above their allowance
    """

    def __init__(self, plan: Plan, header: Header) -> None:
        self.header, self.elements, self.carried = header, 0, 0
        self.events: tuple[AnyEvent, ...] = ()
        sides = seat(plan)
        self._answers = _Answers()
        self._checks = (self._answers, *_checks(plan, sides))
        self._lockstep = Lockstep(self._trace(), sides)

    @property
    def law(self) -> Law:
        return self._lockstep.law

    def serve(self, event: AnyEvent) -> None:
        """One more event on every side; raises `Diverged` when they disagree about it."""
        self.events = (*self.events, event)
        self._lockstep.trace = self._trace()
        verdict = run(self._lockstep, self._checks)
        self.elements += verdict.elements
        merely = [found for found in verdict.findings if _merely_carried(found)]
        self.carried += len(merely)
        if len(verdict.findings) > len(merely):
            raise Diverged(verdict.findings[0].diagnosis)

    @property
    def size(self) -> tuple[int, int]:
        """What is smaller is the better example: fewer events, then less to read."""
        return len(self.events), len(repr(self.events)) + len(repr(self.header.capacity))

    def write(self, path: Path, header: Header) -> None:
        """Keep it as a trace, under a header that says where the model stands seen from there."""
        steps = [Step(event, self._answers.said.get(index)) for index, event in enumerate(self.events)]
        write_trace(path, header, self.events, recorded(steps))

    def _trace(self) -> Trace:
        return Trace(Path("fuzz.jsonl"), self.header, self.events, {}, "")


class _Answers:
    """Compares nothing: keeps what the truth answered, as a recording does."""

    name, tier = "answers", Tier.IDENTITY

    def __init__(self) -> None:
        self.said: dict[int, Answer | None] = {}

    def __call__(self, moment: Moment) -> Iterable[Comparison | Skipped]:
        self.said[moment.index] = moment.truth.answer
        return ()


def _merely_carried(found: Comparison) -> bool:
    return found.tier is Tier.PROPAGATED and found.headroom <= CARRIED


def _checks(plan: Plan, sides: Sides) -> Sequence[Check]:
    """A check remembers one run, so every example has its own."""
    if moves_labels(sides.ops):
        return for_labels()
    return for_numbers(Oracle(plan.checkpoint, rounds(plan, sides.ops), wide(plan.width)))
