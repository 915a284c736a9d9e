"""Checks of engines with several ranks, stages or replicas: their decisions, calls, copies and schedule.

T0: every rank makes the same decisions (answers, lengths, slots, pages, step counts, the rows of every call) and the
same collectives in the same order. Every stage runs the micro-batches of the trace in their ticks, and receives the
last stage's choices. The replicas of a data-parallel group pad their rows with zeros. T1: numbers that several ranks
hold have the same bits on each of them: hidden rows, picks, replicated KV heads.

A finding names the rank that differs from the trace; if the trace does not know, the rank that differs from rank 0. If
ranks share a tensor, it names the rank whose part is wrong: parts are compared with the reference's own run. At the
first wrong event the error of a right part is small, and that of the wrong part is large.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from instep_optimized.pipeline import Ran
from instep_optimized.ranks import Call
from instep_reference.contract.engine import Commit, Committed, Draft, Drafted, Forwarded
from instep_reference.contract.event_facts import facts as facts_of
from instep_reference.contract.event_facts import named
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.contract.shards import Segment, Shard

from ..finding_problem import Problem
from ..trace.micro_batches import Due, due_steps
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.event_log import Served
from ..watch.rank_facts import Decision, GroupFacts, RankFacts, StageFacts
from .check_interface import NOWHERE, Check, compared, verb

LONGEST = 100  # characters of a value that are printed


class Agreement:
    """Compare every decision of every rank with rank 0's, or with the trace."""

    name = "agreement"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        if context.ranks is not None:
            yield from self.of(context, context.ranks.decisions, context.ranks.size)
        if context.group is not None:
            yield from self.of(context, context.group.decisions, context.group.size)
        if context.stages is not None:
            yield from self.of(context, context.stages.decisions, context.stages.count, context.stages.count - 1)

    def of(
        self, context: EventContext, decisions: Sequence[Decision], size: int, chief: int = 0
    ) -> Iterator[Comparison]:
        """Compare the decisions of an event. size: number of ranks or stages;  chief: the one that decides"""
        same = [decision for decision in decisions if len(set(map(repr, decision.values))) == 1]
        if same:
            yield compared(self, context, NOWHERE, len(same) * size, 0)
        for decision in decisions:
            if decision not in same:
                yield from self._differing(context, decision, chief)

    def _differing(self, context: EventContext, decision: Decision, chief: int) -> Iterator[Comparison]:
        right, source = decision.values[chief], f"rank {chief}"
        known = expected(context, decision)
        if known in decision.values:
            right, source = known, "the trace"
        place = next((value.place for value in decision.values if isinstance(value, Served)), decision.place)
        for rank, value in enumerate(decision.values):
            if value != right:
                says = (f"{decision.what} of rank {rank} {_is(decision)} {shortened(value)}; "
                        f"{source} has {shortened(right)}")  # fmt: skip
                yield compared(self, context, place, 1, 1, Problem("differs", says), request=decision.request,
                               rank=rank)  # fmt: skip


def expected(context: EventContext, decision: Decision) -> object:
    """The trace's value of a decision about a request; an object that equals nothing if it does not know."""
    known: Mapping[str, Mapping[str, object]] = {
        "the length": context.expected.lengths_after, "the slot": context.expected.slots_after,
        "the pages": {name: list(pages) for name, pages in context.expected.pages_after.items()},
    }
    return known.get(decision.what, {}).get(decision.request or "", object())


def shortened(value: object) -> str:
    """A value in a message, shortened."""
    if value is None:
        return "nothing"
    said = str(value)
    if isinstance(value, Served):
        last = value.begin + value.count - 1
        said = f"units {value.units}, rows {value.begin} to {last} after {value.before} positions"
    return said if len(said) <= LONGEST else said[:LONGEST] + "..."


def _is(decision: Decision) -> str:
    return "are" if decision.what.endswith("s") else "is"


# Component -> the collective that makes it.
NEEDS = {
    "embedding": "all_reduce", "mixer": "all_reduce", "mlp": "all_reduce", "logits": "all_gather", "pick": "broadcast",
}


