"""As a program: kernels with further groups of warps that share little or nothing, for racecheck.

The compiler passes each group its function and arguments through shared memory and named barriers. racecheck reports
this here, and no mistake of a kernel. `halves` has one further group. `told` has two of them, of 4 warps and of 1, as
the staged kernels of attention have; its groups share barriers that count arrivals, and nothing else.

On one H100 (Triton 3.6.0) racecheck named nothing in `halves`. In `told` it named 10 hazards, all between the read of a
byte in the dispatch loop (`told+0x130`) and the writes of that byte by the first warps. Every warp has such a byte: the
number of the function that it runs next. In the staged kernels of attention racecheck reports the same read first.

In `handed` a group stores numbers in shared memory that two others load, as the factors of `split_kv_gluon.py` and
the gates of `chunk64_carry_gluon.py` are handed over: all of a group stores, its warps wait for each other, one thread
arrives at a barrier that counts, and the other groups wait there. On one H200 racecheck named the dispatch alone in it.
An argument runs one form alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from instep_optimized.kernels.device.gluon_helpers import barrier, fence_async_shared, mbarrier

STEPS, HALF, MANY = 4, 128, 64
PLACES = gl.constexpr(2)  # of numbers that are handed on


@gluon.jit
def _half(x, out, size, SIDE: gl.constexpr):
    at = SIDE * size + gl.arange(0, 128, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(out + at, gl.load(x + at) + 1.0)


@gluon.jit
def halves(x, out, size):
    gl.warp_specialize([(_half, (x, out, size, 0)), (_half, (x, out, size, 1))], [4], [120])


@gluon.jit
def _listener(x, out, size, full, free, steps, SIDE: gl.constexpr):
    """Compute a half of every step after its signal, as a group that reads tiles does."""
    for step in range(steps):
        mbarrier.wait(full, step & 1)
        at = (2 * step + SIDE) * size + gl.arange(0, 128, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        gl.store(out + at, gl.load(x + at) + 1.0)
        mbarrier.arrive(free, count=1)


@gluon.jit
def _teller(steps_told, full, free, steps):
    """Signal both groups to continue after both have finished, as the warp that copies tiles does."""
    for step in range(steps):
        mbarrier.wait(free, (step & 1) ^ 1)
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        gl.store(steps_told + 32 * step + lane, lane + step)
        mbarrier.arrive(full, count=1)


@gluon.jit
def told(x, out, steps_told, size, steps):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_listener, (x, out, size, full, free, steps, 0)),
            (_listener, (x, out, size, full, free, steps, 1)),
            (_teller, (steps_told, full, free, steps)),
        ],
        [4, 1], [120, 24],
    )  # fmt: skip


@gluon.jit
def _store_numbers(x, numbers, full, free, steps):
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for step in range(steps):
        place, turn = step % PLACES, step // PLACES & 1
        mbarrier.wait(free.index(place), turn ^ 1)
        numbers.index(place).store(gl.load(x + 128 * step + lane))
        barrier()
        mbarrier.arrive(full.index(place), count=1)


@gluon.jit
def _load_numbers(out, numbers, full, free, steps):
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 128, LANES)
    for step in range(steps):
        place, turn = step % PLACES, step // PLACES & 1
        mbarrier.wait(full.index(place), turn)
        gl.store(out + 128 * step + lane, numbers.index(place).load(LANES))
        mbarrier.arrive(free.index(place), count=1)


@gluon.jit
def handed(x, out, other, steps):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    numbers = gl.allocate_shared_memory(gl.float32, [PLACES, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER)
    for place in gl.static_range(PLACES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(free.index(place), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_store_numbers, (x, numbers, full, free, steps)),
            (_load_numbers, (out, numbers, full, free, steps)),
            (_load_numbers, (other, numbers, full, free, steps)),
        ],
        [4, 4], [120, 120],
    )  # fmt: skip


def of_two_groups() -> None:
    x = torch.arange(2 * HALF, dtype=torch.float32, device="cuda")
    out = torch.zeros_like(x)
    halves[(1,)](x, out, HALF, num_warps=4)
    assert torch.equal(out, x + 1)
    print("both halves are right")


def of_three_groups() -> None:
    x = torch.arange(2 * HALF * STEPS, dtype=torch.float32, device="cuda")
    out, steps_told = torch.zeros_like(x), torch.zeros(STEPS, 32, dtype=torch.int64, device="cuda")
    told[(1,)](x, out, steps_told, HALF, STEPS, num_warps=4)
    right = torch.arange(32, device="cuda") + torch.arange(STEPS, device="cuda")[:, None]
    assert torch.equal(out, x + 1) and torch.equal(steps_told, right)
    print("both halves of every step are right, and so are the signals")


def of_numbers() -> None:
    x = torch.arange(128 * MANY, dtype=torch.float32, device="cuda")
    out, other = torch.full_like(x, -1), torch.full_like(x, -1)
    handed[(1,)](x, out, other, MANY, num_warps=4)
    assert torch.equal(out, x) and torch.equal(other, x)
    print("numbers that are handed on are right")


if __name__ == "__main__":
    for form in (of_two_groups, of_three_groups, of_numbers):
        if form.__name__ in sys.argv[1:] or not sys.argv[1:]:
            form()
