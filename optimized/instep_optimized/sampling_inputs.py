"""Host inputs of sampling: a request's numbers, and the uniforms of a launch.

Leaves out: the draw itself (`draw` of the op sets).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from instep_reference.contract.engine import Row
from instep_reference.contract.sampling import UNIFORM, Sampling

NUMBERS = 3  # temperature, top_k, top_p: a line of the slot table


class Drawing(NamedTuple):
    """The inputs of `draw` for the B requests of a launch, except their logits; as in `Draw`."""

    window: torch.Tensor
    parents: torch.Tensor | None
    begin: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # hides tuple.count, which is not used
    sampling: torch.Tensor
    uniforms: torch.Tensor
    final: torch.Tensor


def numbers(sampling: Sampling | None) -> tuple[float, int, float]:
    """Turn sampling into a request's line: temperature 0 takes the argmax, top_k 0 and top_p 1 keep all tokens."""
    if sampling is None:
        return 0.0, 0, 1.0
    return sampling.temperature, sampling.top_k or 0, 1.0 if sampling.top_p is None else sampling.top_p


def in_units(rows: Sequence[Row], width: int) -> list[list[int]]:
    """The uniforms of each row's `width` nodes, then its final one, in units of UNIFORM; zeros if none are given.

    No list at all if no request samples: then the launch is the one without a draw.
    """
    if not any(row.uniforms for row in rows):
        return []
    return [
        [round(u / UNIFORM) for u in (*row.uniforms[:-1], *[0.0] * (width + 1 - len(row.uniforms)), *row.uniforms[-1:])]
        for row in rows
    ]
