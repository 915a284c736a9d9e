"""T2: every place, and every state, against the reference's own piece run in fp64 on the subject's bits.

Leaves out: how the pieces are run (`observe/oracle.py`), and which wrong state an error points to (`directed.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..observe.moment import Moment
from ..observe.oracle import Oracle
from ..observe.replay import Replay
from ..observe.rows import rows
from ..verdict import Comparison, Skipped, Tier
from .allowance import NEAR
from .base import slot_of
from .measure import Spot, measured


class Derived:
    """Per request, layer, component and head: e_x <= 3 e_r + 4 ulp."""

    name = "derived"
    tier = Tier.DERIVED

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def __call__(self, moment: Moment) -> Iterator[Comparison | Skipped]:
        for replay in self.oracle.at(moment):
            if isinstance(replay, Skipped):
                yield replay
            else:
                yield from self._places(moment, replay)
                if replay.writes_state:
                    yield from self._state(moment, replay)

    def _places(self, moment: Moment, replay: Replay) -> Iterator[Comparison]:
        for place, truth in replay.truth.places.items():
            yardsticks = [run.places[place] for run in replay.yardsticks if place in run.places]
            found = rows(moment.subject, place, replay.share)
            result = measured(self._spot(moment, replay, place.component), found, truth, yardsticks)
            yield result if result.agrees or found is None else self._named(result, replay, found, truth)

    def _named(self, result: Comparison, replay: Replay, found: torch.Tensor, truth: torch.Tensor) -> Comparison:
        """The known mistake whose result stands near what was found, before the bare size of the error."""
        for sentence, work in replay.wrongs if found.shape == truth.shape else ():
            wrong = self.oracle.runner.true(work).places[result.place]
            away = torch.linalg.vector_norm(found.to(wrong) - wrong)
            if away <= NEAR * torch.linalg.vector_norm(truth - wrong):
                return replace(result, diagnosis=f"{sentence}; {result.diagnosis}")
        return result

    def _state(self, moment: Moment, replay: Replay) -> Iterator[Comparison]:
        if replay.truth.state is not None:
            yardsticks = [run.state for run in replay.yardsticks if run.state is not None]
            found = moment.subject.after[replay.request].state.get(replay.layer)
            yield measured(self._spot(moment, replay, "state"), found, replay.truth.state, yardsticks)

    def _spot(self, moment: Moment, replay: Replay, component: str) -> Spot:
        slot = slot_of(moment, replay.request)
        place = replay.place(component)
        return Spot(self.name, self.tier, moment.index, moment.kind, place, replay.request, slot)
