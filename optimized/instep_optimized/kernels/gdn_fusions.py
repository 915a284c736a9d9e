"""The delta rule together with what comes before it: of windows, of a verify, and of prompts.

No intermediate row of a window or a verify is stored: rows come from the conv, or from the linear maps. Prompts store
rows of 16 bits between the kernels instead of 32. Leaves out: the kernels (`token_by_token_gluon.py`, `causal_conv.py`,
`gdn_inputs.py`, `chunk64.py`). If the kernel of windows does not fit, the parts run, with the same bits.
"""

from __future__ import annotations

import torch

from instep_reference.contract.place_names import Place

from ..memory_addresses import Part
from ..ops.fused import fuses, stored
from ..ops.op_protocols import GdnInputs
from .convs.causal_conv import consumed, conv
from .gdn_dispatch import gdn, staged
from .rowwise.gdn_inputs import gdn_inputs, results


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


@fuses(conv=conv, gdn_inputs=gdn_inputs, gdn=gdn)
def prefill_gdn(
    *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
    dtype: torch.dtype, to: tuple[Place, ...],
) -> torch.Tensor:  # fmt: skip
    """`PrefillGdn` of the seam: the usual kernels, which store and load in the dtypes of their tensors.

    q and k are rounded when they are stored, and not again when they are loaded.
    """
    inputs = results(x, key_heads, key_dim, len(A_log), stored(x.dtype))
    consumed(inputs, x, weight, windows, (a, b, A_log, dt_bias), to[0])
    return gdn(inputs=inputs, parts=parts, dtype=dtype, to=to[-1])
