"""Oracles of states alone: GDN layers from their input rows to their state, or states from the truth's free run.

For models too large for the pieces of `oracle.py`, no MLP, attention, head or draft is computed, so a commit of a real
shape is judged in milliseconds on the subject's device.

The states of an engine that shows no rows between its layers cannot be recomputed from its own bits, because their
inputs are not shown. So the data about a state (the state before, the contribution of each token, the results of known
mistakes) are the truth's own. The errors of a correct engine are then those of whole runs: the yardsticks are the
states of the rounded run, which is drawn again before anything is reported, as in T3. A declared rounding is stochastic
in these draws, and then there are more of them: `tier_allowances.py` derives the value of 16 such draws. Leaves out:
the comparison (`checks/known_wrong_states.py`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol, cast

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import Product, Storage, read_as
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place_names import Place
from instep_reference.weights import Weights, layer_of, read_of

from ..player import Side
from ..verdict import Skipped
from ..watch.event_context import EventContext, RowSpan
from ..watch.rows_by_request import rows
from .declared_product_rounding import NONE
from .oracle import Oracle
from .recomputation import Recomputation, Runner, Sampled, settled
from .recomputation_plan import EventPlan, Planner, Recurrence, Task, after_window, state_before
from .single_layer_run import Work, to_state
from .states_with_folded_tokens import Folding, Run, Runs
from .storage_rounding import narrower

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
        checkpoint.config, layers=tuple((mixer,) if mixer else blocks[:1] for mixer, blocks in mixers), experts=0)

    def get(name: str) -> torch.Tensor:
        return stored[name][: 1 if name.endswith(ONE_ROW) else None].to(device=device, dtype=dtype)

    layers = tuple(layer_of(config, f"model.layers.{layer}", layer, stored, get) for layer in gdn_layers)
    embedding, norm = get("model.embed_tokens.weight"), read_of(config, "model.norm", get, last=True)
    config = replace(config, layers=tuple(config.layers[layer] for layer in gdn_layers))
    return Weights(config, embedding, layers, norm, embedding, None)


class Redraws(Protocol):
    """Further draws of the rounded run."""

    def side(self, index: int, draw: int) -> Side:
        """The rounded run at event `index`, as the draw with this number, which is not 0. Costly."""
        ...

    def side_of(self, index: int, draw: int, request: str) -> Side:
        """The same; only the memory of this request is read."""
        ...


class TrueRunner(Runner):
    """Runs a piece in fp64 alone."""

    def __call__(
        self, work: Work, rows: int, base: torch.Tensor | None = None,
        own: Mapping[Place, torch.Tensor] = MappingProxyType({}),
    ) -> Sampled:
        truth = self.true(work)
        return Sampled(Runs(truth, truth), None)

    def fold(self, piece: Recomputation, folding: Folding, nodes: Sequence[int]) -> Recomputation:
        return replace(piece, truth=Run({}, settled(piece.truth, folding.base, nodes)[0]), folding=folding)


class FreeOracle(StateOracle):
    """redraws: maximum number of further draws of the rounded run; dithered: the same with declared roundings; memory:
    whether the subject shows its pools; repeated_runs: these draws, None means none.
    """

    def __init__(
        self, checkpoint: Checkpoint, rounds: Mapping[str, Storage], width: torch.dtype,
        products: Mapping[str, Product], *, redraws: int, dithered: int, memory: bool = False,
        repeated_runs: Redraws | None = None,
    ) -> None:
        super().__init__(checkpoint, rounds, torch.float64, torch.device("cpu"))
        self.runner = TrueRunner(self.runner.truth, self.runner.truth, {})
        self.width, self.memory, self.repeated_runs = width, memory, repeated_runs
        stored = any(narrower(dtype, width) for dtype in rounds.values())
        self.numbers = range(1, 1 + (dithered if stored or products else redraws))

    def stored(self, component: str, found: torch.Tensor) -> torch.dtype:
        """The dtype whose rounding is allowed: that of the found tensor, but none narrower than declared."""
        declared = read_as(self.rounds.get(component, self.width))
        return declared if narrower(found.dtype, declared) else found.dtype

    def plan(self, context: EventContext) -> EventPlan:
        return super().plan(replace(context, subject=context.truth))

    def _walk(self, context: EventContext) -> Iterator[Recomputation | Skipped]:
        for one in super()._walk(context):
            yield one if isinstance(one, Skipped) else self._by(context, one)

    def _by(self, context: EventContext, piece: Recomputation) -> Recomputation:
        """The piece with the yardsticks of whole runs."""
        if not piece.writes_state or context.rounded is None:
            return piece
        left = _left(context.rounded, piece)
        return replace(piece, yardsticks=Run({}, left[None]), dithered=self._redrawn(context, piece), narrow=False)

    def _redrawn(self, context: EventContext, piece: Recomputation) -> Callable[[int], Run] | None:
        if self.repeated_runs is None:
            return None
        redrawn = partial(self.repeated_runs.side_of, context.index, request=piece.request)
        return partial(_drawn, piece, redrawn, iter(self.numbers))


def _drawn(piece: Recomputation, redrawn: Callable[[int], Side], numbers: object, draws: int) -> Run:
    """This many of the further draws, as far as they last."""
    some = [number for number, _ in zip(cast("Sequence[int]", numbers), range(draws), strict=False)]
    states = [_left(redrawn(number), piece) for number in some]
    like = cast(torch.Tensor, piece.truth.state)
    return Run({}, torch.stack(states) if states else like.new_empty(0, *like.shape))


def _left(side: Side, piece: Recomputation) -> torch.Tensor:
    return piece.left(side).state[piece.layer].to(cast(torch.Tensor, piece.truth.state))
