"""Wrong moves, bit by bit: conv windows with another column or channel order, shifted positions of a cache.

Leaves out: wrong tensors that a check knows itself and attaches to its finding (`Sides`).
"""

from collections.abc import Iterator
from itertools import starmap

import torch

from ...checks.unchanged_bytes import PROPOSED
from ...tier_allowances import NEAR
from ...watch.rows_by_request import field_of, row_spans, rows
from .finding_case import Case, Explanation
from .wrong_rows import permuted


def known_windows(case: Case) -> Iterator[Explanation]:
    yield from starmap(Explanation.of, () if case.finding.sides is None else case.finding.sides.wrongs())


def windows(case: Case) -> Iterator[Explanation]:
    if case.finding.sides is None:
        return
    if case.component == "conv":
        yield Explanation("has the newest input first", case.right.flip(1))
        yield from permuted(case, 1, "column", [])
        yield from permuted(case, 0, "channel", [])
    elif case.component in ("keys", "values"):
        layer = case.finding.place.layer
        field = next((field_of(case.finding.place, state) for state in case.context.subject.after.values()), "")
        truth = case.context.truth.after
        theirs = [
            (f'of request "{name}"', cache) for name, state in case.context.subject.after.items()
            if name != case.finding.request and (cache := getattr(state, field).get(layer)) is not None and len(cache)
            and name in truth and _is_right(cache, getattr(truth[name], field).get(layer))
        ]  # fmt: skip
        yield from permuted(case, 0, "position", theirs)
        yield from permuted(case, 1, "head", [])
        other = "values" if case.component == "keys" else "keys"
        sides = case.context.truth, case.context.subject
        states = [side.after.get(case.finding.request or "") for side in sides]
        right, held = (None if state is None else getattr(state, field.replace(case.component, other)).get(layer)
                       for state in states)  # fmt: skip
        if held is not None and held.shape == case.found.shape and _is_right(case.found, right):
            yield Explanation(f"holds the {other}", held)
    elif case.finding.place == PROPOSED and case.found.dim() == 1:
        yield from _proposed(case)


def _is_right(cache: torch.Tensor, right: torch.Tensor | None) -> bool:
    """Whether entries are right for their owner; if they are wrong for both requests, their owner is unknown."""
    if right is None or right.shape != cache.shape:
        return False
    off, size = (torch.linalg.vector_norm(x.double()) for x in (cache.cpu() - right.cpu(), right))
    return bool(off <= NEAR * size)


def written_rows(case: Case) -> Iterator[Explanation]:
    """New entries of a cache that are other rows of the layer than its keys or values."""
    place, request = case.finding.place, case.finding.request
    if case.granted is not None or case.component not in ("keys", "values") or case.finding.sides is None:
        return
    due = case.component.removesuffix("s")
    span = next((span for span in row_spans(case.context, place.stage) if span.request == request), None)
    if span is None or span.start + span.count > len(case.right):
        return
    for other in case.context.subject.places:
        theirs = rows(case.context.subject, other, span)
        if other[:2] != place[:2] or other.component == due or theirs is None or theirs.dim() != case.right.dim():
            continue
        width = case.right.shape[-1]
        if theirs.shape[-1] >= width and theirs[..., :width].shape[1:] == case.right.shape[1:]:
            wrong = case.right.clone()
            wrong[span.start : span.start + span.count] = theirs[..., :width].to(wrong)
            yield Explanation(f"holds `{other.component}` in the place of `{due}`", wrong)


def _proposed(case: Case) -> Iterator[Explanation]:
    """The draft head's row after draft 1: another row of the event, or the previous content."""
    before = case.context.subject.before.get(case.finding.request or "")
    if before is not None and before.proposal_hidden is not None:
        yield Explanation("is the head's row of the round before", before.proposal_hidden)
    for name, theirs in case.everybody(PROPOSED):
        for row, each in enumerate(theirs):
            yield Explanation(f'is the head\'s row {row} of request "{name}", of {len(theirs)}', each)
