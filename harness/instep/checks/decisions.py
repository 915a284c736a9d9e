"""T4: the own choices of a side (picks, accepted drafts, bonus) are the truth's, except in near ties.

Leaves out: forced choices, which are given (T0 compares them).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from instep_reference.contract.engine import Commit, Committed, Draft, Drafted
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.sampling import probabilities

from ..finding_problem import Problem
from ..tier_allowances import MARGIN_ERRORS, granted
from ..verdict import TIES, Comparison, Skipped, Tier
from ..watch.event_context import EventContext, RowSpan
from ..watch.rows_by_request import parted, row_spans, rows
from .accumulated_errors import OTHER_EXPERTS, carried, family
from .check_interface import compared, exact
from .sampled_tokens import PICK, Row, against, drawing_of
from .tensor_and_choice_judgement import Chosen, Ties, chosen


def drawn_choices(
    drawn_from: Sequence[Row], right: torch.Tensor, own: torch.Tensor, noise: float, stored: torch.dtype,
    rounded: torch.Tensor | None = None,
) -> Chosen:
    """T4 of drawn tokens: a token may differ only if logits within T3's allowance could draw it (`sampled_tokens.py`).

    rounded: the logits of the rounded run
    """
    largest = torch.stack([row.logits.abs().amax() for row in drawn_from])
    most = granted(largest, torch.tensor(noise), stored)
    errors = (most / MARGIN_ERRORS).tolist()  # of one logit
    part = torch.tensor(against(drawn_from, right.tolist(), own.tolist(), errors, stored))
    pairs = () if rounded is None else zip(drawn_from, rounded, strict=True)
    return Chosen(part * most, part, right != own, sum(apart(row, theirs) for row, theirs in pairs))


def apart(row: Row, rounded: torch.Tensor) -> float:
    """The part of all uniforms that draws another token from the rounded run's logits."""
    first = row.children
    others = torch.ones(len(row.logits), dtype=torch.bool)
    others[first] = False
    order = torch.tensor([*first, *others.nonzero().flatten().tolist()])
    both = torch.stack([row.logits, rounded.to(row.logits)])
    until = probabilities(both, row.drawing.sampling)[:, order].cumsum(-1)
    since = until.roll(1, -1)
    since[:, 0] = 0
    return float((1 - (until.amin(0) - since.amax(0)).clamp_min(0).sum()).nan_to_num())


NO_CHOICE = "logits that are not finite choose nothing"


