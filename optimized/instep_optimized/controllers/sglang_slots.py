"""SGLang's slots of batch sizes, 0.5.13 to 0.5.23: an average and a current count per slot.

Leaves out: reading and refusing files (`instep_reference.contract.adaptive_controller_file`). The two dialects differ
in one rule: 0.5.13 also looks upwards after it has gone down. Its counts are above 0, so it never reaches the rules for
0.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from instep_reference.contract.adaptive_controller_file import Slot

from .base import Controller, Made


@dataclass
class Course:
    """One slot: its rules, its sorted counts, and its state.

    current  the count that it wishes for, one of `counts`
    average  moving average of accepted drafts per request
    batches  how many it has processed
    """

    rules: Slot
    rises_after_a_fall: bool
    counts: tuple[int, ...]
    current: int
    average: float
    batches: int = 0

    @classmethod
    def begun(cls, rules: Slot, initial: int, rises_after_a_fall: bool) -> "Course":
        """Start at the initial count, or, if that is no count of this slot, at its middle one."""
        counts = tuple(sorted(set(rules.candidate_steps)))
        current = initial if initial in counts else counts[len(counts) // 2]
        return cls(rules, rises_after_a_fall, counts, current, float(current - 1))

    def process(self, drafts: Sequence[int]) -> None:
        """Process a batch of these accepted drafts, one number per request."""
        rules = self.rules
        if self.current > 0:  # at 0 nothing is drafted, so the average stays as it is
            mean = sum(drafts) / len(drafts)
            self.average = (1 - rules.ema_alpha) * self.average + rules.ema_alpha * mean
        self.batches += 1
        past = self.batches - rules.warmup_batches
        if past > 0 and past % rules.update_interval == 0:
            self.current = self._decided() if self.current > 0 else self._probed()

    def _probed(self) -> int:
        """The first count above 0, if there is one. Its batches until the next decision are the probe."""
        found = self.counts[min(1, len(self.counts) - 1)]
        if found > 0 and self.average < 0:  # this slot began at 0 and has never drafted
            self.average = float(found - 1)
        return found

    def _decided(self) -> int:
        """The count for this average, by steps from the current one to its neighbours."""
        begun = self.counts.index(self.current)
        found = self._fallen(begun)
        if found == begun or self.rises_after_a_fall:
            found = self._risen(found)
        if self.rules.ceiling_coeff > 0:
            found = self._under_the_ceiling(found)
        return self.counts[found]

    def _fallen(self, found: int) -> int:
        while found > 0:
            below = self.counts[found - 1]
            if self.average > (below - 0.5 if below else 0.5) + self.rules.down_hysteresis:
                break
            found -= 1
        return found

    def _risen(self, found: int) -> int:
        while found + 1 < len(self.counts) and self.average > self.counts[found] - 0.5 + self.rules.up_hysteresis:
            found += 1
        return found

    def _under_the_ceiling(self, found: int) -> int:
        """Go down to the ceiling of the average. A rise is not limited."""
        if self.counts[found] <= self.current:
            ceiling = max(1, ceil(self.average * self.rules.ceiling_coeff))
            while found > 0 and self.counts[found] > ceiling:
                found -= 1
        return found


class Slots(Controller):
    """Routes a batch to the slot of its size, and processes batches `lag` forwards after they ran."""

    def __init__(self, made: Made, *, rises_after_a_fall: bool) -> None:
        assert made.file is not None, "a dialect with slots always has a file"
        found = made.file.slots
        union = sorted({count for slot in found.values() for count in slot.candidate_steps})
        initial = union[len(union) // 2] if made.num_steps is None else made.num_steps
        super().__init__(initial, union)
        self._captured, self._lag = made.controlled.captured, made.lag
        self._courses = {key: Course.begun(found[key], initial, rises_after_a_fall) for key in sorted(found)}
        self._forwards = 0
        self._late = deque[tuple[int, Sequence[int]]]()  # batches that are not processed: their forward, their drafts

    @property
    def slots(self) -> dict[int, tuple[int, float]]:
        return {key: (course.current, course.average) for key, course in self._courses.items()}

    def forwarded(self, decode_rows: int) -> None:
        self._forwards += 1
        self._process_due()
        if decode_rows and self.in_force == 0:
            self._count([0] * decode_rows)

    def committed(self, correct_drafts: Sequence[int]) -> None:
        if len(correct_drafts):
            self._count(correct_drafts)

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return self._course(batch).current

    def _count(self, drafts: Sequence[int]) -> None:
        self._late.append((self._forwards, drafts))
        self._process_due()

    def _process_due(self) -> None:
        while self._late and self._late[0][0] + self._lag <= self._forwards:
            _, drafts = self._late.popleft()
            self._course(len(drafts)).process(drafts)

    def _course(self, batch: int) -> Course:
        """Pad the batch as its decode graph does, and return the slot of the largest key that is not above it."""
        padded = next((size for size in self._captured if size >= batch), batch)
        keys = [key for key in self._courses if key <= padded]
        return self._courses[max(keys, default=min(self._courses))]
