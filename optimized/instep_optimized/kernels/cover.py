"""Zeros in the rows of a result that no request covers, written by the kernel that writes the others: no fill before.

A kernel gives its last program along the axis of requests to this, beside the requests. It runs at the same time as
they do, and no row is written twice. Leaves out: a launch with several parts, of which none knows what the others cover
(its op fills the whole result before).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

REQUESTS = tl.constexpr(16)  # that every row compares itself with in one step


def result(parts: tuple[object, ...], x: torch.Tensor, *shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Memory for a result of packed rows, and for how many of these rows `clear` must look: 0 where it is filled."""
    if len(parts) == 1:
        return x.new_empty(shape, dtype=dtype), shape[0]
    return x.new_zeros(shape, dtype=dtype), 0


@triton.jit
def clear(out, out_row, at, inside, units, begin, count, requests, rows, RT: tl.constexpr):
    """Zeros in elements `at` [CT] of the rows of `out` that no request with a unit covers; `inside` [CT]: which exist.

    The programs along the first axis of the grid share the rows, RT at a time.
    """
    for first in range(tl.program_id(0) * RT, rows, tl.num_programs(0) * RT):
        row = first + tl.arange(0, RT)
        covered = tl.zeros((RT,), tl.int32)
        for start in range(0, requests, REQUESTS):
            request = start + tl.arange(0, REQUESTS)
            busy = tl.load(units + request, mask=request < requests, other=-1) >= 0
            past = row[:, None] - tl.load(begin + request, mask=busy, other=0)[None, :]
            mine = (past >= 0) & (past < tl.load(count + request, mask=busy, other=0)[None, :])
            covered = tl.maximum(covered, tl.max(mine.to(tl.int32), axis=1))
        goal = out + (row.to(tl.int64) * out_row)[:, None] + at[None, :]
        free = (row < rows) & (covered == 0)
        tl.store(goal, tl.zeros((RT, at.shape[0]), out.dtype.element_ty), mask=free[:, None] & inside[None, :])
