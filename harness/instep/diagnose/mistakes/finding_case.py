"""A finding with all data that explanations need (`Case`), and the type of an explanation.

Leaves out: the explanations (one file per family), and whether one fits (`explanation_fit.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.declared_rounding import Blocked
from instep_reference.contract.place_names import Place
from instep_reference.weights import Weights

from ...checks.error_measurement import granted_error
from ...checks.ops_on_own_inputs import OwnInputs
from ...checks.poison import Poison
from ...checks.recomputed_values import sampled_rows, scale_of
from ...finding_problem import Code, WrongContent
from ...oracle.oracle import Oracle
from ...oracle.recomputation import Recomputation, rerun
from ...oracle.single_layer_run import LayerWork
from ...verdict import Comparison, Tier
from ...watch.event_context import EventContext
from ...watch.rows_by_request import row_spans, rows
from .run_history import RunHistory

UNRECOGNISED: tuple[Code, ...] = ("differs", "unidentified", "poison")  # codes of labels that need an explanation
STANDS = (*BLOCKS, "keys", "values")  # components of memory
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NUMERIC = (Tier.DERIVED, Tier.DIRECTED, Tier.PROPAGATED)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(x)


def in_16_bits(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor rounded to each dtype of 16 bits that can hold its numbers, if that changes it."""
    for said, dtype in NARROW.items():
        narrow = rounded(x, dtype)
        if narrow.isfinite().all() and not torch.equal(narrow, x):
            yield said, narrow


class Explanation(NamedTuple):
    """A sentence without a subject, and the tensor that the mistake would leave, with the shape of the found one.

    tries  how many tensors were tried for it, if it is the best of several: an int, as a float would overflow
    draws  [draws, ...]: the same tensor as implementations of the mistake may round it; None: rounded as the right one
    name   its entry in the catalogue, if it is one
    """

    sentence: str
    wrong: torch.Tensor
    tries: float = 1
    draws: Callable[[], torch.Tensor] | None = None
    name: str = ""

    @classmethod
    def of(cls, known: WrongContent, wrong: torch.Tensor) -> "Explanation":
        return cls(known.says, wrong, name=known.name)


@dataclass(frozen=True)
class Compared:
    """A comparison with its tensors.

    found    the subject's tensor
    right    the result of the op in fp64 from the subject's own inputs
    granted  [2, blocks]: the allowed relative error, by the norm and by the largest element; None for an exact
             comparison, because the tensor is moved or has labels
    scale    shaped like `right`: errors are relative to it where it is larger
    once     `found` was rounded once, and is compared with the value before that
    """

    finding: Comparison
    found: torch.Tensor
    right: torch.Tensor
    granted: torch.Tensor | None
    _: KW_ONLY
    scale: torch.Tensor | None = None
    once: bool = False

    @property
    def component(self) -> str:
        return self.finding.place.component


