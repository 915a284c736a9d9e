"""T0: a graph is replayed when one should be, on buffers that say what this event says, and nothing has moved.

Leaves out: what a replay computes, which every other check sees. Requests, step count and slots come from the trace:
which bucket and which key are right follows from them. Without graphs only addresses are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep_reference.contract.engine import Draft, Event, Forward
from instep_reference.contract.event_facts import facts, kind_of, named

from ..observe.context import EventContext
from ..observe.event_log import GraphReplay
from ..verdict import Comparison, Skipped, Tier
from .base import NOWHERE, said_of

KINDS = ("verify", "decode")  # kinds of rows that graphs serve, each alone or both together


class Graphs:
    """Keys, buckets, input buffers, addresses."""

    name = "graphs"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        self.pools: dict[tuple[str, int], int] = {}
        self.buffers: dict[tuple[Any, int], tuple[int, ...]] = {}
        self.said = False

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        yield from self._pools(context)
        if not context.log.graphs:
            if not (context.log.ops or self.said):
                yield Skipped(self.name, context.index, "nobody sees whether somebody else's engine is held in graphs")
            self.said = True
            return
        key, requests = due(context.event, context.expected.num_steps, context.expected.topk)
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
        """What a graph or a view holds on to is where it was."""
        now = {(region.name, region.layer): region.units.data_ptr() for region in context.regions()}
        moved = [f"{name} (layer {layer}) moved" for (name, layer), address in now.items()
                 if self.pools.get((name, layer), address) != address]  # fmt: skip
        self.pools |= now
        if now:
            yield said_of(self, context, NOWHERE, len(now), moved)


def due(
    event: Event, num_steps: int, topk: int | None = None
) -> tuple[tuple[str, int] | None, tuple[str, ...]]:
    """The key of the graph that serves an event, and its requests in batch order; None where none does."""
    if not facts(event).batch:
        return None, ()
    kinds = {row.kind for row in event.rows} if isinstance(event, Forward) else {kind_of(event)}
    # No graph holds a prompt, or what runs beside one.
    kind = " and ".join(KINDS) if kinds == set(KINDS) else kinds.pop() if len(kinds) == 1 else "prefill"
    held = kind != "prefill" and bool(named(event)) and (num_steps > 0 or kind != "draft")
    if isinstance(event, Forward) and any(row.uniforms for row in event.rows):
        kind = f"sampled {kind}"  # a graph of its own: all other batches run no op more
    shapes = set(event.parents or ()) if isinstance(event, Draft) and topk is None else set()
    if shapes - {tuple(range(num_steps))}:
        kind = "draft of trees"  # chains alone have their own
    return (kind, num_steps) if held else None, named(event)


def _which(key: tuple[str, int] | None, requests: tuple[str, ...], replays: tuple[GraphReplay, ...]) -> Iterator[str]:
    if key is None:
        for replay in replays:
            yield f"the graph {replay.key} was replayed; nothing of this event is held in one"
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
    """Every row of a graph's own buffers says what the host said, or that it is idle."""
    for name, (given, own, idle) in replay.inputs.items():
        stale = [row for row in range(len(given)) if own[row] != given[row]]
        if stale:
            row = stale[0]
            yield f"{name} of row {row} is {own[row]} in the graph's buffer; this event says {given[row]}"
        padding = [row for row in range(len(given), len(own)) if not _idle(own[row], idle)]
        if padding:
            row = padding[0]
            yield f"{name} of padding row {row} is {own[row]}; an idle row says {idle}"


def _idle(value: Any, idle: Any) -> bool:
    return all(one == idle for one in value) if isinstance(value, list) else bool(value == idle)


def _slots(context: EventContext, replay: GraphReplay, requests: tuple[str, ...]) -> Iterator[str]:
    """The slots of the batch are those that the trace gives its requests."""
    if "slots" not in replay.inputs:
        return
    found = replay.inputs["slots"][1][: len(requests)]
    right = [context.expected.slots_after.get(name) for name in requests]
    for name, slot, due_slot in zip(requests, found, right, strict=False):
        if slot != due_slot:
            yield f'the graph serves request "{name}" in slot {slot}; the trace has it in slot {due_slot}'


def _kinds(context: EventContext, replay: GraphReplay) -> Iterator[str]:
    """Where windows stand beside decodes, each request is served as the trace has it, and not as the other kind too."""
    found, event = replay.inputs.get("kinds", ([], [], -1))[1], context.event
    if not isinstance(event, Forward) or not any(found):
        return
    for row, slots in zip(event.rows, found, strict=False):
        due_slot = context.expected.slots_after.get(row.request)
        for kind, slot in zip(KINDS, slots, strict=False):
            right = due_slot if kind == row.kind else -1
            if slot != right:
                yield f'the graph has slot {slot} for a {kind} of request "{row.request}"; the trace has {right}'
