"""The residual sum, and the norm that reads it."""

import torch

from instep_reference.contract.place_names import Place

from ..op_protocols import AddNorm, Ops


def add_norm(
    ops: Ops, *, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, to: tuple[Place, Place]
) -> AddNorm:
    """Run `MakeAddNorm`, or its parts."""
    if ops.add_norm is not None:
        return ops.add_norm(x=x, y=y, weight=weight, eps=eps, to=to)
    total = ops.add(x=x, y=y, to=to[0])
    return AddNorm(total, ops.norm(x=total, weight=weight, eps=eps, to=to[1]))
