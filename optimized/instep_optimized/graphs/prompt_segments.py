"""Graphs of the target in forwards with prompts, by token bucket: segments between the eager mixers of GDN layers.

A prompt has any number of tokens, so a graph is captured for a bucket of packed rows. Rows after the last token are
padding: no request covers them, so they have no place in any pool, and their results are cut off. The first segment
computes positions, pages and tokens from the lengths and windows on the device, so that nothing of the forward in which
it was captured stays. The mixers get addresses of this forward alone. Leaves out: the mixers (`model/gdn.py`), the
forward's head, roots and draft extend (`forwards.py`), and recording (`capture_and_replay.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from instep_reference.contract.place_names import See

from ..commit.strategy_pair import BoundPair, Mixer
from ..forwards import Planned, RunTarget
from ..model import Model
from ..ops.op_protocols import Ops
from ..packed_batch import Batch, Nodes, TargetRows, Who, begins_of, node_rows, padded, picked_nodes, plan_of
from ..transfer.to_device import HOST, sent
from .capture_and_replay import Break, Recorder, Runner

CHAINS, TREES = "prompt", "prompt and trees"  # kinds of graphs; their keys have 0 where others have a step count


class PromptInputs(NamedTuple):
    """The host's inputs for a forward of B requests with N packed rows, [N] int64 each; the slot table has the rest.

    slots, begin, counts  of the requests, as in `Who`; the rows after the first B are idle
    tokens               of a prompt; -1: the token is in a window
    windows              index of the token among the flattened windows of the B requests; -1: it is of a prompt
    verified, width      of the requests with a window that may be a tree, one after the other: slot, packed rows
    nodes, chained       of such a row: its place among the nodes of these windows; of any other row: its number within
                         its request; else -1
    """

    slots: torch.Tensor
    begin: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    windows: torch.Tensor
    verified: torch.Tensor
    width: torch.Tensor
    nodes: torch.Tensor
    chained: torch.Tensor


IDLE = PromptInputs(-1, 0, 0, -1, -1, -1, 0, -1, -1)  # type: ignore[arg-type]  # the values in rows that pad a bucket


@dataclass
class Replaying:
    """The forward that is replayed: its ops, its addresses, and how many rows it has."""

    ops: Ops
    bound: BoundPair
    rows: int


class PromptGraphs:
    """The graphs of an engine for forwards with prompts.

    runner: keeps the graphs; its buckets are numbers of packed rows
    """

    def __init__(
        self, recorder: Recorder, buckets: Sequence[int], ops: Ops, model: Model, device: torch.device
    ) -> None:
        self.runner = Runner(recorder, buckets, device, breaks=True)
        self._ops, self._model = ops, model
        self._replaying: Replaying | None = None
        nobody = PromptInputs(*(torch.tensor([value]) for value in IDLE))
        for kind in (CHAINS, TREES)[: 1 + (model.memory.slot_table.parents is not None)]:
            self.runner.prepare((kind, 0), ops, self._body(kind), nobody, IDLE)

    def target(self, plan: Sequence[Planned], see: See) -> RunTarget | None:
        """Return the target of this forward in segments; None if it has more rows than the widest graph."""
        rows = sum(planned.span.count for planned in plan)
        if rows > self.runner.buckets[-1]:
            return None
        trees = self._model.memory.slot_table.parents is not None and any(p.span.kind == "verify" for p in plan)
        kind = TREES if trees else CHAINS

        def replay(ops: Ops, batch: Batch, bound: BoundPair) -> TargetRows:
            self._replaying = Replaying(ops, bound, rows)
            try:
                inputs = self._inputs(plan, rows)
                return TargetRows(*self.runner.run((kind, 0), self._ops, self._body(kind), inputs, IDLE, see))
            finally:
                self._replaying = None

        return replay

    def _inputs(self, plan: Sequence[Planned], rows: int) -> PromptInputs:
        memory, spans = self._model.memory, [p.span for p in plan]
        wide = memory.slot_table.window.shape[1]
        verified = [p for p in plan if p.span.kind == "verify"]
        prompts, windows = list[int](), list[int]()
        for number, p in enumerate(plan):
            count, prefill = p.span.count, p.span.kind == "prefill"
            prompts += p.request.prompt[p.begin : p.begin + count] if prefill else [-1] * count
            windows += [-1] * count if prefill else range(number * wide, number * wide + count)
        slots = [[memory.slots.of(p.span.request) for p in some] for some in (plan, verified)]
        parents = memory.slot_table.parents
        nodes = ([-1], [-1]) if parents is None else node_rows(spans, parents.shape[1])
        lists: list[list[int]] = [
            slots[0], begins_of(spans), [span.count for span in spans], prompts, windows,
            slots[1], [p.span.count for p in verified], *nodes,
        ]
        return PromptInputs(*sent([
            [*numbers, *[idle] * (rows - len(numbers))]  # type: ignore[list-item]
            for numbers, idle in zip(lists, IDLE, strict=True)
        ], HOST))

    def _body(self, kind: str) -> "_Body":
        return _Body(self, kind == TREES)


@dataclass(frozen=True)
class _Body:
    """The body of a graph: the target over a bucket of packed rows. trees: whether windows may be trees."""

    of: PromptGraphs
    trees: bool

    def __call__(self, ops: Ops, inputs: PromptInputs, between: Break) -> tuple[torch.Tensor, ...]:
        model, memory = self.of._model, self.of._model.memory
        table, bucket = memory.slot_table, len(inputs.slots)
        requests = slice(0, min(bucket, memory.none_fresh.numel()))  # there are no more requests than slots or rows
        slots = inputs.slots[requests]
        window = ops.select(x=table.window, index=slots).flatten()
        tokens = ops.choose(own=ops.select(x=window, index=inputs.windows), forced=inputs.tokens)
        nodes: Nodes | None = None
        if self.trees:
            plan = plan_of(ops, memory, inputs.verified[requests], inputs.width[requests])
            nodes = picked_nodes(ops, plan, inputs.nodes, inputs.chained)
        who = Who(slots, slots, inputs.begin[requests], inputs.counts[requests])
        # A request may have all rows: the graph does not know how many, so it is captured for the most.
        batch = padded(ops, memory, who, tokens, nodes, most=bucket)
        rows = model.trunk(ops, batch, _Broken(self.of, between))
        return (rows.final,) if rows.features is None else (rows.final, rows.features)


@dataclass(frozen=True)
class _Broken:
    """Ends a segment where a mixer runs (`Mixes`)."""

    of: PromptGraphs
    between: Break

    def mix(self, ops: Ops, mixer: Mixer, rows: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """Let the mixer run eagerly between two segments, on the rows of tokens; padding rows are zeros."""

        def eager(room: torch.Tensor) -> None:
            now = self.of._replaying
            assert now is not None, "only a replay runs eager calls"
            room[: now.rows].copy_(mixer(now.ops, now.bound, *(x[: now.rows] for x in rows)))
            room[now.rows :].zero_()

        return self.between(eager, like)
