"""The common part of all controllers: the candidates, the count in force, and what a controller may be asked.

Leaves out: every rule by which a count is chosen.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.errors import BadInput


@dataclass(frozen=True)
class Made:
    """The inputs of a controller: its description, the initial count as given, its file, and the lag in rounds."""

    controlled: Controlled
    num_steps: int | None
    file: AdaptiveFile | None
    lag: int


class Controller(ABC):
    """A controller of the step count.

    candidates  every count that may ever be in force, sorted, with 0 and the initial count
    initial     the count in force at the beginning;  in_force: now
    messages    changes to the candidates of the file
    """

    def __init__(self, initial: int, counts: Iterable[int]) -> None:
        self.initial = self.in_force = initial
        self.candidates = tuple(sorted({0, initial, *counts}))
        self.messages: list[str] = []

    @property
    def slots(self) -> Mapping[int, tuple[int, float]]:
        """Batch-size key -> its count or wish, and its average of accepted drafts."""
        return {}

    def set_num_steps(self, num_steps: int) -> None:
        """Put `num_steps` in force."""
        if num_steps not in self.candidates:
            raise BadInput("set_num_steps", found=num_steps, expected=f"one of {self.candidates}")
        self.in_force = num_steps

    def forwarded(self, decode_rows: int) -> None:  # noqa: B027  # a dialect without feedback counts nothing
        """Count a forward of at least one row, of which `decode_rows` decode."""

    def committed(self, correct_drafts: Sequence[int]) -> None:  # noqa: B027
        """Count a commit with these accepted drafts, one number per request."""

    @abstractmethod
    def next_num_steps(self, batch: int, scheduled: int) -> int:
        """Return the wish for a round in which `batch` requests decode or verify, and `scheduled` have rows."""
