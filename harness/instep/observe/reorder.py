"""The arithmetic of a width as another correct implementation may do it: sums in any order, functions to 2 ulp.

Monte Carlo arithmetic (Parker 1997) at the level of tensor operations: inside `Reordered` every sum is moved by a draw
from the error that a running sum in some order makes, every inexact function by a draw from the error that vendors'
libraries state, while sums and products of two numbers round as they do; `up_or_down` is a rounding into storage that
falls by chance. Leaves out: which piece is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from instep_reference.contract.place import Place, See
from instep_reference.contract.rounding import Blocked, Storage

from .products import MULTIPLY, Operands
from .routes import Routes
from .storage import State, by_chance, narrower, rounded

# One rounding to nearest moves a number by a uniform draw within half a unit in the last place. Over mantissas m that
# are spread as 1/m, its root mean square is eps / sqrt(12) * sqrt(mean of 1/m^2) = 0.289 * 0.736 eps.
ROUNDING = math.sqrt(0.375 / math.log(2) / 12)

# Uniform within so many units: what CUDA's and most vectorised libraries state for fp32 exp, log, rsqrt, sin and cos.
FUNCTION_ULPS = 2.0

# How torch calls what the reference uses. Functions that are neither here nor in REDUCTIONS are taken to be exact, or
# one rounding, which torch makes as everybody does; a test lists them.
FUNCTIONS = frozenset({"exp", "rsqrt", "sigmoid", "silu", "softplus", "sin", "cos", "pow", "__rpow__"})
REDUCTIONS = frozenset({"matmul", "einsum", "sum", "mean", "softmax"})
MOVED = FUNCTIONS | REDUCTIONS | {name for names in MULTIPLY.values() for name in names}


def up_or_down(x: torch.Tensor, storage: Storage, generator: torch.Generator) -> torch.Tensor:
    """x rounded to one of its two neighbours in narrower storage, by chance: upwards at the odds of where it stands.

    At the part f of the way between them its error has mean 0 and a deviation of sqrt(f (1 - f)) units: never less than
    min(f, 1 - f), the error of rounding to nearest. A number that the narrower dtype has stays what it is.
    """
    if isinstance(storage, Blocked):
        return by_chance(x, storage, generator)
    mantissa, _ = torch.frexp(x)  # at least 1/2 and below 1
    scaled = mantissa * (1 / torch.finfo(storage).eps * 2)  # now neighbours are whole numbers
    cut = torch.floor(scaled + _chance(x, generator)) * (x / scaled)
    return torch.where(x.isfinite() & (x != 0), cut, x).to(storage).to(x.dtype)


def stored(
    x: torch.Tensor, storage: Storage, chance: torch.Generator | None = None, state: State | None = None
) -> torch.Tensor:
    """x as it is kept, in the width that it came in: as declared; with `chance`, what loses bits falls `up_or_down`."""
    falls = chance is not None and narrower(storage, x.dtype)
    return up_or_down(x, storage, chance) if falls and chance is not None else rounded(x, storage, state)


def by_a_unit(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """x moved within a unit of its own last place: what stands where nothing narrower is stored was rounded as well."""
    return _moved(x, torch.finfo(x.dtype).eps, generator)


def aside(hook: See) -> See:
    """The hook with its own operations as torch makes them, and at once: rounding and copying a place moves no sum."""

    def called(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return hook(place, tensor)

    return called


def _moved(x: torch.Tensor, most: float, generator: torch.Generator) -> torch.Tensor:
    """x times a number drawn uniformly within `most` of 1."""
    return x * torch.rsub(_chance(x, generator), 1 - most, alpha=-2 * most)


def _chance(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    sampled = torch.rand(like.shape, generator=generator, dtype=like.dtype, device=generator.device)
    return sampled.to(like.device)


class Reordered(TorchFunctionMode):
    """While it is entered, sums and functions come out as they might elsewhere; every call is a draw of its own.

    operands: what the subject declares to multiply narrower.
    together: whether draws are a further axis. What rows choose differs between them, so every expert runs: whoever
    did not choose it gives it weight 0.
    following: notes what rows choose, and gives them what the truth chose.
    """

    def __init__(
        self, generator: torch.Generator, operands: Operands | None = None, *, together: bool = False,
        following: Routes | None = None,
    ) -> None:
        super().__init__()
        self.generator, self.operands, self.together, self.following = generator, operands, together, following

    def __enter__(self) -> Reordered:
        super().__enter__()  # type: ignore[no-untyped-call]
        if self.following is not None:
            self.following.__enter__()
        return self

    def __exit__(self, *failed: Any) -> None:
        if self.following is not None:
            self.following.__exit__(*failed)
        super().__exit__(*failed)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, name = kwargs or {}, func.__name__
        if name == "nonzero" and self.together:
            return torch.arange(args[0].shape[0])[:, None]
        if name not in MOVED:
            return func(*args, **given)
        if name == "softmax":
            return self._softmax(args[0], *args[1:], **given)
        out = func(*args, **given) if self.operands is None else self.operands.multiply(func, name, args, given)
        if name in FUNCTIONS:
            return self._evaluated(out)
        if name in REDUCTIONS and out.is_floating_point() and (terms := _terms(name, out, args)) > 1:
            return self._summed(out, terms, _squares(func, name, terms, args, given, self.operands))
        return out

    def _evaluated(self, out: torch.Tensor) -> torch.Tensor:
        return _moved(out, FUNCTION_ULPS * torch.finfo(out.dtype).eps, self.generator)

    def _summed(self, out: torch.Tensor, terms: int, squares: torch.Tensor) -> torch.Tensor:
        """A sum s of n terms, by one of all running orders: its partial sums s_k are each rounded.

        For terms in random order s_k has mean k/n s and variance k (n-k) / n (n-1) (q - s^2/n), q the sum of the
        squares of the terms. So the squares of all partial sums sum up to n (s^2/3 + q/6) for n not too small, and
        every one of them brings a rounding of its own size. Blocked and pairwise sums round fewer partial sums.

        squares: q, which nobody else needs.
        """
        deviation = torch.addcmul(squares.mul_(terms / 6), out, out, value=terms / 3).sqrt_()
        at = self.generator.device
        sampled = torch.randn(out.shape, generator=self.generator, dtype=out.dtype, device=at)
        return torch.addcmul(out, deviation, sampled.to(out.device), value=ROUNDING * torch.finfo(out.dtype).eps)

    def _softmax(self, scores: torch.Tensor, dim: int) -> torch.Tensor:
        weights = self._evaluated((scores - scores.amax(dim, keepdim=True)).exp())
        total = weights.sum(dim, keepdim=True)
        if weights.shape[dim] > 1:
            total = self._summed(total, weights.shape[dim], weights.square().sum(dim, keepdim=True))
        return weights / total


def _terms(name: str, out: torch.Tensor, args: Sequence[Any]) -> int:
    """How many terms each element of a sum has; 1 where nothing is summed, as in an outer product."""
    if name == "matmul":
        return int(args[0].shape[-1])
    if name == "einsum":
        equation, left, right = args
        sizes = dict(zip("".join(equation.partition("->")[0].split(",")), (*left.shape, *right.shape), strict=True))
        return math.prod(size for axis, size in sizes.items() if axis not in equation.partition("->")[2])
    return int(args[0].numel() // max(out.numel(), 1))


def _squares(
    func: Callable[..., Any], name: str, terms: int, args: Sequence[Any], given: dict[str, Any],
    operands: Operands | None,
) -> torch.Tensor:
    """The sum of the squares of the terms of each element."""
    if name == "matmul":
        right = args[1].square() if operands is None else operands.square(args[1])
        squares: torch.Tensor = func(args[0].square(), right)
        return squares
    if name == "einsum":
        equation, left, right = args
        return torch.einsum(equation, left.square(), right.square())
    squares = torch.sum(args[0].square(), *args[1:], **given)
    return squares if name == "sum" else squares.div_(terms**2)
