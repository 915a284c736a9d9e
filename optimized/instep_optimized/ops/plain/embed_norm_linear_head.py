"""Ops on separate rows: embedding, norm, linear, add, multiply, concat, select, lm_head.

Leaves out: the MLP (`mlp.py`) and everything with memory. Sums are in at least fp32, with one cast at the end.
"""

import torch
from torch.nn.functional import linear as product

from instep_reference.contract.place_names import Place

from .compute_width import wide, width


def embed(*, tokens: torch.Tensor, table: torch.Tensor, to: Place) -> torch.Tensor:
    """Copy rows of the table, bit by bit."""
    return table[tokens]


def norm(*, x: torch.Tensor, weight: torch.Tensor, eps: float, to: Place) -> torch.Tensor:
    """x / rms(x) * (1 + weight) over the axes of weight."""
    return rms_norm(wide(x), weight, eps).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Do `norm` in the width of x, without the cast."""
    axes = tuple(range(-weight.dim(), 0))
    return x * torch.rsqrt(x.square().mean(dim=axes, keepdim=True) + eps) * (1 + weight.to(x.dtype))


def linear(*, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor:
    """x weight^T, each row in the given shape."""
    work = width(x.dtype, weight.dtype)
    rows = product(x.reshape(x.shape[0], weight.shape[1]).to(work), weight.to(work))
    return rows.to(x.dtype).view(x.shape[0], *shape)


def add(*, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor:
    """Add x + y. A sum of two numbers is rounded once in every width, so nothing is widened."""
    return x + y


def multiply(*, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor:
    """Multiply x * y. Like a sum, a product is rounded once in every width."""
    return x * y


def scaled_add(*, x: torch.Tensor, y: torch.Tensor, alpha: float, beta: float, to: Place) -> torch.Tensor:
    """alpha x + beta y."""
    return (alpha * wide(x) + beta * wide(y)).to(x.dtype)


def concat(*, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor:
    """[x | y]."""
    return torch.cat([x, y], dim=1)


def select(*, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copy rows of x by number, in any dtype; -1 gives zeros."""
    if not x.shape[0]:
        return x.new_zeros((index.shape[0], *x.shape[1:]))
    rows = x[index.clamp(min=0)]
    return rows.masked_fill((index < 0).view(-1, *[1] * (x.dim() - 1)), 0)


def lm_head(*, x: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
    """Compute x weight^T, left in the width in which it was summed."""
    work = width(x.dtype, weight.dtype)
    return product(x.to(work), weight.to(work))
