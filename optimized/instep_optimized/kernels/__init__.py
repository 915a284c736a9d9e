"""The production kernels in Triton. Importing the package first decides whether they are interpreted (`runtime.py`).

Five folders hold the layers' ops: `gdn_windows/` and `gdn_prefill/` (the delta rule), `convs/`, `attention/` and
`products/`. `gdn_dispatch.py` dispatches each part of a batch to the delta rule of its form; `gdn_fusions.py` fuses it
with the steps before it. `rowwise/` has the ops between products, `decisions/` the integer work of a round,
`invariant/` the forms that give a row the same bits next to any other rows, and `device/` the device functions that
several of them share.

Leaves out: the kernel that each op runs (`instep_optimized.ops.triton`).
"""

from __future__ import annotations

from . import runtime as runtime
