"""The oracle of states alone: GDN layers from their input rows to their state, and nothing after it.

For models too large for the pieces of `oracle.py`: no MLP, attention, head or draft is computed, so a commit of a real
shape is judged in milliseconds on the subject's device. Leaves out: the comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import LayerKind
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place import STAGE_LEVEL, Place
from instep_reference.contract.rounding import Product, Storage
from instep_reference.weights import Weights

from ..verdict import Skipped
from ..watch.event_context import EventContext, RowSpan
from ..watch.rows import rows
from .declared_products import NONE
from .folding import PreviousStep
from .layer_work import to_state
from .oracle import Oracle, tree_of
from .recomputation import Recomputation, Runner


class StateOracle(Oracle):
    """As `Oracle`, for the check T2d: a piece per GDN layer and request, ending in the state."""

    every_op = False

    def __init__(
        self, checkpoint: Checkpoint, rounds: Mapping[str, Storage], width: torch.dtype, device: torch.device,
        layers: Collection[int] | None = None, products: Mapping[str, Product] = NONE,
    ) -> None:
        """device: where pieces are computed; layers: the judged ones, None: every GDN layer."""
        self.config, self.rounds, self.device = replace(checkpoint.config, mtp_layers=0), rounds, device
        kinds = enumerate(self.config.layer_kinds)
        self.gdn_layers = [n for n, kind in kinds if kind == "gdn" and (layers is None or n in layers)]
        lean = _lean(checkpoint, self.gdn_layers)
        self.runner = Runner(Weights.of(lean, torch.float64, device), Weights.of(lean, width, device), rounds, products)
        self.flights: dict[str, Mapping[int, Recomputation]] = {}
        self.previous: dict[str, Mapping[int, PreviousStep]] = {}
        self._answered: tuple[EventContext, list[Recomputation | Skipped]] | None = None

    def _trunk(self, context: EventContext, span: RowSpan) -> Iterator[Recomputation | Skipped]:
        name, before = span.request, context.subject.before[span.request]
        tree = tree_of(context, span)
        layers: dict[int, Recomputation] = {}
        for number, layer in enumerate(self.gdn_layers):
            place = Place("trunk", layer - 1, "hidden") if layer else Place("trunk", STAGE_LEVEL, "embedding")
            hidden = rows(context.subject, place, span)
            if hidden is None or hidden.shape[0] != span.count:
                continue  # reported by T0
            base = self._base(before, layer, span.start)
            work = to_state(hidden, before, layer, number, span.start, tree)
            piece = self._piece(context, span, "trunk", layer, work, base if span.kind == "prefill" else None)
            folding, dithered = self._folding(context, piece, base, span.count, tree), self._dithered(span, work, base)
            narrow, leans = (asked(span.kind == "prefill") for asked in (self.runner.narrow, self.runner.leans))
            layers[layer] = replace(piece, folding=folding, dithered=dithered, narrow=narrow, leans=leans)
            yield layers[layer]
        if span.kind == "verify":
            self.flights[name] = layers
        else:
            self._remember(span, layers)

    def _base(self, before: RequestState, layer: int, start: int) -> torch.Tensor:
        """The state before the step; a start of 0 has no state before it in the trace, whatever memory holds."""
        state = before.state[layer].to(self.device, torch.float64)
        return state if start else torch.zeros_like(state)


def _lean(checkpoint: Checkpoint, gdn_layers: list[int]) -> Checkpoint:
    """A model of its GDN layers alone, renumbered, with one token, and an MLP and an output of one row."""
    kinds: tuple[LayerKind, ...] = tuple("gdn" for _ in gdn_layers)
    config = replace(
        checkpoint.config, layer_kinds=kinds, vocab=1, tied=True, intermediate=1, experts=0,
        dense_layers=(), mtp_layers=0,
    )
    tensors = {name: checkpoint.tensors[name][:1] for name in ("model.embed_tokens.weight", "model.norm.weight")}
    for number, layer in enumerate(gdn_layers):
        tensors |= _layer(checkpoint, f"model.layers.{layer}.", f"model.layers.{number}.")
    return Checkpoint(config, MappingProxyType(tensors), checkpoint.digest)


def _layer(checkpoint: Checkpoint, old: str, new: str) -> dict[str, torch.Tensor]:
    kept = ("linear_attn.", "input_layernorm.", "post_attention_layernorm.")
    tensors = {
        new + name.removeprefix(old): tensor for name, tensor in checkpoint.tensors.items()
        if name.startswith(old) and name.removeprefix(old).startswith(kept)
    }
    row = tensors[f"{new}input_layernorm.weight"][None]
    mlp = {f"{new}mlp.{name}_proj.weight": row for name in ("gate", "up")} | {f"{new}mlp.down_proj.weight": row.T}
    out = f"{new}linear_attn.out_proj.weight"
    return {**tensors, **mlp, out: tensors[out][:1]}
