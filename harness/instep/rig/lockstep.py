"""Every event through all sides, one after another, with the checks after each.

Leaves out: building the sides (`sides.py`), and which checks there are (an argument). The trace is the only source
of what is expected: slots, pages, lengths and windows come from the law, never from an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from instep_reference.contract.engine import Event, Forward
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place import AFTER_LAYERS, STAGE_LEVEL

from ..checks.base import Check
from ..observe.moment import Expected, Moment
from ..observe.noted import NOTHING
from ..observe.updates import cut_down, kept
from ..player import Side
from ..trace.book import Book, Phase
from ..trace.bounds import bound
from ..trace.file import Trace
from ..trace.legal import Law
from ..verdict import Comparison, Skipped, Tier, Verdict
from .failures import failures
from .grafting import Mendable
from .guard import SubjectFailed
from .sides import Sides
from .variant import spelled

Progress = Callable[[int, Event], None]


class Lockstep:
    """A trace under way. `step` serves one event on every side and gives the moment that checks look at."""

    def __init__(self, trace: Trace, sides: Sides) -> None:
        self.trace, self.sides = trace, sides
        self.law = Law(trace.header, overlap=sides.overlap)
        self.seconds = {"reference": 0.0, "subject": 0.0}
        self.next = 0
        self.rows = 0  # of the last forward
        self.last: Moment | None = None

    def step(self) -> Moment:
        index, event = self.next, self.trace.events[self.next]
        self._mend(index - 1)
        before = replace(self.law.book, live=dict(self.law.book.live))
        self.law.apply(event, self.trace.where(index))
        self.next += 1
        begun = time.perf_counter()
        truth = self.sides.truth.serve(event)
        rounded = None if self.sides.rounded is None else self.sides.rounded.serve(event)
        self.seconds["reference"] += time.perf_counter() - begun
        self.sides.grafting.begin(index, (truth if rounded is None else rounded).places)
        if isinstance(event, Forward):
            self.rows = len(event.rows)
        self.sides.watch.before(event, bound(event, before, self.law.book, self.rows))
        begun = time.perf_counter()
        subject = self.sides.subject.serve(event)
        slots, pages = self.sides.shown.slots(), self.sides.shown.pages()
        self.seconds["subject"] += time.perf_counter() - begun
        changes = self.sides.watch.after()
        self.sides.grafting.end(index, str(type(event).__struct_config__.tag))
        expected = expect(before, self.law.book)
        redrawn = partial(self._redrawn, index) if self.sides.rounded_draw else None
        regions = self.sides.shown.regions
        noted = NOTHING if self.sides.notes is None else self.sides.notes.take()
        self.last = cut_down(Moment(
            index, event, expected, subject, truth, rounded, changes, slots, pages, redrawn, regions, noted,
            kept(regions()),
        ))  # fmt: skip
        return self.last

    def mended(self) -> list[str]:
        """Whose memory can be replaced as things stand: within a round it belongs to nobody."""
        live = self.law.book.live
        return [name for name, standing in live.items() if standing.slot is not None and not standing.window]

    def _mend(self, index: int) -> None:
        """Put the reference's memory into the subject's, as it was after event `index`."""
        places, sides = self.sides.grafting.memory(index), self.sides
        if not places:
            return
        if not isinstance(sides.shown.engine, Mendable):
            raise BadInput("--graft", found=sides.subject.name, expected="an op set: whose memory we can write")
        right = sides.truth if sides.rounded is None else sides.rounded
        mended = self.mended()
        if not mended:
            raise BadInput("--graft", found=f"{spelled(places[0])}@{index}, when every request is within a round",
                           expected="an event after which some request's memory can be written")  # fmt: skip
        for name in mended:
            sides.shown.engine.mend(name, places, right.states.now[name])
            sides.subject.states.look(name)
        sides.watch.forget()

    def _redrawn(self, last: int, draw: int) -> Side:
        """The rounded run from the start up to this event, as another draw. Every choice stands in the trace."""
        assert self.sides.rounded_draw is not None
        rounded = self.sides.rounded_draw(draw)
        for event in self.trace.events[:last]:
            rounded.serve(event)
        return rounded.serve(self.trace.events[last])


def expect(before: Book, after: Book) -> Expected:
    """What the law says about the moment between two states of the book."""
    there = {name: standing for name, standing in after.live.items() if standing.slot is not None}
    windows = {name: s.window for book in (before, after) for name, s in book.live.items() if s.window}
    return Expected(
        slots_before={name: s.slot for name, s in before.live.items() if s.slot is not None},
        slots_after={name: s.slot for name, s in there.items() if s.slot is not None},
        pages_before={name: s.pages for name, s in before.live.items() if s.slot is not None},
        pages_after={name: s.pages for name, s in there.items()},
        lengths_after={name: s.length for name, s in after.live.items()},
        roots_after={name: s.root for name, s in after.live.items()},
        windows=windows,
        num_steps=after.num_steps,
        flying=frozenset(after.in_phase(Phase.VERIFIED)),
        prompts={name: s.prompt for book in (before, after) for name, s in book.live.items()},
        parents={name: s.parents for book in (before, after) for name, s in book.live.items() if s.window},
    )


def run(
    lockstep: Lockstep, checks: Sequence[Check], *, until: int | None = None, layers: Iterable[int] | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Go on until the first event that disagrees, the event `until`, or the end."""
    verdict, wanted = Verdict(served=False), None if layers is None else frozenset(layers)
    last = len(lockstep.trace.events) - 1 if until is None else min(until, len(lockstep.trace.events) - 1)
    while lockstep.next <= last:
        index, event = lockstep.next, lockstep.trace.events[lockstep.next]
        verdict.events += 1
        try:
            moment = lockstep.step()
            verdict.served |= bool(moment.subject.places)
            results = [result for check in checks for result in check(moment)]  # they ask for regions
        except SubjectFailed as failed:
            verdict.add(failures(lockstep.sides, index, event, failed))
            return verdict
        if verdict.add(result for result in results if _wanted(result, wanted) and not _put(lockstep, result)):
            return verdict
        if progress is not None:
            progress(index, event)
    return verdict


def _put(lockstep: Lockstep, result: Comparison | Skipped) -> bool:
    return isinstance(result, Comparison) and lockstep.sides.grafting.replaces(result, lockstep.mended())


def _wanted(result: Comparison | Skipped, layers: frozenset[int] | None) -> bool:
    """Whatever layers are judged, a wrong owner, length or root belongs to none and is told."""
    if layers is None or isinstance(result, Skipped):
        return True
    nowhere = result.tier is Tier.IDENTITY and result.place.layer in (STAGE_LEVEL, AFTER_LAYERS)
    return result.place.layer in layers or (nowhere and not result.agrees)
