"""The `lazy_rerun` strategy: as `rerun`, but the state is stored only when the ring is nearly full.

Leaves out: state dtypes narrower than the arithmetic (`options.REFUSED`): the state is rounded where it is stored, and
that would depend on the schedule. Traffic per layer and request: between 1 and 2 states. Mirrors ReplaySSM.
"""

from __future__ import annotations

from .base import StrategySpec, printed
from .rerun import MAY_CHANGE, Rerun

WINDOWS, FEWEST = 4, 16  # ring entries: of so many of the widest windows, and at least so many


class LazyRerun(Rerun):
    __doc__ = f"""A verify leaves the slot and its mark alone unless a further window, the widest, would find no room.

    What an event may change is what `rerun` may (units in brackets):
{printed(MAY_CHANGE)}
    """

    @staticmethod
    def ring_size(widest: int) -> int:
        """Entries per slot: the more, the rarer a store, and the more tokens run again."""
        return max(FEWEST, WINDOWS * widest)

    @staticmethod
    def own_entries(widest: int) -> int:
        """As many: what is pending stays in the ring beside the new window."""
        return LazyRerun.ring_size(widest)

    @staticmethod
    def spare(size: int, width: int, widest: int) -> int:
        """Tokens that may stay pending: with this window behind them the widest one still has room."""
        return size - width - widest


LAZY_RERUN = StrategySpec(LazyRerun.demands, LazyRerun)
