"""T0: every pipeline stage runs the micro-batches of the trace in their ticks, and receives the last stage's choices.

A relay must have the requests of its micro-batch, in the rows of the forward, with the accepted tokens of the answer
and the caps of the event. Leaves out: the memory that a stage then has, which all other checks see.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from instep_optimized.pipeline import Ran
from instep_reference.contract.engine import Commit, Committed, Draft, Drafted, Forwarded
from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ..finding_problem import Problem
from ..trace.micro_batches import Due, due_steps
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.rank_facts import StageFacts
from .check_interface import NOWHERE, compared

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
        right, answer = _expected(context, facts), context.subject.answer
        found: dict[str, tuple[int, ...]] = {}
        for one in ran:
            found |= dict(zip(one.requests, one.relayed, strict=False))
        place = CHOSEN.get(type(answer), NOWHERE)
        same = [name for name in right if found.get(name, ())[: len(right[name])] == right[name]]
        if same:
            yield compared(self, context, place, sum(len(right[name]) for name in same), 0)
        for name in (name for name in right if name not in same):
            mine = found.get(name)
            says = "received no relay of the request" if mine is None else _differing(context, mine, right[name])
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


def _expected(context: EventContext, facts: StageFacts) -> Mapping[str, tuple[int, ...]]:
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


def _differing(context: EventContext, found: tuple[int, ...], right: tuple[int, ...]) -> str:
    """The first field of a relay that differs."""
    kind = type(context.subject.answer)
    names = ["micro-batch", "row"]
    names += ["accepted length", "last node", "bonus", "cap"] if kind is Committed else ["root"] * (kind is Forwarded)
    at = next(n for n, value in enumerate(right) if found[n : n + 1] != (value,))
    what = names[at] if at < len(names) else ("path" if kind is Committed else "drafts")
    first = at if at < len(names) else len(names)
    mine, due = (found[at], right[at]) if at < len(names) else (found[first : len(right)], right[first:])
    return f"received {what} {mine} in its relay; expected {due}"


def with_stages(context: EventContext, results: list[Comparison | Skipped]) -> list[Comparison | Skipped]:
    """The results; findings about a part of the model name the stage that has it."""
    facts = context.stages
    if facts is None:
        return results
    return [replace(one, rank=facts.stage_of(one.place)) if isinstance(one, Comparison) and not one.agrees
            and one.rank is None else one for one in results]  # fmt: skip
