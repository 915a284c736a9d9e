"""T3: what has come of all errors so far: hidden rows, final rows, logits, of the free-running subject.

Leaves out: where an error was made (T2 says it). The yardstick is the rounded reference, run end to end with sums in
another order (`observe/reorder.py`): one run, so one draw. At one place its error may be small by luck; so what counts
is the largest that it makes anywhere in this event for this request, in the target or in its head. Nothing is carried
over from earlier events: the allowance of a late event is as tight as that of an early one. Where all that a request
carries hangs on one number, one draw is still luck (the largest of 8388 honest errors on small random models used up
0.79 of its allowance); so before anything is called wrong, the rounded run is drawn again, up to REDRAWS times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from instep_reference.contract.place import Place

from ..observe.moment import Moment
from ..observe.rows import Share, parted, rows, shares
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
        self._drawn: list[Moment] = []

    def __call__(self, moment: Moment) -> Iterator[Comparison | Skipped]:
        if moment.rounded is None:
            if moment.truth.places:
                yield Skipped(self.name, moment.index, "no rounded run to measure by")
            return
        for place, share in _probes(moment):
            if parted(moment, place.stage, share):
                yield Skipped(self.name, moment.index, f"{place} of {share.request}: the drafts differ")
            else:
                yield self._judged(moment, place, share)

    def _judged(self, moment: Moment, place: Place, share: Share) -> Comparison:
        """By one draw of the rounded run; by more of them before it is called wrong."""
        slot = slot_of(moment, share.request)
        spot = Spot(self.name, self.tier, moment.index, moment.kind, place, share.request, slot)
        truth, found = rows(moment.truth, place, share), rows(moment.subject, place, share)
        assert truth is not None, "the truth has every place"
        return judge(spot, truth, self._yardsticks(moment, place, share), found)

    def _yardsticks(self, moment: Moment, place: Place, share: Share) -> Iterator[Draw]:
        for drawn in self._draws(moment):
            rounded = rows(_rounded_of(drawn), place, share)
            assert rounded is not None, "the rounded run has every place"
            yield rounded, carried(drawn)[family(place, share)]

    def _draws(self, moment: Moment) -> Iterator[Moment]:
        """The moment with one draw after another; those that were made are kept while the event lasts."""
        if not self._drawn or self._drawn[0] is not moment:
            self._drawn = [moment]
        yield moment
        for number in range(1, REDRAWS + 1 if moment.redrawn is not None else 1):
            if number == len(self._drawn):
                assert moment.redrawn is not None
                self._drawn.append(replace(moment, rounded=moment.redrawn(number)))
            yield self._drawn[number]


def carried(moment: Moment) -> Mapping[tuple[str, bool], float]:
    """The largest error of the rounded run in this event, per request, in the target and in the draft head."""
    found: dict[tuple[str, bool], float] = {}
    for place, share in _probes(moment):
        truth = rows(moment.truth, place, share)
        rounded = None if moment.rounded is None else rows(moment.rounded, place, share)
        error = TRUTH_ERROR
        if truth is not None and rounded is not None and not parted(moment, place.stage, share):
            off = relative_error(blocks(place.component, rounded), blocks(place.component, truth))
            error = max(error, float(off.max()))
        found[family(place, share)] = max(found.get(family(place, share), 0.0), error)
    return found


def family(place: Place, share: Share) -> tuple[str, bool]:
    """Whose error it is: the request's, in the target (True) or in the draft head."""
    return share.request, place.stage == "trunk"


def _probes(moment: Moment) -> Iterator[tuple[Place, Share]]:
    for place, truth in moment.truth.places.items():
        if place.component in PROPAGATED and truth.shape[0]:
            for share in shares(moment, place.stage):
                if share.asked or place.component != "logits":
                    yield place, share


def _rounded_of(moment: Moment) -> Side:
    assert moment.rounded is not None, "asked before"
    return moment.rounded
