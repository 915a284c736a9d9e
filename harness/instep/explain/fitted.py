"""One number that the finding itself tells: the eps of a norm, or a factor on all that is wrong.

These are tried last, where no mistake that is known explains it, and count as many tries.
Leaves out: numbers that a known mistake has (`constants.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from instep_reference.norms import L2_EPS

from .case import Case, Explanation
from .constants import norm_input
from .judge import cells

TRIES = 1e6  # that a fitted number counts as


def fitted(case: Case) -> Iterator[Explanation]:
    if case.granted is None:
        return
    if case.piece is not None and (x := norm_input(case)) is not None:
        yield from _eps(case, x)
    yield from _factor(case)


def _eps(case: Case, x: torch.Tensor) -> Iterator[Explanation]:
    """The smaller a row, the more of its eps is seen: so small rows have more weight."""
    l2 = case.component in ("q", "k")
    squares, eps = (x.square().sum(-1) if l2 else x.square().mean(-1)), L2_EPS if l2 else case.weights.config.eps
    found, right = (y.to("cpu", torch.float64).reshape(*squares.shape, -1) for y in (case.found, case.right))
    factor = (found * right).sum(-1) / right.square().sum(-1)
    told, weight = (squares + eps) / factor.square() - squares, (squares + eps).pow(-2)
    other = float((told * weight).sum() / weight.sum())
    if other > 0:
        wrong = right * ((squares + eps) / (squares + other)).sqrt()[..., None]
        says = f"is normed with an eps of {other:.2g}; it is {eps:.2g}"
        yield Explanation(says, wrong.reshape(case.right.shape), TRIES)


def _factor(case: Case) -> Iterator[Explanation]:
    assert case.granted is not None, "asked before"
    found, right = (cells(case.component, x.to("cpu", torch.float64)) for x in (case.found, case.right))
    off = (found - right).square().sum(-1) > 9 * case.granted[0].max().square() * right.square().sum(-1)
    whole = right[off].square().sum()
    if off.any() and whole > 0:
        factor = float((found[off] * right[off]).sum() / whole)
        yield Explanation(f"is {factor:.8g} times what is right", factor * case.right, TRIES)
