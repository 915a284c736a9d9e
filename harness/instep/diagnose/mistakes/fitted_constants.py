"""Numbers that are fitted to the finding: the eps of a norm, a factor on the scores or on all wrong numbers.

These are tried last, after all known mistakes, and count as many tries. Leaves out: numbers of known mistakes
(`constants.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from instep_reference.norms import L2_EPS

from .constants import LOG2E
from .explanation_fit import cells
from .finding_case import Case, Explanation
from .norms import norm_input

TRIES = 1e6  # tries that a fitted number counts as
STEPS, NUDGE = 4, 1e-6  # steps of Newton's method, and the relative change that measures the slope


def fitted(case: Case) -> Iterator[Explanation]:
    if case.granted is None:
        return
    if case.piece is not None and (x := norm_input(case)) is not None:
        yield from _eps(case, x)
    if case.component == "attended" and (query := case.own("query")) is not None:
        yield from _scores(case, query)
    yield from _factor(case)


def _eps(case: Case, x: torch.Tensor) -> Iterator[Explanation]:
    """Fit the eps of a norm; small rows have more weight, as eps changes them more."""
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


def _scores(case: Case, query: torch.Tensor) -> Iterator[Explanation]:
    """Fit the scale of a softmax, or the log2(e) of a softmax in powers of 2."""
    found, factor = case.found.to("cpu", torch.float64), 1.0
    for _ in range(STEPS):
        here, beside = (case.again({"query": by * query}) for by in (factor, factor + NUDGE))
        assert here is not None and beside is not None, "the finding is about this place"
        slope = (beside - here) / NUDGE
        if not slope.square().sum() > 0:
            return  # with a single key scores do not matter
        factor += float(((found - here) * slope).sum() / slope.square().sum())
    wrong = case.again({"query": factor * query})
    if wrong is not None and math.isfinite(factor):
        says = f"its scores are {factor:.5g} times the right ones, as with {factor * LOG2E:.5g} for log2(e)"
        yield Explanation(says, wrong, TRIES)


def _factor(case: Case) -> Iterator[Explanation]:
    assert case.granted is not None, "asked before"
    found, right = (cells(case.component, x.to("cpu", torch.float64)) for x in (case.found, case.right))
    off = (found - right).square().sum(-1) > 9 * case.granted[0].max().square() * right.square().sum(-1)
    whole = right[off].square().sum()
    if off.any() and whole > 0:
        factor = float((found[off] * right[off]).sum() / whole)
        yield Explanation(f"is {factor:.8g} times the right value", factor * case.right, TRIES)
