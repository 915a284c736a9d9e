"""Draft extend: the draft head runs over positions that became committed, with the target's final hidden rows.

Leaves out: chains (`round.py`). It runs whatever the step count is, so the draft KV never falls behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batch import Span, begins_of, ints, pack
from ..memory import Memory
from ..ops.base import Ops
from ..request import Request
from .base import Drafter

STAGE = "extend"


@dataclass(frozen=True)
class Advance:
    """Rows `before` .. of a request: tokens [count] one place further on, hidden [count, D] the target's."""

    request: Request
    before: int
    tokens: torch.Tensor
    hidden: torch.Tensor


def extend(ops: Ops, drafter: Drafter, memory: Memory, advances: Sequence[Advance]) -> None:
    """Write the draft KV of these rows; where the root is known, the last row already proposes draft 1."""
    if not advances:
        return
    spans = [Span(advance.request.name, "draft", advance.tokens, advance.before) for advance in advances]
    y = drafter.rows(ops, torch.cat([advance.hidden for advance in advances]), pack(spans, memory), STAGE)
    rooted = [
        (advance.request, begin + span.count - 1)
        for advance, span, begin in zip(advances, spans, begins_of(spans), strict=True)
        if advance.request.root is not None
    ]
    if not rooted:
        return
    last = ops.select(x=y, index=ints([row for _, row in rooted], y.device))
    picks = drafter.pick(ops, last, STAGE)
    for number, (request, _) in enumerate(rooted):
        request.proposal = picks[number : number + 1]
        request.proposal_hidden = last[number : number + 1]
