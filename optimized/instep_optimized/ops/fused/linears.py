"""Several projections of the same rows as one product."""

import math

import torch

from instep_reference.contract.place_names import Place

from ..op_protocols import Ops, Shapes


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
