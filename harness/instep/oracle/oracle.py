"""The oracle: recomputes single layers of the reference from the subject's own bits, in fp64 and as declared.

Every place of an event is recomputed from the subject's rows one boundary earlier: a layer from its hidden rows and its
memory before, the head from its input rows. So an error shows where it was made, and models that are too large for a
whole reference can be checked. The trace determines rows, positions, tokens and counts.
Leaves out: the comparison (`checks/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from instep_reference import trunk
from instep_reference.attention import AttentionMemory
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Draft, Drafted, Forward, Load, RequestState
from instep_reference.contract.event_facts import tracks
from instep_reference.contract.place import AFTER_LAYERS, STAGE_LEVEL, Place, See, draft_stage
from instep_reference.contract.rounding import Product, Storage
from instep_reference.gdn import GdnMemory
from instep_reference.norms import rms_norm
from instep_reference.weights import Weights

from ..trace.tree_shape import lines
from ..verdict import Skipped
from ..watch.event_context import EventContext, RowSpan
from ..watch.grown_tree import head_tree
from ..watch.rows import paths, row_spans, rows
from .declared_products import NONE
from .folding import Folding, PreviousStep, Run, Runs
from .head_rows import of_node, reading, row_of_parent, wrong_rows
from .layer_work import LayerWork, Work, draft_of, to_state
from .miscounted_states import handed_over
from .own_inputs import shown
from .recomputation import REMEMBERED, Recomputation, Runner, only
from .recomputation_cache import Remembering
from .reference_weights import weights_of
from .storage import entries


class Oracle:
    """The oracle of one run. It keeps recomputations of windows until their commit, and of the previous step.

    every_op: whether ops are also recomputed from the subject's own rows at every place.
    every: the interval of events at which everything is recomputed; other events get only states, for T2d.
    """

    every_op = True
    every = 1
    _remembering: Remembering | None = None

    def __init__(
        self, checkpoint: Checkpoint, rounds: Mapping[str, Storage], width: torch.dtype,
        products: Mapping[str, Product] = NONE,
    ) -> None:
        """The subject's declarations. rounds: component -> storage; width: dtype of its computation; products: form of
        an op -> its products."""
        self.config, self.rounds = checkpoint.config, rounds
        self.runner = Runner(weights_of(checkpoint, torch.float64), weights_of(checkpoint, width), rounds, products)
        self.flights: dict[str, Mapping[int, Recomputation]] = {}  # by request and layer
        self.previous: dict[str, Mapping[int, PreviousStep]] = {}  # by request and layer
        self._answered: tuple[EventContext, list[Recomputation | Skipped]] | None = None

    @torch.inference_mode()
    def at(self, context: EventContext) -> list[Recomputation | Skipped]:
        """All recomputations of this event; a second call returns the cached ones."""
        if self._answered is None or self._answered[0] is not context:
            self._answered = (context, list(self._pieces(context)))
        return self._answered[1]

    def _pieces(self, context: EventContext) -> Iterator[Recomputation | Skipped]:
        event = context.event
        if isinstance(event, Admit):
            self.previous.pop(event.request, None)
        elif isinstance(event, Forward):
            for span in row_spans(context, "trunk"):
                yield from self._trunk(context, span)
            for span in row_spans(context, "extend") if self.config.mtp_layers and self.whole(context) else ():
                yield from self._extend(context, span)
        elif isinstance(event, Commit):
            for span in row_spans(context, "extend"):
                verified = self.flights.pop(span.request, None)
                if verified is not None:
                    yield from self._commit(context, span, verified)
        elif not self.whole(context):
            return
        elif isinstance(event, Load):
            for span in row_spans(context, "extend") if self.config.mtp_layers else ():
                yield from self._loaded(context, span, event.name)
        elif isinstance(event, Draft) and self.config.mtp_layers == 1:
            yield from self._chains(context)
        elif isinstance(event, Draft) and not self.config.mtp_layers and self.every_op:
            yield Skipped("derived", context.index, "no draft head is in use, as drafts come from outside")

    def whole(self, context: EventContext) -> bool:
        """Whether everything of this event is recomputed."""
        return context.index % self.every == 0

    # -- the target --------------------------------------------------------------------------------------

    def _trunk(self, context: EventContext, span: RowSpan) -> Iterator[Recomputation | Skipped]:
        name, side, whole = span.request, context.subject, self.whole(context)
        before = side.before[name]
        tree = tree_of(context, span)
        tokens = self._tokens(context, span)
        if whole:
            yield self._piece(context, span, "trunk", STAGE_LEVEL, lambda w, see: _embedded(w, tokens, "trunk", see))
        layers: dict[int, Recomputation] = {}
        for layer, kind in enumerate(self.config.layer_kinds):
            if not whole and kind != "gdn":
                continue
            place = Place("trunk", layer - 1, "hidden") if layer else Place("trunk", STAGE_LEVEL, "embedding")
            hidden = rows(side, place, span)
            if hidden is None or hidden.shape[0] != span.count:
                continue  # T0 reports it
            work = self._layer(hidden, before, layer, kind == "gdn", span.start, tree)
            base = _base(before, layer, span.start) if kind == "gdn" else None
            chunk = span.kind == "prefill"  # its rule has a second form, whose read-out is compared, too
            read = whole or chunk
            state = to_state(hidden, before, layer, layer, span.start, tree, read=read) if base is not None else None
            made = partial(self._piece, context, span, "trunk", layer, base=base if chunk else None)
            piece = made(work) if whole or state is None else made(state, alone=True)
            if base is not None and state is not None:
                dithered = self._dithered(span, state, base)
                folding = self._folding(context, piece, base, span.count, tree)
                piece = replace(
                    piece, folding=folding, dithered=dithered,
                    narrow=self.runner.narrow(chunk), leans=self.runner.leans(chunk),
                    wrongs=self._begun(hidden, before, layer, span.start, folding, tree),
                    all_ops=None if whole else partial(made, work),
                )
            layers[layer] = piece
            yield piece
        if whole:
            yield from self._answers(context, span, "trunk", len(self.config.layer_kinds) - 1)
        if span.kind == "verify":
            self.flights[name] = layers
        else:
            self._remember(span, layers)

    def _begun(
        self, hidden: torch.Tensor, before: RequestState, layer: int, start: int, folding: Folding,
        tree: tuple[int, ...] | None = None,
    ) -> tuple[tuple[str, Work], ...]:
        """The layer started from states that known mistakes leave; used only if a place is wrong."""
        if not start:
            return ()

        def carried(state: Callable[[], torch.Tensor]) -> Work:
            return lambda weights, see: self._layer(
                hidden, replace(before, state={layer: state()}), layer, True, start, tree)(weights, see)  # fmt: skip

        empty = self._layer(hidden, before, layer, True, 0, tree)
        wrongs: list[tuple[str, Work]] = [("was started from zero: everything before these tokens is lost", empty)]
        if (previous := folding.previous) is not None:
            wrongs.append(("lacks the tokens of the previous step", carried(lambda: previous.base)))
            wrongs += [(says, carried(state)) for says, state in handed_over(folding.base, previous)]
        return tuple(wrongs)

    def _remember(self, span: RowSpan, layers: Mapping[int, Recomputation]) -> None:
        """Keep the committed step for the next one."""
        nodes = span.nodes or range(span.count)
        self.previous[span.request] = {
            layer: PreviousStep(
                piece.folding.base, only(piece.folding.tokens, nodes) if len(nodes) <= REMEMBERED else None,
                "accepted" if span.kind == "commit" else "given",
            )
            for layer, piece in layers.items() if piece.folding is not None
        }

    def _layer(
        self, hidden: torch.Tensor, before: RequestState, layer: int, recurrent: bool, start: int,
        tree: tuple[int, ...] | None = None,
    ) -> LayerWork:
        memory: GdnMemory | AttentionMemory | None = None
        if start and recurrent:
            memory = GdnMemory(before.conv[layer], before.state[layer])
        elif start:
            memory = AttentionMemory(before.keys[layer], before.values[layer])
        return LayerWork("trunk", layer, hidden, start, memory, tree)

    def _answers(self, context: EventContext, span: RowSpan, stage: str, last: int) -> Iterator[Recomputation]:
        """The final norm, and the logits where they are needed."""
        hidden = rows(context.subject, Place(stage, last, "hidden"), span)
        final = rows(context.subject, Place(stage, AFTER_LAYERS, "final"), span)
        if hidden is None or final is None or min(len(hidden), len(final)) != span.count:
            return

        def normed(weights: Weights, see: See) -> None:
            norm = weights.final_norm if stage == "trunk" else draft_of(weights).norm
            see(Place(stage, AFTER_LAYERS, "final"), rms_norm(hidden.to(weights.embedding), norm, self.config.eps))

        yield self._piece(context, span, stage, AFTER_LAYERS, normed)
        if span.logit_rows:
            read = final[-span.logit_rows :]

            def scored(weights: Weights, see: See) -> None:
                trunk.logits(weights, read.to(weights.embedding), see, stage)

            yield self._piece(context, span, stage, AFTER_LAYERS, scored)

    # -- the commit --------------------------------------------------------------------------------------

    def _commit(
        self, context: EventContext, span: RowSpan, layers: Mapping[int, Recomputation]
    ) -> Iterator[Recomputation | Skipped]:
        """The state at the accepted length, restarted from before the verify."""
        name, forward, whole = span.request, context.earlier.forward, self.whole(context)
        for verified in [piece.with_all_ops() if whole else piece for piece in layers.values()]:
            if verified.folding is not None:
                tree = verified.folding.parents
                folding = self._folding(context, verified, verified.folding.base, span.count, tree)
                yield replace(self.runner.fold(verified, folding, span.nodes), span=span)
                under = tracks(context.event).get(name, "")
                reached = context.expected.prefixes.get(under, 0) - span.start
                if under in context.subject.tracked and 0 < reached < span.count:  # or else it is the state itself
                    inside = replace(span, count=reached, nodes=span.nodes[:reached])
                    folding = self._folding(context, verified, verified.folding.base, reached, tree)
                    yield replace(self.runner.fold(verified, folding, inside.nodes), span=inside, prefix=under)
        self._remember(span, layers)
        at = Place("trunk", AFTER_LAYERS, "final")
        final = None if forward is None else rows(forward.subject, at, forward.spans[name])
        if self.config.mtp_layers and forward is not None and final is not None and whole:
            event = cast(Commit, context.event)
            path = paths(context, event)[event.requests.index(name)]
            tokens = [forward.windows[name][node] for node in path.nodes] + [path.bonus]
            yield from self._layers(context, span, tokens, final[list(span.nodes)], forward.subject.before[name])

    # -- the draft head ----------------------------------------------------------------------------------

    def _extend(self, context: EventContext, span: RowSpan) -> Iterator[Recomputation | Skipped]:
        name = span.request
        span_of_trunk = next(other for other in row_spans(context, "trunk") if other.request == name)
        hidden = rows(context.subject, Place("trunk", AFTER_LAYERS, "final"), span_of_trunk)
        if hidden is None:
            return
        root = context.expected.roots_after[name]
        known = (*context.expected.prompts[name], *(() if root is None else (root,)))
        tokens = list(known[span.start + 1 :]) if span.kind == "prefill" else [cast(int, root)]
        bare = rows(context.subject, Place("trunk", len(self.config.layer_kinds) - 1, "hidden"), span_of_trunk)
        others = [] if bare is None else [("reads the target's rows before the final norm", bare)]
        others.append(("reads the target's rows shifted by one", hidden.roll(1, 0)))
        yield from self._layers(context, span, tokens, hidden, context.subject.before[name], others)

    def _loaded(self, context: EventContext, span: RowSpan, name: str) -> Iterator[Recomputation]:
        """The last rows of a prefix, with the tokens that follow in the prompt of the request that loads it."""
        kept = context.earlier.saved.get(name)
        if kept is None or kept.state.final is None or kept.state.length != span.start + span.count:
            return  # T0 reports it
        tokens = list(context.expected.prompts[span.request][span.start + 1 :])
        final = torch.cat((*kept.state.tail.values(), kept.state.final[None]))
        yield from self._layers(context, span, tokens, final, kept.state)

    def _layers(
        self, context: EventContext, span: RowSpan, following: list[int], hidden: torch.Tensor, before: RequestState,
        others: Sequence[tuple[str, torch.Tensor]] = (),
    ) -> Iterator[Recomputation]:
        """All MTP layers of a draft extend.

        Layer i is i tokens ahead; the last of these tokens are picks of earlier layers. It reads the rows of these
        layers as far as they have a step for it, and the target's rows otherwise.
        """
        fed, tokens = hidden, following
        for layer in range(self.config.mtp_layers):
            stage = draft_stage(layer)
            mine = next(other for other in row_spans(context, stage) if other.request == span.request)
            mine = replace(mine, nodes=span.nodes)
            yield from self._head(
                context, mine, stage, tokens[layer : layer + mine.count], fed, before, others, layer=layer
            )
            y, picks = (rows(context.subject, Place(stage, AFTER_LAYERS, name), mine) for name in ("final", "pick"))
            if y is None or (picks is None and mine.logit_rows):
                return  # T0 reports it
            if len(tokens) == layer + mine.count and picks is not None:
                tokens = [*tokens, *picks.tolist()]
            chained = layer + 1 < context.expected.num_steps
            fed, stale = (y, hidden) if chained else (hidden, y)
            others = [(f"reads {'the target' if chained else f'MTP layer {layer}'}'s rows", stale)]

    def _chains(self, context: EventContext) -> Iterator[Recomputation]:
        """Chain steps: a row reads the token of its node and the output of its parent, in a chain the previous step."""
        answer, event, steps = context.subject.answer, context.event, context.expected.num_steps
        assert isinstance(answer, Drafted) and isinstance(event, Draft)
        for i in range(1, answer.drafts.shape[1] if context.expected.topk is None else steps):
            for span in row_spans(context, f"chain.{i}"):
                tree = head_tree(context, span.request, answer.drafts[event.requests.index(span.request)].tolist())
                node, before = (*span.nodes, i)[0], context.subject.before[span.request]
                if tree is None or node >= len(tree.parents):
                    continue  # T0 reports it, or its beams are closer than rounding
                line = lines(tree.parents)[node]
                fed = row_of_parent(context, span, line)
                if fed is not None:
                    known = wrong_rows(context, span, line, len(tree.parents))
                    token = tree.tokens[node - 1]
                    yield from self._head(context, span, f"chain.{i}", [token], fed, before, known, line=line)

    def _head(
        self, context: EventContext, span: RowSpan, stage: str, tokens: list[int], hidden: torch.Tensor,
        before: RequestState, others: Sequence[tuple[str, torch.Tensor]] = (), *, layer: int = 0,
        line: Sequence[int] = (),
    ) -> Iterator[Recomputation]:
        """One MTP layer: row p reads hidden row p and token p + 1; earlier keys are the subject's own.

        line: for a draft step, the nodes from the root to its own, whose rows are in scratch memory.
        others: sentences of known mistakes, and the hidden rows that each reads.
        """
        side, start = context.subject, span.start
        if len(tokens) != span.count or hidden.shape[0] != span.count:
            return
        wrongs = tuple((says, reading(tokens, rows, stage)) for says, rows in others)
        yield replace(self._piece(context, span, stage, STAGE_LEVEL, reading(tokens, hidden, stage)), wrongs=wrongs)
        fused = rows(side, Place(stage, STAGE_LEVEL, "fused"), span)
        if fused is None or fused.shape[0] != span.count:
            return
        scratch = [[of_node(context, span, step, 0, name) for step in line[1:-1]] for name in ("key", "value")]
        there = [[row for row in one if row is not None and len(row)] for one in scratch]
        if any(len(one) != len(line[1:-1]) for one in there):
            return
        start += len(line[1:-1])
        keys, values = (
            torch.cat((cache[: span.start], *(entries(name, row, self.rounds) for row in one)))
            for name, one, cache in zip(
                ("key", "value"), there, (before.draft_keys[layer], before.draft_values[layer]), strict=True)
        )

        work = LayerWork(stage, layer, fused, start, AttentionMemory(keys, values))
        yield self._piece(context, span, stage, layer, work)
        yield from self._answers(context, span, stage, layer)

    # -- both --------------------------------------------------------------------------------------------

    def _piece(
        self, context: EventContext, span: RowSpan, stage: str, layer: int, work: Work,
        base: torch.Tensor | None = None, *, alone: bool = False,
    ) -> Recomputation:
        """A recomputation. alone: without the runs on the subject's own rows."""
        own = shown(context, span, stage, layer) if self.every_op and not alone else {}
        runs, near = self._ran(work, span.count, base, own)
        return Recomputation(span, stage, layer, *runs, work, own, near)

    def _ran(
        self, work: Work, count: int, base: torch.Tensor | None, own: Mapping[Place, torch.Tensor]
    ) -> tuple[Runs, Runs | None]:
        if not isinstance(work, LayerWork) or self.runner.generator.device.type != "cpu":
            return self.runner(work, count, base, own)
        if self._remembering is None or self._remembering.runner is not self.runner:
            self._remembering = Remembering(self.runner)
        return self._remembering(work, count, base, own)

    def _dithered(self, span: RowSpan, work: Work, base: torch.Tensor) -> Callable[[int], Run]:
        return partial(self.runner.dithered, work, base=base if span.kind == "prefill" else None)

    def _folding(
        self, context: EventContext, piece: Recomputation, base: torch.Tensor, count: int,
        tree: tuple[int, ...] | None = None,
    ) -> Folding:
        layer, name = piece.layer, piece.request
        previous = self.previous.get(name, {}).get(layer)
        others = [
            (f'of request "{other}"', state.state[layer].to(base))
            for other, state in context.subject.before.items()
            if other != name and layer in state.state
        ]
        return Folding(base, count, previous, others, piece.truth, tree)

    def _tokens(self, context: EventContext, span: RowSpan) -> list[int]:
        if span.kind == "verify":
            return list(context.expected.windows[span.request])
        if span.kind == "prefill":
            return list(context.expected.prompts[span.request][span.start : span.start + span.count])
        return [cast(int, context.truth.before[span.request].root)]


def tree_of(context: EventContext, span: RowSpan) -> tuple[int, ...] | None:
    """The parents of a window's nodes; None if each row follows the row before it."""
    return context.expected.tree(span.request) if span.kind == "verify" else None


def _base(before: RequestState, layer: int, start: int) -> torch.Tensor:
    """The state before the step in fp64; zeros for a start of 0, whatever the memory holds."""
    state = before.state[layer].to("cpu", torch.float64)
    return state if start else torch.zeros_like(state)


def _embedded(weights: Weights, tokens: list[int], stage: str, see: See) -> None:
    trunk.embed(weights, torch.tensor(tokens, device=weights.embedding.device), see, stage)
