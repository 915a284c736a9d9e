"""T0: the replicas of a data-parallel group make the same collectives, and pad their rows with zeros.

A replica without rows joins each of them. Leaves out: memory of requests of another replica, which no event may write
(`unchanged_bytes.py`), and the answers that replicas exchange (`rank_agreement.py`).
"""

from collections.abc import Iterator
from dataclasses import replace

from instep_reference.contract.event_facts import facts, named
from instep_reference.contract.shards import Segment, Shard

from ..finding_problem import Problem
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.rank_facts import GroupFacts
from .check_interface import NOWHERE, compared
from .rank_collectives import differing
from .rank_location import part_at_fault


class Group:
    """Compare the calls of every replica with replica 0's, and the padded rows with zeros."""

    name = "group"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        group = context.group
        if group is None:
            return
        first, *others = group.calls
        if facts(context.event).batch and named(context.event) and not any(group.calls):
            none = Problem("differs", "no replica made a collective: the vocabulary is not shared")
            yield compared(self, context, NOWHERE, 1, 1, none)
        for rank, calls in enumerate(others, start=1):
            wrong = calls != first
            yield compared(self, context, NOWHERE, 1 + len(first), wrong, differing(rank, calls, first),
                           rank=rank if wrong else None)  # fmt: skip
        for rank, padded in enumerate(group.padded):
            for place, rows, dirty in padded:
                says = None if not dirty else Problem("differs", f"has {dirty} numbers other than 0 in {rows} padded "
                                                      f"rows of replica {rank}")  # fmt: skip
                yield compared(self, context, place, rows, dirty, says, rank=rank if dirty else None)


def with_replicas(context: EventContext, results: list[Comparison | Skipped]) -> list[Comparison | Skipped]:
    """The results; findings about a request name its replica, or the one whose part of the vocabulary is wrong."""
    group = context.group
    if group is None:
        return results
    return [replace(one, rank=_replica(context, group, one)) if isinstance(one, Comparison) and not one.agrees
            and one.rank is None else one for one in results]  # fmt: skip


def _replica(context: EventContext, group: GroupFacts, finding: Comparison) -> int | None:
    found, right = (side.places.get(finding.place) for side in (
        context.subject, context.truth if context.rounded is None else context.rounded))  # fmt: skip
    if found is not None and finding.place.component == "logits":
        vocabulary = Shard(1, (Segment(found.shape[1]),))
        if (part := part_at_fault(found, right, vocabulary, group.size)) is not None:
            return part
    return group.owners.get(finding.request or "")
