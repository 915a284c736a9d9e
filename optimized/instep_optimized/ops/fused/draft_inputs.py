"""Input of a draft head's first product: embedded tokens and hidden rows, each normed, side by side."""

import torch

from instep_reference.contract.place_names import Place

from ..op_protocols import Ops


def draft_inputs(
    ops: Ops, *, tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor], eps: float, to: tuple[Place, Place, Place, Place],
) -> torch.Tensor:  # fmt: skip
    """Run `DraftInputs`, or its parts."""
    if ops.draft_inputs is not None:
        return ops.draft_inputs(tokens=tokens, table=table, hidden=hidden, weights=weights, eps=eps, to=to)
    embedding = ops.embed(tokens=tokens, table=table, to=to[0])
    left = ops.norm(x=embedding, weight=weights[0], eps=eps, to=to[1])
    right = ops.norm(x=hidden, weight=weights[1], eps=eps, to=to[2])
    return ops.concat(x=left, y=right, to=to[3])
