"""Wrong moves, bit by bit: conv windows with another column or channel order, shifted positions of a cache.

Leaves out: wrong tensors that a check knows itself and attaches to its finding (`Sides`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap

import torch

from ...checks.unchanged_bytes import PROPOSED
from ...tier_allowances import NEAR
from ...watch.rows_by_request import field_of
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
        theirs = [
            (f'of request "{name}"', cache) for name, state in case.context.subject.after.items()
            if name != case.finding.request and (cache := getattr(state, field).get(layer)) is not None and len(cache)
        ]  # fmt: skip
        yield from permuted(case, 0, "position", theirs)
        yield from permuted(case, 1, "head", [])
        other = "values" if case.component == "keys" else "keys"
        sides = case.context.truth, case.context.subject
        states = [side.after.get(case.finding.request or "") for side in sides]
        right, held = (None if state is None else getattr(state, field.replace(case.component, other)).get(layer)
                       for state in states)  # fmt: skip
        if right is not None and held is not None and held.shape == case.found.shape == right.shape:
            # It is the other's only if it is right for the other; or else both are wrong.
            off, size = (torch.linalg.vector_norm(x.double()) for x in (case.found.cpu() - right.cpu(), right))
            if off <= NEAR * size:
                yield Explanation(f"holds the {other}", held)
    elif case.finding.place == PROPOSED and case.found.dim() == 1:
        yield from _proposed(case)


def _proposed(case: Case) -> Iterator[Explanation]:
    """The draft head's row after draft 1: another row of the event, or the previous content."""
    before = case.context.subject.before.get(case.finding.request or "")
    if before is not None and before.proposal_hidden is not None:
        yield Explanation("is the head's row of the round before", before.proposal_hidden)
    for name, theirs in case.everybody(PROPOSED):
        for row, each in enumerate(theirs):
            yield Explanation(f'is the head\'s row {row} of request "{name}", of {len(theirs)}', each)
