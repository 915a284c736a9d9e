"""Launches that begin while the one before them ends ("programmatic dependent launch").

Leaves out: which launches do (`runtime.launch`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait():
    """Until the launch before this one has written everything; the next one may come and wait likewise.

    A kernel with EARLY calls this before it reads or writes anything but weights. So everything before it is done, also
    what ran before the launch before: that one waited, too.
    """
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def wait_before_product():
    """`wait`; the next launch comes at once. A product copies weights until this launch ends, and waits then.

    It may come before this launch waited: whoever waits for this one also waits for all that this one waits for.
    """
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def wait_alone():
    """`wait`; the next launch does not come before this one ends."""
    gdc_wait()


@triton.jit
def next_comes():
    """The next launch comes at once. This one calls `wait_alone` in every program before it ends: see above."""
    gdc_launch_dependents()
