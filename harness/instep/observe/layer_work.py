"""One layer of the reference over the rows of one request, as a piece whose inputs can be replaced one by one.

Leaves out: where the rows and the memory come from (`oracle.py`), and how a piece is run (`recomputation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch

from instep_reference import trunk
from instep_reference.contract.place import See
from instep_reference.gdn import GdnMemory
from instep_reference.weights import DraftWeights, Weights

from .tree_forms import depths, forms

# A piece of the reference: given weights in some width, it shows its places, and returns the state it left, if any.
Work = Callable[[Weights, See], torch.Tensor | None]


@dataclass(frozen=True)
class LayerWork:
    """hidden: its rows, the first of them at position `start`; memory: what it remembers, None where nothing came
    before. The layer of an MTP stage is one of the draft head's. parents: of each row, where they are the nodes of a
    tree; None: each row follows the row before it."""

    stage: str
    layer: int
    hidden: torch.Tensor
    start: int
    memory: trunk.LayerMemory | None = None
    parents: tuple[int, ...] | None = None

    def __call__(self, weights: Weights, see: See) -> torch.Tensor | None:
        config, layers, like = weights.config, weights.layers, weights.embedding
        if self.stage != "trunk":
            config, layers = config.drafter(), draft_of(weights).layers
        if self.memory is None:
            memory = trunk.empty_memory(config, config.layer_kinds[self.layer], like.dtype, like.device)
        else:
            own: Any = self.memory
            memory = type(own)(*(getattr(own, field.name).to(like) for field in fields(own)))
        positions, forms = positions_of(self.start, self.hidden.shape[0], self.parents, like.device)
        hidden = self.hidden.to(like)
        _, after = trunk.layer(
            config, layers[self.layer], self.layer, self.stage, hidden, memory, positions, see, forms)
        return after.state if isinstance(after, GdnMemory) else None


def positions_of(
    start: int, count: int, parents: tuple[int, ...] | None, device: torch.device
) -> tuple[torch.Tensor, trunk.Forms]:
    """The positions of a window's rows, and the forms of what looks backwards in it."""
    if parents is None:
        return start + torch.arange(count, device=device), {}
    return start + torch.tensor(depths(parents), device=device), forms(parents)


def draft_of(weights: Weights) -> DraftWeights:
    return cast(DraftWeights, weights.draft)
