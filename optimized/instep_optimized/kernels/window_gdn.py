"""The delta rule of windows with its norms and gates: rows come from the conv, with nothing stored in between.

Leaves out: the kernel (`token_by_token_gluon.py`). If it does not fit, `gdn_inputs.py` and `gdn_dispatch.py` run, with
the same bits.
"""

from __future__ import annotations

import torch

from instep_reference.contract.place_names import Place

from ..memory_addresses import Part
from ..ops.fused import fuses
from ..ops.op_protocols import GdnInputs
from .gdn_dispatch import gdn, staged
from .rowwise.gdn_inputs import gdn_inputs


@fuses(gdn_inputs=gdn_inputs, gdn=gdn)
def window_gdn(
    *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, parts: tuple[Part, ...], dtype: torch.dtype, to: tuple[Place, ...],
) -> torch.Tensor:  # fmt: skip
    """`WindowGdn` of the seam."""
    heads, keys = A_log.shape[0], key_heads * key_dim
    q, k, v = torch.split(mixed, [keys, keys, mixed.shape[1] - 2 * keys], dim=1)
    shape = len(mixed), key_heads, key_dim
    rows = GdnInputs(q.view(shape), k.view(shape), v.view(len(mixed), heads, -1), a, b)
    if staged is not None and len(parts) == 1 and len(parts[0].begin):
        core = torch.empty_like(rows.v, dtype=dtype, memory_format=torch.contiguous_format)
        if staged.fits(rows, parts[0], core, raw=True):
            staged.staged(rows, parts[0], core, look=len(core), rule=staged.Rule(A_log, dt_bias, key_dim**-0.5))
            return core
    inputs = gdn_inputs(mixed=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, key_heads=key_heads, key_dim=key_dim,
                        to=to[:-1])  # fmt: skip
    return gdn(inputs=inputs, parts=parts, dtype=dtype, to=to[-1])
