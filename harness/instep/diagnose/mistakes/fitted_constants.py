"""Numbers that are fitted to the finding: the eps of a norm, a factor on scores, on all wrong numbers or on each tile.

These are tried last, after all known mistakes, and count as many tries. Leaves out: numbers of known mistakes
(`constants.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from instep_reference.contract.declared_rounding import Blocked
from instep_reference.trunk import WithState

from .constants import LOG2E
from .explanation_fit import cells
from .finding_case import Case, Explanation
from .norms import eps_of, norm_input

TRIES = 10**6  # tries that a fitted number counts as
FEWEST, EXACT = 8, 1e-5  # numbers of an entry that share a scale, and how nearly they do
SAME_SCALE = 1e-3  # a relative change of a scale that is none
STEPS, NUDGE = 4, 1e-6  # steps of Newton's method, and the relative change that measures the slope


def fitted(case: Case) -> Iterator[Explanation]:
    if case.granted is None:
        return
    if case.piece is not None and (x := norm_input(case)) is not None:
        yield from _eps(case, x)
    if case.component == "attended" and (query := case.own("query")) is not None:
        yield from _scores(case, query)
    yield from _factor(case)
    yield from _scales(case)


def scales_of_entries(case: Case) -> Iterator[Explanation]:
    """Entries of a cache whose stored numbers are right, and were read with other scales."""
    stored = None if case.oracle is None else case.oracle.rounds.get(case.component)
    if case.granted is not None or case.component not in ("keys", "values") or not isinstance(stored, Blocked):
        return
    found, right = (x.to("cpu", torch.float64) for x in (case.found, case.right))
    factors = (found * right).sum(-1, keepdim=True) / right.square().sum(-1, keepdim=True)
    near = (found - factors * right).abs() <= EXACT * right.abs().amax(-1, keepdim=True)
    wrong = (found != right).any(-1)
    if found.shape[-1] >= FEWEST and (factors[wrong] > 0).all() and near.all():
        yield Explanation(_of_scales("entry", factors[wrong]), case.found)


def _scales(case: Case) -> Iterator[Explanation]:
    """A state that is stored with scales: right but for a factor of each tile, as it is left or as it is read."""
    stored = None if case.oracle is None else case.oracle.rounds.get("state")
    right, core = case.right.to("cpu", torch.float64), case.component == "core"
    if not isinstance(stored, Blocked) or stored.tile is None or case.component not in ("core", "state"):
        return
    tall, wide, rest = *stored.tile, torch.zeros_like(right)
    if core:
        memory: Any = None if case.work is None else case.work.memory
        if not isinstance(memory, WithState) or (tall is not None and tall < memory.state.shape[1]):
            return  # nothing is read, or a column has several scales
        rest, tall = _made(case, memory=replace(memory, state=torch.zeros_like(memory.state))), None
    given, found = right - rest, case.found.to("cpu", torch.float64) - rest
    if core:
        given, found = given.transpose(0, 1), found.transpose(0, 1)  # heads first, as in a state
    factors, count = torch.ones_like(given), 0
    for rows in _runs(given.shape[1], tall):
        for columns in _runs(given.shape[2], wide):
            mine, theirs = given[:, rows, columns], found[:, rows, columns]
            each = (mine * theirs).sum((1, 2)) / mine.square().sum((1, 2))
            each = torch.where((each - 1).abs() > SAME_SCALE, each, 1.0)  # also if there is nothing to scale
            factors[:, rows, columns] = each[:, None, None]
            count += int((each != 1).sum())
    if count and (factors > 0).all():
        wrong = (factors * given).transpose(0, 1) if core else factors * given
        says = _of_scales("tile", factors[factors != 1])
        yield Explanation(says, rest + wrong, TRIES**count)


def _runs(size: int, tile: int | None) -> list[slice]:
    step = tile or size
    return [slice(begin, begin + step) for begin in range(0, size, step)]


def _of_scales(what: str, factors: torch.Tensor) -> str:
    least, most = float(factors.min()), float(factors.max())
    return f"is read with other scales: the numbers of each {what} are {least:.3g} to {most:.3g} times the right ones"


def _eps(case: Case, x: torch.Tensor) -> Iterator[Explanation]:
    """Fit the eps of a norm; small rows have more weight, as eps changes them more."""
    x = x.flatten(1) if case.weights.config.row_norms and case.component in ("query", "key") else x
    squares, eps = x.square().sum(-1) if case.component in ("q", "k") else x.square().mean(-1), eps_of(case)
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
        here, beside = (_made(case, {"query": by * query}) for by in (factor, factor + NUDGE))
        slope = (beside - here) / NUDGE
        if not slope.square().sum() > 0:
            return  # with a single key scores do not matter
        factor += float(((found - here) * slope).sum() / slope.square().sum())
    says = f"its scores are {factor:.5g} times the right ones, as with {factor * LOG2E:.5g} for log2(e)"
    yield Explanation(says, _made(case, {"query": factor * query}), TRIES)


def _made(case: Case, changes: Mapping[str, torch.Tensor] | None = None, **work: Any) -> torch.Tensor:
    wrong = case.again(changes, **work)
    assert wrong is not None, "the finding is about this place"
    return wrong


def _factor(case: Case) -> Iterator[Explanation]:
    assert case.granted is not None, "asked before"
    found, right = (cells(case.component, x.to("cpu", torch.float64)) for x in (case.found, case.right))
    off = (found - right).square().sum(-1) > 9 * case.granted[0].max().square() * right.square().sum(-1)
    whole = right[off].square().sum()
    if whole > 0:
        factor = float((found[off] * right[off]).sum() / whole)
        yield Explanation(f"is {factor:.8g} times the right value", factor * case.right, TRIES)
