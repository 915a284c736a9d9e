"""T3: accumulated errors of the free-running subject in hidden rows, final rows and logits.

For a subject that shows no rows between its layers (`Shown.whole`), memory is judged here, too: conv windows, states
and KV entries after every event that wrote them, relative to the largest error of the rounded run in that component.
The yardstick is the rounded reference, run end to end with sums in another order (`oracle/reordered_arithmetic.py`):
one run is one draw. Its error at one place may be small by luck, so the limit uses its largest error in this event for
this request, in the target or in the draft head. No allowance is carried over from earlier events, so late events have
the same limit as early ones. If everything depends on one number, one draw can still be luck (the largest of 8388
errors of correct engines on small random models used 0.79 of its allowance). So before anything is called wrong, the
rounded run is drawn again up to REDRAWS times (`run/compared_engine.py`, `RepeatedRuns`), with stochastic rounding, as
draws in 16 bits would be equal.
Leaves out: where an error was made, which T2 reports.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch

from instep_reference.contract.place_names import Place

from ..finding_problem import Explained
from ..oracle.state_oracle import Redraws
from ..player import Side
from ..tier_allowances import REDRAWS, TRUTH_ERROR
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext, RowSpan
from ..watch.rows_by_request import parted, row_spans, rows
from ..watch.visible_places import PROPAGATED
from .check_interface import slot_of
from .error_measurement import Spot, blocks, relative_error
from .tensor_and_choice_judgement import Draw, judge
from .wrong_conv_windows import named_windows

WINDOW = "conv"
OTHER_EXPERTS = "its rows went to other experts in a near tie"
FEEDS = {"conv": "state", "state": "state", "keys": "kv", "values": "kv"}  # component -> the feed that shows it
Stored = Callable[[str, torch.Tensor], torch.dtype]  # (component, found tensor) -> dtype whose rounding is granted


class Propagated:
    """Per request and layer, at every stage; a draft chain only while both sides run on the same tokens."""

    name = "propagated"
    tier = Tier.PROPAGATED

    def __init__(
        self, repeated_runs: Redraws | None = None, stored: Stored | None = None, others: Collection[str] = ()
    ) -> None:
        """repeated_runs: further draws of the rounded run; None means none. stored: the dtype whose rounding is
        granted; None means the tensor's own dtype, which T2 compares with the declaration. others: requests whose rows
        went to other experts (`experts.py`)."""
        self._drawn: list[EventContext] = []  # the last context, with one draw after another
        self._carried: list[Mapping[tuple[str, bool], float]] = []  # errors of the draws so far
        self._repeated_runs, self._stored, self._others = repeated_runs, stored, others

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        if context.rounded is None:
            if context.truth.places:
                yield Skipped(self.name, context.index, "no rounded run to measure by")
            return
        for place, span in _probes(context):
            if not context.shown.place(place) or span.request in context.shown.gone:
                continue
            if span.request in self._others or parted(context, place.stage, span):
                why = OTHER_EXPERTS if span.request in self._others else "the drafts differ"
                yield Skipped(self.name, context.index, why, f"{place} of {span.request}")
            else:
                yield self._rows(context, place, span)
        for name in () if context.shown.whole else wrote(context):
            for place, truth in context.truth.after[name].parts():
                if place.stage == "trunk" and truth.numel() and context.shown.has(
                        FEEDS[place.component]) and context.shown.layer(place):
                    yield self._memory(context, place, name, truth)

    def _rows(self, context: EventContext, place: Place, span: RowSpan) -> Comparison:
        truth, found = rows(context.truth, place, span), rows(context.subject, place, span)
        assert truth is not None, "the truth has every place"
        which = context.shown.rows(place, span.request)
        drawn = self._yardsticks(context, place, span)
        draws = ((rounded[which], least) for rounded, least in drawn)
        return self._judged(context, place, span.request, truth[which], draws, None if found is None else found[which])

    def _judged(
        self, context: EventContext, place: Place, request: str, truth: torch.Tensor, draws: Iterator[Draw],
        found: torch.Tensor | None,
    ) -> Comparison:
        """Judge by one draw of the rounded run, and by more before it is called wrong."""
        spot = Spot(self.name, self.tier, context.index, context.kind, place, request, slot_of(context, request))
        stored = None if self._stored is None or found is None else self._stored(place.component, found)
        return judge(spot, truth, draws, found, stored=stored)

    def _yardsticks(self, context: EventContext, place: Place, span: RowSpan) -> Iterator[Draw]:
        for number, sampled in enumerate(self._draws(context)):
            rounded = rows(_rounded_of(sampled), place, span)
            assert rounded is not None, "the rounded run has every place"
            if number == len(self._carried):
                self._carried.append(carried(sampled))
            if number and parted(sampled, place.stage, span):
                continue  # this draw grew another tree
            yield rounded, self._carried[number][family(place, span)]

    def _memory(self, context: EventContext, place: Place, request: str, truth: torch.Tensor) -> Comparison:
        """Judge a request's memory of one layer, and recognise known wrong conv windows."""
        draws = (
            (dict(_rounded_of(sampled).after[request].parts())[place], kept(sampled, request)[place.component])
            for sampled in self._draws(context)
        )
        found = dict(context.subject.after[request].parts()).get(place)
        result = self._judged(context, place, request, truth, draws, found)
        if result.problem is None or found is None or place.component != WINDOW or found.shape != truth.shape:
            return result
        equal = named_windows(context, place.layer, request, found, truth)
        if not equal:
            return result
        return replace(result, problem=replace(result.problem, code="identified", mistake=Explained.one_of(equal)))

    def _draws(self, context: EventContext) -> Iterator[EventContext]:
        """The context with one draw after another; draws are kept for the rest of the event."""
        if not self._drawn or self._drawn[0] is not context:
            self._drawn, self._carried = [context], []
        yield context
        if self._repeated_runs is None:
            return
        for number in range(1, REDRAWS + 1):
            if number == len(self._drawn):
                self._drawn.append(replace(context, rounded=self._repeated_runs.side(context.index, number)))
            yield self._drawn[number]


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


def wrote(context: EventContext) -> list[str]:
    """The requests whose memory this event wrote and the engine shows now."""
    busy = [span.request for stage in ("trunk", "extend") for span in row_spans(context, stage)
            if span.kind in ("prefill", "decode", "commit")]  # fmt: skip
    return [name for name in dict.fromkeys((*busy, *sorted(context.shown.rebuilt))) if context.shown.memory(name)]


def kept(context: EventContext, request: str) -> Mapping[str, float]:
    """The largest error of the rounded run in the memory of a request, by component."""
    found: dict[str, float] = {}
    rounded = dict(_rounded_of(context).after[request].parts())
    for place, truth in context.truth.after[request].parts():
        if place.stage == "trunk" and truth.numel():
            name = place.component
            off = float(relative_error(blocks(name, rounded[place]), blocks(name, truth)).max())
            found[name] = max(found.get(name, TRUTH_ERROR), off)
    return found


def family(place: Place, span: RowSpan) -> tuple[str, bool]:
    """The group that shares an error: the request, in the target (True) or in the draft head (False)."""
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
