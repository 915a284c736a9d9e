"""The interface of a controller: it takes note of events, and answers with a wish.

Leaves out: the rules (one file per dialect, from the text of `contract/controllers.py`).
"""

from collections.abc import Sequence


class Controller:
    """A controller that learns nothing from events. Dialects override what they need.

    counts      the initial count, and those of the file or table, sorted
    candidates  every count that may come into force: these and 0
    """

    def __init__(self, initial: int, counts: Sequence[int] = (), messages: Sequence[str] = ()) -> None:
        self.initial = self.in_force = initial
        self.counts = tuple(sorted({initial, *counts}))
        self.candidates = tuple(sorted({0, *self.counts}))
        self.messages = list(messages)

    @property
    def slots(self) -> dict[int, tuple[int, float]]:
        """Return slot -> (current count, average)."""
        return {}

    def set_num_steps(self, num_steps: int) -> None:
        """Put `num_steps` in force."""
        self.in_force = num_steps

    def forwarded(self, decode_rows: int) -> None:
        """Take note of a forward with at least one row, of which this many are decode rows."""

    def committed(self, num_correct_drafts: Sequence[int]) -> None:
        """Take note of a commit: the accepted drafts of each request."""

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        """Return the wish for the round that comes."""
        raise NotImplementedError
