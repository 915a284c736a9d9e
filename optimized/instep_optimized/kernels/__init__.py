"""The production kernels in Triton. To import the package decides first whether they are interpreted (`runtime.py`).

Leaves out: which kernel serves which op (`instep_optimized.ops.triton`).
"""

from __future__ import annotations

from . import runtime as runtime
