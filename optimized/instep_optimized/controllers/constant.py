"""The constant controller: the initial count, always."""

from .base import Controller, Made


class Constant(Controller):
    """Wishes for the initial count, whatever is in force."""

    def __init__(self, made: Made) -> None:
        assert made.num_steps is not None, "`Controlled.check` requires it"
        super().__init__(made.num_steps, ())

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return self.initial
