"""The conv form `widened`: each channel has one line of inputs, in which the windows of all positions overlap.

A verify of T tokens writes W-1 + T-1 inputs, which contain all T windows. A commit moves only the mark. Leaves out: the
use of the windows, which is the `columns` strategy; its columns overlap here. Mirrors LightLLM and vLLM. LightLLM
keeps a narrow committed window in addition to the line; here `peek` returns it.
"""

from instep_reference.contract.config import ModelConfig

from ..memory.budget import Component, Sizes, mark, widened
from ..memory.pool import Demand
from ..memory.tiled_units import Units
from .base import StrategySpec, printed
from .columns import Columns, may_change

MAY_CHANGE = may_change("conv", "offset")


class Widened(Columns):
    __doc__ = f"""Lines [C, W-1 + widest-1] by slot; the window of offset p, [C, W-1], begins at input p of the line.

    The mark is the offset of the committed window. Example, W = 4: mark 2 means inputs 2, 3, 4 of the line. A verify of
    T tokens writes the windows of offsets 0 to T-1, from the left end of the line for every T. The windows overlap, so
    every op reads its whole old window before it writes. Writes that an event may make (units in brackets):
{printed(MAY_CHANGE)}
    """

    component: Component = "conv"
    mark = "offset"
    may = MAY_CHANGE

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        return widened(config, sizes), mark(cls.mark, sizes)

    @staticmethod
    def _by_column(units: Units, widest: int) -> Units:
        """View [slots, C, W-1 + widest-1] -> [slots, widest, C, W-1]: window p begins one input after window p-1."""
        slots, channels, line = units.pool.shape
        slot, channel, one = units.pool.stride()
        return Units(units.pool.as_strided((slots, widest, channels, line - (widest - 1)), (slot, one, channel, one)))


WIDENED = StrategySpec(Widened.demands, Widened, "conv")
