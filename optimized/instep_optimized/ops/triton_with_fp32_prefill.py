"""The table of the production kernels with prefill in fp32 products: `PRECISE`.

With 32-bit activations it is `triton`. With 16-bit ones `triton` prefills in blocks of 64 with operands in bf16, and
this set in blocks of 16 with fp32 operands. Leaves out: everything that both share.
"""

from dataclasses import replace

from ..kernels.gdn_dispatch import precise_gdn
from ..kernels.products.moe import precise_moe
from .triton import TRITON

PRECISE = replace(
    TRITON, name="precise", gdn=precise_gdn, kda=precise_gdn, moe=precise_moe,
    products={"lm_head": TRITON.products["lm_head"]},
)
