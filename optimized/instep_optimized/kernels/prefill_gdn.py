"""The delta rule of prompts with the conv and norms before it: rows of 16 bits between the kernels instead of 32.

Leaves out: the kernels (`causal_conv.py`, `gdn_inputs.py`, `chunk64.py`). They are the usual ones: they store and load
in the dtypes of their tensors.
"""

from __future__ import annotations

import torch

from instep_reference.contract.place_names import Place

from ..memory_addresses import Part
from ..ops.fused import fuses
from ..ops.fused.prefill_gdn import stored
from .convs.causal_conv import consumed, conv
from .gdn_dispatch import gdn
from .rowwise.gdn_inputs import gdn_inputs, results


@fuses(conv=conv, gdn_inputs=gdn_inputs, gdn=gdn)
def prefill_gdn(
    *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
    dtype: torch.dtype, to: tuple[Place, ...],
) -> torch.Tensor:  # fmt: skip
    """`PrefillGdn` of the seam. q and k are rounded when they are stored, and not again when they are loaded."""
    inputs = results(x, key_heads, key_dim, len(A_log), stored(x.dtype))
    consumed(inputs, x, weight, windows, (a, b, A_log, dt_bias), to[0])
    return gdn(inputs=inputs, parts=parts, dtype=dtype, to=to[-1])