class Decisions:
    """A choice may differ while the truth's margin is under twice the logit error that T3 grants."""

    name = "decisions"
    tier = Tier.DECISIONS

    def __init__(self, others: Collection[str] = ()) -> None:
        """others: requests whose rows went to other experts (`experts.py`)."""
        self.ties, self.others = Ties(), others
        self.noise: Mapping[tuple[str, bool], float] = {}  # errors of the rounded run in this event
        self.full = False  # whether there were too many ties
        self.tied: set[str] = set()  # requests with a tie within the window in flight
        self.lost: set[str] = set()  # requests with logits there that are not finite

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        self.noise = carried(context)
        for place in context.truth.places:
            if place.component == "pick" and context.shown.place(place):
                yield from self._picks(context, place)
        chains = isinstance(context.event, Draft) and context.expected.topk is None
        if chains and not context.shown.whole and context.shown.has("draft"):
            assert isinstance(context.event, Draft)
            yield from self._drafts(context, context.event)
        if isinstance(context.event, Commit) and context.shown.has("logits"):
            yield from self._accepted(context, context.event)
        if not self.full:  # a run that continues after a finding reports the total once
            for total in self.ties.too_many(TIES, context.index, context.kind, PICK):
                self.full = True
                yield total

    def _picks(self, context: EventContext, place: Place) -> Iterator[Comparison | Skipped]:
        for span in row_spans(context, place.stage):
            if span.request in context.shown.gone:
                continue
            if span.logit_rows and (span.request in self.others or parted(context, place.stage, span)):
                why = OTHER_EXPERTS if span.request in self.others else "the drafts differ"
                yield Skipped(self.name, context.index, why, f"{place} of {span.request}")
            elif span.logit_rows:
                yield self._without_choice(context, place, span) or self._chosen(context, place, span)

    def _without_choice(self, context: EventContext, place: Place, span: RowSpan) -> Skipped | None:
        """For an engine whose choices instep derives from its logits: numbers that are not finite choose nothing."""
        seen = None if context.shown.whole else rows(context.subject, place._replace(component="logits"), span)
        if seen is None or bool(seen.isfinite().all()):
            return None
        if span.kind == "verify":
            self.lost.add(span.request)
        return Skipped(self.name, context.index, NO_CHOICE, f"{place} of {span.request}")

    def _chosen(self, context: EventContext, place: Place, span: RowSpan) -> Comparison:
        """Compare choices by their margins, in units of the allowed error of the logits; 1 is the limit."""
        own, right = rows(context.subject, place, span), rows(context.truth, place, span)
        logits = rows(context.truth, place._replace(component="logits"), span)
        seen = rows(context.subject, place._replace(component="logits"), span)
        assert right is not None and logits is not None, "the truth has every place"
        if own is None or own.shape != right.shape or seen is None:
            return exact(self, context, place, 0 if own is None else len(own), len(right), "has {} choices")
        own, largest, noise = own.to(right.device), seen.to(right.device).argmax(-1), self.noise[family(place, span)]
        drawing = drawing_of(context, span) if place == PICK else None
        beside = None if context.rounded is None else rows(context.rounded, place._replace(component="logits"), span)
        if drawing is not None:  # `sampled_tokens.py` judges whether it follows from its own logits
            choices = drawn_choices(Row.every(logits, drawing), right, own, noise, seen.dtype, beside)
        elif torch.equal(own, largest):
            choices = chosen(logits, right, own, noise, seen.dtype, rounded=beside)
        else:
            says = "chose {} against its own logits"
            return exact(self, context, place, own.tolist(), largest.tolist(), says, span.request)
        self.ties.add(choices)
        if choices.ties and span.kind == "verify":
            self.tied.add(span.request)
        row, margin = choices.row, float(choices.margin[choices.row])
        said = f"row {row} chose {int(own[row])}, the truth {int(right[row])} by a margin of {margin:.3g}"
        return compared(
            self, context, place, span.logit_rows, choices.worst, Problem.of(said) if choices.differs.any() else None,
            allowed=1.0, request=span.request, blocks=span.logit_rows, undecided=choices.ties)

    def _drafts(self, context: EventContext, event: Draft) -> Iterator[Comparison]:
        """Own drafts of a subject that shows no rows of its draft head, judged by the truth's logits of the step."""
        ours, right = context.subject.answer, context.truth.answer
        assert isinstance(ours, Drafted) and isinstance(right, Drafted)
        for step in range(1, right.own.shape[1]):
            place = Place(f"chain.{step}", AFTER_LAYERS, "logits")
            for span in row_spans(context, place.stage):
                row = event.requests.index(span.request)
                logits = rows(context.truth, place, span)
                if logits is None or span.request in context.shown.gone:
                    continue
                own, theirs = ours.own[row, step : step + 1], right.own[row, step : step + 1]
                known = 0 <= int(own) < logits.shape[1]
                noise = self.noise[family(place, span)]
                choices = chosen(logits, theirs, own.clamp(0, logits.shape[1] - 1), noise, torch.float32)
                self.ties.add(choices)
                said = f"own draft {step + 1} is {int(own)}; the truth's is {int(theirs)}"
                worst = choices.worst if known else math.inf
                yield compared(
                    self, context, place._replace(component="pick"), 1, worst, None if worst <= 1 else Problem.of(said),
                    allowed=1.0, request=span.request, undecided=choices.ties)

    def _accepted(self, context: EventContext, event: Commit) -> Iterator[Comparison | Skipped]:
        ours, right = context.subject.answer, context.truth.answer
        assert isinstance(ours, Committed) and isinstance(right, Committed)
        place = PICK
        for row, name in enumerate(event.requests):
            if name in context.shown.gone:
                continue
            if name in self.tied or name in self.lost or name in self.others:
                tied = "a choice in the window was a tie" if name in self.tied else OTHER_EXPERTS
                why = NO_CHOICE if name in self.lost else tied
                yield Skipped(self.name, context.index, why, f"{place} of {name}")
                continue
            found, expected = (
                (int(side.own_num_correct_drafts[row]), int(side.own_bonus[row])) for side in (ours, right)
            )
            yield exact(self, context, place, found, expected, "own (accepted drafts, bonus) are {}", name)
        self.tied, self.lost = set(), set()
