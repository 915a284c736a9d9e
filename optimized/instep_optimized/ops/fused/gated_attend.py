"""Attention, and the output gate of its rows."""

import torch

from instep_reference.contract.place_names import Place

from ...memory_addresses import Pages
from ..op_protocols import Ops


def gated_attend(
    ops: Ops, *, query: torch.Tensor, pages: Pages, projected: torch.Tensor, to: tuple[Place, Place]
) -> torch.Tensor:
    """Run `GatedAttend`, or its parts."""
    if ops.gated_attend is not None:
        return ops.gated_attend(query=query, pages=pages, projected=projected, to=to)
    attended = ops.attend(query=query, pages=pages, to=to[0])
    return ops.output_gate(attended=attended, projected=projected, to=to[1])
