"""Signals between the programs of two launches that run at the same time: what is written, and who takes what.

The places are int32 in global memory, and 0 before any program of the first launch reads one (`clear`). The launch
that waits for signals comes after the launch that gives them, and begins once all programs of that one run
(`gdc_launch_dependents`). Those programs wait for no other program, so there is no deadlock. If the second launch
begins after the first has ended, all signals are set.

Another unit of the multiprocessor copies boxes than does loads and stores, and it has a separate view of memory (its
"proxy"). So both sides have a fence between accesses through the one and through the other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import barrier, gdc_launch_dependents, gdc_wait

PLACES = gl.constexpr(1024)  # places that a program clears


@gluon.jit
def clear(places, count, EARLY: gl.constexpr):
    """Clear all signals. Grid (places, in pieces of PLACES)."""
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
    """Wait until every box that this program has stored is in memory. A `barrier` must follow."""
    _all_threads("cp.async.bulk.wait_group 0; fence.proxy.async;")


@gluon.jit
def signal(place):
    """Signal that everything which this program wrote before its last `barrier` may be read."""
    gl.atomic_xchg(place, 1, sem="release", scope="gpu")


@gluon.jit
def turn(place):
    """Take the next of the turns 0, 1, .. of a launch's programs. A turn that is taken is visible to `signalled`."""
    return gl.atomic_add(place, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def signalled(places):
    """Count how many of a warp's places [32], from the first on, have their signal. Waits until the first has.

    Data that was written before these signals may be read then, also as boxes. Several warps may find different counts:
    they agree only that the first place has its signal.
    """
    WARP: gl.constexpr = places.type.layout
    missing = 0
    while missing == 0:
        seen = gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [places], gl.int32, False, 1)
        missing = gl.min(gl.where(seen != 0, 32, gl.arange(0, 32, WARP)), axis=0)
    _all_threads("fence.proxy.async;")
    barrier()
    return missing
