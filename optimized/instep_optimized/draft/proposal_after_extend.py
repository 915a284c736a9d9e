"""The end of every draft extend: pick the token after each request's last row, and keep it as a proposal.

Leaves out: the rows themselves (`mtp.py`), and every other use of a pick (the drafters).
"""

import torch

from ..memory.slot_table import SlotTable
from ..ops.op_protocols import Ops
from .drafter_protocol import PickRows
from .mtp import MtpLayer


def stage_of(layer: int) -> str:
    """Return the stage in which an MTP layer runs its extend; the first one's is the draft extend itself."""
    return f"extend.{layer}" if layer else "extend"


def propose(
    ops: Ops, slot_table: SlotTable, layer: MtpLayer, number: int, y: torch.Tensor, asked: PickRows
) -> torch.Tensor:
    """Pick from the rows y [N, D] of MTP layer `number` -> picks [M].

    If the request's root is known, the pick is its draft `number` + 1. The row y of the first layer's pick is kept too,
    because a chain of drafts continues from it.
    """
    if not len(asked.last):
        return asked.last
    rows = ops.select(x=y, index=asked.last)
    picks = layer.pick(ops, rows, stage_of(number))
    ops.store_rows(rows=picks, pool=slot_table.proposals[:, number : number + 1], locations=asked.slots)
    if not number:
        ops.store_rows(rows=rows, pool=slot_table.proposed[:, None], locations=asked.slots)
    return picks
