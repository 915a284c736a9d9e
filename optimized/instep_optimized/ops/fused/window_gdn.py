"""The delta rule of windows, with the norms and gates before it: no intermediate row is stored."""

import torch

from instep_reference.contract.place_names import Place

from ...memory_addresses import Part
from ..op_protocols import Ops


def window_gdn(
    ops: Ops, *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, parts: tuple[Part, ...], dtype: torch.dtype, to: tuple[Place, ...],
) -> torch.Tensor:  # fmt: skip
    """Run `WindowGdn` if it `serves`, or else its parts."""
    rule = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "key_heads": key_heads, "key_dim": key_dim}
    if ops.window_gdn is not None and serves(parts, mixed.dtype):
        return ops.window_gdn(mixed=mixed, **rule, parts=parts, dtype=dtype, to=to)  # type: ignore[arg-type]
    inputs = ops.gdn_inputs(mixed=mixed, **rule, to=to[:-1])  # type: ignore[arg-type]
    return ops.gdn(inputs=inputs, parts=parts, dtype=dtype, to=to[-1])


def serves(parts: tuple[Part, ...], dtype: torch.dtype) -> bool:
    """Return whether the op supports these parts with rows in dtype. 32-bit rows gain nothing from it."""
    chains = len(parts) > 0 and all(part.form == "window" and part.parents is None for part in parts)
    return chains and dtype.itemsize == 2
