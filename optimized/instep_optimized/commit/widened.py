"""The conv form `widened`: one line of inputs per channel, in which the window of every position is a piece.

Leaves out: how it is used, which is the `columns` strategy on pieces that overlap. A verify writes W-1 + T-1 inputs
for T windows, and a commit moves the mark alone. Mirrors LightLLM and vLLM; the narrow committed window that LightLLM
keeps beside it is here what `peek` returns.
"""

from __future__ import annotations

import torch

from instep_reference.contract.config import ModelConfig

from ..memory.budget import Component, Sizes, mark, widened
from ..memory.pool import Demand
from .base import StrategySpec, printed
from .columns import Columns, may_change

MAY_CHANGE = may_change("conv", "offset")


class Widened(Columns):
    __doc__ = f"""Lines [C, W-1 + widest-1] by slot; the window of offset p, [C, W-1], begins at input p of the line.

    The mark is the offset of the committed window. A window of T tokens writes offsets 0 to T-1, left-aligned for
    every T; every op reads the whole window before it writes. What an event may change (units in brackets):
{printed(MAY_CHANGE)}
    """

    component: Component = "conv"
    mark = "offset"
    may = MAY_CHANGE

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        return widened(config, sizes), mark(cls.mark, sizes)

    @staticmethod
    def _by_column(units: torch.Tensor, widest: int) -> torch.Tensor:
        """[slots, C, W-1 + widest-1] -> [slots, widest, C, W-1], each window one input further on; they overlap."""
        slots, channels, line = units.shape
        slot, channel, one = units.stride()
        return units.as_strided((slots, widest, channels, line - (widest - 1)), (slot, one, channel, one))


WIDENED = StrategySpec(Widened.demands, Widened)
