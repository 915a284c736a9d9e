"""Launches that begin while the one before them ends ("programmatic dependent launch").

Leaves out: which launches begin early (`runtime.launch`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait():
    """Wait until the previous launch has written everything; the next launch may start and wait likewise.

    A kernel with EARLY calls this before it reads or writes anything but weights. Then all earlier work is done,
    including launches before the previous one, because the previous one waited, too.
    """
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def wait_before_product():
    """Let the next launch start at once, then `wait`. A product copies weights until this launch ends, and waits then.

    The next launch may start before this one has waited: waiting for this one includes everything that this one waits
    for.
    """
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def wait_alone():
    """Do `wait`; the next launch does not start before this one ends."""
    gdc_wait()


@triton.jit
def next_comes():
    """Let the next launch start at once. This launch calls `wait_alone` in every program before it ends: see above."""
    gdc_launch_dependents()
