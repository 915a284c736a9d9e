"""Integer work of a ring: which tokens run again, where rows are kept, how many tokens the state then contains.

Nothing here waits for the host. The `ledger` op set uses it too. Leaves out: the ring itself (`rerun_ring.py`).
"""

import torch

from ..integer_op_protocols import RingPlan


def plan_ring(
    *, slots: torch.Tensor, before: torch.Tensor, count: torch.Tensor, settled: torch.Tensor, size: int, most: int,
    spare: int | None,
) -> RingPlan:
    """`PlanRing` of the seam. A wrong mark cannot reach outside the ring: the pending count is clamped to its room.

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
