"""Assign the rows of a stage to requests: taken from the trace, never from an engine.

If the engine assigned the rows, every check would repeat a wrong gather. A subject does not have to show all rows: no
component inside a fused op, and updates of the delta rule only for the rows of a verify in engines whose rings keep
them. The reference shows the update of every token, so a context's copy is reduced to the rows that the subject has to
show. Rows of other requests in the same forward are zeros there. Leaves out: the contents of the rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from instep_reference.contract.engine import Commit, Committed, Draft, Drafted, Forward, Path, Region, RequestState
from instep_reference.contract.event_facts import committed_paths, restores
from instep_reference.contract.place_names import AFTER_LAYERS, Place, draft_stage

from ..player import Side
from .event_context import EventContext, RowSpan
from .grown_tree import grown_of


def row_spans(context: EventContext, stage: str) -> list[RowSpan]:
    """The rows of `stage` in batch order; empty when the event has no such stage."""
    event, family = context.event, stage.partition(".")[0]
    if isinstance(event, Forward):
        return _pack(_of_forward(context, event, stage)) if family in ("trunk", "extend") else []
    if isinstance(event, Commit):
        return _pack(_of_commit(context, event)) if family == "extend" else []
    kept = getattr(event, "name", "")
    blocks = (name := restores(event)) and context.truth.after[name].block_keys  # a load computes no row of them
    if name and family == "extend" and kept in context.expected.prefixes and not blocks:
        # With its own next tokens these are rows of its prompt.
        length = context.expected.prefixes[kept]
        count = min(length, max(1, len(context.truth.after[name].draft_keys)))
        return _pack([(name, "prefill", count, length - count, int(_fills(context, name, stage)), ())])
    if isinstance(event, Draft) and family == "block":  # the root and every draft; the root's choice is not used
        lengths = context.expected.lengths_after
        widths = {name: len(context.expected.parents[name]) for name in event.requests}
        return _pack([(name, "draft", widths[name], lengths[name], widths[name], ()) for name in event.requests])
    if isinstance(event, Draft) and family == "chain":
        step, expected = int(stage.partition(".")[2]), context.expected  # drafts without children have no row
        if expected.topk is not None:
            first, topk = 1 + (step - 1) * expected.topk, expected.topk
            beams = [(node,) for node in range(first, first + topk)] if step else [()]
            return _pack([(name, "draft", 1, expected.lengths_after[name], 1, nodes)
                          for name in event.requests for nodes in beams])  # fmt: skip
        return _pack([(name, "draft", 1, expected.lengths_after[name], 1, ()) for name in event.requests
                      if step in expected.parents[name]])  # fmt: skip
    return []


def paths(context: EventContext, event: Commit) -> list[Path]:
    """The accepted paths: the trace's, or the truth's own when the trace leaves them free."""
    if event.accepted is not None:
        return list(committed_paths(event))
    answer = context.truth.answer
    assert isinstance(answer, Committed)
    index, bonus = answer.accept_index.tolist(), answer.bonus.tolist()
    return [
        Path(tuple(node for node in row[1:] if node >= 0), token) for row, token in zip(index, bonus, strict=True)
    ]


def rows(side: Side, place: Place, span: RowSpan) -> torch.Tensor | None:
    """This request's rows of a place, or None when the side has no such place; missing rows stay missing."""
    tensor = side.places.get(place)
    if tensor is None:
        return None
    begin, count = span.at(place)
    return tensor[begin : begin + count]


def in_batch_order(context: EventContext, owners: Mapping[str, int]) -> dict[Place, torch.Tensor]:
    """The subject's places with the rows of the batch in order, if each replica showed the rows of its own requests."""
    found = dict(context.subject.places)
    for place, tensor in found.items():
        spans = row_spans(context, place.stage)
        extents = [(owners.get(span.request, 0), *span.at(place)) for span in spans]
        if not spans or sum(count for _, _, count in extents) != len(tensor):
            continue
        begins, end = dict[int, int](), 0  # span -> its first row, replica after replica
        for number in sorted(range(len(spans)), key=lambda n: extents[n][0]):
            begins[number], end = end, end + extents[number][2]
        rows = [begins[n] + row for n, (_, _, count) in enumerate(extents) for row in range(count)]
        found[place] = tensor[torch.tensor(rows, dtype=torch.int64)]
    return found


def field_of(place: Place, state: RequestState) -> str:
    """The field of this state for a component of memory."""
    side = "block" if state.block_keys else "draft"
    return place.component if place.stage == "trunk" else f"{side}_{place.component}"


def whose(context: EventContext, place: Place, row: int) -> str | None:
    """The request that a row of a place belongs to; None: it has no owner."""
    for span in row_spans(context, place.stage):
        begin, count = span.at(place)
        if begin <= row < begin + count:
            return span.request
    return None


