"""The runner of every campaign: trials in order, a time limit, Ctrl-C, progress, and a file kept after every trial.

Leaves out: the trials, their judgement, and the result that they are folded into, which each campaign declares.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self, TypeVar

T = TypeVar("T")
Advance = Callable[[str, int, int | None], None]  # description, done, total (None: unknown)


class Over(BaseException):
    """Ends a trial, because its time is over. Hypothesis catches only Exception, which this is not."""


class TrialRunner:
    """One run of a campaign. Once a trial has ended, Ctrl-C leaves the `with` block quietly: what ran counts.

    seconds      time limit; None means no limit
    advance      shows the progress
    keep         writes the result so far, so that a killed run loses no more than one trial
    until        the time at which the present share is over
    name         the description of the present trial
    ended        the number of trials and shares that have ended
    interrupted  whether the user pressed Ctrl-C
    """

    def __init__(
        self, seconds: float | None = None, advance: Advance = lambda what, done, of: None,
        keep: Callable[[], object] = lambda: None,
    ) -> None:
        self.advance, self.keep, self.name, self.ended, self.interrupted = advance, keep, "", 0, False
        self._begun = time.monotonic()
        self._end = self.until = self._begun + (math.inf if seconds is None else seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        self.stop(error)
        return isinstance(error, KeyboardInterrupt) and self.ended > 0

    def stop(self, error: BaseException | None) -> None:
        """Note whether a trial was ended by Ctrl-C."""
        self.interrupted |= isinstance(error, KeyboardInterrupt)

    @property
    def over(self) -> bool:
        return self.interrupted or time.monotonic() >= self.until

    @property
    def seconds(self) -> float:
        """The duration of the present share until now."""
        return time.monotonic() - self._begun

    def events(self, until: int | None, last: int) -> Callable[[int, object], None]:
        """The progress of the present trial by event, up to the last one or `until`."""
        total = 1 + (last if until is None else min(until, last))
        return lambda index, event: self.advance(self.name, index + 1, total)

    def shares(self, groups: Sequence[T]) -> Iterator[T]:
        """The groups in order. Each gets an equal share of the time that is left when it begins."""
        for number, group in enumerate(groups):
            if self.interrupted:
                return
            self._begun = time.monotonic()
            self.until = self._begun + (self._end - self._begun) / (len(groups) - number)
            yield group
            self.ended += 1

    def trials(self, several: Iterable[T], name: Callable[[T], str]) -> Iterator[T]:
        """The trials that begin before the share is over. name: the description of a trial in the progress."""
        total = len(several) if isinstance(several, Sequence) else None
        for done, trial in enumerate(several):
            if self.over:
                return
            self.name = name(trial)
            self.advance(self.name, done, total)
            yield trial
            self.ended += 1
            self.keep()
