"""The `lazy_rerun` strategy: as `rerun`, but the state is stored only when the ring is nearly full.

Leaves out: state dtypes narrower than the arithmetic (`options.REFUSED`). Such a state is rounded when it is stored,
and its bits would depend on the schedule. Traffic per layer and request: between 1 and 2 states. Mirrors ReplaySSM.
"""

from .base import StrategySpec, printed
from .rerun import MAY_CHANGE, Rerun

WINDOWS, FEWEST = 4, 16  # capacity of a ring in widest windows, and its minimum number of entries


class LazyRerun(Rerun):
    __doc__ = f"""A verify stores the state only if the ring would otherwise have no room for the next window.

    The next window is taken as the widest one. If there is room, the verify leaves the slot and its mark alone.
    Example: the widest window has 4 tokens, so the ring has 16 entries. A verify of 4 tokens leaves up to
    16 - 4 - 4 = 8 tokens pending. With 9 pending tokens it stores the state, and nothing older is pending any more.
    An event may change what it may change under `rerun` (units in brackets):
{printed(MAY_CHANGE)}
    """

    @staticmethod
    def ring_size(widest: int) -> int:
        """Number of entries per slot. More entries mean that states are stored less often, but more tokens rerun."""
        return max(FEWEST, WINDOWS * widest)

    @staticmethod
    def own_entries(widest: int) -> int:
        """As many as `ring_size`: updates of all pending tokens stay in the ring, next to those of the new window."""
        return LazyRerun.ring_size(widest)

    @staticmethod
    def spare(size: int, width: int, widest: int) -> int:
        """Maximum number of pending tokens: this window and then one of the widest still fit after them."""
        return size - width - widest


LAZY_RERUN = StrategySpec(LazyRerun.demands, LazyRerun)
