"""T0: every rank makes the same collectives in the same order, and exactly the results that need one have one.

A sum of partial products needs an all-reduce, the logits an all-gather, a choice a broadcast. No other result may have
a collective: a recurrent state belongs to one rank. Leaves out: a rank that waits for a call that another rank does not
make. It is reported while the event runs, because nothing comes after it.
"""

from collections.abc import Iterator, Sequence

from instep_optimized.ranks import Call
from instep_reference.contract.engine import Draft

from ..finding_problem import Problem
from ..verdict import Comparison, Tier
from ..watch.event_context import EventContext
from .check_interface import NOWHERE, compared

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
        first, *others = facts.calls
        for rank, calls in enumerate(others, start=1):
            yield compared(self, context, NOWHERE, 1 + len(first), calls != first, differing(rank, calls, first),
                           rank=rank if calls != first else None)  # fmt: skip
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


def differing(rank: int, calls: tuple[Call, ...], first: tuple[Call, ...]) -> Problem | None:
    """The first call in which a rank differs from rank 0."""
    if calls == first:
        return None
    at = next((at for at, pair in enumerate(zip(calls, first, strict=False)) if pair[0] != pair[1]),
              min(len(calls), len(first)))  # fmt: skip
    mine, theirs = (str(one[at]) if at < len(one) else "done" for one in (calls, first))
    return Problem("differs", f"at call {at} rank {rank} is {mine}; rank 0 is {theirs}")
