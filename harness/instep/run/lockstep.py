"""The lock-step loop: every event runs on all sides, followed by the checks.

All expectations come from the trace: slots, pages, lengths and windows follow from its rules, never from an engine.
Leaves out: building the sides (`build_compared_engines.py`), and the checks, which are an argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from instep_optimized.ops.fused import inside_of
from instep_reference.contract.declared_rounding import read_as
from instep_reference.contract.engine import Admit, Commit, Draft, Event, Forward, RequestState
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import Phase, facts, kind_of, moves, named, restricted
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL

from ..checks.check_interface import Check, Remembering
from ..checks.ranks import with_ranks
from ..subject.engines.ranked import RankedEngine
from ..subject.engines.replicated import GroupEngine
from ..subject.engines.staged import PartedEngine, StagedEngine
from ..subject.guarded_calls import SubjectFailed
from ..trace.event_rules import EventRules
from ..trace.file import Trace
from ..trace.micro_batches import MicroBatches
from ..trace.request_table import RequestTable
from ..trace.write_bound import Bound, bound
from ..verdict import INTERRUPTED, UNDECIDABLE, Comparison, Skipped, Tier, Verdict
from ..watch.event_context import EventContext, Expected, KeptCopy
from ..watch.event_log import NOTHING
from ..watch.facts_for_later_events import left_by
from ..watch.rank_facts import GroupFacts, RankFacts, StageFacts
from ..watch.rows_by_request import cut_down, in_batch_order, kept
from ..watch.visible_places import Shown
from .build_compared_engines import Participants
from .patched_tensors import PatchableEngine
from .run_variants import spelled
from .subject_errors import failures

Progress = Callable[[int, Event], None]
Result = Comparison | Skipped
Settle = Callable[[EventContext, Sequence[Result]], Sequence[Result]]
IN_A_ROUND = (Phase.DRAFTED, Phase.VERIFIED)


@dataclass(frozen=True)
class Part:
    """A run of a part of a trace, of an engine driven through callbacks.

    begin         the first event, between two rounds; the reference starts from the texts so far
    checked_from  the first event that is checked, between two rounds; checks only remember the events before it
    counted_from  the first event whose results count
    follows       whether the reference continues from the states that the subject shows after each event
    to_end        whether the run continues after an event that disagrees
    stops         exceptions that end the run with the verdict so far: an interrupt, the end of a time limit
    """

    begin: int = 0
    checked_from: int = 0
    counted_from: int = 0
    follows: bool = False
    to_end: bool = False
    stops: tuple[type[BaseException], ...] = ()


EVERY_EVENT = Part()


class Lockstep:
    """A running trace. `step` serves one event on every side and returns the context for the checks.

    follows  whether the reference continues from the states that the subject shows after each event, not from its own
    receiver  that of the second engine of the trace, with its own participants and checks; None: there is one engine
    checks    those of this engine, if there is a second one
    """

    def __init__(
        self, trace: Trace, participants: Participants, *, follows: bool = False, receiver: Lockstep | None = None,
        rules: EventRules | None = None,
    ) -> None:
        self.trace, self.participants, self.follows = trace, participants, follows
        self.rules = rules or EventRules(trace.header, overlap=participants.overlap)
        self.receiver, self.checks = receiver, list[Check]()
        self.brought = dict[str, KeptCopy]()  # copies of the other engine, since the last event
        if receiver is not None:
            assert self.rules.other is not None
            receiver.rules = self.rules.other
        self.seconds = {"reference": 0.0, "subject": 0.0}
        self.next = 0
        self.end: int | None = None  # the last event to run
        self.goes_on = False  # whether more events may follow it
        self.rows = 0  # rows of the last forward
        ops = participants.built.ops
        self.inside = frozenset[str]() if ops is None else inside_of(ops)
        self.last: EventContext | None = None
        engine = participants.built.subject
        self.micro_batches = MicroBatches(engine.micro_batches if isinstance(engine, StagedEngine) else 1)

    def begin(self, index: int) -> None:
        """Go to event `index`, which is between two rounds; the events before it are not served."""
        for number, event in enumerate(self.trace.events[:index]):
            self.rules.apply(event, self.trace.where(number))
        with torch.inference_mode():
            self.participants.begin(self.rules.table, self.trace.events[:index])
        self.next = index

    def _follow(self) -> None:
        """Put the states that the subject showed last into the reference."""
        table, last = self.rules.table, self.last
        wrote = list(table.live)
        shown: Mapping[str, RequestState] = self.participants.subject.states.now
        if last is not None:
            event, shown = last.event, last.subject.after
            rows = event.rows if isinstance(event, Forward) else ()
            wrote = [row.request for row in rows if row.kind != "verify"]
            wrote += event.requests if isinstance(event, Commit) else ()
        self.participants.follow([name for name in wrote if name in table.live], shown, self.next,
                                 between_rounds=not table.in_phase(*IN_A_ROUND))  # fmt: skip

    def tables(self) -> list[RequestTable]:
        """The request tables of all engines, that of the first one first."""
        return [self.rules.table, *([] if self.rules.other is None else [self.rules.other.table])]

    @property
    def at_last(self) -> Lockstep:
        """The run of the engine that served the last event."""
        other = self.receiver
        return other if other is not None and self.rules.serving(self.trace.events[max(self.next - 1, 0)]) is (
            other.rules) else self

    def all_seconds(self) -> dict[str, float]:
        """Wall clock per side, of both engines together."""
        more = {} if self.receiver is None else self.receiver.seconds
        return {side: spent + more.get(side, 0.0) for side, spent in self.seconds.items()}

    def serving(self) -> Lockstep:
        """The run of the engine that serves the next event. A copy that it fetches is brought from the other one."""
        event = self.trace.events[self.next]
        if self.receiver is None:
            return self
        at = self if self.rules.serving(event) is self.rules else self.receiver
        at.next, at.end, at.goes_on = self.next, self.end, self.goes_on
        if facts(event).copy == "back":
            at.bring(self.receiver if at is self else self, moves(event))
        return at

    def bring(self, other: Lockstep, name: str) -> None:
        """Bring a copy of the other engine to this one: to both references, and to what the checks expect."""
        earlier = left_by(other.last).saved.get(name)
        if earlier is not None:
            state = {layer: state.to(read_as(self.participants.state)) if state.is_floating_point() else state
                     for layer, state in earlier.state.state.items()}  # fmt: skip
            self.brought[name] = KeptCopy(replace(earlier.state, state=state), earlier.proposed, earlier.state,
                                          None if other.last is None else other.last.ranks)  # fmt: skip
        self.participants.bring(other.participants, name)

    def step(self) -> EventContext:
        index, event = self.next, self.trace.events[self.next]
        self._patch(index - 1 if self.last is None else self.last.index)
        if self.follows:
            self._follow()
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
        self.participants.watch.before(event, self._bound(event, before))
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
        earlier = left_by(self.last)
        if self.brought:
            earlier, self.brought = replace(earlier, saved={**earlier.saved, **self.brought}), {}
        regions = self.participants.shown.regions()  # outside inference mode, so that views can be written later
        context = EventContext(
            index, event, expected, subject, truth, rounded_side, changes, slots, pages, regions, log, kept(regions),
            earlier, self._shown(), self._ranks(), self._stages(event), self._group(),
        )  # fmt: skip
        if context.group is not None:
            places = in_batch_order(context, context.group.owners)
            context = replace(context, subject=replace(subject, places=places))
        self.last = cut_down(context)
        return self.last

    def _bound(self, event: Event, before: RequestTable) -> Bound:
        """The bound of the writes of an event; of each replica of a group, if only some requests are its own."""
        after, engine = self.rules.table, self.participants.built.subject
        whole = bound(event, before, after, self.rows)
        # Pages that a commit gives back are freed, and so overwritten, on every replica.
        if not isinstance(engine, GroupEngine) or (after.capacity.trim and isinstance(event, Commit)):
            return whole
        return replace(whole, of_rank={
            rank: bound(restricted(event, [name for name, owner in engine.owners.items() if owner == rank]), before,
                        after, self.rows) for rank in range(engine.group.size)
        } if isinstance(event, Draft | Forward | Commit) else {})

    def _group(self) -> GroupFacts | None:
        """The facts about the replicas of the subject, if it is a data-parallel group."""
        engine = self.participants.built.subject
        return engine.take_group_facts() if isinstance(engine, GroupEngine) else None

    def _ranks(self) -> RankFacts | None:
        """The facts about the ranks of the subject, if it has several."""
        engine = self.participants.built.subject
        if isinstance(engine, PartedEngine) or not isinstance(engine, RankedEngine):
            return None
        return engine.take_facts()

    def _stages(self, event: Event) -> StageFacts | None:
        """The facts about the pipeline stages of the subject, if it has several."""
        engine, parts = self.participants.built.subject, self.micro_batches
        return engine.take_stage_facts(event, parts) if isinstance(engine, StagedEngine) else None

    def joined(self, results: Sequence[Result]) -> list[Result]:
        """The results of this event; of ranks in processes, also the findings of the other ranks."""
        engine, found = self.participants.built.subject, [*results]
        if not isinstance(engine, RankedEngine):
            return found
        if engine.group.size == len(engine.group.ranks):
            return found
        bad = {(one.check, one.place, one.request, one.rank): _sendable(one)
               for one in found if isinstance(one, Comparison) and not one.agrees}  # fmt: skip
        for rank, theirs in enumerate(engine.group.gather([bad])):
            if rank not in engine.group.ranks:
                found += [one if one.rank is not None else replace(one, rank=rank)
                          for key, one in theirs.items() if key not in bad]  # fmt: skip
        return found

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
        if not isinstance(participants.shown.engine, PatchableEngine | RankedEngine):
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


def between_rounds(trace: Trace, index: int) -> int:
    """The last event up to `index` before which no request is within a round."""
    rules, between = EventRules(trace.header), 0
    for number, event in enumerate(trace.events[:index]):
        rules.apply(event, trace.where(number))
        between = between if rules.table.in_phase(*IN_A_ROUND) else number + 1
    return between


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
        track_interval=after.capacity.track_interval,
        track_slots=None if after.capacity.tracked is None else {
            name: kept.track_slot for name in after.on_device() if (kept := after.saved[name]).track_slot is not None},
        steps_to_track=after.steps,
        sampling={name: s.sampling for name, s in after.live.items() if s.sampling is not None and s.draws},
        topk=after.capacity.topk, device_widths=after.capacity.device_widths,
        grown=after.capacity.grown(after.num_steps),
        request_rows_before={name: s.request_row for name, s in before.live.items() if s.request_row is not None},
        request_rows_after={name: s.request_row for name, s in there.items() if s.request_row is not None},
        coming=after.coming(),
    )


def run(
    lockstep: Lockstep, checks: Sequence[Check], *, until: int | None = None, layers: Iterable[int] | None = None,
    progress: Progress | None = None, admissions: bool = True, past_lost: bool = False,
    settle: Settle | None = None, part: Part = EVERY_EVENT,
) -> Verdict:
    """Run until the first event that disagrees, the event `until`, or the end.

    admissions: whether all of them are checked, or only the first event. Each check reads the states of all live
    requests, which for many large requests takes longer than everything else.
    past_lost: go on after an event in which all that disagrees is NaN or infinite numbers, which the reference does not
    have, or of which too little could be decided.
    settle: the results of an event that count; None: all.
    """
    verdict, wanted = Verdict(served=False), None if layers is None else frozenset(layers)
    last = len(lockstep.trace.events) - 1 if until is None else min(until, len(lockstep.trace.events) - 1)
    lockstep.end = last
    while lockstep.next <= last:
        index, event = lockstep.next, lockstep.trace.events[lockstep.next]
        counts = index >= part.counted_from
        verdict.events += counts
        at = lockstep.serving()
        try:
            if isinstance(event, Admit) and index and not admissions:
                at.pass_by()
                continue
            context = at.step()
            if index < part.checked_from:
                for check in checks:
                    if isinstance(check, Remembering):
                        check.remember(context)
                continue
            of_engine = checks if at is lockstep else at.checks
            with torch.inference_mode():  # checks read regions
                judged = (one for check in of_engine for one in check(context))
                results = with_ranks(context, judged)
            if at is not lockstep:
                results = [_at_receiver(one) for one in results]
            if settle is not None:
                results = [*settle(context, results)]
            results = lockstep.joined(results)
        except SubjectFailed as failed:
            found = failures(at.participants, index, event, failed)
            verdict.add(found if at is lockstep else map(_at_receiver, found))
            return verdict
        except part.stops as stopped:
            verdict.events -= counts
            verdict.stopped = str(stopped) or INTERRUPTED
            return verdict
        finally:
            lockstep.next = at.next
        if not counts:
            continue
        verdict.served |= context.shown.computed(context.subject)
        verdict.unserved += context.shown.unserved
        verdict.segmented |= bool(context.log.prompt_buckets)
        if isinstance(event, Forward) and any(row.kind == "prefill" for row in event.rows):
            verdict.prompts += 1
            verdict.replayed += bool(context.log.replays)
        if context.group is not None:
            verdict.replicas = context.group.size
            verdict.shared += len({context.group.owners.get(name) for name in named(event)}) > 1
        if context.stages is not None:
            verdict.stages, verdict.micro_batches = context.stages.count, at.micro_batches.most
            verdict.overlapped += len(context.stages.parts) > 1
            verdict.relayed += isinstance(event, Commit) and any(ran.relayed for ran in context.stages.ran[0])
        bad = verdict.add(result for result in results if _wanted(result, wanted) and not _put(at, result))
        if bad and not part.to_end and not (
                past_lost and all(one.lost or one.check == UNDECIDABLE for one in bad)):
            return verdict
        try:
            if progress is not None:
                progress(index, event)
        except part.stops as stopped:
            verdict.stopped = str(stopped) or INTERRUPTED
            return verdict
    return verdict


def _at_receiver(result: Result) -> Result:
    """The result of an event that the second engine served."""
    return replace(result, kind=f"{result.kind} at the receiver") if isinstance(result, Comparison) else result


def _sendable(finding: Comparison) -> Comparison:
    """The finding with all its wrong contents computed, so that another process can read them."""
    sides = finding.sides
    return finding if sides is None else replace(
        finding, sides=replace(sides, wrongs=partial(tuple, [*sides.wrongs()])))  # fmt: skip


def _put(lockstep: Lockstep, result: Comparison | Skipped) -> bool:
    return isinstance(result, Comparison) and lockstep.participants.patching.replaces(result, lockstep.patched())


def _wanted(result: Comparison | Skipped, layers: frozenset[int] | None) -> bool:
    """Whether a result is about one of the layers, or about no layer, as owners, lengths and roots are."""
    if layers is None or isinstance(result, Skipped):
        return True
    nowhere = result.tier is Tier.IDENTITY and result.place.layer in (STAGE_LEVEL, AFTER_LAYERS)
    return result.place.layer in layers or (nowhere and not result.agrees)
