"""Logits, and the pick from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from instep_reference.contract.place_names import Place

if TYPE_CHECKING:
    from ..op_protocols import Ops


class HeadPick(Protocol):
    """`lm_head`, then `pick`  ->  argmax [M] int64. `to`: places of logits and pick; the logits stay inside."""

    def __call__(self, *, x: torch.Tensor, weight: torch.Tensor, to: tuple[Place, Place]) -> torch.Tensor: ...


def head_pick(ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, to: tuple[Place, Place]) -> torch.Tensor:
    """Run `HeadPick`, or its parts."""
    if ops.head_pick is not None:
        return ops.head_pick(x=x, weight=weight, to=to)
    return ops.pick(logits=ops.lm_head(x=x, weight=weight, to=to[0]), to=to[1])
