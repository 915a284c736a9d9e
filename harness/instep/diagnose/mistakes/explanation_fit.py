"""Whether an explanation fits: the rest of the error must be within the allowance of the place.

A fault may touch only some rows, heads or columns. So the tensor is divided into cells. A cell is taken from the
explanation if that is closer than the right cell, and the whole must then be within the allowance. To exclude random
matches, the matched numbers are counted against the tensors that were tried. Leaves out: the explanations.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from instep_reference.contract.place_names import Place

from ...checks.check_interface import listed
from ...checks.error_measurement import HEAD_AXIS, blocks, granted_error
from ...oracle.storage_rounding import before_rounding
from ...tier_allowances import COLUMNS, NEAR, SCALE_FLOOR
from ...watch.memory_changes import bits
from .finding_case import Compared, Explanation

CHANCE = 1e-3  # largest probability that an unrelated tensor explains the finding
# Two explanations differ if the remaining error of one, as a part of the allowance, is this many times the other's.
# Below the floor both leave no more than the rounding of a correct engine.
APART, FLOOR = 2.0, 0.25
PER_HEAD = ("b", "a", "log_decay", "beta")  # one number per row and head
SAME = 1e-12  # relative to the largest number: two formulas for the same tensor in fp64 differ by less


@dataclass(frozen=True)
class Fit:
    """left: the remaining error as a part of the allowance; part: whether only some cells were taken from it."""

    sentence: str
    left: float
    part: bool
    stands: torch.Tensor
    name: str = ""  # its entry in the catalogue, if it is one


def best(case: Compared, explanations: Iterable[Explanation]) -> tuple[str | None, int]:
    """The sentence of the explanation that fits best, and how many fit equally well.

    Explanations with the same tensor count as one; the further sentences follow in brackets.
    """
    return only(nearest(case, explanations))


def only(near: Sequence[Fit]) -> tuple[str | None, int]:
    """The sentence of explanations that fit equally well, if they are one, and how many they are."""
    apart = [one for one in near if not _same(one.stands, near[0].stands)]
    if apart or not near:
        return None, len(near)
    also = f" [equal bits: {'; '.join(one.sentence for one in near[1:])}]" if near[1:] else ""
    return near[0].sentence + also, 1


def nearest(case: Compared, explanations: Iterable[Explanation]) -> list[Fit]:
    """The explanations that fit equally well, each sentence once; one of all cells precedes one of some cells."""
    tried = list(explanations)
    fits = [found for one in tried if (found := fit(case, one, len(tried))) is not None]
    whole = [one for one in fits if not one.part] or fits
    least = max(min((one.left for one in whole), default=0.0), FLOOR)
    return list({one.sentence: one for one in whole if one.left <= APART * least}.values())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    finite = one.shape == other.shape and bool(other.isfinite().all())
    return finite and bool((one - other).abs().max() <= SAME * other.abs().max())


def agrees(case: Compared, with_one: Explanation | None = None) -> bool:
    """Whether the found tensor is right for its own inputs, or, as a whole, what an explanation makes of them."""
    if with_one is None:
        return _left(case, case.right) <= 1
    wrong = _double(with_one.wrong)
    return wrong.shape == case.found.shape and _explained_left(case, wrong, with_one) <= 1


def fit(case: Compared, one: Explanation, tried: float = 1.0) -> Fit | None:
    """How well an explanation fits; None if it does not."""
    if one.wrong.shape != case.found.shape:
        return None
    if (granted := case.granted) is None:
        return _exactly(case, one)
    found, right, wrong = (_double(x) for x in (case.found, case.right, one.wrong))
    lost = ~found.isfinite()
    if not torch.equal(lost, ~wrong.isfinite()):
        return None
    if lost.any():  # equal in both; now compare the other numbers
        found, wrong = (torch.where(lost, right, x) for x in (found, wrong))
        case = replace(case, found=found.to(case.found))
    apart_by = off(case, wrong), off(case, right), wrong - right
    near, far, apart = (cells(case.component, x).square().sum(-1) for x in apart_by)
    grain = 9 * granted[0].max().square() * cells(case.component, right).square().sum(-1)
    matters, nearer = apart > grain, near < far
    taken = matters & nearer
    chance = math.log(tried) + math.log(one.tries)
    if not taken.any():
        begins = cells(case.component, lost.double()).shape[:-1].numel()  # places where the lost numbers could begin
        alone = lost.any() and not lost.all() and chance <= math.log(CHANCE * begins) and agrees(case)
        return Fit(one.sentence, 0.0, False, one.wrong, one.name) if alone else None
    stands = torch.where(_spread(case.component, nearer, found), wrong, right)
    left = _explained_left(case, stands, one)
    ratio = math.sqrt(float(near[taken].sum() / far[taken].sum()))
    count = int(_spread(case.component, taken, found).sum())
    match = ratio if one.tries == 1 else _match(case, wrong, taken)
    chance += count * math.log(max(match, 1e-300))
    if not (left <= 1 and ratio <= NEAR and chance <= math.log(CHANCE)):
        return None
    part = bool((taken != matters).any())
    return Fit(one.sentence + (where(case.component, taken, matters) if part else ""), left, part, stands, one.name)


def _match(case: Compared, wrong: torch.Tensor, taken: torch.Tensor) -> float:
    """The error that is left in the cells taken, as a part of the error from the right tensor.

    For the best of several tensors, and of the found numbers as they are: the nearest of many unrelated numbers is
    often within the rounding that `off` does not judge.
    """
    left, error = (cells(case.component, _double(case.found) - x).square().sum(-1)[taken].sum()
                   for x in (wrong, _double(case.right)))  # fmt: skip
    return math.sqrt(float(left / error))


def _exactly(case: Compared, one: Explanation) -> Fit | None:
    """The fit of moved data: every wrong element must be the explanation's, bit by bit."""
    found, right = bits(case.found), bits(case.right)
    wrong = bits(one.wrong.to(case.found.dtype))
    off, matters = found != right, wrong != right
    if not off.any() or (found != wrong)[off].any():
        return None
    part = bool((matters & ~off).any())
    return Fit(one.sentence + (where(case.component, off, matters) if part else ""), 0.0, part, wrong, one.name)


