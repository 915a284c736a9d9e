"""The oracle of states alone: GDN layers from their input rows to their state, and nothing after it.

For models too large for the pieces of `oracle.py`: no MLP, attention, head or draft is computed, so a commit of a real
shape is judged in milliseconds on the subject's device. Leaves out: the comparison.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import Product, Storage
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place_names import Place
from instep_reference.weights import Weights, layer_of, read_of

from ..watch.event_context import EventContext, RowSpan
from ..watch.rows_by_request import rows
from .declared_product_rounding import NONE
from .oracle import Oracle
from .recomputation import Runner
from .recomputation_plan import EventPlan, Planner, Recurrence, Task, after_window, state_before
from .single_layer_run import to_state

ONE_ROW = ("embed_tokens.weight", ".out_proj.weight", ".o_proj.weight")  # no state depends on more of these


class StateOracle(Oracle):
    """As `Oracle`, for the check T2d: a piece per GDN layer and request, ending in the state."""

    def __init__(
        self, checkpoint: Checkpoint, rounds: Mapping[str, Storage], width: torch.dtype, device: torch.device,
        layers: Collection[int] | None = None, products: Mapping[str, Product] = NONE,
    ) -> None:
        """device: where pieces are computed; layers: the judged ones, None: every GDN layer."""
        config, self.device = replace(checkpoint.config, mtp_layers=0, block=None), device
        self.gdn_layers = [n for n in config.recurrent if layers is None or n in layers]
        truth, narrow = (_lean(checkpoint, self.gdn_layers, dtype, device) for dtype in (torch.float64, width))
        self._begin(config, rounds, Runner(truth, narrow, rounds, products))

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

    def _read(self, span: RowSpan, layer: int) -> torch.Tensor | None:
        """The rows that the mixer's norm reads. An embedding of n-grams is not computed here."""
        if layer not in self.config.keeping("ngram"):
            return self._hidden(span, layer)
        hidden = rows(self.context.subject, Place("trunk", layer, "ple"), span)
        return None if hidden is None or hidden.shape[0] != span.count else hidden

    def _target(self, span: RowSpan, before: RequestState) -> Iterator[Task]:
        parents = self._parents(span)
        for number, layer in enumerate(self.gdn_layers):
            hidden = self._read(span, layer)
            if hidden is None:
                continue
            base = state_before(before, layer, span.start, self.device)
            work = to_state(hidden, before, layer, number, span.start, parents)
            chunk, state = (base if span.kind == "prefill" else None), Recurrence(base, work, parents, number=number)
            if chunk is not None and span.start and layer in before.conv:
                after = partial(after_window, hidden, before, layer, number, span.start)
                state = replace(state, window=(before.conv[layer], after))
            yield Task(span, "trunk", layer, work, chunk=chunk, recurrence=state)


def _lean(checkpoint: Checkpoint, gdn_layers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Weights:
    """Load the mixers of the GDN layers alone, with one token and one row of an output.

    Each is loaded under its own number, because lightning attention computes its decays from it.
    """
    mixers = zip(checkpoint.config.mixers, checkpoint.config.layers, strict=True)
    stored, config = checkpoint.tensors, replace(
        checkpoint.config, layers=tuple((mixer,) if mixer else blocks[:1] for mixer, blocks in mixers), vocab=1,
        tied=True, intermediate=1, experts=0, mtp_layers=0, block=None,
    )

    def get(name: str) -> torch.Tensor:
        return stored[name][: 1 if name.endswith(ONE_ROW) else None].to(device=device, dtype=dtype)

    layers = tuple(layer_of(config, f"model.layers.{layer}", layer, stored, get) for layer in gdn_layers)
    embedding, norm = get("model.embed_tokens.weight"), read_of(config, "model.norm", get, last=True)
    config = replace(config, layers=tuple(config.layers[layer] for layer in gdn_layers))
    return Weights(config, embedding, layers, norm, embedding, None)
