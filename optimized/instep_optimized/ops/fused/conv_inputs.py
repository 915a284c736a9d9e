"""The conv, and the delta rule's inputs from its result."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from instep_reference.contract.place_names import Place

from ...memory_addresses import Part
from ..op_protocols import GdnInputs, Ops

Bounds = Mapping[str, float]  # arguments of `gdn_inputs` that are given if they do not have the value of GDN
NONE: Bounds = MappingProxyType({})


def conv_inputs(
    ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, to: tuple[Place, ...],
    bounds: Bounds = NONE,
) -> GdnInputs:  # fmt: skip
    """Run `ConvInputs`, or its parts."""
    gates = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    heads = {"key_heads": key_heads, "key_dim": key_dim}
    if ops.conv_inputs is not None and not bounds:
        return ops.conv_inputs(x=x, weight=weight, parts=parts, **gates, **heads, to=to)  # type: ignore[arg-type]
    mixed = ops.conv(x=x, weight=weight, parts=parts, to=to[0])
    return ops.gdn_inputs(mixed=mixed, **gates, **heads, to=to[1:], **bounds)  # type: ignore[arg-type]