def _explained_left(case: Compared, stands: torch.Tensor, one: Explanation) -> float:
    """As `_left`. If it is too much, the error that the mistake makes by its own rounding is granted as well."""
    left = _left(case, stands)
    if left <= 1 or one.draws is None or case.granted is None or not math.isfinite(left):
        return left
    if off(case, stands).norm() > NEAR * off(case, case.right).norm():
        return left  # no rounding
    draws, stored = one.draws(), case.found.dtype
    if case.once:
        stored = draws.dtype
    else:
        draws = draws.to(stored).to(draws.dtype)
    place = Place("", 0, case.component)
    granted = torch.maximum(case.granted, granted_error(place, stored, _double(one.wrong), draws, case.scale))
    return _left(case, stands, granted)


def off(case: Compared, other: torch.Tensor) -> torch.Tensor:
    """The difference of the found tensor from another one in fp64, without the granted rounding."""
    found, other = (_double(x) for x in (case.found, other))
    return (before_rounding(case.found.cpu(), other) if case.once else found) - other


def part_left(case: Compared, one: Explanation) -> float:
    """The part of the whole error that an explanation leaves; infinite if it cannot be compared."""
    wrong = _double(one.wrong)
    if wrong.shape != case.found.shape or not wrong.isfinite().all():
        return math.inf
    return float(off(case, wrong).norm() / off(case, case.right).norm())


def _left(case: Compared, stands: torch.Tensor, granted: torch.Tensor | None = None) -> float:
    """The worst error of the found tensor compared with this one, as a part of the allowance."""
    granted_here = case.granted if granted is None else granted
    assert granted_here is not None, "it is a number that has an error"
    if not case.found.isfinite().all():
        return math.inf
    x, o, w = (blocks(case.component, tensor) for tensor in (off(case, stands), case.right, stands))
    parts, least = [], o if case.scale is None else blocks(case.component, case.scale)
    for metric, part in zip((_norm, _largest), granted_here, strict=True):
        size = torch.maximum(torch.maximum(metric(o), metric(w)), metric(least))
        limit = part * size.clamp_min(SCALE_FLOOR)
        error = metric(x)
        parts.append(torch.where(error == 0, 0.0, error / limit).max())
    return float(torch.stack(parts).max())


def cells(component: str, tensor: torch.Tensor) -> torch.Tensor:
    """[..., elements]: units that may be wrong separately: 8 columns of a head of a row; for states a head's tiles."""
    if component == "state":
        tensor = tensor.movedim(1, -1)  # [HV, V, K]
        size = COLUMNS if tensor.shape[1] % COLUMNS == 0 else tensor.shape[1]
        return tensor.reshape(tensor.shape[0], -1, size * tensor.shape[2])
    if component in PER_HEAD:
        return tensor[..., None]
    size = COLUMNS if tensor.shape[-1] % COLUMNS == 0 else tensor.shape[-1]
    return tensor.reshape(*tensor.shape[:-1], -1, size)


def _spread(component: str, taken: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Expand values per cell to elements."""
    if component == "state":
        return taken.repeat_interleave(like.shape[2] // taken.shape[1], 1)[:, None, :].expand(like.shape)
    if component in PER_HEAD:
        return taken
    return taken.repeat_interleave(like.shape[-1] // taken.shape[-1], -1)


def where(component: str, taken: torch.Tensor, matters: torch.Tensor) -> str:
    """The wrong rows, heads and columns, as ", in rows 2, 5, in head 1"; empty if all that could be wrong are."""
    last = taken.dim() - 1
    names = {axis: "" for axis in range(taken.dim())}
    names[last] = "column"
    if component != "state":
        names[0] = "row"
    if component in PER_HEAD:
        names[last] = "head"
    elif component in HEAD_AXIS:
        names[HEAD_AXIS[component]] = "head"
    said = []
    for axis, name in names.items():
        rest = [other for other in range(taken.dim()) if other != axis]
        mine, all_ = (x.sum(rest) > 0 if rest else x for x in (taken, matters))
        if not name or torch.equal(mine, all_):
            continue
        numbers = mine.nonzero().flatten().tolist()
        tiled = name == "column" and component not in ("conv", "keys", "values")
        said.append(_tiles(numbers) if tiled else listed(name, numbers))
    return "".join(f", in {one}" for one in said)


def _tiles(numbers: list[int]) -> str:
    """columns 8 to 15"""
    if len(numbers) == 1:
        return f"columns {COLUMNS * numbers[0]} to {COLUMNS * numbers[0] + COLUMNS - 1}"
    return listed(f"tiles of {COLUMNS} columns, number", numbers)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu", torch.float64)


def _norm(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(x, dim=-1)
    return found


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1)
