"""The dialect vllm-table: the count by the number of scheduled requests.

Mirrors: `v1/spec_decode/dynamic/utils.py` of vLLM 0.33. Differs: the table is searched and not expanded, so there is no
largest batch.
"""

from ..contract.controllers import Controlled
from .base import Controller


class ByTable(Controller):
    def __init__(self, table: tuple[tuple[int, int, int], ...], most: int, initial: int) -> None:
        self.starts = {first: min(drafts, most) for first, _, drafts in table}
        super().__init__(initial, tuple(self.starts.values()))

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        """Ranges are disjoint, and a gap takes the entry before it: so the last start not above `scheduled` decides."""
        return self.starts[max(first for first in self.starts if first <= max(scheduled, 1))]


def controller(controlled: Controlled, num_steps: int | None, lag: int) -> ByTable:
    most = controlled.num_speculative_tokens
    assert most is not None, "the contract refuses it"
    return ByTable(controlled.table, most, most if num_steps is None else num_steps)
