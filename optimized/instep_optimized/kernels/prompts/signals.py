"""What programs of two launches that run at the same time tell each other: what was written, and who takes what.

The places are int32 in global memory, and 0 before anybody of the first launch reads one (`clear`). The launch that
waits for signals comes behind the one that gives them, and begins once all programs of that one run
(`gdc_launch_dependents`). They wait for nobody, so nobody waits for ever. Where the second launch begins when the first
has ended, all signals stand.

Boxes are copied by another unit of the multiprocessor than loads and stores, which has a view of memory of its own (its
"proxy"). So both sides have a fence between what is seen through the one and through the other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.layouts import barrier, gdc_launch_dependents, gdc_wait

PLACES = gl.constexpr(1024)  # that a program clears


@gluon.jit
def clear(places, count, EARLY: gl.constexpr):
    """No signal. Grid (places, in pieces of PLACES)."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    at = gl.program_id(0) * PLACES + gl.arange(0, PLACES, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    gl.store(places + at, 0 * at, mask=at < count)


@gluon.jit
def _all_threads(code: gl.constexpr):
    """Run an instruction without operands in every thread."""
    lane = gl.arange(0, 32 * gl.num_warps(), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.inline_asm_elementwise(code + " mov.u32 $0, 0;", "=r,r", [lane], gl.int32, False, 1)


@gluon.jit
def written():
    """Until every box that this program has stored stands in memory. Behind it a `barrier` is needed."""
    _all_threads("cp.async.bulk.wait_group 0; fence.proxy.async;")


@gluon.jit
def signal(place):
    """Say that what this program has written before its last `barrier` may be read."""
    gl.atomic_xchg(place, 1, sem="release", scope="gpu")


@gluon.jit
def turn(place):
    """The next of the turns 0, 1, .. that programs of a launch take. Once one is taken, `signalled` sees it."""
    return gl.atomic_add(place, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def signalled(places):
    """How many of a warp's places [32], from the first on, have their signal. Waits until the first has.

    What was written before these signals may be read then, also as boxes. Each of several warps finds a number of its
    own: only that the first place has its signal is true for all.
    """
    WARP: gl.constexpr = places.type.layout
    missing = 0
    while missing == 0:
        seen = gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [places], gl.int32, False, 1)
        missing = gl.min(gl.where(seen != 0, 32, gl.arange(0, 32, WARP)), axis=0)
    _all_threads("fence.proxy.async;")
    barrier()
    return missing
