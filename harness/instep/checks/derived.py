"""T2: every place, and every state, against the reference's own piece run in fp64 on the subject's bits.

Leaves out: how the pieces are run (`observe/oracle.py`), and which wrong state an error points to (`directed.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from instep_reference.contract.place import Place

from ..observe.context import EventContext
from ..observe.oracle import Oracle
from ..observe.recomputation import Recomputation, Run
from ..observe.rows import rows
from ..observe.updates import UPDATE, due
from ..verdict import Comparison, Skipped, Tier
from .allowance import NEAR
from .base import slot_of
from .directed import scene_of
from .measure import Spot, measured
from .run_again import wrong_updates


class Derived:
    """Per request, layer, component and head: e_x <= 3 e_r + 4 ulp."""

    name = "derived"
    tier = Tier.DERIVED

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        for piece in self.oracle.at(context):
            if isinstance(piece, Skipped):
                yield piece
            else:
                yield from self._piece(context, piece)

    def _piece(self, context: EventContext, piece: Recomputation, but: Run | None = None) -> Iterator[Comparison]:
        """but: a truth that was judged already; what is the same bits there is left out."""
        for place, truth in piece.truth.places.items():
            if not due(context, place, piece.span) or (but is not None and torch.equal(truth, but.places[place])):
                continue
            found, scale = rows(context.subject, place, piece.span), _scale(piece, place)
            sampled = piece.yardsticks.places[place]
            result = self._measured(self._spot(context, piece, place.component), found, truth, sampled, scale)
            yield result if result.agrees or found is None else self._named(context, result, piece, found, truth)
        state, known = piece.truth.state, None if but is None else but.state
        if piece.writes_state and state is not None and (known is None or not torch.equal(state, known)):
            yield from self._state(context, piece, state)

    def _measured(
        self, spot: Spot, found: torch.Tensor | None, truth: torch.Tensor, sampled: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> Comparison:
        return measured(spot, found, truth, sampled, scale=scale)

    def _named(
        self, context: EventContext, result: Comparison, piece: Recomputation, found: torch.Tensor, truth: torch.Tensor
    ) -> Comparison:
        """The known mistake whose result stands near what was found, before the bare size of the error."""
        for sentence, work in piece.wrongs if found.shape == truth.shape else ():
            wrong = self.oracle.runner.true(work).places[result.place]
            if _stands_for(found, wrong, truth):
                return replace(result, diagnosis=f"{sentence}; {result.diagnosis}")
        if result.place.component == UPDATE and piece.folding is not None and found.shape == truth.shape:
            pieces = [other for other in self.oracle.at(context) if isinstance(other, Recomputation)]
            for sentence, updates in wrong_updates(scene_of(piece, pieces)):
                if _stands_for(found, updates, truth):
                    return replace(result, diagnosis=f"{sentence}; {result.diagnosis}")
        return _narrowed(result, found, truth, piece.yardsticks.places[result.place])

    def _state(self, context: EventContext, piece: Recomputation, truth: torch.Tensor) -> Iterator[Comparison]:
        sampled = piece.yardsticks.state
        if sampled is not None:
            found, stored = context.subject.after[piece.request].state.get(piece.layer), self.oracle.rounds.get("state")
            result = measured(self._spot(context, piece, "state"), found, truth, sampled, stored=stored)
            if found is not None and stored is not None and found.dtype != stored and found.shape == truth.shape:
                said = "; ".join(filter(None, (f"is {found.dtype}, {stored} is declared", result.diagnosis)))
                result = replace(result, worst=math.inf, diagnosis=said)
            yield result if result.agrees or found is None else _narrowed(result, found, truth, sampled)

    def _spot(self, context: EventContext, piece: Recomputation, component: str) -> Spot:
        slot = slot_of(context, piece.request)
        place = piece.place(component)
        return Spot(self.name, self.tier, context.index, context.kind, place, piece.request, slot)


def _stands_for(found: torch.Tensor, wrong: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether what was found is this wrong thing, as far as it can be told from the truth."""
    away = torch.linalg.vector_norm(found.to(wrong) - wrong)
    return bool(away <= NEAR * torch.linalg.vector_norm(truth - wrong))


def _scale(piece: Recomputation, place: Place) -> torch.Tensor | None:
    """An update beta (v - S'k) is a difference, and next to nothing for a token that S knows: beta (|v| + |S'k|)."""
    if place.component != UPDATE:
        return None
    written = piece.truth.of("beta")[..., None] * piece.truth.of("v")
    return written.abs() + (written - piece.truth.places[place]).abs()


def _narrowed(result: Comparison, found: torch.Tensor, truth: torch.Tensor, sampled: torch.Tensor) -> Comparison:
    """Whether what is wrong is the truth rounded to a narrower dtype.

    Numbers of a narrower dtype alone prove nothing: zeros are such numbers, and so is a copy of a row that is stored
    in that dtype. So neither the truth nor the yardsticks may be such numbers, and what was found must stand within a
    unit of that dtype from the truth, beside the error that the yardsticks make.
    """
    if found.shape != truth.shape:
        return result
    found, sampled = found.to(truth.device), sampled.to(truth)
    correct = (sampled - truth).abs().amax() if sampled.numel() else truth.new_zeros(())
    for narrow in (torch.bfloat16, torch.float16):
        if torch.finfo(narrow).bits >= torch.finfo(found.dtype).bits or not _holds(narrow, found):
            continue
        near = (found.to(truth) - truth).abs() <= torch.finfo(narrow).eps * truth.abs() + correct
        if near.all() and not _holds(narrow, truth) and not _holds(narrow, sampled):
            said = f"as if stored in {str(narrow).removeprefix('torch.')}; {result.diagnosis}"
            return replace(result, diagnosis=said)
    return result


def _holds(narrow: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether every number is one of that dtype."""
    return torch.equal(tensor.to(narrow).to(tensor.dtype), tensor)
