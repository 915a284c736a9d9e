"""The dialect sglang-0.5.13: slots by batch size and a ceiling, counts from 1, and up again after steps down.

Mirrors: `srt/speculative/adaptive_spec_params.py` of SGLang 0.5.13.
"""

from ..contract.controllers import Controlled
from . import sglang_0_5_14 as later


class Slot(later.Slot):
    def decided(self) -> int:
        """Decide from the average: down, then up from there."""
        return self.counts[self.capped(self.raised(self.lowered(self.counts.index(self.current))))]


class Slots(later.Slots):
    slot = Slot


def controller(controlled: Controlled, num_steps: int | None, lag: int) -> Slots:
    return Slots(later.slots_of(controlled), controlled.captured, num_steps, lag)
