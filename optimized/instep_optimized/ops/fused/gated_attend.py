"""Attention, and the output gate of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from instep_reference.contract.place_names import Place

from ...memory_addresses import Pages

if TYPE_CHECKING:
    from ..op_protocols import Ops


class GatedAttend(Protocol):
    """`attend`, then `output_gate`  ->  opened [N, heads, head_dim]. `to`: places of attended and of opened rows."""

    def __call__(
        self, *, query: torch.Tensor, pages: Pages, projected: torch.Tensor, to: tuple[Place, Place]
    ) -> torch.Tensor: ...


def gated_attend(
    ops: Ops, *, query: torch.Tensor, pages: Pages, projected: torch.Tensor, to: tuple[Place, Place]
) -> torch.Tensor:
    """Run `GatedAttend`, or its parts."""
    if ops.gated_attend is not None:
        return ops.gated_attend(query=query, pages=pages, projected=projected, to=to)
    attended = ops.attend(query=query, pages=pages, to=to[0])
    return ops.output_gate(attended=attended, projected=projected, to=to[1])
