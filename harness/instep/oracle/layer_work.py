"""One layer of the reference over the rows of one request, as a piece whose inputs can be replaced one by one.

Leaves out: the source of the rows and the memory (`oracle.py`), and running a piece (`recomputation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch

from instep_reference import gdn, trunk
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place import Place, See
from instep_reference.gdn import GdnMemory
from instep_reference.norms import rms_norm
from instep_reference.weights import DraftWeights, GdnWeights, Weights

from ..trace.tree_shape import depths
from .tree_forms import forms

# A piece of the reference: from weights in some width it computes its places, and returns its final state, if any.
Work = Callable[[Weights, See], torch.Tensor | None]


@dataclass(frozen=True)
class LayerWork:
    """hidden: its rows, the first of them at position `start`; memory: the memory before, None if there is none. An MTP
    stage has the layers of the draft head. parents: of each row, if the rows are nodes of a tree; None: a chain.
    """

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


def to_state(
    hidden: torch.Tensor, before: RequestState, layer: int, number: int, start: int,
    tree: tuple[int, ...] | None = None, *, read: bool = True,
) -> Work:
    """Run a GDN layer from its rows to the state, and nothing after it; `number`: the layer's index in the weights.

    read: whether the read-outs are computed as well; for a tree's nodes they always are
    """

    def work(weights: Weights, see: See) -> torch.Tensor:
        like, mine = weights.embedding, weights.layers[number]
        assert isinstance(mine.mixer, GdnWeights), "asked of GDN layers alone"
        memory = gdn.empty(weights.config, like.dtype, like.device)
        if start:
            memory = GdnMemory(before.conv[layer].to(like), before.state[layer].to(like))

        def at(component: str, tensor: torch.Tensor) -> torch.Tensor:
            return see(Place("trunk", layer, component), tensor)

        normed = at("normed", rms_norm(hidden.to(like), mine.input_norm, weights.config.eps))
        if not read and tree is None:
            return gdn.state_after(weights.config, mine.mixer, normed, memory, at)
        positions, forms = positions_of(start, hidden.shape[0], tree, like.device)
        return gdn.mix(weights.config, mine.mixer, normed, memory, positions, at, **forms.get("gdn", {}))[1].state

    return work


def positions_of(
    start: int, count: int, parents: tuple[int, ...] | None, device: torch.device
) -> tuple[torch.Tensor, trunk.Forms]:
    """The positions of a window's rows, and the forms of the ops that look backwards in it."""
    if parents is None:
        return start + torch.arange(count, device=device), {}
    return start + torch.tensor(depths(parents), device=device), forms(parents)


def draft_of(weights: Weights) -> DraftWeights:
    return cast(DraftWeights, weights.draft)
