"""The production kernels in Triton. To import the package decides first whether they are interpreted (`runtime.py`).

`gdn.py` and four folders are the layers' ops: `windows/` and `prompts/` (the delta rule), `convs/`, `attention/` and
`products/`. `rowwise/` has what stands between them, `decisions/` the whole numbers of a round, `invariant/` the forms
that give a row the same bits beside any others, and `device/` the device functions that several of them share.

Leaves out: which kernel serves which op (`instep_optimized.ops.triton`).
"""

from __future__ import annotations

from . import runtime as runtime
