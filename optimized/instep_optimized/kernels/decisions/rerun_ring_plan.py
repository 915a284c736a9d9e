"""Integer work of the ring: which tokens run again, where rows are kept, how many tokens the state then contains.

Leaves out: the ring itself, which the delta rule reads and writes (`token_by_token.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...ops.integer_op_protocols import RingPlan
from ..device.programmatic_dependent_launch import wait
from ..runtime import ceil_div, launch, tile

REQUESTS = 64  # per program
ABSORBED = -1  # encodes spare=None in the kernel: rows go into the state, none is kept


def plan_ring(
    *, slots: torch.Tensor, before: torch.Tensor, count: torch.Tensor, settled: torch.Tensor, size: int, most: int,
    spare: int | None,
) -> RingPlan:
    """`PlanRing` of the seam."""
    requests, tall = slots.numel(), tile(REQUESTS, REQUESTS)
    told = RingPlan(*(slots.new_empty(requests) for _ in RingPlan._fields))
    launch(
        _ring, (ceil_div(requests, tall),), slots, before, count, settled, settled.stride(0), *told,
        size, size - most, ABSORBED if spare is None else spare, requests, RT=tall,
    )  # fmt: skip
    return told


@triton.jit(do_not_specialize=["size", "limit", "spare"])
def _ring(
    slots, before, count, settled, settled_step, begin, pending, keep, settle, after,
    size, limit, spare, requests,
    RT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Plan for RT requests. Grid (tiles).

    A mark may hold anything, so the pending count computed from it is clamped first.
    """
    if EARLY:
        wait()
    request = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    asked = request < requests
    slot = tl.load(slots + request, mask=asked, other=-1)
    busy = slot >= 0
    reach = tl.load(before + request, mask=busy, other=0)
    rows = tl.load(count + request, mask=busy, other=0)
    mark = tl.load(settled + slot * settled_step, mask=busy, other=0)
    owed = tl.where(busy, tl.minimum(tl.maximum(reach - mark, 0), limit), 0)
    kept = busy & (spare >= 0)
    stored = kept & (owed > spare)
    # On the device a remainder has the sign of the dividend: + size makes it positive, for owed <= size.
    first = (reach - owed + size) % size
    tl.store(begin + request, tl.where(busy, first, 0), mask=asked)
    tl.store(pending + request, owed, mask=asked)
    tl.store(keep + request, tl.where(kept, reach % size, -1), mask=asked)
    tl.store(settle + request, tl.where(stored, slot, -1), mask=asked)
    # The new mark: after a verify the tokens that were stored, after other rows all tokens.
    now = tl.where(kept, tl.where(stored, reach, reach - owed), reach + rows)
    tl.store(after + request, tl.where(busy, now, 0), mask=asked)
