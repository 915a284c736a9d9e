"""The arithmetic of a width as another correct implementation may do it: sums in any order, functions to 2 ulp.

Monte Carlo arithmetic (Parker 1997) at the level of tensor operations. Inside `Reordered` every sum is moved by a draw
from the error of a running sum in some order, and every inexact function by a draw from the error that vendors'
libraries state. Sums and products of two numbers round as they do. `up_or_down` is stochastic rounding into storage.
Leaves out: which piece is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._C._functorch import _add_batch_dim, get_unwrapped, is_batchedtensor, maybe_get_bdim, maybe_get_level
from torch.overrides import TorchFunctionMode

from instep_reference.contract.declared_rounding import Blocked, Storage
from instep_reference.contract.place_names import Place, See

from .declared_product_rounding import MULTIPLY, Operands
from .expert_routes import Routes
from .storage_rounding import State, by_chance, narrower, rounded

# One rounding to nearest moves a number by a uniform draw within half a unit in the last place. Over mantissas m that
# are spread as 1/m, its root mean square is eps / sqrt(12) * sqrt(mean of 1/m^2) = 0.289 * 0.736 eps.
ROUNDING = math.sqrt(0.375 / math.log(2) / 12)

# Uniform within this many units; CUDA's and most vectorised libraries state this for fp32 exp, log, rsqrt, sin and cos.
FUNCTION_ULPS = 2.0

# torch's names of the functions that the reference uses. Functions that are neither here nor in REDUCTIONS are exact,
# or one rounding that is the same everywhere; a test lists them.
FUNCTIONS = frozenset({"exp", "rsqrt", "sigmoid", "silu", "softplus", "sin", "cos", "pow", "__rpow__"})
REDUCTIONS = frozenset({"matmul", "einsum", "sum", "mean", "softmax"})
EINSUM = torch._C._VariableFunctions.einsum  # type: ignore[attr-defined]
MOVED = FUNCTIONS | REDUCTIONS | {name for names in MULTIPLY.values() for name in names}


def up_or_down(x: torch.Tensor, storage: Storage, generator: torch.Generator) -> torch.Tensor:
    """Round x stochastically to one of its two neighbours in narrower storage.

    At the fraction f of the way between them the probability of rounding up is f. The error has mean 0 and a deviation
    of
    sqrt(f (1 - f)) units: never less than min(f, 1 - f), the error of rounding to nearest. A number that the narrower
    dtype can represent does not change.
    """
    if isinstance(storage, Blocked):
        return by_chance(x, storage, generator)
    mantissa, _ = torch.frexp(x)  # at least 1/2 and below 1
    scaled = mantissa * (1 / torch.finfo(storage).eps * 2)  # now neighbours are integers
    cut = torch.floor(scaled + _chance(x, generator)) * (x / scaled)
    return torch.where(x.isfinite() & (x != 0), cut, x).to(storage).to(x.dtype)


def stored(
    x: torch.Tensor, storage: Storage, chance: torch.Generator | None = None, state: State | None = None
) -> torch.Tensor:
    """x as it is stored, in the width that it came in: as declared; with `chance`, lossy rounding is `up_or_down`."""
    falls = chance is not None and narrower(storage, x.dtype)
    return up_or_down(x, storage, chance) if falls and chance is not None else rounded(x, storage, state)


def in_two_parts(x: torch.Tensor, dtype: torch.dtype, chance: torch.Generator | None = None) -> torch.Tensor:
    """Add up the two parts of numbers of a ring (`RING` of the contract), in the width of x; chance: as in `stored`."""
    high = rounded(x, dtype)
    return high + stored(x - high, dtype, chance)


def by_a_unit(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """x moved within one ulp: a value that is not stored narrower was rounded as well."""
    return _moved(x, torch.finfo(x.dtype).eps, generator)


def aside(hook: See) -> See:
    """The hook with its own operations unmoved: rounding and copying a place moves no sum."""

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
    """While it is entered, sums and functions give results of other implementations; every call is a separate draw.

    operands: the subject's declaration of narrower products
    together: whether draws are a further axis. Rows choose different experts in them, so every expert runs, with weight
    0 for rows that did not choose it
    following: records the choices of rows, and gives them the truth's choices
    runs: for draws as a further axis, how many each run has. The draws of a run differ by roundings, so their sums
    round alike but for a rounding of that rounding: the sizes of the terms are those of its first draw
    """

    def __init__(
        self, generator: torch.Generator, operands: Operands | None = None, *, together: bool = False,
        following: Routes | None = None, runs: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.generator, self.operands, self.together, self.following = generator, operands, together, following
        self._runs = runs_of_axis(runs)

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
        name, given = func.__name__, kwargs or {}
        if name not in MOVED:
            if name == "nonzero" and self.together:
                return torch.arange(args[0].shape[0])[:, None]
            return func(*args, **given)
        if name == "softmax":
            return self._softmax(args[0], *args[1:], **given)
        if name == "einsum":
            func = _of_two_factors
        out = func(*args, **given) if self.operands is None else self.operands.multiply(func, name, args, given)
        if name in FUNCTIONS:
            return self._evaluated(out)
        if name in REDUCTIONS and out.is_floating_point() and (terms := _terms(name, out, args)) > 1:
            return self._summed(out, terms, self._squares(func, name, terms, args, given))
        return out

    def _evaluated(self, out: torch.Tensor) -> torch.Tensor:
        return _moved(out, FUNCTION_ULPS * torch.finfo(out.dtype).eps, self.generator)

    def _summed(self, out: torch.Tensor, terms: int, squares: torch.Tensor) -> torch.Tensor:
        """A sum s of n terms, by one of all running orders: its partial sums s_k are each rounded.

        For terms in random order s_k has mean k/n s and variance k (n-k) / n (n-1) (q - s^2/n), q the sum of the
        squares of the terms. So the squares of all partial sums sum up to n (s^2/3 + q/6) for n not too small, and
        every one of them adds a rounding of its size. Blocked and pairwise sums round fewer partial sums.

        squares: q
        """
        deviation = torch.addcmul(squares, out, out, value=2).sqrt_()  # of n/6 partial sums
        sampled = torch.randn(out.shape, generator=self.generator, dtype=out.dtype, device=self.generator.device)
        rounding = ROUNDING * math.sqrt(terms / 6) * torch.finfo(out.dtype).eps
        return torch.addcmul(out, deviation, sampled.to(out.device), value=rounding)

    def _softmax(self, scores: torch.Tensor, dim: int) -> torch.Tensor:
        weights = self._evaluated((scores - scores.amax(dim, keepdim=True)).exp())
        total = weights.sum(dim, keepdim=True)
        if weights.shape[dim] > 1:
            squares = self._runs.spread(self._runs.first(weights).square().sum(dim, keepdim=True))
            total = self._summed(total, weights.shape[dim], squares)
        return weights / total

    def _squares(
        self, func: Callable[..., Any], name: str, terms: int, args: Sequence[Any], given: dict[str, Any]
    ) -> torch.Tensor:
        """The sum of the squares of the terms of each element, from the first draw of each run."""
        first = self._runs.first
        if name == "matmul":
            right = first(args[1])
            right = right.square() if self.operands is None else self.operands.square(right)
            squares: torch.Tensor = func(first(args[0]).square(), right)
        elif name == "einsum":
            squares = func(args[0], first(args[1]).square(), first(args[2]).square())
        else:
            squares = torch.sum(first(args[0]).square(), *args[1:], **given)
        return self._runs.spread(squares if name != "mean" else squares.div(terms**2))


class RunsOfAxis:
    """Which draws of a further axis (`torch.func.vmap`) belong to which run."""

    def __init__(self, runs: tuple[int, ...]) -> None:
        self.starts = torch.tensor([sum(runs[:number]) for number in range(len(runs))])
        self.run_of = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs, dtype=torch.int64))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """The first draw of every run: one without the axis, several with an axis as long; x itself without draws."""
        if not is_batchedtensor(x):
            return x
        draws, axis = get_unwrapped(x), maybe_get_bdim(x)
        if len(self.starts) == 1:
            return draws.select(axis, 0)
        return _add_batch_dim(draws.index_select(axis, self.starts.to(draws.device)), axis, maybe_get_level(x))

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """The value of its run for every draw."""
        if not is_batchedtensor(x):
            return x
        firsts, axis = get_unwrapped(x), maybe_get_bdim(x)
        return _add_batch_dim(firsts.index_select(axis, self.run_of.to(firsts.device)), axis, maybe_get_level(x))


@lru_cache
def runs_of_axis(runs: tuple[int, ...]) -> RunsOfAxis:
    return RunsOfAxis(runs)


def _of_two_factors(equation: str, *factors: torch.Tensor) -> torch.Tensor:
    """`torch.einsum` without its search for an order of more factors, which takes as long as a small product."""
    product: torch.Tensor = EINSUM(equation, factors)
    return product


def _terms(name: str, out: torch.Tensor, args: Sequence[Any]) -> int:
    """The number of terms of each element of a sum; 1 without a sum, as in an outer product."""
    if name == "matmul":
        return int(args[0].shape[-1])
    if name == "einsum":
        return _terms_of_product(args[0], tuple(args[1].shape), tuple(args[2].shape))
    return int(args[0].numel() // max(out.numel(), 1))


@lru_cache(1024)
def _terms_of_product(equation: str, left: tuple[int, ...], right: tuple[int, ...]) -> int:
    sizes = dict(zip("".join(equation.partition("->")[0].split(",")), (*left, *right), strict=True))
    return math.prod(size for axis, size in sizes.items() if axis not in equation.partition("->")[2])
