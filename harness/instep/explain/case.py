"""One finding with all that an explanation of it may need, and what an explanation is.

Leaves out: the explanations (one file per family), and which of them explains (`judge.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from instep_reference.contract.place import Place
from instep_reference.weights import Weights

from ..checks.allowance import allowed
from ..checks.derived import scale_of
from ..checks.measure import blocks, relative_error
from ..checks.own_inputs import OwnInputs
from ..checks.poison import Poison
from ..observe.context import EventContext
from ..observe.oracle import Oracle
from ..observe.own_inputs import rerun
from ..observe.recomputation import Recomputation
from ..observe.rows import row_spans, rows
from ..observe.storage import before_rounding
from ..problem import Code
from ..verdict import Comparison, Tier
from .older import Older

UNRECOGNISED: tuple[Code, ...] = ("differs", "unidentified", "poison")  # codes of labels that need an explanation
STANDS = ("conv", "state", "keys", "values")  # components of memory
NUMERIC = (Tier.DERIVED, Tier.DIRECTED, Tier.PROPAGATED)


class Explanation(NamedTuple):
    """A sentence without its subject, and the tensor that would then stand there, shaped as what was found.

    tries  how many tensors were tried for it, where the best of several was taken
    """

    sentence: str
    wrong: torch.Tensor
    tries: float = 1.0


@dataclass(frozen=True)
class Case:
    """found: the subject's tensor; right: what its own op should have made of the subject's own inputs, in fp64.

    granted  [2, blocks]: the relative error that is allowed there, by the norm and by the largest element; None: what
             is found is exact, because it is moved or is a label
    piece    the reference's piece that `right` is from; older: what requests held before
    """

    finding: Comparison
    context: EventContext
    found: torch.Tensor
    right: torch.Tensor
    granted: torch.Tensor | None
    older: Older
    oracle: Oracle | None = None
    piece: Recomputation | None = None
    scale: torch.Tensor | None = None  # like `right`: errors are relative to it where it is larger
    once: bool = False  # what was found was rounded once, and is held to what it was before that

    @property
    def component(self) -> str:
        return self.finding.place.component

    def off(self, other: torch.Tensor) -> torch.Tensor:
        """How far what was found is from another tensor, in fp64; without the rounding that is no error."""
        found, other = (x.to("cpu", torch.float64) for x in (self.found, other))
        return (before_rounding(self.found.cpu(), other) if self.once else found) - other

    @cached_property
    def weights(self) -> Weights:
        assert self.oracle is not None, "asked where there is a piece"
        return self.oracle.runner.truth

    @cached_property
    def pieces(self) -> list[Recomputation]:
        """Of all requests of the event."""
        if self.oracle is None:
            return []
        return [piece for piece in self.oracle.at(self.context) if isinstance(piece, Recomputation)]

    def own(self, component: str) -> torch.Tensor | None:
        """The subject's rows of another place of the same piece, in fp64; of what stays inside an op of its own, what
        should have come of the subject's rows there."""
        if self.piece is None:
            return None
        at, near = self.piece.place(component), self.piece.from_own_inputs or self.piece
        mine = near.truth.places.get(at) if component in self.context.shown.inside else self.piece.own.get(at)
        return None if mine is None else mine.to("cpu", torch.float64)

    def again(
        self, changes: Mapping[str, torch.Tensor] | None = None, weights: Weights | None = None, **work: Any
    ) -> torch.Tensor | None:
        """What would stand there with other rows, other weights, or another `start`, `memory` or `hidden`."""
        assert self.piece is not None
        piece = replace(self.piece, work=replace(self.piece.work, **work)) if work else self.piece  # type: ignore[type-var]
        run = rerun(piece, self.weights if weights is None else weights, changes)
        return run.state if self.component == "state" else run.places.get(self.finding.place)

    def rights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is right at the like place of other requests. Not what stands there: that has the same fault."""
        place = self.finding.place
        if self.piece is None:
            for span in row_spans(self.context, place.stage):
                theirs = rows(self.context.truth, place, span)
                if span.request != self.finding.request and theirs is not None and len(theirs):
                    yield f'of request "{span.request}"', theirs
        for other in self.pieces if self.piece is not None else ():
            mine = (other.stage, other.layer) == (place.stage, place.layer) and place in other.truth.places
            if mine and other.request != self.finding.request:
                yield f'of request "{other.request}"', rerun(other, self.weights).places[place]

    def everybody(self, place: Place) -> Iterator[tuple[str, torch.Tensor]]:
        """The subject's rows of a place: the request, and its rows."""
        for span in row_spans(self.context, place.stage):
            theirs = rows(self.context.subject, place, span)
            if theirs is not None and len(theirs):
                yield span.request, theirs

    def others(self, component: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The subject's rows of the like place that belong to other requests: whose, and the rows."""
        for name, theirs in self.everybody(self.finding.place._replace(component=component)):
            if name != self.finding.request:
                yield f'of request "{name}"', theirs.to("cpu", torch.float64)


def case_of(finding: Comparison, context: EventContext, oracle: Oracle | None, older: Older) -> Case | None:
    """None: there is nothing to explain, as no tensor of this shape was due there."""
    if finding.sides is not None:
        found, right = finding.sides.found, finding.sides.right
        return Case(finding, context, found, right, None, older, oracle)
    if finding.raised is not None or finding.request is None:
        return None
    if finding.tier not in NUMERIC and finding.check != Poison.name:
        return _of_labels(finding, context, older) if finding.check == "labels" else None
    piece = _piece(finding, context, oracle)
    if piece is None:
        return _free_running(finding, context, older)
    return _of_piece(finding, context, oracle, older, piece)


def _piece(finding: Comparison, context: EventContext, oracle: Oracle | None) -> Recomputation | None:
    for piece in [] if oracle is None else oracle.at(context):
        if not isinstance(piece, Recomputation) or piece.request != finding.request:
            continue
        state = finding.place.component == "state" and piece.writes_state and piece.place("state") == finding.place
        if state or finding.place in piece.truth.places:
            return piece
    return None


def _of_piece(
    finding: Comparison, context: EventContext, oracle: Oracle | None, older: Older, piece: Recomputation
) -> Case | None:
    near = piece.from_own_inputs or piece
    scale = None
    if finding.place.component == "state":
        found = piece.left(context.subject).state.get(piece.layer)
        right, sampled = near.truth.state, near.yardsticks.state
        stored = None if oracle is None else oracle.rounds.get("state")
        if found is not None and stored is not None and found.dtype != stored:
            return None  # the finding says so
    else:
        found, scale = rows(context.subject, finding.place, piece.span), scale_of(near, finding.place)
        right, sampled = near.truth.places[finding.place], near.yardsticks.places[finding.place]
    if found is None or right is None or sampled is None or found.shape != right.shape:
        return None
    judge = None if oracle is None else OwnInputs(oracle)
    once = judge is not None and judge.rounded_once(finding.place.component, found, sampled)
    kept = found.dtype if judge is None else judge.stored(finding.place.component, found, sampled)
    if kept != found.dtype:
        return None  # the finding says so
    granted = _granted(finding.place, sampled.dtype if once else kept, right, sampled, scale)
    return Case(finding, context, found, right.cpu(), granted, older, oracle, piece, scale, once)


def _free_running(finding: Comparison, context: EventContext, older: Older) -> Case | None:
    """Where no piece was computed again: beside the truth of the whole run."""
    span = next((s for s in row_spans(context, finding.place.stage) if s.request == finding.request), None)
    if span is None or context.rounded is None:
        return None
    found, truth, rounded = (
        rows(side, finding.place, span) for side in (context.subject, context.truth, context.rounded)
    )
    if found is None or truth is None or rounded is None or found.shape != truth.shape or not truth.numel():
        return None
    return Case(finding, context, found, truth, _granted(finding.place, found.dtype, truth, rounded[None]), older)


def _of_labels(finding: Comparison, context: EventContext, older: Older) -> Case | None:
    span = next((s for s in row_spans(context, finding.place.stage) if s.request == finding.request), None)
    if finding.place.component in STANDS:
        if finding.problem is None or finding.problem.code not in UNRECOGNISED:
            return None  # the check recognised it, or there is no tensor
        held = (side.after.get(finding.request or "") for side in (context.subject, context.truth))
        found, right = (None if state is None else dict(state.parts()).get(finding.place) for state in held)
    else:
        found, right = (
            None if span is None else rows(side, finding.place, span) for side in (context.subject, context.truth)
        )
    if found is None or right is None or found.shape != right.shape or not right.numel():
        return None
    return Case(finding, context, found, right, None, older)


def _granted(
    place: Place, stored: torch.dtype, truth: torch.Tensor, sampled: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    o = blocks(place.component, truth)
    floor = None if scale is None else blocks(place.component, scale)
    yardstick = relative_error(blocks(place.component, sampled, many=True), o, floor).amax(1)
    granted = allowed(yardstick, stored)
    return torch.where(granted.isfinite(), granted, 0.0)
