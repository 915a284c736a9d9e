"""The rank whose part of a wrong tensor is wrong, for findings about tensors that ranks share.

The parts of the ranks are compared with the reference's own run. At the first wrong event its error is small, and that
of the wrong part is large. Leaves out: results of collectives, which are equal on every rank.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from instep_reference.contract.shards import Shard

from ..verdict import Comparison, Skipped
from ..watch.event_context import EventContext
from ..watch.rank_facts import RankFacts

APART = 4.0  # a rank is named if its error is this many times that of every other rank


def with_ranks(context: EventContext, results: Iterable[Comparison | Skipped]) -> list[Comparison | Skipped]:
    """The results; findings about a part of one rank name the rank."""
    facts = context.ranks
    if facts is None:
        return list(results)
    return [replace(one, rank=rank_of(context, facts, one)) if isinstance(one, Comparison) and not one.agrees
            and one.rank is None else one for one in results]  # fmt: skip


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
