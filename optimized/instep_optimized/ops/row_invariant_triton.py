"""The table of row-invariant kernels: `INVARIANT`. It replaces the production kernels whose bits depend on other rows.

With this set, speculation gives the bits of plain decoding through the whole model. A prefill has equal bits only with
the same chunks. Leaves out: kernels that are row-invariant already (norms, inputs, conv, the delta rule in windows,
moves, decisions).
"""

from dataclasses import replace

from ..kernels.invariant.attend import attend, attend_latents
from ..kernels.invariant.linear import linear, lm_head, mlp, squared_mlp
from ..kernels.invariant.moe import moe
from .rowwise_op_names import BY_ROW
from .triton import TRITON

INVARIANT = replace(
    TRITON, name="invariant", linear=linear, mlp=mlp, squared_mlp=squared_mlp, moe=moe, lm_head=lm_head,
    attend=attend, attend_latents=attend_latents, row_invariant=frozenset(BY_ROW),
)
