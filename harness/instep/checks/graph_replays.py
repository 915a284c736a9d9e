"""T0: the right CUDA graph is replayed, its buffers have the inputs of this event, and no address has changed.

The right bucket and key follow from the requests, step count and slots of the trace. Without graphs only addresses are
compared. A forward with a prompt has segments between its GDN layers. Leaves out: the results of a replay, which all
other checks see.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from instep_reference.contract.engine import Commit, Draft, Forward
from instep_reference.contract.event_facts import facts, kind_of, named

from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.event_log import GraphReplay
from ..watch.rows_by_request import row_spans
from .check_interface import NOWHERE, TellsOnce, counted, said_of, verb

KINDS = ("verify", "decode")  # kinds of rows that graphs of rounds serve, each alone or both together
PROMPT = "prompt"  # key of a graph for a forward with a prompt; TREES if its windows may be trees
TREES = "prompt and trees"
EAGER = ("mixed", "core")  # every eager mixer has a convolution or a read-out of a state


@dataclass(frozen=True)
class Due:
    """The graph that serves an event. rows: those that are not padding: requests, or the packed rows of a prompt.

    most: rows of the replica with the most of them, in whose bucket all replicas of a group are
    """

    key: tuple[str, int]
    rows: int
    noun: str = "request"
    most: int = 0


class Graphs(TellsOnce):
    """Keys, buckets, input buffers, addresses."""

    name = "graphs"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        super().__init__()
        self.pools: dict[tuple[str, int], int] = {}
        self.buffers: dict[tuple[int, Any, int], tuple[int, ...]] = {}  # by stage, key, bucket

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        yield from self._pools(context)
        if not context.log.graphs:
            if not context.log.ops:
                yield from self.once(context, "instep does not see the CUDA graphs of this engine")
            return
        wanted, replays = due(context), context.log.replays
        served = [named(context.event)] * len(replays)
        if context.group is not None:
            owners, served = context.group.owners, list[tuple[str, ...]]()
            every = [tuple(name for name in named(context.event) if owners[name] == rank)
                     for rank in range(context.group.size)]  # fmt: skip
            for rank, names in enumerate(every):
                mine = [replay for replay in replays if replay.stage == rank]
                here = None if wanted is None else replace(
                    wanted, rows=max(1, len(names)), most=max(map(len, every)))  # an idle replica has one idle row
                said = [*_which(here, tuple(mine))]
                yield said_of(self, context, NOWHERE, 1, said, rank=rank if said else None)
                served += [names] * len(mine)
        elif context.stages is None:
            yield said_of(self, context, NOWHERE, 1, [*_which(wanted, replays)])
        else:
            served = list[tuple[str, ...]]()
            for stage in context.stages.here:
                mine = [replay for replay in replays if replay.stage == stage]
                for said in _of_stage(wanted, mine, context.stages.parts):
                    yield said_of(self, context, NOWHERE, 1, said, rank=stage if said else None)
                served += [*context.stages.parts, *[()] * len(mine)][: len(mine)]
        kept = [f"{name} is in memory of graphs, which the next replay overwrites" for name in context.log.in_graphs]
        yield said_of(self, context, NOWHERE, 1, kept)
        for replay, requests in zip(replays, served, strict=True):
            said = [*_inputs(replay), *_slots(context, replay, requests), *_kinds(context, replay, requests)]
            said += [*_prompt(context, replay), *_ran(context, replay)]
            if replay.freed:
                said.append(f"{counted(replay.freed, 'input')} of the graph {replay.key} for {replay.bucket} "
                            f"{verb(replay.freed, 'was', 'were')} freed after it was captured; "
                            "a replay reads what others write there")  # fmt: skip
            elements = sum(len(own) for _, own, _ in replay.inputs.values())
            of = replay.stage if said and (context.stages or context.group) is not None else None
            yield said_of(self, context, NOWHERE, elements, said, rank=of)
            were = self.buffers.setdefault((replay.stage, replay.key, replay.bucket), replay.addresses)
            moved = sum(was != now for was, now in zip(were, replay.addresses, strict=True))
            yield said_of(self, context, NOWHERE, len(were), [
                f"{moved} of {len(were)} buffers of the graph {replay.key} for {replay.bucket} requests moved"
            ] if moved else [])  # fmt: skip

    def _pools(self, context: EventContext) -> Iterator[Comparison]:
        """The memory that graphs and views point to has not moved."""
        now = {(region.name, region.layer): region.units.data_ptr() for region in context.regions}
        moved = [f"{name} (layer {layer}) moved" for (name, layer), address in now.items()
                 if self.pools.get((name, layer), address) != address]  # fmt: skip
        self.pools |= now
        if now:
            yield said_of(self, context, NOWHERE, len(now), moved)


def due(context: EventContext) -> Due | None:
    """The graph that serves an event; None if no graph does."""
    event, num_steps, topk = context.event, context.expected.num_steps, context.expected.topk
    blocks = any(state.block_keys for state in context.truth.before.values())  # such graphs hold windows of any width
    if not facts(event).batch:
        return None
    kinds = {row.kind for row in event.rows} if isinstance(event, Forward) else {kind_of(event)}
    if isinstance(event, Forward) and "prefill" in kinds:
        spans = row_spans(context, "trunk")
        rows = sum(span.count for span in spans)
        trees = "verify" in kinds and "parents" in {region.name.partition("@")[0] for region in context.regions}
        fits = any(rows <= bucket for bucket in context.log.prompt_buckets)
        return Due((TREES if trees else PROMPT, 0), rows, "row") if fits else None
    kind = " and ".join(KINDS) if kinds == set(KINDS) else kinds.pop()
    held = bool(named(event)) and (num_steps > 0 or kind != "draft")
    if isinstance(event, Forward) and any(row.uniforms for row in event.rows):
        kind = f"sampled {kind}"  # a separate graph, so that other batches run no extra op
    if isinstance(event, Commit) and event.caps:
        kind = "capped commit"  # as above
    shapes = set(event.parents or ()) if isinstance(event, Draft) and topk is None and not blocks else set()
    shapes = set() if context.expected.device_widths else shapes  # one graph serves every mix of widths
    if shapes - {tuple(range(num_steps))}:
        kind = "shaped draft"  # chains of the step count have separate graphs
    return Due((kind, num_steps), len(named(event))) if held else None


def _which(wanted: Due | None, replays: tuple[GraphReplay, ...]) -> Iterator[str]:
    if wanted is None:
        for replay in replays:
            yield f"the graph {replay.key} was replayed; this event replays none"
        return
    key, rows, noun = wanted.key, wanted.rows, wanted.noun
    if len(replays) != 1:
        yield f"{_replayed(replays)}; the event is one replay of {key}"
    for replay in replays:
        if tuple(replay.key) != key:
            yield f"the graph {replay.key} was replayed; the event is one of {key}"
        if replay.rows != rows:
            yield f"the graph was replayed for {replay.rows} {noun}s; the event has {rows}"
        most = max(rows, wanted.most)
        right = min((bucket for bucket in replay.buckets if bucket >= most), default=0)
        if replay.bucket != right:
            yield f"the bucket is for {replay.bucket} {noun}s; for {most} it is the one for {right}"


def _replayed(replays: Sequence[GraphReplay]) -> str:
    return f"{counted(len(replays), 'graph')} {verb(len(replays), 'was', 'were')} replayed"


def _of_stage(
    wanted: Due | None, replays: Sequence[GraphReplay], parts: Sequence[tuple[str, ...]]
) -> Iterator[list[str]]:
    """Compare the replays of one pipeline stage: one for each micro-batch, in order."""
    due = () if wanted is None else parts
    if len(replays) != len(due):
        yield [f"{_replayed(replays)}; {len(due)} micro-batches need one each"]
    elif wanted is None:
        yield []
    else:
        for replay, part in zip(replays, parts, strict=True):
            yield [*_which(replace(wanted, rows=len(part)), (replay,))]


def _inputs(replay: GraphReplay) -> Iterator[str]:
    """Compare every row of the graph's buffers with the host's inputs, or with an idle row."""
    for name, (given, own, idle) in replay.inputs.items():
        stale = [row for row in range(len(given)) if own[row] != given[row]]
        if stale:
            row = stale[0]
            yield f"{name} of row {row} is {own[row]} in the graph's buffer; this event has {given[row]}"
        padding = [row for row in range(len(given), len(own)) if not _idle(own[row], idle)]
        if padding:
            row = padding[0]
            yield f"{name} of padding row {row} is {own[row]}; an idle row has {idle}"


def _idle(value: Any, idle: Any) -> bool:
    return all(one == idle for one in value) if isinstance(value, list) else bool(value == idle)


def _slots(context: EventContext, replay: GraphReplay, requests: tuple[str, ...]) -> Iterator[str]:
    """Compare the slots of the batch with the slots in the trace."""
    if "slots" not in replay.inputs:
        return
    if context.group is not None and not requests and max(replay.inputs["slots"][1]) >= 0:
        yield (f"the graph serves slot {max(replay.inputs['slots'][1])} on a replica that has no request in this "
               "event")  # fmt: skip
    found = replay.inputs["slots"][1][: len(requests)]
    right = [context.expected.slots_after.get(name) for name in requests]
    for name, slot, due_slot in zip(requests, found, right, strict=False):
        if slot != due_slot:
            yield f'the graph serves request "{name}" in slot {slot}; the trace has it in slot {due_slot}'


def _prompt(context: EventContext, replay: GraphReplay) -> Iterator[str]:
    """Compare the tokens of prompts, and the rows of each request, with the trace."""
    if replay.key[0] not in (PROMPT, TREES) or not isinstance(context.event, Forward):
        return
    tokens, begins, counts = (replay.inputs[name][1] for name in ("tokens", "begin", "counts"))
    for number, span in enumerate(row_spans(context, "trunk")):
        if (begins[number], counts[number]) != (span.begin, span.count):
            yield (f'the graph has rows {begins[number]} to {begins[number] + counts[number] - 1} for request '
                   f'"{span.request}"; the trace has {span.begin} to {span.begin + span.count - 1}')  # fmt: skip
        if span.kind == "prefill":
            right = list(context.expected.prompts[span.request][span.start : span.start + span.count])
            found = tokens[span.begin : span.begin + span.count]
            if found != right:
                yield f'the graph has tokens {found} of the prompt of "{span.request}"; the trace has {right}'


def _ran(context: EventContext, replay: GraphReplay) -> Iterator[str]:
    """Compare the segments of a graph, and the eager calls between them, with the GDN layers of the model."""
    if replay.key[0] not in (PROMPT, TREES):
        return
    places = [place for place in context.truth.places if place.stage == "trunk"]
    # An embedding of n-grams runs eagerly too, before the mixer of its layer.
    layers = len({place.layer for place in places if place.component in EAGER})
    layers += sum(place.component == "ngrams" for place in places)
    right = [("segment", 0)]
    for layer in range(layers):
        right += [("eager", layer), ("segment", 1 + layer)]
    if list(replay.ran) != right:
        wrong = next((n for n, (one, due) in enumerate(zip(replay.ran, right, strict=False)) if one != due), None)
        if wrong is None:
            yield f"{len(replay.ran)} segments and eager calls ran; {layers} GDN layers need {len(right)}"
        else:
            yield (f"{' '.join(map(str, replay.ran[wrong]))} of the graph ran where {' '.join(map(str, right[wrong]))} "
                   "was due")  # fmt: skip


def _kinds(context: EventContext, replay: GraphReplay, requests: tuple[str, ...]) -> Iterator[str]:
    """In a batch of windows and decodes, each request is served as its kind in the trace, and not as both kinds."""
    if not isinstance(context.event, Forward) or "kinds" not in replay.inputs:
        return
    rows = (row for row in context.event.rows if row.request in requests)
    for row, slots in zip(rows, replay.inputs["kinds"][1], strict=False):
        due_slot = context.expected.slots_after.get(row.request)
        for kind, slot in zip(KINDS, slots, strict=False):
            right = due_slot if kind == row.kind else -1
            if slot != right:
                yield f'the graph has slot {slot} for a {kind} of request "{row.request}"; the trace has {right}'
