"""T3: what has come of all errors so far: hidden rows, final rows, logits, of the free-running subject.

Leaves out: where an error was made (T2 says it). The yardstick is the rounded reference, run end to end: one run,
so one draw. Its error at one place may be small by luck, so the largest that it has made so far anywhere in the
target, or in the draft head, is what it stands for; what ran away stands out by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from instep_reference.contract.place import Place

from ..observe.moment import Moment
from ..observe.rows import Share, parted, rows, shares
from ..verdict import Comparison, Skipped, Tier
from .allowance import SUM_ERROR, TRUTH_ERROR
from .base import slot_of
from .measure import Spot, blocks, measured, relative_error

PROPAGATED = ("hidden", "final", "logits")


class Propagated:
    """Per request and layer, at every stage; a draft chain as long as both sides run on the same tokens."""

    name = "propagated"
    tier = Tier.PROPAGATED

    def __init__(self) -> None:
        self.noise = {"trunk": TRUTH_ERROR, "draft": TRUTH_ERROR}
        self.layers = 1  # of the target and its head, as far as they were seen

    def __call__(self, moment: Moment) -> Iterator[Comparison | Skipped]:
        if moment.rounded is None:
            if moment.truth.places:
                yield Skipped(self.name, moment.index, "no rounded run to measure by")
            return
        judged: list[tuple[Place, Share, torch.Tensor, torch.Tensor]] = []
        for place, share in _probes(moment):
            truth, rounded = (rows(side, place, share) for side in (moment.truth, moment.rounded))
            assert truth is not None and rounded is not None, "both references have every place"
            if parted(moment, place.stage, share):
                yield Skipped(self.name, moment.index, f"{place} of {share.request}: the drafts differ")
                continue
            judged.append((place, share, truth, rounded))
            if place.component == "hidden" and place.stage == "trunk":
                self.layers = max(self.layers, place.layer + 2)
            error = float(relative_error(blocks(place.component, rounded), blocks(place.component, truth)).max())
            grain = SUM_ERROR * torch.finfo(rounded.dtype).eps * self.layers
            self.noise[_family(place)] = max(self.noise[_family(place)], error, grain)
        for place, share, truth, rounded in judged:
            slot = slot_of(moment, share.request)
            spot = Spot(self.name, self.tier, moment.index, moment.kind, place, share.request, slot)
            yield measured(spot, rows(moment.subject, place, share), truth, [rounded], self.noise[_family(place)])


def _probes(moment: Moment) -> Iterator[tuple[Place, Share]]:
    for place, truth in moment.truth.places.items():
        if place.component in PROPAGATED and truth.shape[0]:
            for share in shares(moment, place.stage):
                if share.asked or place.component != "logits":
                    yield place, share


def _family(place: Place) -> str:
    return "trunk" if place.stage == "trunk" else "draft"
