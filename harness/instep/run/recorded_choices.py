"""A check of the reference itself: the truth still makes the choices of the recording.

A changed reference would change the expectations of both sides unnoticed. The recording engine's own choices, which are
stored with the trace, reveal it. Leaves out: the subject.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from instep_reference.contract.engine import Draft
from instep_reference.contract.place import AFTER_LAYERS, Place

from ..problem import Problem
from ..trace.driver import own_say
from ..trace.header import Recording
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext

EXACT = "float64"


class RecordedChoices:
    """Compare every choice of the fp64 reference, forced or not, with the recorded one, exactly.

    A recorder with another width or drafter may choose differently; then the check is skipped with that reason.
    """

    name = "remembered"
    tier = Tier.DECISIONS

    def __init__(self, recorded: Mapping[str, torch.Tensor], recording: Recording, drafter: str) -> None:
        self.recorded, self.other = recorded, ""
        if recording.dtype != EXACT:
            self.other = f"the recorder chose in {recording.dtype}; the reference chooses in {EXACT}"
        elif recording.drafter != drafter:
            self.other = f"the recorder drafted with {recording.drafter}; {drafter} is replayed"

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        said = own_say(context.event, context.truth.answer)
        if said is None:
            return
        known = self.recorded.get(f"own.{context.index}")
        if known is None or self.other:
            unsaid = "the trace has no choices of its recorder"
            yield Skipped(self.name, context.index, self.other or unsaid)
            return
        same = said.shape == known.shape
        wrong = int((said != known).sum()) if same else said.numel()
        stage = "chain.1" if isinstance(context.event, Draft) else "trunk"
        yield Comparison(
            self.name, self.tier, context.index, context.kind, Place(stage, AFTER_LAYERS, "pick"),
            elements=said.numel(), worst=float(wrong), allowed=0.0,
            problem=None if wrong == 0 else Problem("differs", (
                f"the reference now chooses {said.tolist()}; when the trace was recorded, it chose "
                f"{known.tolist() if same else 'another number of tokens'}"
            )),
        )