class Collectives:
    """Compare the calls of every rank with rank 0's, and those of rank 0 with the places that it showed."""

    name = "collectives"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        facts = context.ranks
        if facts is None:
            return
        first = facts.calls[0]
        yield from same_calls(self, context, facts.calls)
        due = {(place, NEEDS[place.component]) for place in context.subject.places if place.component in NEEDS}
        made = {(at, call.kind) for call in first if (at := call.place) is not None}
        if due & made:
            yield compared(self, context, NOWHERE, len(due & made), 0)
        for place, kind in due - made:
            lacks = Problem("differs", f"is made without {kind}: every rank has its own")
            yield compared(self, context, place, 1, 1, lacks)
        if context.expected.topk and isinstance(context.event, Draft):
            yield from self._topk(context, first)
        for place, kind in made - due:
            if place in context.subject.places:
                more = Problem("differs", f"went through {kind}, and needs no such collective")
                yield compared(self, context, place, 1, 1, more)

    def _topk(self, context: EventContext, calls: Sequence[Call]) -> Iterator[Comparison]:
        """Tokens and probabilities from which a tree grows are broadcast after the logits of each step."""
        for at, call in enumerate(calls):
            if call.place is not None and call.place.component == "logits":
                after = [(one.kind, one.place) for one in calls[at + 1 : at + 3]]
                lacks = None if after == [("broadcast", None)] * 2 else Problem(
                    "differs", "are followed by top-k tokens without broadcast: every rank has its own")
                yield compared(self, context, call.place, 1, int(lacks is not None), lacks)


def same_calls(check: Check, context: EventContext, calls: Sequence[tuple[Call, ...]]) -> Iterator[Comparison]:
    """Compare the calls of every rank or replica with those of the first."""
    first, *others = calls
    for rank, mine in enumerate(others, start=1):
        problem = differing(rank, mine, first)
        wrong = problem is not None
        yield compared(check, context, NOWHERE, 1 + len(first), wrong, problem, rank=rank if wrong else None)


def differing(rank: int, calls: tuple[Call, ...], first: tuple[Call, ...]) -> Problem | None:
    """The first call in which a rank differs from rank 0."""
    if calls == first:
        return None
    at = next((at for at, pair in enumerate(zip(calls, first, strict=False)) if pair[0] != pair[1]),
              min(len(calls), len(first)))  # fmt: skip
    mine, theirs = (str(one[at]) if at < len(one) else "done" for one in (calls, first))
    return Problem("differs", f"at call {at} rank {rank} is {mine}; rank 0 is {theirs}")


class Replicas:
    """Compare what a rank holds with the bits of an earlier rank that holds it too."""

    name = "replicas"
    tier = Tier.BITWISE

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        facts = context.ranks
        if facts is None:
            return
        equal = sum(one.elements for one in facts.replicas if not one.differing)
        if equal:
            yield compared(self, context, NOWHERE, equal, 0)
        for one in facts.replicas:
            if one.differing:
                count = f"{one.differing} of {one.elements} numbers"
                holds = f"other bits than rank {one.other}"
                if one.zero or one.like is not None:
                    head = "zeros" if one.zero else f"the KV head of rank {one.like}"
                    holds = f"{head}, not a copy of the one of rank {one.other}"
                says = f"rank {one.rank} holds {holds}: {count} {verb(one.differing, 'differs', 'differ')}"
                yield compared(self, context, one.place, one.elements, one.differing, Problem("differs", says),
                               request=one.request, rank=one.rank)  # fmt: skip


APART = 4.0  # a rank is named if its error is this many times that of every other rank


def with_ranks(context: EventContext, results: Iterable[Comparison | Skipped]) -> list[Comparison | Skipped]:
    """The results; a finding about a part of one rank, stage or replica names it."""
    whose: Callable[[Comparison], int | None]
    if context.ranks is not None:
        whose = partial(rank_of, context, context.ranks)
    elif context.stages is not None:
        whose = partial(stage_of, context.stages)
    elif context.group is not None:
        whose = partial(replica_of, context, context.group)
    else:
        return list(results)
    return [replace(one, rank=whose(one)) if isinstance(one, Comparison) and not one.agrees and one.rank is None
            else one for one in results]  # fmt: skip


