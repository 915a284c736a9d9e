"""T0: the right CUDA graph is replayed, its buffers have the inputs of this event, and no address has changed.

The right bucket and key follow from the requests, step count and slots of the trace. Without graphs only addresses are
compared. Leaves out: the results of a replay, which all other checks see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep_reference.contract.engine import Draft, Event, Forward
from instep_reference.contract.event_facts import facts, kind_of, named

from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.event_log import GraphReplay
from .check_interface import NOWHERE, TellsOnce, said_of

KINDS = ("verify", "decode")  # kinds of rows that graphs serve, each alone or both together


class Graphs(TellsOnce):
    """Keys, buckets, input buffers, addresses."""

    name = "graphs"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        super().__init__()
        self.pools: dict[tuple[str, int], int] = {}
        self.buffers: dict[tuple[Any, int], tuple[int, ...]] = {}

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        yield from self._pools(context)
        if not context.log.graphs:
            if not context.log.ops:
                yield from self.once(context, "instep does not see the CUDA graphs of this engine")
            return
        blocks = any(state.block_keys for state in context.truth.before.values())
        key, requests = due(context.event, context.expected.num_steps, context.expected.topk, blocks=blocks)
        replays = context.log.replays
        yield said_of(self, context, NOWHERE, 1, [*_which(key, requests, replays)])
        for replay in replays:
            said = [*_inputs(replay), *_slots(context, replay, requests), *_kinds(context, replay)]
            elements = sum(len(own) for _, own, _ in replay.inputs.values())
            yield said_of(self, context, NOWHERE, elements, said)
            were = self.buffers.setdefault((replay.key, replay.bucket), replay.addresses)
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


def due(
    event: Event, num_steps: int, topk: int | None = None, *, blocks: bool = False
) -> tuple[tuple[str, int] | None, tuple[str, ...]]:
    """The key of the graph that serves an event, and its requests in batch order; None if no graph does.

    blocks: a block drafter drafts, whose graphs hold windows of any width
    """
    if not facts(event).batch:
        return None, ()
    kinds = {row.kind for row in event.rows} if isinstance(event, Forward) else {kind_of(event)}
    # No graph contains a prompt, or rows that run in one batch with a prompt.
    kind = " and ".join(KINDS) if kinds == set(KINDS) else kinds.pop() if len(kinds) == 1 else "prefill"
    held = kind != "prefill" and bool(named(event)) and (num_steps > 0 or kind != "draft")
    if isinstance(event, Forward) and any(row.uniforms for row in event.rows):
        kind = f"sampled {kind}"  # a separate graph, so that other batches run no extra op
    shapes = set(event.parents or ()) if isinstance(event, Draft) and topk is None and not blocks else set()
    if shapes - {tuple(range(num_steps))}:
        kind = "shaped draft"  # chains of the step count have separate graphs
    return (kind, num_steps) if held else None, named(event)


def _which(key: tuple[str, int] | None, requests: tuple[str, ...], replays: tuple[GraphReplay, ...]) -> Iterator[str]:
    if key is None:
        for replay in replays:
            yield f"the graph {replay.key} was replayed; this event replays none"
        return
    if len(replays) != 1:
        yield f"{len(replays)} graphs were replayed; the event is one replay of {key}"
    for replay in replays:
        if tuple(replay.key) != key:
            yield f"the graph {replay.key} was replayed; the event is one of {key}"
        if replay.rows != len(requests):
            yield f"the graph was replayed for {replay.rows} requests; the event has {len(requests)}"
        right = min((bucket for bucket in replay.buckets if bucket >= len(requests)), default=0)
        if replay.bucket != right:
            yield f"the bucket is for {replay.bucket} requests; for {len(requests)} it is the one for {right}"


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
    found = replay.inputs["slots"][1][: len(requests)]
    right = [context.expected.slots_after.get(name) for name in requests]
    for name, slot, due_slot in zip(requests, found, right, strict=False):
        if slot != due_slot:
            yield f'the graph serves request "{name}" in slot {slot}; the trace has it in slot {due_slot}'


def _kinds(context: EventContext, replay: GraphReplay) -> Iterator[str]:
    """In a batch of windows and decodes, each request is served as its kind in the trace, and not as both kinds."""
    found, event = replay.inputs.get("kinds", ([], [], -1))[1], context.event
    if not isinstance(event, Forward) or not any(found):
        return
    for row, slots in zip(event.rows, found, strict=False):
        due_slot = context.expected.slots_after.get(row.request)
        for kind, slot in zip(KINDS, slots, strict=False):
            right = due_slot if kind == row.kind else -1
            if slot != right:
                yield f'the graph has slot {slot} for a {kind} of request "{row.request}"; the trace has {right}'
