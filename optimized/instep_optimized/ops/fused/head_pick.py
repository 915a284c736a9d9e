"""Logits, and the pick from them."""

import torch

from instep_reference.contract.place_names import Place

from ..op_protocols import Ops


def head_pick(ops: Ops, *, x: torch.Tensor, weight: torch.Tensor, to: tuple[Place, Place]) -> torch.Tensor:
    """Run `HeadPick`, or its parts."""
    if ops.head_pick is not None:
        return ops.head_pick(x=x, weight=weight, to=to)
    return ops.pick(logits=ops.lm_head(x=x, weight=weight, to=to[0]), to=to[1])
