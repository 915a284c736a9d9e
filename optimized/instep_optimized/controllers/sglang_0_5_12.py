"""SGLang's controller of 0.5.12, with brackets of batch sizes and 0 steps in addition to the release's flat file."""

from collections.abc import Sequence
from dataclasses import dataclass

from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket

from .base import Controller, Made

DEFAULT_CANDIDATES = (1, 3, 7)  # of the specification, when a bracket names none


@dataclass
class _Course:
    """One bracket of batch sizes: its rules, its sorted candidates, and the state of its controller."""

    rules: Bracket
    candidates: tuple[int, ...]
    ema: float
    wish: int
    batches: int = 0

    def count(self, in_force: int, mean: float | None, probing: bool) -> None:
        """Count one batch. mean: accepted drafts per request if it was a commit; None: a forward of decode rows."""
        rules = self.rules
        self.batches += 1
        if mean is not None and in_force > 0:
            self.ema = (1 - rules.ema_alpha) * self.ema + rules.ema_alpha * mean
        past = self.batches - rules.warmup_batches
        due = past > 0 and past % rules.update_interval == 0
        if in_force == 0 and due:
            self.wish = min(self._above(0), default=self.wish)
        elif in_force > 0 and (due or (mean is not None and probing and past > 0)):
            self.wish = self._decide(in_force)

    def _decide(self, steps: int) -> int:
        start = steps
        while below := self._below(steps):
            lower = max(below)
            floor = (lower - 0.5 if lower else 0.5) + self.rules.down_hysteresis
            if self.ema > floor:
                break
            steps = lower
        if steps < start:
            return steps
        while above := self._above(steps):
            if self.ema <= steps - 0.5 + self.rules.up_hysteresis:
                break
            steps = min(above)
        return steps

    def _below(self, steps: int) -> list[int]:
        return [candidate for candidate in self.candidates if candidate < steps]

    def _above(self, steps: int) -> list[int]:
        return [candidate for candidate in self.candidates if candidate > steps]


class Brackets(Controller):
    """The wish is that of the bracket of the last counted batch. Without a file it is the count in force."""

    def __init__(self, made: Made) -> None:
        assert made.num_steps is not None, "`controller` and `Controlled.check` require it"
        messages = list[str]()
        self._courses = {} if made.file is None else _resolved(made.file, made.num_steps, messages)
        super().__init__(made.num_steps, (steps for course in self._courses.values() for steps in course.candidates))
        self.messages += messages
        self._batch, self._probing = 0, False

    @property
    def slots(self) -> dict[int, tuple[int, float]]:
        return {key: (course.wish, course.ema) for key, course in self._courses.items()}

    def set_num_steps(self, num_steps: int) -> None:
        before = self.in_force
        super().set_num_steps(num_steps)
        if num_steps == 0:
            self._probing = False
        elif before == 0:
            self._probing = True
        if self._courses:
            self._course(self._batch).wish = num_steps

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return self._course(self._batch).wish if self._courses else self.in_force

    def committed(self, correct_drafts: Sequence[int]) -> None:
        if correct_drafts:
            self._count(len(correct_drafts), sum(correct_drafts) / len(correct_drafts))
            self._probing = False

    def forwarded(self, decode_rows: int) -> None:
        if decode_rows and self.in_force == 0:
            self._count(decode_rows, None)

    def _count(self, size: int, mean: float | None) -> None:
        self._batch = size
        if self._courses:
            self._course(size).count(self.in_force, mean, self._probing)

    def _course(self, size: int) -> _Course:
        """Return the largest key not above the batch; below all keys, the smallest."""
        return self._courses[max((key for key in self._courses if key <= size), default=min(self._courses))]


def _resolved(file: AdaptiveFile, initial: int, messages: list[str]) -> dict[int, _Course]:
    """Fill in the candidates of each bracket, and add a message for each bracket into which one was inserted."""
    brackets = {1: file.flat} if file.flat is not None else file.by_batch
    courses = {}
    for key, rules in sorted(brackets.items()):
        named = DEFAULT_CANDIDATES if rules.candidate_steps is None else rules.candidate_steps
        if initial not in named:
            where = "" if file.flat is not None else f" of batch size {key}"
            messages.append(f"the initial step count {initial} was added to the candidates{where}")
        candidates = tuple(sorted({*named, initial}))
        courses[key] = _Course(rules, candidates, ema=float(max(initial - 1, 0)), wish=initial)
    return courses
