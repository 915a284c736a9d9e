"""What a wrong tensor looks like: transposed, shifted by a row, another row's, another request's, twice, zero.

Leaves out: wrong states that follow from a wrong step (`checks/hypotheses.py`), which T2d names with proof. These are
resemblances: a hint is given where the wrong part is much nearer to it than to what is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch

from instep_reference.contract.engine import RequestState

from ..observe.context import EventContext
from ..observe.rows import row_spans
from ..player import Side
from ..replay.patching import field_of
from ..replay.variant import in_memory
from ..verdict import Comparison

NEARER = 0.05  # of the distance to what is right
ROUNDING = 1e-5  # of its size: what two correct runs may differ by, amplified through the layers
MOST = 3  # hints to a finding


def hints(context: EventContext | None, finding: Comparison) -> tuple[str, ...]:
    """At most three sentences that go without their subject ("matches if transposed")."""
    if context is None or context.index != finding.event:
        return ()
    reference = context.truth if context.rounded is None else context.rounded
    found = _of_memory if in_memory(finding.place) else _of_rows
    return tuple(dict.fromkeys(found(context, reference, finding)))[:MOST]


def _of_rows(context: EventContext, reference: Side, finding: Comparison) -> Iterator[str]:
    """The rows of the finding's request, or all of them, beside the right rows of the whole event."""
    ours, right = context.subject.places.get(finding.place), reference.places.get(finding.place)
    if ours is None or right is None or ours.shape != right.shape:
        return
    owners = _owners(context, finding)
    mine = [row for row in range(len(right)) if finding.request is None or owners.get(row) == finding.request]
    wrong = [row for row in mine if _differ(ours[row], right[row])]
    if not wrong:
        return
    yield from _of_any(ours[wrong], right[wrong], heads=1)
    for step, word in ((-1, "before"), (1, "behind")):
        there = [row for row in wrong if 0 <= row + step < len(right)]
        if len(there) > 1 and _near(ours[there], right[[row + step for row in there]], right[there]):
            yield f"each row equals the one {word} it"
    for other in range(len(right)):
        if _near(ours[wrong[0]], right[other], right[wrong[0]]):
            whose = "" if owners.get(other) == finding.request else f' of request "{owners.get(other)}"'
            yield f"row {wrong[0]} equals row {other}{whose if finding.request else ''}"
            return


def _owners(context: EventContext, finding: Comparison) -> dict[int, str]:
    """Row of the event -> whose it is."""
    parts = ((span.request, *span.at(finding.place)) for span in row_spans(context, finding.place.stage))
    return {row: name for name, begin, count in parts for row in range(begin, begin + count)}


def _of_memory(context: EventContext, reference: Side, finding: Comparison) -> Iterator[str]:
    """What a request holds in a layer, beside what it held, and what others hold."""
    name = finding.request

    if name is None:
        return

    def held(states: Mapping[str, RequestState], request: str) -> torch.Tensor | None:
        layers = getattr(states[request], field_of(finding.place)) if request in states else {}
        return cast(Mapping[int, torch.Tensor], layers).get(finding.place.layer)

    ours, right = held(context.subject.after, name), held(reference.after, name)
    if ours is None or right is None or ours.shape != right.shape or not _differ(ours, right):
        return
    before = held(reference.before, name)
    if before is not None and before.shape == ours.shape and _near(ours, before, right):
        yield "holds what it held before the event"
    for other in reference.after:
        its = held(reference.after, other)
        if other != name and its is not None and its.shape == ours.shape and _near(ours, its, right):
            yield f'holds what belongs to request "{other}"'
    yield from _of_any(ours, right, heads=0)
    axis, what = (1, "column") if finding.place.component == "conv" else (0, "row")
    for step, word in ((1, "before"), (-1, "behind")):
        parts = [_without(tensor, axis, side) for tensor, side in ((ours, step), (right, -step), (right, step))]
        if finding.place.component != "state" and _near(*parts):
            yield f"each {what} equals the one {word} it"


def _of_any(ours: torch.Tensor, right: torch.Tensor, *, heads: int) -> Iterator[str]:
    """What may be said of any tensor; heads: the axis that counts them, where there are two more behind or beside."""
    if not ours.any():
        yield "is all zero"
        return
    if ours.is_floating_point():
        for factor, said in ((2.0, "is twice"), (0.5, "is half of"), (-1.0, "is the opposite of")):
            if _near(ours, factor * right, right):
                yield f"{said} what is right"
    if right.dim() == 3:
        if any(_near(ours, turned, right) for turned in _turned(right)):
            yield "matches if transposed"
        if any(_near(ours, right.roll(step, heads), right) for step in (1, -1)):
            yield "matches if its heads are shifted by one"


def _turned(right: torch.Tensor) -> Sequence[torch.Tensor]:
    """The last two axes, as if written in one order and read in the other; and the other way round."""
    rows, columns = right.shape[-2:]
    one = right.transpose(-1, -2).reshape(right.shape)
    return one, right.reshape(*right.shape[:-2], columns, rows).transpose(-1, -2)


def _without(tensor: torch.Tensor, axis: int, step: int) -> torch.Tensor:
    """All along an axis but the first (step 1) or the last (step -1)."""
    return tensor.narrow(axis, 1 if step > 0 else 0, max(tensor.shape[axis] - 1, 0))


def _differ(ours: torch.Tensor, right: torch.Tensor) -> bool:
    """By more than two correct runs would; labels and whole numbers at all."""
    if not ours.is_floating_point():
        return not torch.equal(ours, right)
    away = torch.linalg.vector_norm(ours.double() - right.double())
    return not bool(away <= ROUNDING * torch.linalg.vector_norm(right.double()))


def _near(ours: torch.Tensor, other: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether it is this, rather than what is right."""
    if not ours.numel() or torch.equal(other, right):
        return False
    if not ours.is_floating_point():
        return torch.equal(ours, other)
    away = torch.linalg.vector_norm(ours.double() - right.double())
    return bool(torch.linalg.vector_norm(ours.double() - other.double()) <= NEARER * away)
