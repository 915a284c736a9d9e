"""vLLM's table: the number of drafts by the number of scheduled requests, without feedback.

Leaves out: that a wish acts a round later (the driver's `wish_delay`).
"""

from bisect import bisect_right

from .base import Controller, Made


class BySize(Controller):
    """Each entry of the table reaches up to the next one, so gaps and larger batches take the entry before them."""

    def __init__(self, made: Made) -> None:
        most = made.controlled.num_speculative_tokens
        assert most is not None, "`Controlled.check` requires it"
        entries = sorted(made.controlled.table)
        self._begins = [begin for begin, _, _ in entries]
        self._drafts = [min(drafts, most) for _, _, drafts in entries]
        super().__init__(most if made.num_steps is None else made.num_steps, self._drafts)

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return self._drafts[max(bisect_right(self._begins, scheduled) - 1, 0)]
