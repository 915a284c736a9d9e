"""The measurement of T2 and T3: errors of a tensor and of yardsticks against the truth, block by block.

Leaves out: the constants (`tier_allowances.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from instep_reference.contract.place_names import Place

from ..finding_problem import Problem
from ..tier_allowances import SCALE_FLOOR, SMALLEST_BLOCK, YARDSTICK_FACTOR, allowed
from ..verdict import Comparison, Tier

# Components whose heads are separate blocks, and the axis of the heads.
HEAD_AXIS = {
    "z": 1, "q": 1, "k": 1, "v": 1, "core": 1, "update": 1, "gated": 1,
    "projected": 1, "key_raw": 1, "query": 1, "key": 1, "value": 1, "attended": 1, "opened": 1,
    "state": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Spot:
    """The fields of a `Comparison` that are known before the measurement."""

    check: str
    tier: Tier
    event: int
    kind: str
    place: Place
    request: str
    slot: int | None


def measured(
    spot: Spot, subject: torch.Tensor | None, truth: torch.Tensor, yardsticks: Sequence[torch.Tensor] | torch.Tensor,
    noise_floor: float = 0.0, stored: torch.dtype | None = None, factor: float = 1.0,
    scale: torch.Tensor | None = None,
) -> Comparison:
    """Compare a tensor block by block; the result has the block closest to its limit or farthest beyond it.

        e_x = |x - o| / max(|o|, floor)  <=  3 e_r + 4 ulp      for the norm, and for the largest element

    Shapes:  subject x, truth o and every yardstick r alike; blocks are heads where the component has them.
    yardsticks: a sequence, or one stacked tensor.
    noise_floor: e_r is at least this.
    stored: the declared dtype, whose ulp is granted; None means the subject's own. factor: how many allowances.
    scale: shaped like the truth; errors are relative to it where it is larger, as for a difference of large numbers.
    """
    wrong = unlike(spot, subject, truth)
    if wrong is not None:
        return wrong
    assert subject is not None
    sampled = yardsticks if isinstance(yardsticks, torch.Tensor) else torch.stack(list(yardsticks))
    # All in one operation, as most tensors are small: [1 + draws + 1, blocks, elements], the truth last.
    rows = torch.cat([one.to("cpu", torch.float64) for one in (subject[None], sampled, truth[None])])
    rows = blocks(spot.place.component, rows, many=True)
    rows[:-1].sub_(rows[-1])
    off = sizes(rows).numpy()  # [2, 1 + draws + 1, blocks]; for few numbers numpy takes a third of the time
    most = off[:, -1:]
    if scale is not None:
        most = np.maximum(most, sizes(blocks(spot.place.component, scale)).numpy()[:, None])
    with np.errstate(all="ignore"):
        errors = off[:, :-1] / np.maximum(most, SCALE_FLOOR)
        error, yardstick = errors[:, 0], np.maximum(errors[:, 1:].max(1), noise_floor)
        limit = factor * allowed(yardstick, subject.dtype if stored is None else stored)
        limit[~np.isfinite(limit)] = 0.0  # a yardstick that overflows allows nothing
        parts = np.where(error == 0, 0.0, error / limit)
    number = rows.shape[1]
    metric, block = divmod(int(parts.argmax()), number)  # argmax takes a NaN for the largest
    worst, granted, noise = (float(each[metric, block]) for each in (error, limit, yardstick))
    return Comparison(
        spot.check, spot.tier, spot.event, spot.kind, spot.place, elements=subject.numel(), blocks=number,
        worst=worst, allowed=granted, request=spot.request, slot=spot.slot, head=block if number > 1 else None,
        problem=None if worst <= granted else Problem.of(not_finite(subject), "not_finite") or Problem(
            "differs", _sentence(("norm", "largest element")[metric], worst, granted, noise)),
    )  # fmt: skip


def blocks(component: str, tensor: torch.Tensor, *, many: bool = False) -> torch.Tensor:
    """[blocks, elements] in fp64: one block per head, or one block if a head has too few numbers to judge.

    many: the tensor has a further first axis, and so has the result.
    """
    axis, lead = HEAD_AXIS.get(component), int(many)
    tensor = tensor.to("cpu", torch.float64)
    elements = math.prod(tensor.shape[lead:])
    if axis is not None and elements >= SMALLEST_BLOCK * tensor.shape[axis + lead]:
        return tensor.movedim(axis + lead, lead).flatten(lead + 1)
    return tensor.reshape(*tensor.shape[:lead], 1, -1)


def relative_error(x: torch.Tensor, o: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """|x - o| / |o|, by the norm and by the largest element; / |scale| where that is larger.

    Shapes:  x [..., blocks, elements]   o, scale [blocks, elements]  ->  [2, ..., blocks]
    """
    most = sizes(o) if scale is None else torch.maximum(sizes(o), sizes(scale))
    off = sizes(x - o)
    return off / most.clamp_min(SCALE_FLOOR).reshape(2, *[1] * (off.dim() - most.dim()), *most.shape[1:])


def sizes(x: torch.Tensor) -> torch.Tensor:
    """[..., elements] -> [2, ...]: the norm, and the largest element."""
    return torch.stack((torch.linalg.vector_norm(x, dim=-1), x.abs().amax(-1)))


def unlike(spot: Spot, subject: torch.Tensor | None, truth: torch.Tensor) -> Comparison | None:
    """A failed comparison if there is no tensor or it has another shape, or else None."""
    if subject is not None and subject.shape == truth.shape and truth.numel():
        return None
    found = "nothing" if subject is None else f"shape {tuple(subject.shape)}"
    return Comparison(
        spot.check, spot.tier, spot.event, spot.kind, spot.place, elements=0, worst=float("inf"), allowed=0.0,
        request=spot.request, slot=spot.slot,
        problem=Problem("missing", f"has {found}; expected shape {tuple(truth.shape)}"),
    )  # fmt: skip


def not_finite(tensor: torch.Tensor) -> str:
    """A clause that counts numbers that are not finite and places the first; empty if all are finite."""
    lost = ~tensor.isfinite()
    if not lost.any():
        return ""
    first, infinite = tuple(lost.nonzero()[0].tolist()), int(tensor.isinf().sum())
    kinds = ("NaN", "infinite") if 0 < infinite < int(lost.sum()) else ("infinite",) if infinite else ("NaN",)
    return f"{int(lost.sum())} of {tensor.numel()} numbers are not finite ({' or '.join(kinds)}), the first at {first}"


def _sentence(metric: str, worst: float, most: float, noise: float) -> str:
    if not math.isfinite(noise):
        return f"relative error {worst:.2e} by the {metric}, where the yardstick itself overflows"
    rounding = most - YARDSTICK_FACTOR * noise
    smallest = f"would pass at {(worst - rounding) / noise:.3g} times that" if noise else "no factor would pass"
    return f"relative error {worst:.2e} by the {metric}; the yardstick errs by {noise:.1e} ({smallest})"


def granted_error(
    place: Place, stored: torch.dtype, truth: torch.Tensor, sampled: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The relative error [2, blocks] that is allowed, by the norm and by the largest element.

    Shapes:  truth, scale alike   sampled [draws, ...]
    """
    o = blocks(place.component, truth)
    floor = None if scale is None else blocks(place.component, scale)
    yardstick = relative_error(blocks(place.component, sampled, many=True), o, floor).amax(1)
    granted = allowed(yardstick, stored)
    return torch.where(granted.isfinite(), granted, 0.0)
