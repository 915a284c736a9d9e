"""The dialect sglang-0.5.14: slots by batch size, a ceiling, 0 steps and their probe.

Mirrors: `srt/speculative/adaptive_spec_params.py` of SGLang 0.5.14 to 0.5.23. Differs: results that are late because
rounds overlap are queued here; there the scheduler's loop does that.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..contract.adaptive_controller_file import AdaptiveFile
from ..contract.adaptive_controller_file import Slot as Rule
from ..contract.controllers import Controlled
from .base import Controller


@dataclass
class Slot:
    """One slot: its rule, its sorted counts, the current one, the average, and its counted batches."""

    rule: Rule
    counts: tuple[int, ...]
    current: int
    ema: float = field(init=False)
    batches: int = 0

    def __post_init__(self) -> None:
        self.ema = float(self.current - 1)

    def process(self, values: Sequence[int]) -> None:
        """Take in one batch, and decide if a decision is due."""
        rule = self.rule
        if self.current > 0:
            self.ema = (1 - rule.ema_alpha) * self.ema + rule.ema_alpha * (sum(values) / len(values))
        self.batches += 1
        late = self.batches - rule.warmup_batches
        if late > 0 and late % rule.update_interval == 0:
            self.current = self.decided()

    def decided(self) -> int:
        """Decide from the average; at 0 the next count up is tried."""
        if self.current == 0:
            return self.probed()
        at = self.counts.index(self.current)
        lower = self.lowered(at)
        return self.counts[self.capped(lower if lower < at else self.raised(at))]

    def probed(self) -> int:
        target = self.counts[min(self.counts.index(0) + 1, len(self.counts) - 1)]
        if target > 0 and self.ema < 0:  # nothing was ever drafted here
            self.ema = float(target - 1)
        return target

    def lowered(self, at: int) -> int:
        """An average that is equal to the threshold steps down."""
        while at > 0:
            below = self.counts[at - 1]
            if self.ema > (0.5 if below == 0 else below - 0.5) + self.rule.down_hysteresis:
                break
            at -= 1
        return at

    def raised(self, at: int) -> int:
        while at + 1 < len(self.counts) and self.ema > self.counts[at] - 0.5 + self.rule.up_hysteresis:
            at += 1
        return at

    def capped(self, at: int) -> int:
        """Apply the ceiling to a count that does not rise."""
        if self.rule.ceiling_coeff > 0 and self.counts[at] <= self.current:
            ceiling = max(1, math.ceil(self.ema * self.rule.ceiling_coeff))
            while at > 0 and self.counts[at] > ceiling:
                at -= 1
        return at


class Slots(Controller):
    """The slots of a file, and the batches whose results are late."""

    slot = Slot

    def __init__(self, rules: Mapping[int, Rule], captured: Sequence[int], num_steps: int | None, lag: int) -> None:
        union = sorted({count for rule in rules.values() for count in rule.candidate_steps})
        super().__init__(union[len(union) // 2] if num_steps is None else num_steps, union)
        self.captured, self.lag, self.forwards = sorted(captured), lag, 0
        self.waiting: deque[tuple[int, tuple[int, ...]]] = deque()  # the number of its forward, values
        self.by_key = {key: self._begun(rule) for key, rule in rules.items()}

    def _begun(self, rule: Rule) -> Slot:
        counts = tuple(sorted(set(rule.candidate_steps)))
        return self.slot(rule, counts, self.initial if self.initial in counts else counts[len(counts) // 2])

    @property
    def slots(self) -> dict[int, tuple[int, float]]:
        return {key: (slot.current, slot.ema) for key, slot in self.by_key.items()}

    def routed(self, batch: int) -> Slot:
        """Return the slot of a batch, which is padded to a captured size first."""
        padded = next((size for size in self.captured if size >= batch), batch)
        return self.by_key[max((key for key in self.by_key if key <= padded), default=min(self.by_key))]

    def forwarded(self, decode_rows: int) -> None:
        self.forwards += 1
        self._process()
        if decode_rows and self.in_force == 0:
            self._counted((0,) * decode_rows)

    def committed(self, num_correct_drafts: Sequence[int]) -> None:
        if num_correct_drafts:
            self._counted(tuple(num_correct_drafts))

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return self.routed(batch).current

    def _counted(self, values: tuple[int, ...]) -> None:
        self.waiting.append((self.forwards, values))
        self._process()

    def _process(self) -> None:
        """Process the batches whose results have arrived."""
        while self.waiting and self.waiting[0][0] + self.lag <= self.forwards:
            _, values = self.waiting.popleft()
            self.routed(len(values)).process(values)


def slots_of(controlled: Controlled) -> Mapping[int, Rule]:
    file = controlled.adaptive_file()
    assert isinstance(file, AdaptiveFile), "the dialect has a file"
    return file.slots


def controller(controlled: Controlled, num_steps: int | None, lag: int) -> Slots:
    return Slots(slots_of(controlled), controlled.captured, num_steps, lag)
