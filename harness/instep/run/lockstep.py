"""The lock-step loop: every event runs on all sides, followed by the checks.

All expectations come from the trace: slots, pages, lengths and windows follow from its rules, never from an engine.
Leaves out: building the sides (`participants.py`), and the checks, which are an argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from instep_optimized.ops.fused import inside_of
from instep_reference.contract.engine import Admit, Event, Forward
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import Phase, kind_of
from instep_reference.contract.place import AFTER_LAYERS, STAGE_LEVEL

from ..checks.base import Check
from ..subject.guard import SubjectFailed
from ..trace.event_rules import EventRules
from ..trace.file import Trace
from ..trace.request_table import RequestTable
from ..trace.write_bound import bound
from ..verdict import Comparison, Skipped, Tier, Verdict
from ..watch.carried_facts import left_by
from ..watch.event_context import EventContext, Expected
from ..watch.event_log import NOTHING
from ..watch.required_rows import cut_down, kept
from ..watch.visible_places import Shown
from .failures import failures
from .participants import Participants
from .tensor_patching import PatchableEngine
from .variant import spelled

Progress = Callable[[int, Event], None]
Result = Comparison | Skipped
Settle = Callable[[EventContext, Sequence[Result]], Sequence[Result]]


class Lockstep:
    """A running trace. `step` serves one event on every side and returns the context for the checks."""

    def __init__(self, trace: Trace, participants: Participants) -> None:
        self.trace, self.participants = trace, participants
        self.rules = EventRules(trace.header, overlap=participants.overlap)
        self.seconds = {"reference": 0.0, "subject": 0.0}
        self.next = 0
        self.end: int | None = None  # the last event to run
        self.goes_on = False  # whether more events may follow it
        self.rows = 0  # rows of the last forward
        ops = participants.built.ops
        self.inside = frozenset[str]() if ops is None else inside_of(ops)
        self.last: EventContext | None = None

    def step(self) -> EventContext:
        index, event = self.next, self.trace.events[self.next]
        self._patch(index - 1)
        before = self.rules.table.as_it_stands()
        self.rules.apply(event, self.trace.where(index))
        self.next += 1
        self.participants.ask_with(self.rules.table.coming())
        begun = time.perf_counter()
        with torch.inference_mode():
            truth = self.participants.truth.serve(event)
            rankings, rounded = self.participants.truth.rankings(), self.participants.rounded
            rounded_side = None if rounded is None else rounded.serve_following(event, rankings)
        self.seconds["reference"] += time.perf_counter() - begun
        if self.participants.repeated_runs is not None:
            self.participants.repeated_runs.add(event, rankings)
        self.participants.patching.begin(index, (truth if rounded_side is None else rounded_side).places)
        if isinstance(event, Forward):
            self.rows = len(event.rows)
        self.participants.watch.before(event, bound(event, before, self.rules.table, self.rows))
        begun = time.perf_counter()
        subject = self.participants.subject.serve(event)
        slots, pages = self.participants.shown.slots(), self.participants.shown.pages()
        self.seconds["subject"] += time.perf_counter() - begun
        changes = self.participants.watch.after()
        self.participants.patching.end(index, kind_of(event))
        expected = expect(before, self.rules.table)
        instrumentation = self.participants.built.instrumentation
        last = index in (self.end, len(self.trace.events) - 1) and not self.goes_on
        log = NOTHING if instrumentation is None else instrumentation.take(last=last)
        regions = self.participants.shown.regions()  # outside inference mode, so that views can be written later
        self.last = cut_down(EventContext(
            index, event, expected, subject, truth, rounded_side, changes, slots, pages, regions, log, kept(regions),
            left_by(self.last), self._shown(),
        ))  # fmt: skip
        return self.last

    def pass_by(self) -> None:
        """Serve the next event without checks and without reading states."""
        states = self.participants.subject.states
        states.resting = True
        try:
            self.step()
        finally:
            states.resting = False

    def _shown(self) -> Shown:
        engine = self.participants.shown
        return replace(self.participants.says_shown(), inside=self.inside, refuses=engine.refuses)

    def patched(self) -> list[str]:
        """The requests whose memory can be replaced now, which excludes requests within a round."""
        live = self.rules.table.live
        return [name for name, standing in live.items() if standing.slot is not None and not standing.window]

    def _patch(self, index: int) -> None:
        """Replace the subject's memory with the reference's memory after event `index`."""
        places, participants = self.participants.patching.memory(index), self.participants
        if not places:
            return
        if not isinstance(participants.shown.engine, PatchableEngine):
            raise BadInput("--graft", found=participants.subject.name, expected="an op set with memory to write")
        right = participants.truth if participants.rounded is None else participants.rounded
        patched = self.patched()
        if not patched:
            raise BadInput("--graft", found=f"{spelled(places[0])}@{index}, when every request is within a round",
                           expected="an event after which some request's memory can be written")  # fmt: skip
        for name in patched:
            participants.shown.engine.patch(name, places, right.states.now[name])
            participants.subject.states.look(name)
        participants.watch.forget()


def expect(before: RequestTable, after: RequestTable) -> Expected:
    """The expectations of the rules about the event between two states of the request table."""
    there = {name: standing for name, standing in after.live.items() if standing.slot is not None}
    windows = {name: s.window for table in (before, after) for name, s in table.live.items() if s.window}
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
        prompts={name: s.prompt for table in (before, after) for name, s in table.live.items()},
        parents={name: s.parents for table in (before, after) for name, s in table.live.items() if s.window},
        copies=after.copies(),
        prefixes={name: kept.length for name, kept in after.saved.items() if kept.prefix},
        sampling={name: s.sampling for name, s in after.live.items() if s.sampling is not None and s.draws},
        topk=after.capacity.topk,
        grown=after.capacity.grown(after.num_steps),
        request_rows_before={name: s.request_row for name, s in before.live.items() if s.request_row is not None},
        request_rows_after={name: s.request_row for name, s in there.items() if s.request_row is not None},
    )


def run(
    lockstep: Lockstep, checks: Sequence[Check], *, until: int | None = None, layers: Iterable[int] | None = None,
    progress: Progress | None = None, admissions: bool = True, past_lost: bool = False,
    settle: Settle | None = None,
) -> Verdict:
    """Run until the first event that disagrees, the event `until`, or the end.

    admissions: whether all of them are checked, or only the first event. Each check reads the states of all live
    requests, which for many large requests takes longer than everything else.
    past_lost: go on after an event in which all that disagrees is NaN or infinite numbers: the reference has none.
    settle: the results of an event that count; None: all.
    """
    verdict, wanted = Verdict(served=False), None if layers is None else frozenset(layers)
    last = len(lockstep.trace.events) - 1 if until is None else min(until, len(lockstep.trace.events) - 1)
    lockstep.end = last
    while lockstep.next <= last:
        index, event = lockstep.next, lockstep.trace.events[lockstep.next]
        verdict.events += 1
        try:
            if isinstance(event, Admit) and index and not admissions:
                lockstep.pass_by()
                continue
            context = lockstep.step()
            verdict.served |= context.shown.computed(context.subject)
            verdict.unserved += context.shown.unserved
            with torch.inference_mode():
                results = [result for check in checks for result in check(context)]  # they read regions
            if settle is not None:
                results = [*settle(context, results)]
        except SubjectFailed as failed:
            verdict.add(failures(lockstep.participants, index, event, failed))
            return verdict
        bad = verdict.add(result for result in results if _wanted(result, wanted) and not _put(lockstep, result))
        if bad and not (past_lost and all(one.lost for one in bad)):
            return verdict
        if progress is not None:
            progress(index, event)
    return verdict


def _put(lockstep: Lockstep, result: Comparison | Skipped) -> bool:
    return isinstance(result, Comparison) and lockstep.participants.patching.replaces(result, lockstep.patched())


def _wanted(result: Comparison | Skipped, layers: frozenset[int] | None) -> bool:
    """Whether a result is about one of the layers, or about no layer, as owners, lengths and roots are."""
    if layers is None or isinstance(result, Skipped):
        return True
    nowhere = result.tier is Tier.IDENTITY and result.place.layer in (STAGE_LEVEL, AFTER_LAYERS)
    return result.place.layer in layers or (nowhere and not result.agrees)
