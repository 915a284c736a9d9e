"""The plan of an event: which layers of which requests are recomputed, and from which inputs.

A plan follows from the context of the event alone. The inputs are the subject's rows one boundary earlier: a layer
reads its hidden rows and its memory before, the head its input rows. The trace determines rows, positions, tokens and
counts. Leaves out: running the plan (`oracle.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch

from instep_reference import trunk
from instep_reference.attention import AttentionMemory
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import Storage, kept_in
from instep_reference.contract.engine import Commit, Draft, Drafted, Forward, RequestState
from instep_reference.contract.event_facts import inner_multiples, restores, tracks
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, See, draft_stage
from instep_reference.norms import rms_norm
from instep_reference.weights import Weights

from ..finding_problem import NamedMistake, WrongContent
from ..player import Side
from ..trace.tree_shape import lines
from ..verdict import Skipped
from ..watch.event_context import EventContext, RowSpan
from ..watch.grown_tree import head_tree, step_of
from ..watch.rows_by_request import due, paths, row_spans, rows, tokens_of
from .single_layer_run import LayerWork, Work, block_of, context_of, draft_of, keys_and_values, to_state
from .storage_rounding import entries

Wrongs = tuple[tuple[WrongContent, Work], ...]  # known mistakes, and the ops on the inputs that each reads
# Known mistakes in the input of an MTP layer: the rows of another place, or of another step.
BEFORE_NORM = NamedMistake("rows-before-the-norm", "reads {} before {} final norm")
SHIFTED = NamedMistake("targets-rows-shifted", "reads the target's rows shifted by one")
STALE_ROWS = NamedMistake("rows-of-another-layer", "reads {}'s rows")
STALE_STEP = NamedMistake("row-of-another-step", "reads the head's row of {}, not of {}")
OTHER_LAYERS = NamedMistake("rows-after-another-layer", "reads the target's rows after {}")
LATE_KEYS = NamedMistake("context-keys-at-the-next-position", "rotates the keys of the context one position too {}")
LAYER_NORM = NamedMistake("context-through-the-layers-norm", "passes the context through the layer's input norm")
INSIDE = "the memory inside a chunk is seen only as a prefix keeps it, rounded: the rows after it are not compared"
KNOWN = (BEFORE_NORM, SHIFTED, STALE_ROWS, STALE_STEP, OTHER_LAYERS, LATE_KEYS, LAYER_NORM)


@dataclass(frozen=True)
class Task:
    """One recomputation: ops over the rows of one request, with all their inputs.

    work        the ops on the subject's rows
    own         the subject's rows of the places of these ops, for the runs in which every op reads them
    chunk       the state before a prefill chunk, whose delta rule has a second form
    wrongs      known mistakes that read other rows
    recurrence  for a GDN layer of the target
    """

    span: RowSpan
    stage: str
    layer: int
    work: Work
    own: Mapping[Place, torch.Tensor] = field(default_factory=dict)
    chunk: torch.Tensor | None = None
    wrongs: Wrongs = ()
    recurrence: "Recurrence | None" = None

    def map(self, change: Callable[[Work], Work]) -> "Task":
        """The same task with changed ops."""
        step = self.recurrence
        if step is not None:
            all_ops = None if step.all_ops is None else step.all_ops.map(change)
            step = replace(step, to_state=change(step.to_state), all_ops=all_ops)
        return replace(self, work=change(self.work), recurrence=step)


@dataclass(frozen=True)
class Recurrence:
    """The inputs by which a GDN layer goes from one state to the next.

    base      the state before the rows [HV, K, V] in fp64
    to_state  the layer up to its state and nothing after it
    parents   of the rows, if they are nodes of a tree
    layer     the whole layer, which known mistakes start from a wrong state; None: no mistakes are computed
    all_ops   the task with every op of the layer, if this one ends at the state
    window    for a chunk that continues a prompt: the conv window before it, and `to_state` after any conv window
    number    the layer's index in the weights
    """

    base: torch.Tensor
    to_state: Work
    parents: tuple[int, ...] | None
    layer: LayerWork | None = None
    all_ops: Task | None = None
    window: tuple[torch.Tensor, Callable[[torch.Tensor], Work]] | None = None
    number: int = 0


@dataclass(frozen=True)
class SpanPlan:
    """The tasks of one span of rows, in order. folds: for a commit, the spans that end with a kept state, each with the
    name of its prefix, "" for the request's own state. prefix: for the rows of a chunk up to a prefix inside it, its
    name; inside: these rows, if the chunk itself is recomputed as a whole.
    """

    span: RowSpan
    stage: str
    tasks: tuple[Task, ...]
    folds: tuple[tuple[RowSpan, str], ...] = ()
    prefix: str = ""
    inside: "tuple[SpanPlan, ...]" = ()


@dataclass(frozen=True)
class EventPlan:
    """The recomputations of one event, in order.

    before   the requests before the event;  skipped: what is not recomputed
    whole    whether everything is recomputed, or only the states
    """

    before: Mapping[str, RequestState]
    whole: bool
    spans: tuple[SpanPlan, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Planner:
    """Plans one event. config: the model as its drafter uses it; rounds: component -> storage; whole: see `EventPlan`.

    narrow: whether states are stored, or products of chunks made, narrower than they are summed. Then the part of a
    chunk after a prefix inside it begins with the subject's own memory there, as only that is rounded as declared.
    """

    context: EventContext
    config: ModelConfig
    rounds: Mapping[str, Storage]
    whole: bool = True
    narrow: bool = False

    def plan(self) -> EventPlan:
        context, event, heads = self.context, self.context.event, self.config.mtp_layers if self.whole else 0
        blocks = self.whole and self.config.block is not None
        spans, skipped = list[SpanPlan](), list[Skipped]()
        extend = row_spans(context, "extend") if heads or blocks or isinstance(event, Commit) else []
        if isinstance(event, Forward):
            for span in row_spans(context, "trunk"):
                *parts, last = self._parts(span, event)
                if self.narrow and parts and kept_in(self.rounds, forward=True):
                    # The memory inside the chunk is seen only as the prefix keeps it, so no later part begins with it.
                    one, before, under = parts[0]
                    spans.append(SpanPlan(one, "trunk", tuple(self._target(one, before)), prefix=under))
                    skipped.append(Skipped("derived", context.index, INSIDE, f"of {span.request}"))
                    continue
                if self.narrow:
                    spans += [SpanPlan(one, "trunk", tuple(self._target(one, before)), prefix=under)
                              for one, before, under in (*parts, last)]  # fmt: skip
                    continue
                before, alone = context.subject.before[span.request], replace(self, whole=False)
                inside = list[SpanPlan]()
                for one, _, under in parts:
                    until = replace(part_of(span, 0, one.start + one.count - span.start), logit_rows=0)
                    inside.append(SpanPlan(until, "trunk", tuple(alone._target(until, before)), prefix=under))
                spans.append(SpanPlan(span, "trunk", tuple(self._target(span, before)), inside=tuple(inside)))
            spans += [SpanPlan(span, "extend", tuple(self._extend(span))) for span in extend]
        elif isinstance(event, Commit):
            spans += [SpanPlan(span, "extend", tuple(self._commit(span)), self._folds(span)) for span in extend]
        elif restores(event):
            spans += [SpanPlan(span, "extend", tuple(self._load(span, getattr(event, "name", "")))) for span in extend]
        elif isinstance(event, Draft) and blocks:
            spans += [SpanPlan(span, "block", tuple(self._block(span))) for span in row_spans(context, "block")]
        elif isinstance(event, Draft) and heads == 1:
            spans += self._draft(event)
        elif isinstance(event, Draft) and self.whole and not heads:
            skipped += [Skipped("derived", context.index, "no draft head is in use, as drafts come from outside")]
        return EventPlan(context.subject.before, self.whole, tuple(spans), tuple(skipped))

    # -- the target --------------------------------------------------------------------------------------

    def _parts(self, span: RowSpan, event: Forward) -> Iterator[tuple[RowSpan, RequestState, str]]:
        """The parts of a request's rows, the memory before each, and the name of the prefix that ends it.

        A chunk has a part for each prefix that is tracked inside it, and a last one without a name. The part after a
        prefix begins with the subject's own memory there.
        """
        context, row = self.context, next(row for row in event.rows if row.request == span.request)
        before, begin, every = context.subject.before[span.request], 0, context.expected.track_interval or 1
        for under, end in zip(row.inner, inner_multiples(span.start, span.start + span.count, every), strict=False):
            kept = context.subject.tracked.get(under)
            if kept is not None and kept.length == end:  # or else T0 reports it
                yield replace(part_of(span, begin, end - span.start), logit_rows=0), before, under
                before, begin = kept, end - span.start
        yield part_of(span, begin, span.count), before, ""

    def _target(self, span: RowSpan, before: RequestState) -> Iterator[Task]:
        """The layers of the target; only the GDN layers up to their states, if not everything is recomputed."""
        if self.whole:
            tokens = self._tokens(span)
            yield self._task(span, "trunk", STAGE_LEVEL, lambda w, see: _embedded(w, tokens, "trunk", see))
        for layer in range(len(self.config.layers)):
            recurrent = layer in self.config.recurrent
            hidden = self._hidden(span, layer) if self.whole or recurrent else None
            if hidden is not None:
                run = self._recurrence if recurrent else self._without_state
                yield run(span, before, layer, hidden)
        if self.whole and self.config.block is not None:
            yield from self._features(span, self.config.block.target_layer_ids)
        if self.whole:
            yield from self._answers(span, "trunk", len(self.config.layers) - 1)

    def _features(self, span: RowSpan, layers: Sequence[int]) -> Iterator[Task]:
        """The rows that a block drafter reads, layer by layer side by side. Nothing is computed."""
        own = [rows(self.context.subject, Place("trunk", layer, "hidden"), span) for layer in layers]
        there = [one for one in own if one is not None and len(one) == span.count]
        for number in range(1, len(layers)) if len(there) == len(layers) else ():
            place, joined = Place("trunk", layers[number], "features"), torch.cat(there[: number + 1], -1)
            wrongs = []
            for off in (-1, 1):  # engines count the rows that a layer gets, or the rows after it
                others = [self._hidden(span, layer + off + 1) for layer in layers[: number + 1]]
                if all(one is not None for one in others):
                    known = OTHER_LAYERS.known(f"layers {' and '.join(str(x + off) for x in layers[: number + 1])}")
                    wrongs.append((known, partial(_shown, place, torch.cat([x for x in others if x is not None], -1))))
            yield self._task(span, "trunk", place.layer, partial(_shown, place, joined), wrongs=tuple(wrongs))

    def _fed(self, side: Side, span: RowSpan) -> torch.Tensor | None:
        """The rows of the target that the drafter takes in: final rows, or those that a block drafter reads."""
        block = self.config.block
        if block is None:
            return rows(side, Place("trunk", AFTER_LAYERS, "final"), span)
        component = "hidden" if len(block.target_layer_ids) == 1 else "features"
        return rows(side, Place("trunk", block.target_layer_ids[-1], component), span)

    def _context(self, span: RowSpan, fed: torch.Tensor) -> Iterator[Task]:
        """The context of a block drafter over committed rows."""
        others = ((SHIFTED.known(), fed.roll(1, 0)),) if len(fed) > 1 else ()
        yield self._task(span, "extend", STAGE_LEVEL, context_of(fed),
                         wrongs=tuple((known, context_of(x)) for known, x in others))  # fmt: skip
        context = rows(self.context.subject, Place("extend", STAGE_LEVEL, "context"), span)
        if context is not None and len(context) == span.count and self.config.block is not None:
            for layer in range(self.config.block.num_hidden_layers):
                work, start = partial(keys_and_values, layer, context), span.start
                wrongs = (
                    (LATE_KEYS.known("late"), work(start + 1)), (LATE_KEYS.known("early"), work(start - 1)),
                    (LAYER_NORM.known(), work(start, normed=True)),
                )
                yield self._task(span, "extend", layer, work(start), wrongs=wrongs)

    def _block(self, span: RowSpan) -> Iterator[Task]:
        """The block drafter over one block: the root, and a mask token for every draft."""
        block, before = self.config.block, self.context.subject.before[span.request]
        assert block is not None, "asked before"
        tokens = [cast(int, before.root), *[block.mask_token_id] * (span.count - 1)]
        yield self._task(span, "block", STAGE_LEVEL, lambda w, see: _embedded(w, tokens, "block", see))
        for layer in range(block.num_hidden_layers):
            at = Place("block", layer - 1, "hidden") if layer else Place("block", STAGE_LEVEL, "embedding")
            hidden = rows(self.context.subject, at, span)
            if hidden is None or len(hidden) != span.count:
                return
            memory = AttentionMemory(before.block_keys[layer], before.block_values[layer])
            yield self._task(span, "block", layer, LayerWork("block", layer, hidden, span.start, memory))
        yield from self._answers(span, "block", block.num_hidden_layers - 1)

    def _hidden(self, span: RowSpan, layer: int) -> torch.Tensor | None:
        """The rows that a layer reads; None if the subject does not have all of them, which T0 reports."""
        place = Place("trunk", layer - 1, "hidden") if layer else Place("trunk", STAGE_LEVEL, "embedding")
        hidden = rows(self.context.subject, place, span)
        return None if hidden is None or hidden.shape[0] != span.count else hidden

    def _without_state(self, span: RowSpan, before: RequestState, layer: int, hidden: torch.Tensor) -> Task:
        """A layer with attention, with a conv alone, or without a mixer."""
        memory = trunk.memory_of(self.config, self.config.mixers[layer], before, layer) if span.start else None
        return self._task(
            span, "trunk", layer, LayerWork("trunk", layer, hidden, span.start, memory, self._parents(span)))

    def _recurrence(self, span: RowSpan, before: RequestState, layer: int, hidden: torch.Tensor) -> Task:
        parents = self._parents(span)
        memory = trunk.memory_of(self.config, self.config.mixers[layer], before, layer) if span.start else None
        tokens = tuple(self._tokens(span)) if layer in self.config.keeping("ngram") else ()
        work = LayerWork("trunk", layer, hidden, span.start, memory, parents, tokens)
        base, chunk = state_before(before, layer, span.start, torch.device("cpu")), span.kind == "prefill"
        # The delta rule of a chunk has a second form, whose read-out is compared, too.
        state = to_state(hidden, before, layer, layer, span.start, parents, read=self.whole or chunk, tokens=tokens)
        task = self._task(span, "trunk", layer, work, base if chunk else None)
        after = partial(after_window, hidden, before, layer, layer, span.start, tokens=tokens)
        window = (before.conv[layer], after) if chunk and span.start and layer in self.config.convolving else None
        recurrence = Recurrence(base, state, parents, work, window=window, number=layer)
        if self.whole:
            return replace(task, recurrence=recurrence)
        return replace(task, work=state, own={}, recurrence=replace(recurrence, all_ops=task))

    def _answers(self, span: RowSpan, stage: str, last: int) -> Iterator[Task]:
        """The final norm, and the logits where they are needed."""
        hidden = rows(self.context.subject, Place(stage, last, "hidden"), span)
        final = rows(self.context.subject, Place(stage, AFTER_LAYERS, "final"), span)
        if hidden is None or final is None or min(len(hidden), len(final)) != span.count:
            return

        def normed(weights: Weights, see: See) -> None:
            norm, config = weights.final_norm, self.config
            if stage == "block":
                norm, config = block_of(weights).norm, self.config.block_model()
            elif stage != "trunk":
                norm = draft_of(weights).norm
            see(Place(stage, AFTER_LAYERS, "final"), trunk.read(config, norm, hidden.to(weights.embedding))[0])

        yield self._task(span, stage, AFTER_LAYERS, normed)
        if span.logit_rows:
            read = final[-span.logit_rows :]

            def scored(weights: Weights, see: See) -> None:
                trunk.logits(weights, read.to(weights.embedding), see, stage)

            yield self._task(span, stage, AFTER_LAYERS, scored)

    # -- the commit --------------------------------------------------------------------------------------

    def _folds(self, span: RowSpan) -> tuple[tuple[RowSpan, str], ...]:
        """The accepted nodes, and those of a tracked prefix that ends inside them."""
        under = next((name for name, request in tracks(self.context.event).items() if request == span.request), "")
        reached = self.context.expected.prefixes.get(under, 0) - span.start
        if under in self.context.subject.tracked and 0 < reached < span.count:  # or else it is the state itself
            return (span, ""), (replace(span, count=reached, nodes=span.nodes[:reached]), under)
        return ((span, ""),)

    def _commit(self, span: RowSpan) -> Iterator[Task]:
        """The draft head over the accepted nodes, whose rows the verify has."""
        context, forward, name = self.context, self.context.earlier.forward, span.request
        drafts = self.config.mtp_layers or self.config.block
        if not drafts or not self.whole or forward is None:
            return
        final = self._fed(forward.subject, forward.spans[name])
        if final is not None and self.config.block is not None:
            yield from self._context(span, final[list(span.nodes)])
        elif final is not None:
            event = cast(Commit, context.event)
            path = paths(context, event)[event.requests.index(name)]
            tokens = [forward.windows[name][node] for node in path.nodes] + [path.bonus]
            yield from self._layers(span, tokens, final[list(span.nodes)], forward.subject.before[name])

    # -- the draft head ----------------------------------------------------------------------------------

    def _extend(self, span: RowSpan) -> Iterator[Task]:
        context, name = self.context, span.request
        span_of_trunk = next(other for other in row_spans(context, "trunk") if other.request == name)
        hidden = self._fed(context.subject, span_of_trunk)
        if hidden is not None and self.config.block is not None:
            yield from self._context(span, hidden)
        if hidden is None or self.config.block is not None:
            return
        root = context.expected.roots_after[name]
        known = (*context.expected.prompts[name], *(() if root is None else (root,)))
        tokens = list(known[span.start + 1 :]) if span.kind == "prefill" else [cast(int, root)]
        bare = rows(context.subject, Place("trunk", len(self.config.layers) - 1, "hidden"), span_of_trunk)
        others = [] if bare is None else [(BEFORE_NORM.known("the target's rows", "the"), bare)]
        others.append((SHIFTED.known(), hidden.roll(1, 0)))
        yield from self._layers(span, tokens, hidden, context.subject.before[name], others)

    def _load(self, span: RowSpan, name: str) -> Iterator[Task]:
        """The last rows of a prefix, with the tokens that follow in the prompt of the request that loads it."""
        kept = self.context.earlier.saved.get(name)
        if kept is None or kept.state.final is None or kept.state.length != span.start + span.count:
            return  # T0 reports it
        tokens = list(self.context.expected.prompts[span.request][span.start + 1 :])
        final = torch.cat((*kept.state.tail.values(), kept.state.final[None]))
        yield from self._layers(span, tokens, final, kept.state)

    def _layers(
        self, span: RowSpan, following: list[int], hidden: torch.Tensor, before: RequestState,
        others: Sequence[tuple[WrongContent, torch.Tensor]] = (),
    ) -> Iterator[Task]:
        """All MTP layers of a draft extend.

        Layer i is i tokens ahead; the last of these tokens are picks of earlier layers. It reads the rows of these
        layers as far as they have a step for it, and the target's rows otherwise.
        """
        context, fed, tokens = self.context, hidden, following
        for layer in range(self.config.mtp_layers):
            stage = draft_stage(layer)
            mine = next(other for other in row_spans(context, stage) if other.request == span.request)
            mine = replace(mine, nodes=span.nodes)
            yield from self._head(mine, stage, tokens[layer : layer + mine.count], fed, before, others, layer=layer)
            y, picks = (rows(context.subject, Place(stage, AFTER_LAYERS, name), mine) for name in ("final", "pick"))
            if y is None or (picks is None and mine.logit_rows):
                return  # T0 reports it
            if len(tokens) == layer + mine.count and picks is not None:
                tokens = [*tokens, *picks.tolist()]
            chained = layer + 1 < context.expected.num_steps
            fed, stale = (y, hidden) if chained else (hidden, y)
            others = [(STALE_ROWS.known("the target" if chained else f"MTP layer {layer}"), stale)]

    def _draft(self, event: Draft) -> Iterator[SpanPlan]:
        """Chain steps: a row reads the token of its node and the output of its parent, in a chain the previous step."""
        context, answer = self.context, self.context.subject.answer
        assert isinstance(answer, Drafted)
        for i in range(1, answer.drafts.shape[1] if context.expected.topk is None else context.expected.num_steps):
            for span in row_spans(context, stage := f"chain.{i}"):
                tree = head_tree(context, span.request, answer.drafts[event.requests.index(span.request)].tolist())
                node, before = (*span.nodes, i)[0], context.subject.before[span.request]
                if tree is None or node >= len(tree.parents):
                    continue  # T0 reports it, or its beams are closer than rounding
                line, token = lines(tree.parents)[node], tree.tokens[node - 1]
                fed = _row_of_parent(context, span, line)
                if fed is not None:
                    known = _rows_of_mistakes(context, span, line, len(tree.parents))
                    yield SpanPlan(span, stage, tuple(self._head(span, stage, [token], fed, before, known, line=line)))

    def _head(
        self, span: RowSpan, stage: str, tokens: list[int], hidden: torch.Tensor, before: RequestState,
        others: Sequence[tuple[WrongContent, torch.Tensor]] = (), *, layer: int = 0, line: Sequence[int] = (),
    ) -> Iterator[Task]:
        """One MTP layer: row p reads hidden row p and token p + 1; earlier keys are the subject's own.

        line: for a draft step, the nodes from the root to its own, whose rows are in scratch memory.
        others: known mistakes, and the hidden rows that each reads.
        """
        if len(tokens) != span.count or hidden.shape[0] != span.count:
            return
        wrongs = tuple((known, _input_of_head(tokens, rows, stage)) for known, rows in others)
        yield self._task(span, stage, STAGE_LEVEL, _input_of_head(tokens, hidden, stage), wrongs=wrongs)
        fused = rows(self.context.subject, Place(stage, STAGE_LEVEL, "fused"), span)
        if fused is None or fused.shape[0] != span.count:
            return
        scratch = [[_row_of_node(self.context, span, step, 0, name) for step in line[1:-1]]
                   for name in ("key", "value")]  # fmt: skip
        there = [[row for row in one if row is not None and len(row)] for one in scratch]
        if any(len(one) != len(line[1:-1]) for one in there):
            return
        keys, values = (
            torch.cat((cache[: span.start], *(entries(name, row, self.rounds) for row in one)))
            for name, one, cache in zip(
                ("key", "value"), there, (before.draft_keys[layer], before.draft_values[layer]), strict=True)
        )
        start = span.start + len(line[1:-1])
        yield self._task(span, stage, layer, LayerWork(stage, layer, fused, start, AttentionMemory(keys, values)))
        yield from self._answers(span, stage, layer)

    # -- both --------------------------------------------------------------------------------------------

    def _task(
        self, span: RowSpan, stage: str, layer: int, work: Work, chunk: torch.Tensor | None = None, wrongs: Wrongs = (),
    ) -> Task:
        """A task with the subject's rows of every place that it has to show."""
        context = self.context
        own = {
            place: mine for place in context.subject.places
            if (place.stage, place.layer) == (stage, layer) and due(context, place, span)
            and (mine := rows(context.subject, place, span)) is not None
        }
        return Task(span, stage, layer, work, own, chunk, wrongs)

    def _parents(self, span: RowSpan) -> tuple[int, ...] | None:
        """The parents of a window's nodes; None if each row follows the row before it."""
        return self.context.expected.tree(span.request) if span.kind == "verify" else None

    def _tokens(self, span: RowSpan) -> list[int]:
        return list(tokens_of(self.context, span))


