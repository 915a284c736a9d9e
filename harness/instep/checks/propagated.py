"""T3: what has come of all errors so far: hidden rows, final rows, logits, of the free-running subject.

Leaves out: where an error was made (T2 says it). The yardstick is the rounded reference, run end to end with sums in
another order (`observe/reorder.py`): one run, so one draw. At one place its error may be small by luck; so what counts
is the largest that it makes anywhere in this event for this request, in the target or in its head. Nothing is carried
over from earlier events: the allowance of a late event is as tight as that of an early one. Where all that a request
carries hangs on one number, one draw is still luck (the largest of 8388 errors of correct engines on small random
models used up 0.79 of its allowance); so before anything is called wrong, the rounded run is drawn again, up to REDRAWS
times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from instep_reference.contract.place import Place

from ..observe.context import EventContext
from ..observe.rows import RowSpan, parted, row_spans, rows
from ..player import Side
from ..verdict import Comparison, Skipped, Tier
from .allowance import REDRAWS, TRUTH_ERROR
from .base import slot_of
from .judge import Draw, judge
from .measure import Spot, blocks, relative_error

PROPAGATED = ("hidden", "final", "logits")


class Propagated:
    """Per request and layer, at every stage; a draft chain as long as both sides run on the same tokens."""

    name = "propagated"
    tier = Tier.PROPAGATED

    def __init__(self) -> None:
        self._resampled: list[EventContext] = []

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        if context.rounded is None:
            if context.truth.places:
                yield Skipped(self.name, context.index, "no rounded run to measure by")
            return
        for place, span in _probes(context):
            if parted(context, place.stage, span):
                yield Skipped(self.name, context.index, f"{place} of {span.request}: the drafts differ")
            else:
                yield self._judged(context, place, span)

    def _judged(self, context: EventContext, place: Place, span: RowSpan) -> Comparison:
        """By one draw of the rounded run; by more of them before it is called wrong."""
        slot = slot_of(context, span.request)
        spot = Spot(self.name, self.tier, context.index, context.kind, place, span.request, slot)
        truth, found = rows(context.truth, place, span), rows(context.subject, place, span)
        assert truth is not None, "the truth has every place"
        return judge(spot, truth, self._yardsticks(context, place, span), found)

    def _yardsticks(self, context: EventContext, place: Place, span: RowSpan) -> Iterator[Draw]:
        for sampled in self._draws(context):
            rounded = rows(_rounded_of(sampled), place, span)
            assert rounded is not None, "the rounded run has every place"
            yield rounded, carried(sampled)[family(place, span)]

    def _draws(self, context: EventContext) -> Iterator[EventContext]:
        """The context with one draw after another; those that were made are kept while the event lasts."""
        if not self._resampled or self._resampled[0] is not context:
            self._resampled = [context]
        yield context
        for number in range(1, REDRAWS + 1 if context.resampled is not None else 1):
            if number == len(self._resampled):
                assert context.resampled is not None
                self._resampled.append(replace(context, rounded=context.resampled(number)))
            yield self._resampled[number]


def carried(context: EventContext) -> Mapping[tuple[str, bool], float]:
    """The largest error of the rounded run in this event, per request, in the target and in the draft head."""
    found: dict[tuple[str, bool], float] = {}
    for place, span in _probes(context):
        truth = rows(context.truth, place, span)
        rounded = None if context.rounded is None else rows(context.rounded, place, span)
        error = TRUTH_ERROR
        if truth is not None and rounded is not None and not parted(context, place.stage, span):
            off = relative_error(blocks(place.component, rounded), blocks(place.component, truth))
            error = max(error, float(off.max()))
        found[family(place, span)] = max(found.get(family(place, span), 0.0), error)
    return found


def family(place: Place, span: RowSpan) -> tuple[str, bool]:
    """Whose error it is: the request's, in the target (True) or in the draft head."""
    return span.request, place.stage == "trunk"


def _probes(context: EventContext) -> Iterator[tuple[Place, RowSpan]]:
    for place, truth in context.truth.places.items():
        if place.component in PROPAGATED and truth.shape[0]:
            for span in row_spans(context, place.stage):
                if span.logit_rows or place.component != "logits":
                    yield place, span


def _rounded_of(context: EventContext) -> Side:
    assert context.rounded is not None, "asked before"
    return context.rounded
