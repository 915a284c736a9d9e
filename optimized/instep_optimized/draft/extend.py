"""What every draft extend ends in: tokens are picked behind the last rows, and kept on the slot table as proposals.

Leaves out: the rows themselves (`mtp.py`), and what becomes of a pick beside that (the drafters).
"""

from __future__ import annotations

import torch

from ..memory.slot_table import SlotTable
from ..ops.base import Ops
from .base import Asked
from .mtp import MtpLayer


def stage_of(layer: int) -> str:
    """The stage in which an MTP layer runs its extend; the first one's is the draft extend itself."""
    return f"extend.{layer}" if layer else "extend"


def propose(
    ops: Ops, slot_table: SlotTable, layer: MtpLayer, number: int, y: torch.Tensor, asked: Asked
) -> torch.Tensor:
    """y [N, D] of MTP layer `number` -> its picks [M], which are draft `number` + 1 of everyone whose root is known.

    The first layer's y behind it is kept too.
    """
    if not len(asked.last):
        return asked.last
    rows = ops.select(x=y, index=asked.last)
    picks = layer.pick(ops, rows, stage_of(number))
    ops.store_rows(rows=picks, pool=slot_table.proposals[:, number : number + 1], locations=asked.slots)
    if not number:
        ops.store_rows(rows=rows, pool=slot_table.proposed[:, None], locations=asked.slots)
    return picks
