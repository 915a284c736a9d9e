"""T4: what each side chooses by itself: picks, accepted drafts, bonus; equal unless the truth itself hardly chose.

Leaves out: forced choices, which are given (T0 compares them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from instep_reference.contract.engine import Commit, Committed
from instep_reference.contract.place import AFTER_LAYERS, Place

from ..observe.moment import Moment
from ..observe.rows import Share, parted, rows, shares
from ..verdict import Comparison, Skipped, Tier
from .base import exact, slot_of
from .judge import Ties, chosen
from .propagated import carried, family


class Decisions:
    """A choice may differ while the truth's margin is under twice the logit error that T3 grants."""

    name = "decisions"
    tier = Tier.DECISIONS

    def __init__(self) -> None:
        self.ties = Ties()
        self.noise: Mapping[tuple[str, bool], float] = {}  # what the rounded run is off by in this event
        self.tied: set[str] = set()  # requests with a tie within the window in flight

    def __call__(self, moment: Moment) -> Iterator[Comparison | Skipped]:
        self.noise = carried(moment)
        for place in moment.truth.places:
            if place.component == "pick":
                yield from self._picks(moment, place)
        if isinstance(moment.event, Commit):
            yield from self._accepted(moment, moment.event)
        yield from self.ties.too_many("ties", moment.index, moment.kind, Place("trunk", AFTER_LAYERS, "pick"))

    def _picks(self, moment: Moment, place: Place) -> Iterator[Comparison | Skipped]:
        for share in shares(moment, place.stage):
            if share.asked and parted(moment, place.stage, share):
                yield Skipped(self.name, moment.index, f"{place} of {share.request}: the drafts differ")
            elif share.asked:
                yield self._chosen(moment, place, share)

    def _chosen(self, moment: Moment, place: Place, share: Share) -> Comparison:
        """Margins in units of what the logits may be off by; 1 is the limit."""
        own, right = rows(moment.subject, place, share), rows(moment.truth, place, share)
        logits = rows(moment.truth, place._replace(component="logits"), share)
        seen = rows(moment.subject, place._replace(component="logits"), share)
        assert right is not None and logits is not None, "the truth has every place"
        if own is None or own.shape != right.shape or seen is None:
            return exact(self, moment, place, 0 if own is None else own.shape[0], right.shape[0], "has {} choices")
        own, largest = own.to(right.device), seen.to(right.device).argmax(-1)
        if not torch.equal(own, largest):
            says = "chose {} against its own logits"
            return exact(self, moment, place, own.tolist(), largest.tolist(), says, share.request)
        choices = chosen(logits, right, own, self.noise[family(place, share)], seen.dtype)
        self.ties.add(choices)
        if choices.ties and share.kind == "verify":
            self.tied.add(share.request)
        row, margin = choices.row, float(choices.margin[choices.row])
        said = f"row {row} chose {int(own[row])}, the truth {int(right[row])} by a margin of {margin:.3g}"
        return Comparison(
            self.name, self.tier, moment.index, moment.kind, place, elements=share.asked, blocks=share.asked,
            undecided=choices.ties, worst=choices.worst, allowed=1.0, request=share.request,
            slot=slot_of(moment, share.request), diagnosis=said if choices.differs.any() else "",
        )  # fmt: skip

    def _accepted(self, moment: Moment, event: Commit) -> Iterator[Comparison | Skipped]:
        ours, right = moment.subject.answer, moment.truth.answer
        assert isinstance(ours, Committed) and isinstance(right, Committed)
        place = Place("trunk", AFTER_LAYERS, "pick")
        for row, name in enumerate(event.requests):
            if name in self.tied:
                yield Skipped(self.name, moment.index, f'own acceptance of "{name}": a choice in its window was a tie')
                continue
            found, expected = (
                (int(side.own_num_correct_drafts[row]), int(side.own_bonus[row])) for side in (ours, right)
            )
            yield exact(self, moment, place, found, expected, "own (accepted drafts, bonus) are {}", name)
        self.tied = set()
