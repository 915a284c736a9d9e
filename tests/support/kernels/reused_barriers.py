"""As a program on a GPU: whether another process's slice of time changes memory that was a barrier.

`forgotten` makes a barrier, fills memory with numbers, waits, and checks the numbers. It has three forms. The barrier
signals to a second group of warps that the first one is done, and is kept. Or it is unused, and the compiler puts the
numbers over it. Or it is unused, but invalidated before. Meanwhile another process multiplies matrices, so that the
device interrupts the kernel.

On an H200 and an H100 (Triton 3.6.0, driver 580.159.04) no word changed in 132 programs that ran alone, nor next to the
other process if the barrier was kept. If it was forgotten, two words of each program became those of a barrier. The
form in which it is invalidated has not run yet.

The other kernels are compiled alone (`kit.over_barriers`): what the compiler needs for itself lies over a barrier, too.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from instep.run.stress import Neighbour
from instep_optimized.kernels.device.gluon_helpers import along, barrier, fence_async_shared, mbarrier

NUMBERS, PROGRAMS, LONG_NS = 128, 132, 30_000_000
_TIME = gl.constexpr("{ .reg .b32 x; mov.b32 x, $1; nanosleep.u32 20000; mov.u64 $0, %globaltimer; }")


@gluon.jit
def _made():
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    barrier()
    return full


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
def forgotten(out, nanoseconds, KEPT: gl.constexpr, N: gl.constexpr, ENDED: gl.constexpr):
    full = _made()
    if ENDED:
        mbarrier.invalidate(full)
    numbers = gl.allocate_shared_memory(gl.int32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if KEPT:
        gl.warp_specialize([(_looks, (out, numbers, full, nanoseconds, N)), (_waits, (full,))], [4], [120])
    else:
        gl.warp_specialize([(_looks, (out, numbers, None, nanoseconds, N)), (_waits, (None,))], [4], [120])


@gluon.jit
def summed(out, USES: gl.constexpr):
    """Without further groups: warps exchange sums in the barrier's place, unless its second use comes after them"""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    full, lane = _made(), gl.arange(0, 128, LANES)
    if USES > 0:
        mbarrier.arrive(full, count=1)
        mbarrier.wait(full, 0)
    gl.store(out, gl.sum(gl.load(out + lane), axis=0))
    if USES > 1:
        mbarrier.arrive(full, count=1)
        mbarrier.wait(full, 1)


@gluon.jit
def exchanged(out):
    """Change a layout after the groups, in the place of their barrier"""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    COLUMNS: gl.constexpr = gl.BlockedLayout([2, 1], [4, 8], [1, 4], [0, 1])
    full = _made()
    gl.warp_specialize([(_arrives, (full,)), (_waits, (full,))], [4], [120])
    row, column = along(0, 32, ROWS), along(1, 32, ROWS)
    tile = gl.convert_layout(gl.load(out + row * 32 + column), COLUMNS)
    gl.store(out + along(0, 32, COLUMNS) * 32 + along(1, 32, COLUMNS), tile)


@gluon.jit
def _arrives(full):
    mbarrier.arrive(full, count=1)


def changed(kept: bool, ended: bool = False) -> int:
    """Words that changed while the kernel waited"""
    out = torch.zeros(PROGRAMS, NUMBERS, dtype=torch.int32, device="cuda")
    forgotten[(PROGRAMS,)](out, LONG_NS, kept, NUMBERS, ended, num_warps=4)
    return int(out.count_nonzero())


def in_each_form() -> tuple[int, int, int]:
    return changed(True), changed(False, ended=True), changed(False)


if __name__ == "__main__":
    in_each_form()  # compiled
    alone = in_each_form()
    with (other := Neighbour(torch.device("cuda"))):
        beside = in_each_form()
    assert other.result().times, "the other process ended"
    for what, words in (("alone", alone), ("beside another process", beside)):
        print(f"{what}, words changed over a barrier: kept {words[0]}, invalidated {words[1]}, forgotten {words[2]}")
    assert alone == (0, 0, 0) and beside[:2] == (0, 0), "no word may change but over a barrier that was forgotten"