def parted(context: EventContext, stage: str, span: RowSpan) -> bool:
    """Whether subject and truth run this step of a draft on different tokens, after free picks or a layer's own."""
    family, _, number = stage.partition(".")
    if family == "extend":
        picks = [Place(draft_stage(layer), AFTER_LAYERS, "pick") for layer in range(int(number or 0))]
        said = [[side.places.get(place) for place in picks] for side in (context.subject, context.truth)]
        return any(
            one is not None and other is not None and not torch.equal(one, other)
            for one, other in zip(*said, strict=True)
        )
    if family != "chain":
        return False
    if context.expected.topk is not None:
        return _other_beams(context, span)
    ours, right = context.subject.answer, context.truth.answer
    if not (isinstance(ours, Drafted) and isinstance(right, Drafted)):
        return False
    assert isinstance(context.event, Draft)
    row, step = context.event.requests.index(span.request), int(stage.partition(".")[2])
    return ours.drafts[row, :step].tolist() != right.drafts[row, :step].tolist()


def _other_beams(context: EventContext, span: RowSpan) -> bool:
    """Whether the sides run a row of a grown tree after different tokens."""
    sides = (side for side in (context.subject, context.truth, context.rounded) if side is not None)
    growths = [grown_of(context, side, span.request) for side in sides]
    paths = {None if one is None or any(node >= len(one.parents) for node in span.nodes)
             else tuple(map(one.path, span.nodes)) for one in growths}  # fmt: skip
    return len(paths) > 1 or None in paths


_Piece = tuple[str, Literal["prefill", "verify", "decode", "commit", "draft"], int, int, int, tuple[int, ...]]


def _of_forward(context: EventContext, event: Forward, stage: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    for row in event.rows:
        after = context.expected.lengths_after[row.request]
        if row.kind == "verify":
            count = len(context.expected.windows[row.request])
            if stage == "trunk":
                pieces.append((row.request, "verify", count, after, count, ()))
            continue
        rooted = row.kind == "decode" or context.expected.roots_after[row.request] is not None
        count = row.tokens if row.kind == "prefill" else 1
        logit_rows = rooted or _fills(context, row.request, stage)
        pieces.append((row.request, row.kind, count, after - count, int(logit_rows), ()))
    return pieces


def _fills(context: EventContext, request: str, stage: str) -> bool:
    """Whether an MTP layer picks inside a prompt, because the next layer, which reads one token further, has none."""
    family, _, number = stage.partition(".")
    layer, layers = int(number or 0), len(context.truth.after[request].draft_keys)
    behind = len(context.expected.prompts[request]) - context.expected.lengths_after[request] - 1
    return family == "extend" and layer + 1 < layers and behind <= layer


def _of_commit(context: EventContext, event: Commit) -> list[_Piece]:
    pieces: list[_Piece] = []
    for name, path in zip(event.requests, paths(context, event), strict=True):
        nodes = (0, *path.nodes)
        after = context.expected.lengths_after[name]
        pieces.append((name, "commit", len(nodes), after - len(nodes), 1, nodes))
    return pieces


def _pack(pieces: list[_Piece]) -> list[RowSpan]:
    packed: list[RowSpan] = []
    begin = logit_begin = 0
    for request, kind, count, start, logit_rows, nodes in pieces:
        packed.append(RowSpan(request, kind, begin, count, start, logit_begin, logit_rows, nodes))
        begin, logit_begin = begin + count, logit_begin + logit_rows
    return packed


def tokens_of(context: EventContext, span: RowSpan) -> tuple[int, ...]:
    """The tokens of a request's rows of the target."""
    if span.kind == "verify":
        return context.expected.windows[span.request]
    if span.kind == "prefill":
        return context.expected.prompts[span.request][span.start : span.start + span.count]
    root = context.truth.before[span.request].root
    assert root is not None, "a request decodes its root"
    return (root,)


UPDATE = "update"  # the component


def kept(regions: Sequence[Region]) -> bool:
    """Whether an engine with these pools keeps updates."""
    return any(region.means is not None and region.means.keeps == UPDATE for region in regions)


def due(context: EventContext, place: Place, span: RowSpan) -> bool:
    """Whether the subject has to show these rows of a place."""
    return context.shown.place(place) and (place.component != UPDATE or (context.updates and span.kind == "verify"))


def cut_down(context: EventContext) -> EventContext:
    """The context reduced, on every side, to the rows that the subject has to show."""
    verified = [span for span in row_spans(context, "trunk") if context.updates and span.kind == "verify"]
    inside, rounded = context.shown.inside, context.rounded
    return replace(
        context, subject=_side(context.subject, verified, inside), truth=_side(context.truth, verified, inside),
        rounded=None if rounded is None else _side(rounded, verified, inside))


def _side(side: Side, verified: Sequence[RowSpan], inside: Collection[str]) -> Side:
    places: dict[Place, torch.Tensor] = {}
    for place, tensor in side.places.items():
        if place.component in inside:
            continue
        if place.component != UPDATE:
            places[place] = tensor
        elif verified:
            places[place] = torch.zeros_like(tensor)
            for span in verified:
                rows = slice(span.begin, span.begin + span.count)
                places[place][rows] = tensor[rows]
    return replace(side, places=places)
