"""What a tensor looks like beside the right one: zero, twice, half, opposite, transposed, rounded to 16 bits.

These say what stands there, whatever put it there. Leaves out: everything that names a mechanism.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..observe.memory import pattern
from .case import Case, Explanation
from .judge import cells

NARROW = (torch.bfloat16, torch.float16)


def appearance(case: Case) -> Iterator[Explanation]:
    right = case.right
    yield Explanation("is all zero", torch.zeros_like(right))
    poison = case.context.log.poison
    if poison is not None and case.granted is None:
        nobodys = torch.full_like(right, pattern(poison, right.dtype))
        yield Explanation("is poison, as memory that nobody wrote", nobodys)
    if right.is_floating_point():
        for factor, said in ((2.0, "is twice"), (0.5, "is half of"), (-1.0, "is the opposite of")):
            yield Explanation(f"{said} what is right", factor * right)
        yield from _narrowed(case)
    if right.dim() == 3 or case.component == "conv":
        turned = right.transpose(-1, -2).reshape(right.shape)
        back = right.reshape(*right.shape[:-2], right.shape[-1], right.shape[-2]).transpose(-1, -2)
        for each in (turned,) if torch.equal(turned, back) else (turned, back):
            yield Explanation("is transposed", each)


def _narrowed(case: Case) -> Iterator[Explanation]:
    """Rounded to a narrower dtype.

    Numbers of a narrower dtype alone prove nothing: zeros are such numbers, and so is a copy of a row that is stored in
    that dtype. So the right numbers may not be such numbers, and what was found must stand within a unit of that dtype
    from them, beside the error that is granted.
    """
    if case.granted is None:
        return
    found, right = case.found.to("cpu", torch.float64), case.right.to("cpu", torch.float64)
    rounded = right.to(case.found.dtype)
    slack = case.granted[1].max() * right.abs().max()
    for narrow in NARROW:
        if torch.finfo(narrow).bits >= torch.finfo(case.found.dtype).bits:
            continue
        holds, held = (_cells_hold(case, narrow, x) for x in (case.found, rounded))
        off = (found - right).abs()
        near = cells(case.component, (off <= torch.finfo(narrow).eps * right.abs() + slack).double()).amin(-1) > 0
        wrong = cells(case.component, off.square()).sum(-1) > 0
        if not (holds & near & ~held & wrong).any() or not near[wrong].all() or (holds & held).all():
            continue
        if (holds | ~wrong).all():
            yield Explanation(f"as if stored in {str(narrow).removeprefix('torch.')}", found)


def _cells_hold(case: Case, narrow: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Cells in which every number is one of that dtype."""
    same = tensor.to(narrow).to(tensor.dtype) == tensor
    held: torch.Tensor = cells(case.component, same.double()).amin(-1) > 0
    return held