def stage_of(facts: StageFacts, finding: Comparison) -> int | None:
    """The stage that has the part of the model."""
    return facts.stage_of(finding.place)


def rank_of(context: EventContext, facts: RankFacts, finding: Comparison) -> int | None:
    """The rank whose part is wrong; None if there is no such rank, or several."""
    place, sides = finding.place, (context.subject, context.truth if context.rounded is None else context.rounded)
    shard = facts.row(place)
    if shard is not None:
        found, right = (side.places.get(place) for side in sides)
    else:
        side = "" if place.stage == "trunk" else "block_" if "block_keys" in facts.memory else "draft_"
        shard = facts.memory.get(side + place.component)
        states = (side.after.get(finding.request or "") for side in sides)
        found, right = (None if state is None else dict(state.parts()).get(place) for state in states)
    return None if shard is None else part_at_fault(found, right, shard, facts.size)


def part_at_fault(found: torch.Tensor | None, right: torch.Tensor | None, shard: Shard, size: int) -> int | None:
    """The rank whose part of a tensor is wrong; None if there is no such rank, or several."""
    if found is None or right is None or found.shape != right.shape:
        return None
    errors = []
    for rank in range(size):
        spans = shard.spans(rank, size)
        mine, due = (torch.cat([x.narrow(shard.axis, span.start, len(span)) for span in spans], shard.axis)
                     for x in (found, right))  # fmt: skip
        errors.append(_error(mine, due))
    worst = max(range(size), key=errors.__getitem__)
    return worst if all(errors[worst] > APART * error for rank, error in enumerate(errors) if rank != worst) else None


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    """The relative error by norm; of labels, the number of wrong ones."""
    if not found.is_floating_point():
        return float((found != right).sum())
    found, right = (x.to("cpu", torch.float64) for x in (found, right))
    apart, size = torch.linalg.vector_norm(found - right), torch.linalg.vector_norm(right)
    error = float(apart / size.clamp_min(torch.finfo(torch.float64).tiny))
    return float("inf") if error != error else error


class Group:
    """Compare the calls of every replica with replica 0's, and the padded rows with zeros."""

    name = "group"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        group = context.group
        if group is None:
            return
        if facts_of(context.event).batch and named(context.event) and not any(group.calls):
            none = Problem("differs", "no replica made a collective: the vocabulary is not shared")
            yield compared(self, context, NOWHERE, 1, 1, none)
        yield from same_calls(self, context, group.calls)
        for rank, padded in enumerate(group.padded):
            for place, rows, dirty in padded:
                says = None if not dirty else Problem("differs", f"has {dirty} numbers other than 0 in {rows} padded "
                                                      f"rows of replica {rank}")  # fmt: skip
                yield compared(self, context, place, rows, dirty, says, rank=rank if dirty else None)


def replica_of(context: EventContext, group: GroupFacts, finding: Comparison) -> int | None:
    """The replica of the finding's request, or the one whose part of the vocabulary is wrong."""
    found, right = (side.places.get(finding.place) for side in (
        context.subject, context.truth if context.rounded is None else context.rounded))  # fmt: skip
    if found is not None and finding.place.component == "logits":
        vocabulary = Shard(1, (Segment(found.shape[1]),))
        if (part := part_at_fault(found, right, vocabulary, group.size)) is not None:
            return part
    return group.owners.get(finding.request or "")


PICKED = Place("trunk", AFTER_LAYERS, "pick")
CHOSEN: dict[type, Place] = {Drafted: PICKED._replace(stage="chain"), Forwarded: PICKED, Committed: PICKED}