@dataclass(frozen=True)
class Case(Compared):
    """A finding in its event. history: memory of earlier rounds. piece: the recomputation that `right` is from."""

    context: EventContext
    history: RunHistory
    oracle: Oracle | None = None
    piece: Recomputation | None = None

    @cached_property
    def weights(self) -> Weights:
        assert self.oracle is not None, "asked where there is a piece"
        return self.oracle.runner.truth

    @cached_property
    def pieces(self) -> list[Recomputation]:
        """The recomputations of all requests of the event."""
        if self.oracle is None:
            return []
        return [piece for piece in self.oracle.at(self.context) if isinstance(piece, Recomputation)]

    @property
    def work(self) -> LayerWork | None:
        """The layer that runs again, if it is one."""
        work = None if self.piece is None else self.piece.work
        return work if isinstance(work, LayerWork) else None

    @property
    def hidden(self) -> torch.Tensor | None:
        """The rows that this layer was given, in fp64."""
        return None if self.work is None else self.work.hidden.to("cpu", torch.float64)

    def own(self, component: str) -> torch.Tensor | None:
        """The subject's rows of another place of the same recomputation, in fp64.

        Rows inside a fused op are not visible; then they are computed from the subject's rows.
        """
        if self.piece is None:
            return None
        at, near = self.piece.place(component), self.piece.from_own_inputs or self.piece
        mine = near.truth.places.get(at) if component in self.context.shown.inside else self.piece.own.get(at)
        return None if mine is None else mine.to("cpu", torch.float64)

    def again(
        self, changes: Mapping[str, torch.Tensor] | None = None, weights: Weights | None = None, **work: Any
    ) -> torch.Tensor | None:
        """The result with other rows, other weights, or another `start`, `memory` or `hidden`."""
        assert self.piece is not None
        piece = replace(self.piece, work=replace(self.piece.work, **work)) if work else self.piece  # type: ignore[type-var]
        run = rerun(piece, self.weights if weights is None else weights, changes)
        return run.state if self.component == "state" else run.places.get(self.finding.place)

    def made(
        self, says: str, changes: Mapping[str, torch.Tensor] | None = None, weights: Weights | None = None, **work: Any
    ) -> Iterator[Explanation]:
        """The explanation of a result that `again` makes."""
        wrong = self.again(changes, weights, **work)
        if wrong is not None:
            yield Explanation(says, wrong)

    def rights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The right tensors at the same place of other requests. Their found tensors may have the same fault."""
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
        """The subject's rows of a place, per request."""
        for span in row_spans(self.context, place.stage):
            theirs = rows(self.context.subject, place, span)
            if theirs is not None and len(theirs):
                yield span.request, theirs

    def others(self, component: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The subject's rows of other requests at the same place: whose, and the rows."""
        for name, theirs in self.everybody(self.finding.place._replace(component=component)):
            if name != self.finding.request:
                yield f'of request "{name}"', theirs.to("cpu", torch.float64)


def case_of(finding: Comparison, context: EventContext, oracle: Oracle | None, history: RunHistory) -> Case | None:
    """The case of a finding; None if there is nothing to explain, as no tensor of this shape was due."""
    if finding.sides is not None:
        found, right = finding.sides.found, finding.sides.right
        return Case(finding, found, right, None, context, history, oracle)
    if finding.raised is not None or finding.request is None:
        return None
    if finding.tier not in NUMERIC and finding.check != Poison.name:
        return _of_labels(finding, context, history) if finding.check == "labels" else None
    piece = _piece(finding, context, oracle)
    if piece is None:
        return _free_running(finding, context, history)
    return _of_piece(finding, context, oracle, history, piece)


def _piece(finding: Comparison, context: EventContext, oracle: Oracle | None) -> Recomputation | None:
    for piece in [] if oracle is None else oracle.at(context):
        if not isinstance(piece, Recomputation) or piece.request != finding.request:
            continue
        state = finding.place.component == "state" and piece.writes_state and piece.place("state") == finding.place
        state = state and piece.prefix == (finding.problem.prefix if finding.problem is not None else "")
        if state or finding.place in piece.truth.places:
            return piece
    return None


def _of_piece(
    finding: Comparison, context: EventContext, oracle: Oracle | None, history: RunHistory, piece: Recomputation
) -> Case | None:
    near, scale = piece.with_all_draws(), None
    near = near.from_own_inputs or near
    if finding.place.component == "state":
        found = piece.left(context.subject).state.get(piece.layer)
        right, sampled = near.truth.state, near.yardsticks.state
        stored = None if oracle is None else oracle.rounds.get("state")
        stored = stored.shown if isinstance(stored, Blocked) else stored
        narrow = oracle is not None and piece.kept_in(oracle.rounds)
        if narrow or (found is not None and stored is not None and found.dtype != stored):
            return None  # the finding reports it
    else:
        found, scale = rows(context.subject, finding.place, piece.span), scale_of(near, finding.place)
        right = near.truth.places[finding.place]
        sampled = sampled_rows(near, finding.place, {} if oracle is None else oracle.rounds)
    if found is None or right is None or sampled is None or found.shape != right.shape:
        return None
    judge = None if oracle is None else OwnInputs(oracle)
    once = (judge is not None and piece.near is not None
            and judge.rounded_once(finding.place.component, found, sampled))
    kept = found.dtype if judge is None else judge.stored(finding.place.component, found, sampled)
    if kept != found.dtype:
        return None  # the finding reports it
    granted = granted_error(finding.place, sampled.dtype if once else kept, right, sampled, scale)
    return Case(finding, found, right.cpu(), granted, context, history, oracle, piece, scale=scale, once=once)


def _free_running(finding: Comparison, context: EventContext, history: RunHistory) -> Case | None:
    """The case of a place without recomputation, compared with the truth of the whole run."""
    span = next((s for s in row_spans(context, finding.place.stage) if s.request == finding.request), None)
    if span is None or context.rounded is None:
        return None
    found, truth, rounded = (
        rows(side, finding.place, span) for side in (context.subject, context.truth, context.rounded)
    )
    if found is None or truth is None or rounded is None or found.shape != truth.shape or not truth.numel():
        return None
    granted = granted_error(finding.place, found.dtype, truth, rounded[None])
    return Case(finding, found, truth, granted, context, history)


def _of_labels(finding: Comparison, context: EventContext, history: RunHistory) -> Case | None:
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
    return Case(finding, found, right, None, context, history)
