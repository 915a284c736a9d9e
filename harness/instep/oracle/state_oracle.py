"""The oracle of states alone: GDN layers from their input rows to their state, and nothing after it.

For models too large for the pieces of `oracle.py`: no MLP, attention, head or draft is computed, so a commit of a real
shape is judged in milliseconds on the subject's device. Leaves out: the comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import Product, Storage
from instep_reference.contract.engine import RequestState
from instep_reference.weights import Weights

from ..watch.event_context import EventContext, RowSpan
from .declared_product_rounding import NONE
from .oracle import Oracle
from .recomputation import Runner
from .recomputation_plan import EventPlan, Planner, Recurrence, Task, after_window, state_before
from .single_layer_run import to_state


class StateOracle(Oracle):
    """As `Oracle`, for the check T2d: a piece per GDN layer and request, ending in the state."""

    def __init__(
        self, checkpoint: Checkpoint, rounds: Mapping[str, Storage], width: torch.dtype, device: torch.device,
        layers: Collection[int] | None = None, products: Mapping[str, Product] = NONE,
    ) -> None:
        """device: where pieces are computed; layers: the judged ones, None: every GDN layer."""
        config, self.device = replace(checkpoint.config, mtp_layers=0, block=None), device
        self.gdn_layers = [n for n in config.recurrent if layers is None or n in layers]
        lean = _lean(checkpoint, self.gdn_layers)
        self._begin(config, rounds, Runner(
            Weights.of(lean, torch.float64, device), Weights.of(lean, width, device), rounds, products))

    def plan(self, context: EventContext) -> EventPlan:
        return StatePlanner(context, self.config, self.rounds, narrow=self.runner.narrow(chunk=True),
                            gdn_layers=self.gdn_layers, device=self.device).plan()  # fmt: skip


@dataclass(frozen=True)
class StatePlanner(Planner):
    """Plans states alone. gdn_layers: the judged layers, in the order of their weights."""

    gdn_layers: Sequence[int] = field(kw_only=True)
    device: torch.device = field(kw_only=True)

    def plan(self) -> EventPlan:
        return replace(super().plan(), skipped=())

    def _target(self, span: RowSpan, before: RequestState) -> Iterator[Task]:
        parents = self._parents(span)
        for number, layer in enumerate(self.gdn_layers):
            hidden = self._hidden(span, layer)
            if hidden is None:
                continue
            base = state_before(before, layer, span.start, self.device)
            work = to_state(hidden, before, layer, number, span.start, parents)
            chunk, state = (base if span.kind == "prefill" else None), Recurrence(base, work, parents, number=number)
            if chunk is not None and span.start:
                after = partial(after_window, hidden, before, layer, number, span.start)
                state = replace(state, window=(before.conv[layer], after))
            yield Task(span, "trunk", layer, work, chunk=chunk, recurrence=state)


def _lean(checkpoint: Checkpoint, gdn_layers: list[int]) -> Checkpoint:
    """A model of its GDN layers alone, renumbered, with one token, and an MLP and an output of one row."""
    blocks = tuple((checkpoint.config.mixers[layer], *("mlp",) * (len(checkpoint.config.layers[layer]) > 1))
                   for layer in gdn_layers)  # fmt: skip
    config = replace(
        checkpoint.config, layers=blocks, vocab=1, tied=True, intermediate=1, experts=0, mtp_layers=0, block=None,
    )
    tensors = {name: checkpoint.tensors[name][:1] for name in ("model.embed_tokens.weight", "model.norm.weight")}
    for number, layer in enumerate(gdn_layers):
        tensors |= _layer(checkpoint, f"model.layers.{layer}.", f"model.layers.{number}.")
    return Checkpoint(config, MappingProxyType(tensors), checkpoint.digest)


def _layer(checkpoint: Checkpoint, old: str, new: str) -> dict[str, torch.Tensor]:
    kept = ("linear_attn.", "self_attn.", "mixer.", "norm.", "input_layernorm.", "post_attention_layernorm.")
    tensors = {
        new + name.removeprefix(old): tensor for name, tensor in checkpoint.tensors.items()
        if name.startswith(old) and name.removeprefix(old).startswith(kept)
    }
    ends, mlp = (".out_proj.weight", ".o_proj.weight"), dict[str, torch.Tensor]()
    if f"{new}input_layernorm.weight" in tensors:  # or else the layer has one block
        row = tensors[f"{new}input_layernorm.weight"][None]
        mlp = {f"{new}mlp.{name}_proj.weight": row for name in ("gate", "up")} | {f"{new}mlp.down_proj.weight": row.T}
    return tensors | mlp | {name: tensor[:1] for name, tensor in tensors.items() if name.endswith(ends)}
