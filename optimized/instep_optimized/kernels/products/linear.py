"""Matrix products: linear layers, the dense MLP and the head, by the vendor's library or `few_rows.py`.

Operands are stored in the activation dtype, and the library sums in fp32. A library may split a sum over several
programs and then add the parts in 16 bits, a rounding point that is not declared: two switches below forbid that. The
library may choose another kernel for another number of rows, so a row's bits may depend on that number. They also do
when there are so few rows that K has two sums (`few_rows.halved`). Leaves out: row-invariant products
(`invariant/linear.py`) and experts (`moe.py`).
"""

from __future__ import annotations

import math

import torch

from instep_reference.contract.place_names import Place

from ...ops.fused import fuses
from ...ops.op_protocols import Shapes
from ..decisions.argmax_and_acceptance import joined, pick
from ..rowwise.pointwise import silu_mul, square
from .few_rows import fits, largest, product

torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def linear(*, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor:
    """`Linear` of the seam."""
    return _product(x.flatten(1), weight).view(x.shape[0], *shape)


@fuses(linear=linear)
def linears(
    *, x: torch.Tensor, weight: torch.Tensor, shapes: Shapes, to: tuple[Place, ...]
) -> tuple[torch.Tensor, ...]:
    """Implement `Linears`: views on one product, so the row stride is the product's full width."""
    whole = torch.split(_product(x.flatten(1), weight), [math.prod(shape) for shape in shapes], dim=1)
    return tuple(part.view(len(x), *shape) for part, shape in zip(whole, shapes, strict=True))


def mlp(*, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor:
    """Implement `Mlp`: the middle rows are rounded to x's dtype; with many rows gate and up are rounded before, too."""
    return clamped_mlp(x=x, gate_up=gate_up, down=down, to=to, limit=None)


def clamped_mlp(
    *, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Place, limit: float | None
) -> torch.Tensor:
    """`mlp`, and with a limit a clamped SwiGLU, which the kernel of few rows does not have."""
    few = limit is None and fits(x, gate_up, gated=True)
    middle = product(x, gate_up, gated=True) if few else silu_mul(x @ gate_up.t(), limit)
    return _product(middle, down)


def squared_mlp(*, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor:
    """Implement `SquaredMlp`: up, and its squared ReLU, are rounded to x's dtype."""
    return _product(square(_product(x, up)), down)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return product(x, weight) if fits(x, weight) else x @ weight.t()


def lm_head(*, x: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
    """Implement `LmHead`: operands as stored, fp32 logits. On a GPU no fp32 copy of the weight is made."""
    if x.dtype == torch.float32:
        return x @ weight.t()
    if fits(x, weight, head=True):
        return product(x, weight, dtype=torch.float32)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


@fuses(lm_head=lm_head, pick=pick)
def head_pick(*, x: torch.Tensor, weight: torch.Tensor, to: tuple[Place, Place]) -> torch.Tensor:
    """Implement `HeadPick`: with few rows no logit leaves the program that computed it."""
    if fits(x, weight, head=True):
        return joined(*largest(x, weight))
    return pick(logits=lm_head(x=x, weight=weight, to=to[0]), to=to[1])
