"""As a program on a GPU: whether a time slice of another process changes memory that was a barrier.

Its kernel makes a barrier, fills memory with numbers, waits, and looks whether they still stand there. Either the
barrier tells a second group of warps that the first one is done, and is kept; or nobody uses it, and the compiler puts
the numbers over it. Meanwhile another process multiplies matrices, so that the device takes turns.

On one H200 (Triton 3.6.0, driver 580.159.04) no word changed in 132 programs that ran alone, nor beside the other
process where the barrier was kept; where it was forgotten, two of each did: those of a barrier.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from instep_optimized.kernels.device.layouts import barrier, fence_async_shared, mbarrier
from support.turns import taken_in_turns

NUMBERS, PROGRAMS, TURN_NS = 128, 132, 30_000_000
_TIME = gl.constexpr("{ .reg .b32 x; mov.b32 x, $1; nanosleep.u32 20000; mov.u64 $0, %globaltimer; }")


@gluon.jit
def _looks(out, numbers, full, nanoseconds, N: gl.constexpr):
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, N, LANES)
    numbers.store(lane + 1)
    barrier()
    begun = gl.max(gl.inline_asm_elementwise(_TIME, "=l,r", [lane], gl.int64, False, 1), axis=0)
    now = begun
    while now - begun < nanoseconds:
        now = gl.max(gl.inline_asm_elementwise(_TIME, "=l,r", [lane], gl.int64, False, 1), axis=0)
    barrier()
    gl.store(out + gl.program_id(0) * N + lane, numbers.load(LANES) - lane - 1)
    if full is not None:
        mbarrier.arrive(full, count=1)


@gluon.jit
def _waits(full):
    if full is not None:
        mbarrier.wait(full, 0)


@gluon.jit
def forgotten(out, nanoseconds, KEPT: gl.constexpr, N: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    barrier()
    numbers = gl.allocate_shared_memory(gl.int32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if KEPT:
        gl.warp_specialize([(_looks, (out, numbers, full, nanoseconds, N)), (_waits, (full,))], [4], [120])
    else:
        gl.warp_specialize([(_looks, (out, numbers, None, nanoseconds, N)), (_waits, (None,))], [4], [120])


def changed(kept: bool) -> int:
    """Words that another process's turns changed"""
    out = torch.zeros(PROGRAMS, NUMBERS, dtype=torch.int32, device="cuda")
    forgotten[(PROGRAMS,)](out, TURN_NS, kept, NUMBERS, num_warps=4)
    return int(out.count_nonzero())


if __name__ == "__main__":
    changed(True), changed(False)
    alone = changed(True), changed(False)
    with taken_in_turns():
        beside = changed(True), changed(False)
    print("words changed behind a barrier that was kept and one that was forgotten:")
    print(f"alone {alone[0]}, {alone[1]}; beside another process {beside[0]}, {beside[1]}")
    assert alone == (0, 0) and not beside[0], "a barrier that is kept costs no number"