def part_of(span: RowSpan, begin: int, end: int) -> RowSpan:
    """The rows `begin` to `end` of a span."""
    return replace(span, begin=span.begin + begin, start=span.start + begin, count=end - begin)


def _shown(place: Place, tensor: torch.Tensor, weights: Weights, see: See) -> None:
    see(place, tensor.to(weights.embedding))


def after_window(
    hidden: torch.Tensor, before: RequestState, layer: int, number: int, start: int, window: torch.Tensor,
    tokens: Sequence[int] = (),
) -> Work:
    """The layer up to its state, on the rows of a chunk that a conv window other than the memory's precedes."""
    return to_state(hidden, replace(before, conv={**before.conv, layer: window}), layer, number, start, tokens=tokens)


def state_before(before: RequestState, layer: int, start: int, device: torch.device) -> torch.Tensor:
    """The state before the step in fp64; zeros for a start of 0, whatever the memory holds."""
    state = before.state[layer].to(device, torch.float64)
    return state if start else torch.zeros_like(state)


def _embedded(weights: Weights, tokens: list[int], stage: str, see: See) -> None:
    trunk.embed(weights, torch.tensor(tokens, device=weights.embedding.device), see, stage)


def _input_of_head(tokens: list[int], hidden: torch.Tensor, stage: str) -> Work:
    """The ops before the head's layer: fc([norm(embedding of token p + 1) | norm(hidden p)])."""

    def work(weights: Weights, see: See) -> None:
        draft, eps = draft_of(weights), weights.config.drafter().eps
        ids = torch.tensor(tokens, device=weights.embedding.device)
        embedded = rms_norm(trunk.embed(weights, ids, see, stage), draft.norm_embedding, eps)
        embedded = see(Place(stage, STAGE_LEVEL, "normed"), embedded)
        fed = rms_norm(hidden.to(weights.embedding), draft.norm_hidden, eps)
        fed = see(Place(stage, STAGE_LEVEL, "post_normed"), fed)
        joined = see(Place(stage, STAGE_LEVEL, "joined"), torch.cat((embedded, fed), -1))
        see(Place(stage, STAGE_LEVEL, "fused"), joined @ draft.fc.T)

    return work


