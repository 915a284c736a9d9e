"""The conv form `windows`: a verify keeps the conv window after every position; a commit copies the accepted one back.

Leaves out: the method, which is the `snapshot` strategy on another component.
"""

from ..memory.budget import Component
from .base import StrategySpec, printed
from .snapshot import Snapshot, may_change

MAY_CHANGE = may_change("conv")


class Windows(Snapshot):
    __doc__ = f"""Conv windows [C, W-1] by slot; the ones that a verify keeps, one per row, by batch row.

    Writes that an event may make (units in brackets):
{printed(MAY_CHANGE)}
    """

    component: Component = "conv"
    may = MAY_CHANGE


WINDOWS = StrategySpec(Windows.demands, Windows, "conv")
