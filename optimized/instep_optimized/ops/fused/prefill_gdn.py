"""The recurrence of a layer, with the conv and the norms before it: the fusions of `gdn`, or else its parts.

In a fusion of prompts intermediate rows have the dtype of their use.
"""

import torch

from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import GDN, Recurrence

from ...memory_addresses import Part
from ..op_protocols import Ops
from .conv_inputs import NONE, Bounds
from .verify_gdn import verify_gdn


def prefill_gdn(
    ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
    dtype: torch.dtype, to: tuple[Place, ...], row: Recurrence = GDN, bounds: Bounds = NONE,
) -> torch.Tensor:  # fmt: skip
    """Run `FusedGdn` if there is one, `PrefillGdn` if it `serves`, or else the composition of `verify_gdn`."""
    if ops.fused_gdn is not None and row is GDN and not bounds:
        mixed = ops.conv(x=x, weight=weight, parts=windows, to=to[0])  # [N, C]
        return ops.fused_gdn(mixed=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, key_heads=key_heads,
                             key_dim=key_dim, parts=parts, dtype=dtype, to=to[-1])  # fmt: skip
    given = {"x": x, "weight": weight, "windows": windows, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias,
             "key_heads": key_heads, "key_dim": key_dim, "parts": parts, "dtype": dtype, "to": to}  # fmt: skip
    if ops.prefill_gdn is not None and row is GDN and not bounds and serves(ops, (*windows, *parts), dtype):
        return ops.prefill_gdn(**given)  # type: ignore[arg-type]
    return verify_gdn(ops, **given, row=row, bounds=bounds)  # type: ignore[arg-type]


def serves(ops: Ops, parts: tuple[Part, ...], dtype: torch.dtype) -> bool:
    """Return whether no dropped bit would be read: the products of every part round q and k to bf16 first."""
    said = ops.products.get("gdn.chunk")
    prompts = {part.form for part in parts} == {"chunk"} and all(part.per_row is None for part in parts)
    return prompts and dtype.itemsize == 2 and said is not None and said.format == "bf16"


def stored(activation: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtypes of q, k, v, log_decay and beta inside the op: q and k as products read them; v unchanged."""
    return torch.bfloat16, torch.bfloat16, activation, torch.float32, torch.float32
