"""T1: numbers that several ranks hold have the same bits on each of them: hidden rows, picks, replicated KV heads.

Leaves out: whether the numbers are right: the other checks judge those of the first rank that holds them.
"""

from collections.abc import Iterator

from ..finding_problem import Problem
from ..verdict import Comparison, Tier
from ..watch.event_context import EventContext
from .check_interface import NOWHERE, compared, verb


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
