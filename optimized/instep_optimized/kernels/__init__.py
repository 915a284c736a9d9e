"""The production kernels in Triton. To import the package decides first whether they are interpreted (`runtime.py`).

Five folders are the layers' ops: `windows/` and `prompts/` (the delta rule), `convs/`, `attention/` and `products/`.
`gdn.py` takes each part of a batch to the delta rule of its form; `gated.py` and `prefill.py` are that with what comes
before it. `rowwise/` has what stands between products, `decisions/` the whole numbers of a round, `invariant/` the
forms that give a row the same bits beside any others, and `device/` the device functions that several of them share.

Leaves out: which kernel serves which op (`instep_optimized.ops.triton`).
"""

from __future__ import annotations

from . import runtime as runtime