def _row_of_node(context: EventContext, span: RowSpan, node: int, layer: int, component: str) -> torch.Tensor | None:
    """A request's row at another node of the same draft. A step has rows only for requests that run it."""
    stage = f"chain.{step_of(context, node)}"
    mine = next((other for other in row_spans(context, stage)
                 if other.request == span.request and other.nodes in ((), (node,))), None)  # fmt: skip
    return None if mine is None else rows(context.subject, Place(stage, layer, component), mine)


def _row_of_parent(context: EventContext, span: RowSpan, line: Sequence[int]) -> torch.Tensor | None:
    """The head's own y from which a row continues; line: the nodes from the root to its own."""
    if line[-2]:
        return _row_of_node(context, span, line[-2], AFTER_LAYERS, "final")
    row = context.subject.before[span.request].proposal_hidden
    return None if row is None else row[None]


def _rows_of_mistakes(
    context: EventContext, span: RowSpan, line: Sequence[int], nodes: int
) -> list[tuple[WrongContent, torch.Tensor]]:
    """The rows that known mistakes would read; nodes: of the head's tree."""
    grows, right = context.expected.topk is not None, _spelled(context, line[-2])
    others = [node for node in range(1, nodes) if node not in line] if grows else []
    stale = [(STALE_STEP.known(_spelled(context, node), right),
              _row_of_parent(context, span, (node, -1))) for node in (*line[:-2], *others)]  # fmt: skip
    bare = BEFORE_NORM.known("the head's row", "its"), _row_of_node(context, span, line[-2], 0, "hidden")
    return [(known, row) for known, row in (*stale, bare) if row is not None]


def _spelled(context: EventContext, node: int) -> str:
    """A row of the draft head in words."""
    topk = context.expected.topk
    return f"step {node}" if topk is None or not node else (
        f"step {step_of(context, node)}, beam {(node - 1) % topk}")
