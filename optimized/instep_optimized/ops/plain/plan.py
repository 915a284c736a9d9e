"""The ring's whole numbers: what is run again, where rows are kept, and how far the state then reaches.

Leaves out: the ring itself (`ring.py`). Nothing here waits for the host; label sets use it as it is.
"""

from __future__ import annotations

import torch

from ..base import RingPlan


def plan_ring(
    *, slots: torch.Tensor, before: torch.Tensor, count: torch.Tensor, settled: torch.Tensor, size: int, most: int,
    spare: int | None,
) -> RingPlan:
    """`PlanRing` of the seam. Marks may hold anything: what is pending never reaches over the ring.

    Shapes:  slots, before, count (B)   settled (slots)  ->  (B) each
    """
    busy, slot = slots >= 0, slots.clamp(min=0)
    pending = torch.where(busy, before - settled[slot], 0).clamp(0, size - most)
    begin = torch.where(busy, (before - pending) % size, 0)
    nowhere = torch.full_like(slots, -1)
    if spare is None:
        return RingPlan(begin, pending, nowhere, nowhere.clone(), torch.where(busy, before + count, 0))
    stored = busy & (pending > spare)
    after = torch.where(stored, before, before - pending)
    return RingPlan(
        begin, pending, torch.where(busy, before % size, -1), torch.where(stored, slots, -1),
        torch.where(busy, after, 0),
    )
