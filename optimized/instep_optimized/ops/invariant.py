"""The table of row-invariant kernels: `INVARIANT`, the production kernels but for those whose bits see other rows.

Leaves out: what the production kernels give row by row already (norms, inputs, conv, the delta rule in windows, moves,
decisions). With this set speculation is plain decoding, bit for bit, through the whole model; a prefill is equal only
to one with the same chunks.
"""

from __future__ import annotations

from dataclasses import replace

from ..kernels.invariant.attend import attend
from ..kernels.invariant.linear import linear, lm_head, mlp
from ..kernels.invariant.moe import moe
from .triton import TRITON

INVARIANT = replace(
    TRITON, name="invariant", linear=linear, mlp=mlp, moe=moe, lm_head=lm_head, attend=attend, row_invariant=True
)
