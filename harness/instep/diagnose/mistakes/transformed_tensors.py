"""How a tensor looks compared with the right one: zero, twice, half, opposite, transposed, rounded to 16 bits.

These describe the content and not how it came about. Leaves out: everything that names a mechanism.
"""

from collections.abc import Iterator

import torch

from ...checks.wrong_state_inputs import turned
from ...watch.memory_changes import pattern
from .explanation_fit import cells
from .finding_case import NARROW, Case, Explanation

MOST_RANKS = 8  # whose labels a sum may have


def appearance(case: Case) -> Iterator[Explanation]:
    right = case.right
    zeros = torch.zeros_like(right)  # of any sign
    yield Explanation("is all zero", torch.where(case.found.cpu() == 0, case.found.cpu().to(zeros), zeros))
    poison = case.context.log.poison
    if poison is not None and case.granted is None:
        nobodys = torch.full_like(right, pattern(poison, right.dtype))
        yield Explanation("is poison: memory that was never written", nobodys)
    for times in range(2, MOST_RANKS + 1) if case.granted is None and not right.is_floating_point() else ():
        yield Explanation(f"is {times} times the right value, as if {times} ranks had added theirs", times * right)
    if right.is_floating_point():
        for factor, said in ((2.0, "is twice"), (0.5, "is half of"), (-1.0, "is the opposite of")):
            yield Explanation(f"{said} the right value", factor * right)
        yield from _narrowed(case)
    if right.dim() == 3 or case.component == "conv":
        yield from (Explanation("is transposed", each) for each in turned(right))


def _narrowed(case: Case) -> Iterator[Explanation]:
    """Rounded to a narrower dtype.

    That all numbers exist in a narrower dtype proves nothing: so do zeros, and copies of rows in that dtype. So the
    right numbers must not exist in it, and the found ones must be within a unit of that dtype of them, plus the
    allowed error.
    """
    if case.granted is None:
        return
    found, right = case.found.to("cpu", torch.float64), case.right.to("cpu", torch.float64)
    slack = case.granted[1].max() * right.abs().max()
    for said, narrow in NARROW.items():
        if torch.finfo(narrow).bits >= torch.finfo(case.found.dtype).bits:
            continue
        holds, held = (_in_cells(case, x.to(narrow).to(x) == x) for x in (case.found, right.to(case.found.dtype)))
        near = _in_cells(case, (found - right).abs() <= torch.finfo(narrow).eps * right.abs() + slack)
        wrong = ~_in_cells(case, found == right)
        if (wrong & ~held).any() and (holds & near)[wrong].all():
            yield Explanation(f"as if stored in {said}", found)


def _in_cells(case: Case, numbers: torch.Tensor) -> torch.Tensor:
    """Whether something is true of all numbers of a cell, for each cell."""
    every: torch.Tensor = cells(case.component, numbers.to("cpu", torch.float64)).amin(-1) > 0
    return every
