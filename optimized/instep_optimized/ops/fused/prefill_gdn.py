"""The delta rule of prompts, with the conv and the norms before it: rows between them are stored as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from instep_reference.contract.place import Place

from ...layout import Part
from .conv_inputs import conv_inputs
from .window_gdn import serves as of_windows

if TYPE_CHECKING:
    from ..base import Ops


class PrefillGdn(Protocol):
    """`conv`, `gdn_inputs`, then `gdn`, with the arguments of all three  ->  core [N, HV, V].

    windows, parts: of the conv and of the states, all of them chunks without `per_row`. dtype: of 16 bits.
    `to`: places of mixed, q, k, v, log_decay, beta and core. All but core stay inside.
    """

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
        A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
        dtype: torch.dtype, to: tuple[Place, ...],
    ) -> torch.Tensor: ...


def prefill_gdn(
    ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
    dtype: torch.dtype, to: tuple[Place, ...],
) -> torch.Tensor:  # fmt: skip
    """`PrefillGdn` where it `serves`; of windows the conv and `WindowGdn`, where that serves; or its parts."""
    rule = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "key_heads": key_heads, "key_dim": key_dim}
    if ops.prefill_gdn is not None and serves(ops, (*windows, *parts), dtype):
        return ops.prefill_gdn(x=x, weight=weight, windows=windows, **rule, parts=parts, dtype=dtype, to=to)  # type: ignore[arg-type]
    if ops.window_gdn is not None and of_windows(parts, x.dtype):
        mixed = ops.conv(x=x, weight=weight, parts=windows, to=to[0])
        return ops.window_gdn(mixed=mixed, **rule, parts=parts, dtype=dtype, to=to[1:])  # type: ignore[arg-type]
    inputs = conv_inputs(ops, x=x, weight=weight, parts=windows, **rule, to=to[:-1])  # type: ignore[arg-type]
    return ops.gdn(inputs=inputs, parts=parts, dtype=dtype, to=to[-1])


def serves(ops: Ops, parts: tuple[Part, ...], dtype: torch.dtype) -> bool:
    """Whether no bit that is left out would be read: the products of every part round q and k to bf16 first."""
    said = ops.products.get("gdn.chunk")
    prompts = {part.form for part in parts} == {"chunk"} and all(part.per_row is None for part in parts)
    return prompts and dtype.itemsize == 2 and said is not None and said.format == "bf16"


def stored(activation: torch.dtype) -> tuple[torch.dtype, ...]:
    """Of q, k, v, log_decay and beta inside the op: q and k as products read them; v as it comes, and that is exact."""
    return torch.bfloat16, torch.bfloat16, activation, torch.float32, torch.float32
