"""Several projections of the same rows as one product."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch

from instep_reference.contract.place_names import Place

if TYPE_CHECKING:
    from ..op_protocols import Ops

Shapes = tuple[tuple[int, ...], ...]


class Linears(Protocol):
    """`linear` for each of `shapes`. The weights [out_i, in] are stacked in `weight`. `to`: their places.

    The results may be views on one tensor. A column is a separate sum, but its order may depend on the other columns.
    """

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, shapes: Shapes, to: tuple[Place, ...]
    ) -> tuple[torch.Tensor, ...]: ...


def linears(
    ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, shapes: Shapes, to: tuple[Place, ...]
) -> tuple[torch.Tensor, ...]:
    """Run `Linears`, or its parts."""
    if ops.linears is not None:
        return ops.linears(x=x, weight=weight, shapes=shapes, to=to)
    weights = torch.split(weight, [math.prod(shape) for shape in shapes])
    return tuple(
        ops.linear(x=x, weight=part, shape=shape, to=place)
        for part, shape, place in zip(weights, shapes, to, strict=True)
    )