class Stages:
    """Compare the steps of every stage with the schedule, and every relay with the answer of the last stage."""

    name = "stages"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        facts = context.stages
        if facts is None:
            return
        for stage, ran in enumerate(facts.ran):
            due = [_rooted(context, step) for step in due_steps(context.event, facts.parts, stage, facts.count)]
            made = [(one.step.tick, one.step.micro_batch, one.step.action, one.requests) for one in ran]
            most = max(len(due), len(made))
            wrong = next((n for n in range(most) if made[n : n + 1] != due[n : n + 1]), None)
            says = "" if wrong is None else (
                f"step {wrong} is {_told(made, wrong)}; the schedule has {_told(due, wrong)}")
            yield compared(self, context, NOWHERE, 1 + len(due), bool(says), Problem.of(says),
                           rank=stage if says else None)  # fmt: skip
            if stage + 1 < facts.count and due:
                yield from self._relays(context, facts, stage, ran)

    def _relays(
        self, context: EventContext, facts: StageFacts, stage: int, ran: tuple[Ran, ...]
    ) -> Iterator[Comparison]:
        """Compare the relays that a stage received in this event with what they must have."""
        right, answer = _relays_due(context, facts), context.subject.answer
        found: dict[str, tuple[int, ...]] = {}
        for one in ran:
            found |= dict(zip(one.requests, one.relayed, strict=False))
        place = CHOSEN.get(type(answer), NOWHERE)
        same = [name for name in right if found.get(name, ())[: len(right[name])] == right[name]]
        if same:
            yield compared(self, context, place, sum(len(right[name]) for name in same), 0)
        for name in (name for name in right if name not in same):
            mine = found.get(name)
            says = "received no relay of the request" if mine is None else _wrong_field(context, mine, right[name])
            yield compared(self, context, place, len(right[name]), 1, Problem("differs", f"stage {stage} {says}"),
                           request=name, rank=stage)  # fmt: skip


def _rooted(context: EventContext, step: Due) -> Due:
    """The step; a relay has only the requests that have a root after the forward, as the last stage answers."""
    tick, micro_batch, action, names = step
    roots = getattr(context.subject.answer, "roots", {})
    return step if action == "run" else (tick, micro_batch, action, tuple(name for name in names if name in roots))


def _told(steps: Sequence[Due], number: int) -> str:
    if number >= len(steps):
        return "nothing"
    tick, micro_batch, action, names = steps[number]
    return f"{action} micro-batch {micro_batch} with {', '.join(names) or 'no request'} at tick {tick}"


def _relays_due(context: EventContext, facts: StageFacts) -> Mapping[str, tuple[int, ...]]:
    """Request -> the row of its relay: micro-batch, place in it, values."""
    event, answer = context.event, context.subject.answer
    if isinstance(answer, Drafted) and isinstance(event, Draft):
        where = {name: (number, place) for number, part in enumerate(facts.parts) for place, name in enumerate(part)}
        return {name: (*where[name], *(token for token in row if token >= 0))
                for name, row in zip(event.requests, answer.drafts.tolist(), strict=True)}  # fmt: skip
    if isinstance(answer, Forwarded):
        rooted = [[name for name in part if name in answer.roots] for part in facts.parts]
        return {name: (number, place, answer.roots[name])
                for number, part in enumerate(rooted) for place, name in enumerate(part)}  # fmt: skip
    if isinstance(answer, Committed) and isinstance(event, Commit):
        caps = event.caps or (-1,) * len(event.requests)
        columns = (answer.accept_lens, answer.last_correct_step_indices, answer.bonus)
        values = zip(*(column.tolist() for column in columns), strict=True)
        return {name: (*facts.verified[name], *mine, cap, *path) for name, mine, cap, path in zip(
            event.requests, values, caps, answer.accept_index.tolist(), strict=True)}  # fmt: skip
    return {}


def _wrong_field(context: EventContext, found: tuple[int, ...], right: tuple[int, ...]) -> str:
    """The first field of a relay that differs."""
    kind = type(context.subject.answer)
    names = ["micro-batch", "row"]
    names += ["accepted length", "last node", "bonus", "cap"] if kind is Committed else ["root"] * (kind is Forwarded)
    at = next(n for n, value in enumerate(right) if found[n : n + 1] != (value,))
    what = names[at] if at < len(names) else ("path" if kind is Committed else "drafts")
    first = at if at < len(names) else len(names)
    mine, due = (found[at], right[at]) if at < len(names) else (found[first : len(right)], right[first:])
    return f"received {what} {mine} in its relay; expected {due}"
