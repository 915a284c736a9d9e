"""The oracle: recomputes single layers of the reference from the subject's own bits, in fp64 and as declared.

Every place of an event is recomputed from the subject's rows one boundary earlier. So an error shows where it was made,
and models that are too large for a whole reference can be checked. `recomputation_plan.py` lists the recomputations and
their inputs, and the oracle runs this plan.
Leaves out: the comparison (`checks/`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import Product, Storage
from instep_reference.contract.engine import Admit
from instep_reference.trunk import WithState
from instep_reference.weights import GdnWeights, Weights

from ..finding_problem import WrongContent
from ..verdict import Skipped
from ..watch.event_context import EventContext, RowSpan
from .declared_product_rounding import NONE
from .miscounted_states import FROM_ZERO, LATER_WINDOW, LOST, handed_over
from .recomputation import REMEMBERED, ROUNDED_ONCE, LayerCache, Recomputation, Runner, only
from .recomputation_plan import EventPlan, Planner, SpanPlan, Task
from .reference_weights import weights_of
from .single_layer_run import LayerWork, Work
from .states_with_folded_tokens import Folding, PreviousStep, Run

IN_A_RING = 32  # maximum tokens of earlier steps that are kept: two rings of 16 entries
Layers = Mapping[int, Recomputation]  # the GDN layers of one step


class Oracle:
    """The oracle of one run. It keeps recomputations of windows until their commit, and of the previous step.

    every: the interval of events at which everything is recomputed; other events get only states, for T2d.
    """

    every = 1

    def __init__(
        self, checkpoint: Checkpoint, rounds: Mapping[str, Storage], width: torch.dtype,
        products: Mapping[str, Product] = NONE, once: frozenset[str] = ROUNDED_ONCE,
        promised: frozenset[str] = frozenset(),
    ) -> None:
        """The subject's declarations. rounds: component -> storage; width: dtype of its computation; products: form of
        an op -> its products; once, promised: as in `Runner`, which has the latter in both."""
        self._begin(checkpoint.config, rounds, Runner(
            weights_of(checkpoint, torch.float64), weights_of(checkpoint, width), rounds, products, once | promised,
            promised))

    def _begin(self, config: ModelConfig, rounds: Mapping[str, Storage], runner: Runner) -> None:
        self.config, self.rounds, self.runner = config, rounds, runner
        self.flights: dict[str, Layers] = {}  # by request
        self.previous: dict[str, Mapping[int, PreviousStep]] = {}  # by request and layer
        self._answered: tuple[EventContext, list[Recomputation | Skipped]] | None = None
        self._cache: LayerCache | None = None

    @torch.inference_mode()
    def at(self, context: EventContext) -> list[Recomputation | Skipped]:
        """All recomputations of this event; a second call returns the cached ones."""
        if self._answered is None or self._answered[0] is not context:
            self._answered = (context, list(self._walk(context)))
        return self._answered[1]

    def plan(self, context: EventContext) -> EventPlan:
        """The recomputations of this event, and their inputs."""
        narrow = self.runner.narrow(chunk=True)
        return Planner(context, self.config, self.rounds, self.whole(context), narrow).plan()

    def whole(self, context: EventContext) -> bool:
        """Whether everything of this event is recomputed."""
        return context.index % self.every == 0

    def _walk(self, context: EventContext) -> Iterator[Recomputation | Skipped]:
        plan = self.plan(context)
        if isinstance(context.event, Admit):
            self.previous.pop(context.event.request, None)
        yield from plan.skipped
        for part in plan.spans:
            if part.folds:
                verified = self.flights.pop(part.span.request, None)
                if verified is None:
                    continue
                yield from self._fold(plan, part, verified)
            layers: dict[int, Recomputation] = {}
            for task in part.tasks:
                piece = self.runner.kept(replace(self._recompute(plan, task), prefix=part.prefix))
                if piece.folding is not None:
                    layers[piece.layer] = piece
                yield piece
            for within in part.inside:
                for piece in (self._recompute(plan, task) for task in within.tasks):
                    assert piece.folding is not None, "up to a prefix only states are recomputed"
                    folding = replace(piece.folding, tokens=layers[piece.layer].truth)
                    yield self.runner.kept(replace(piece, prefix=within.prefix, folding=folding))
            if part.stage == "trunk" and part.span.kind == "verify":
                self.flights[part.span.request] = layers
            elif part.stage == "trunk":
                self._remember(part.span, layers)

    def _recompute(self, plan: EventPlan, task: Task) -> Recomputation:
        """The recomputation of one task."""
        piece, step, runner = self._run(task), task.recurrence, self.runner
        if step is None:
            return piece
        folding, chunk = self._folding(plan, piece, step.base, task.span.count, step.parents), task.chunk is not None
        folding = replace(folding, safe=_safe_gate(runner.truth, step.number))
        return replace(
            piece, folding=folding, dithered=partial(runner.dithered, step.to_state, base=task.chunk),
            narrow=runner.narrow(chunk), leans=runner.leans(chunk),
            wrongs=() if step.layer is None else _wrong_starts(step.layer, folding),
            later_windows=tuple if step.window is None else partial(self._later_windows, piece, *step.window),
            all_ops=None if step.all_ops is None else partial(self._run, step.all_ops),
        )

    def _later_windows(
        self, piece: Recomputation, window: torch.Tensor, after: Callable[[torch.Tensor], Work]
    ) -> Iterator[tuple[WrongContent, torch.Tensor]]:
        """States in fp64 that a chunk leaves if the conv window [C, W-1] before it is that of some tokens later."""
        fed = piece.truth.of("qkv")
        for count in range(1, min(len(fed), REMEMBERED) + 1):
            state = self.runner.true(after(torch.cat((window.to(fed), fed[:count].T), 1)[:, count:])).state
            assert state is not None, "the layer ends in a state"
            yield LATER_WINDOW.known(count, "s" * (count > 1)), state

    def _run(self, task: Task) -> Recomputation:
        """The runs of one task, without its states before."""
        work, count, cache = task.work, task.span.count, self._cache
        if not isinstance(work, LayerWork) or self.runner.generator.device.type != "cpu":
            sampled = self.runner(work, count, task.chunk, task.own)
        else:
            if cache is None or cache.runner is not self.runner:
                cache = self._cache = LayerCache(self.runner)
            sampled = cache(work, count, task.chunk, task.own)
        return Recomputation(task.span, task.stage, task.layer, *sampled.runs, work, task.own, sampled.near,
                             wrongs=task.wrongs, drawn_further=sampled.further)  # fmt: skip

    def _fold(self, plan: EventPlan, part: SpanPlan, verified: Layers) -> Iterator[Recomputation]:
        """The states at the accepted lengths, restarted from before the verify."""
        for piece in [piece.with_all_ops() if plan.whole else piece for piece in verified.values()]:
            assert piece.folding is not None, "only GDN layers are kept"
            for span, prefix in part.folds:
                folding = self._folding(plan, piece, piece.folding.base, span.count, piece.folding.parents)
                folding = replace(folding, safe=piece.folding.safe)
                folded = self.runner.fold(piece, folding, span.nodes)
                yield self.runner.kept(replace(folded, span=span, prefix=prefix))
        self._remember(part.span, verified)

    def _folding(
        self, plan: EventPlan, piece: Recomputation, base: torch.Tensor, count: int, parents: tuple[int, ...] | None
    ) -> Folding:
        layer, name = piece.layer, piece.request
        others = [
            (f'of request "{other}"', state.state[layer].to(base))
            for other, state in plan.before.items() if other != name and layer in state.state
        ]
        return Folding(base, count, self.previous.get(name, {}).get(layer), others, piece.truth, parents)

    def _remember(self, span: RowSpan, layers: Layers) -> None:
        """Keep the committed step for the next one."""
        nodes, before = span.nodes or range(span.count), self.previous.get(span.request, {})
        found: dict[int, PreviousStep] = {}
        for layer, piece in layers.items():
            if piece.folding is None:
                continue
            tokens = only(piece.folding.tokens, nodes) if len(nodes) <= REMEMBERED else None
            older = before[layer].recent if layer in before else ()
            recent = () if tokens is None or span.kind == "prefill" else _newest((*older, tokens))
            verb = "accepted" if span.kind == "commit" else "given"
            last = only(piece.folding.tokens, nodes[-REMEMBERED:]) if span.kind == "prefill" else None
            found[layer] = PreviousStep(piece.folding.base, tokens, verb, recent, last)
        self.previous[span.request] = found


def _safe_gate(weights: Weights, number: int) -> tuple[float, torch.Tensor] | None:
    """The bound of a safe gate, and exp(A_log) [HV] of the layer with this index."""
    bound, mixer = weights.config.decay_bound, weights.layers[number].mixer
    return (bound, mixer.A_log.exp()) if bound is not None and isinstance(mixer, GdnWeights) else None


def _newest(steps: tuple[Run, ...]) -> tuple[Run, ...]:
    """The last steps whose tokens a ring may hold."""
    sizes = [len(step.of("k")) for step in steps]
    return tuple(step for number, step in enumerate(steps) if sum(sizes[number:]) <= IN_A_RING)


def _wrong_starts(layer: LayerWork, folding: Folding) -> tuple[tuple[WrongContent, Work], ...]:
    """The layer started from states that known mistakes leave; used only if a place is wrong."""
    memory, previous = layer.memory, folding.previous
    if not isinstance(memory, WithState):
        return ()

    def carried(state: Callable[[], torch.Tensor]) -> Work:
        return lambda weights, see: replace(layer, memory=replace(memory, state=state()))(weights, see)

    empty = replace(layer, start=0, memory=None)
    wrongs: list[tuple[WrongContent, Work]] = [(FROM_ZERO.known(), empty)]
    if previous is not None:
        wrongs.append((LOST.known(), carried(lambda: previous.base)))
        wrongs += [(known, carried(state)) for known, state in handed_over(folding.base, previous)]
    return tuple(wrongs)
