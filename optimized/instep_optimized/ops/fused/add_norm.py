"""The residual sum, and the norm that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from instep_reference.contract.place_names import Place

if TYPE_CHECKING:
    from ..op_protocols import Ops


class AddNorm(NamedTuple):
    """total [N, D] = x + y, as it is stored; normed [N, D], computed from the stored sum."""

    total: torch.Tensor
    normed: torch.Tensor


class MakeAddNorm(Protocol):
    """`add`, then `norm`. `to`: places of the sum and of the normed rows."""

    def __call__(
        self, *, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, to: tuple[Place, Place]
    ) -> AddNorm: ...


def add_norm(
    ops: Ops, *, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, to: tuple[Place, Place]
) -> AddNorm:
    """Run `MakeAddNorm`, or its parts."""
    if ops.add_norm is not None:
        return ops.add_norm(x=x, y=y, weight=weight, eps=eps, to=to)
    total = ops.add(x=x, y=y, to=to[0])
    return AddNorm(total, ops.norm(x=total, weight=weight, eps=eps, to=to[1]))
