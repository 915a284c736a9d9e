"""The delta rule of a verify with everything that comes before it: rows come from the linear maps.

Leaves out: the kernel (`token_by_token_gluon.py`). If it does not fit, `causal_conv.py` and `window_gdn.py` run, with
the same bits.
"""

from __future__ import annotations

import torch

from instep_reference.contract.place_names import Place

from ..memory_addresses import Part
from ..ops.fused import fuses
from .convs.causal_conv import conv
from .gdn_dispatch import gdn, staged
from .rowwise.gdn_inputs import gdn_inputs
from .window_gdn import window_gdn


@fuses(conv=conv, gdn_inputs=gdn_inputs, gdn=gdn)
def verify_gdn(
    *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
    dtype: torch.dtype, to: tuple[Place, ...],
) -> torch.Tensor:  # fmt: skip
    """`VerifyGdn` of the seam."""
    values = x.shape[1] - 2 * key_heads * key_dim  # of all heads
    if staged is not None and len(windows) == len(parts) == 1:
        (window,), (part,) = windows, parts
        if staged.fits_conv(x, weight, window, part, len(part.begin) * values):
            rows = staged.words_of(x, a, b, key_heads, key_dim)
            core = x.new_empty(len(x), len(A_log), values // len(A_log), dtype=dtype)
            if staged.fits(rows, part, core, raw=True, numbers=staged.TAPS):
                staged.staged(rows, part, core, look=len(core), rule=staged.Rule(A_log, dt_bias, key_dim**-0.5),
                              conv=(weight, window.read, window.per_row))  # fmt: skip
                return core
    mixed = conv(x=x, weight=weight, parts=windows, to=to[0])
    return window_gdn(mixed=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, key_heads=key_heads, key_dim=key_dim,
                      parts=parts, dtype=dtype, to=to[1:])  # fmt: skip
