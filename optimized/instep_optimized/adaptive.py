"""Adaptive step counts on this side: the resolved candidates, and the controller that wishes for a count.

Leaves out: when a wish is followed (the driver's choice) and the effect of a switch (`round.py`). The specification is
the text of `instep_reference.contract.adaptive`; the reference implements it separately, and the wishes are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instep_reference.contract.adaptive import AdaptiveFile, Bracket
from instep_reference.contract.errors import BadInput

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


class Controller:
    """The step count in force, the wish, and all counts that may ever be in force.

    candidates  sorted, over all brackets, with 0;  messages: changes to the candidates of the file
    """

    def __init__(self, initial: int, file: AdaptiveFile | None) -> None:
        if initial < 0:
            raise BadInput("num_steps", found=initial, expected="at least 0")
        self.in_force = initial
        self.messages: list[str] = []
        self._batch, self._probing = 0, False
        self._courses = {} if file is None else self._resolved(file, initial)
        known = {0, initial, *(steps for course in self._courses.values() for steps in course.candidates)}
        self.candidates = tuple(sorted(known))

    def set(self, num_steps: int) -> None:
        """Put `num_steps` in force."""
        if num_steps not in self.candidates:
            raise BadInput("set_num_steps", found=num_steps, expected=f"one of {self.candidates}")
        if num_steps == 0:
            self._probing = False
        elif self.in_force == 0:
            self._probing = True
        self.in_force = num_steps
        if self._courses:
            self._course(self._batch).wish = num_steps

    def wish(self) -> int:
        return self._course(self._batch).wish if self._courses else self.in_force

    def committed(self, num_correct_drafts: Sequence[int]) -> None:
        """Count a commit with these accepted counts, one per request."""
        if num_correct_drafts:
            mean = sum(num_correct_drafts) / len(num_correct_drafts)
            self._count(len(num_correct_drafts), mean)
            self._probing = False

    def decoded(self, rows: int) -> None:
        """Count a forward with that many decode rows, which is a batch only while the step count is 0."""
        if rows and self.in_force == 0:
            self._count(rows, None)

    def _count(self, size: int, mean: float | None) -> None:
        self._batch = size
        if self._courses:
            self._course(size).count(self.in_force, mean, self._probing)

    def _course(self, size: int) -> _Course:
        """Return the largest key not above the batch; below all keys, the smallest."""
        return self._courses[max((key for key in self._courses if key <= size), default=min(self._courses))]

    def _resolved(self, file: AdaptiveFile, initial: int) -> dict[int, _Course]:
        brackets = {1: file.flat} if file.flat is not None else file.by_batch
        courses = {}
        for key, rules in sorted(brackets.items()):
            named = DEFAULT_CANDIDATES if rules.candidate_steps is None else rules.candidate_steps
            if initial not in named:
                where = "" if file.flat is not None else f" of batch size {key}"
                self.messages.append(f"the initial step count {initial} was added to the candidates{where}")
            candidates = tuple(sorted({*named, initial}))
            courses[key] = _Course(rules, candidates, ema=float(max(initial - 1, 0)), wish=initial)
        return courses
