"""The production kernels in Triton; importing the package settles first how they run (`runtime.py`).

Leaves out: which op is served by which kernel (`instep_optimized.ops.triton`).
"""

from __future__ import annotations

from . import runtime as runtime
