"""T0: every rank made the same decisions: answers, lengths, slots, pages, step counts, and the rows of every call.

The rank that differs from the trace is named; if the trace does not know, the rank that differs from rank 0.
Leaves out: numbers that several ranks hold (`rank_replicas.py`), and collectives (`rank_collectives.py`).
"""

from collections.abc import Iterator, Mapping, Sequence

from ..finding_problem import Problem
from ..verdict import Comparison, Tier
from ..watch.event_context import EventContext
from ..watch.event_log import Served
from ..watch.rank_facts import Decision
from .check_interface import NOWHERE, compared

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
