"""The optimized engine: one method per event. It routes; what is computed stands behind the ops.

Leaves out: arithmetic (`ops/`), addresses (`commit/`, `batch.py`), the model (`model/`, `draft/`) and everything that
hangs on the step count (`round.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from instep_reference.contract.adaptive import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import (
    Capacity,
    Committed,
    Drafted,
    Event,
    Forwarded,
    Path,
    Region,
    RequestState,
    Row,
)
from instep_reference.contract.errors import BadInput, OutOfCapacity, Unsupported
from instep_reference.contract.place import See

from . import footprint
from .adaptive import Controller
from .batch import Span, begins_of, ints, pack
from .commit import STRATEGIES
from .commit.base import changes
from .draft import DRAFTERS
from .draft.extend import Advance, extend
from .landing import land
from .memory import Memory
from .memory.budget import Sizes, check_room, demands
from .memory.saved import Kept, copied, read, write
from .model.trunk import STAGE, Trunk
from .ops.around import around
from .ops.base import Ops
from .options import Options, check
from .request import Flight, Request, logical, roots
from .round import Round
from .rows import asked, asked_rows, shifted, spans_of
from .weights import Stored


class OptimizedEngine:
    """Implements `Engine`, `Inspectable` and `Watched` of the contract. `messages`: what was changed on the way in."""

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, options: Options, capacity: Capacity, *, num_steps: int,
        adaptive: AdaptiveFile | None = None,
    ) -> None:
        config = checkpoint.config
        check(options, config)
        self._device = torch.device(options.device)
        self._base = self._ops = ops
        self._capacity, self._vocab = capacity, config.vocab
        self._controller = Controller(num_steps, adaptive)
        self.messages = tuple(self._controller.messages)
        widest = self._controller.candidates[-1] + 1
        check_room(capacity, widest)
        sizes = Sizes(ops.types(options.activation, options.state), options.layout, capacity, widest)
        strategy = STRATEGIES[options.strategy]
        self._memory = Memory(
            demands(config, sizes) + strategy.demands(config, sizes), capacity,
            guarded=options.guarded, poison=options.poison, device=self._device,
        )
        stored = Stored(checkpoint.tensors, options.activation, self._device)
        self._trunk = Trunk.of(stored, config, self._memory)
        self._drafter = (
            DRAFTERS[config.model_type, options.drafter](stored, config, self._trunk.head, self._memory)
            if config.mtp_layers else None
        )
        self._rounds = {
            steps: Round(steps, strategy.make(self._memory, steps + 1), len(capacity.slots), self._device)
            for steps in self._controller.candidates
        }
        self._round = self._rounds[num_steps]
        self._requests: dict[str, Request] = {}
        self._preempted: dict[str, tuple[Request, Kept]] = {}
        self._saved: dict[str, tuple[Request, Kept]] = {}

    # Events

    def admit(self, request: str, prompt: tuple[int, ...]) -> None:
        wrong = [token for token in prompt if not 0 <= token < self._vocab]
        if wrong or not prompt:
            found = f"token {wrong[0]}" if wrong else "no token"
            raise BadInput(f"prompt of {request!r}", found=found, expected=f"tokens from 0 to {self._vocab - 1}")
        self._memory.claim(request)
        self._requests[request] = Request(request, prompt, ints(prompt, self._device))

    def draft(
        self, requests: tuple[str, ...], picks: tuple[tuple[int, ...], ...] | None = None,
        parents: tuple[tuple[int, ...], ...] | None = None,
    ) -> Drafted:
        if parents is not None and any(list(tree) != list(range(len(tree))) for tree in parents):
            raise Unsupported("drafts that form a tree: this engine verifies chains")
        if self._drafter is None and picks is None:
            raise Unsupported("this model has no draft head: drafts must be given")
        drafted = [self._requests[name] for name in requests]
        if not drafted or not self._round.num_steps:
            empty = torch.zeros(len(drafted), self._round.num_steps, dtype=torch.int64, device=self._device)
            return Drafted(empty, empty.clone())
        self._memory.pages.grow(footprint.draft_wants(requests, self._requests, self._round.num_steps))
        return self._round.draft(self._ops, self._drafter, self._memory, drafted, picks)

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        if not rows:
            return Forwarded({}, {})
        self._make_room(rows)
        spans = spans_of(rows, self._requests)
        final = self._trunk(self._ops, pack(spans, self._memory), self._round.commit)
        counts = [asked(span, self._requests[span.request]) for span in spans]
        picks = self._picks(spans, final)
        advances: list[Advance] = []
        for row, span, begin, pick in zip(rows, spans, begins_of(spans), torch.split(picks, counts), strict=True):
            request, hidden = self._requests[row.request], final[begin : begin + span.count]
            if row.kind == "verify":
                request.flight = Flight(span.tokens, pick, hidden, span.row)
                continue
            request.length += span.count
            if len(pick):
                request.root = pick if row.root is None else ints([row.root], self._device)
            advances.append(Advance(request, span.before, shifted(span, request), hidden))
        self._extend(advances)
        self._controller.decoded(sum(row.kind == "decode" for row in rows))
        # A copy: what the caller does with an answer changes nothing here.
        said = zip(rows, torch.split(picks.clone(), counts), strict=True)
        own = {row.request: pick for row, pick in said if len(pick)}
        return Forwarded(roots([advance.request for advance in advances]), own)

    def commit(self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None) -> Committed:
        landed = [self._requests[name] for name in requests]
        answer = land(self._ops, self._round.commit, self._memory, landed, accepted, self._device)
        # The one host read of a commit: how many tokens each request advances.
        counts = answer.num_correct_drafts.tolist()
        advances, chosen = [], answer.bonus.clone()
        for number, (request, count) in enumerate(zip(landed, counts, strict=True)):
            flight = request.flight
            assert flight is not None
            bonus = chosen[number : number + 1]
            tokens = torch.cat([flight.tokens[1 : count + 1], bonus])
            advances.append(Advance(request, request.length, tokens, flight.final[: count + 1]))
            request.length += count + 1
            request.root, request.drafts, request.flight = bonus, None, None
        self._extend(advances)
        self._controller.committed(counts)
        return answer

    def set_num_steps(self, num_steps: int) -> None:
        self._controller.set(num_steps)
        self._round = self._rounds[num_steps]

    def next_num_steps(self) -> int:
        return self._controller.wish()

    def save(self, request: str, name: str) -> None:
        self._saved[name] = self._kept(request)

    def load(self, request: str, name: str) -> None:
        kept, memory = self._saved[name]
        if kept.prompt != self._requests[request].prompt:
            raise BadInput(f"load of {name!r}", found=f"another prompt in {request!r}", expected="the prompt it has")
        self._restore(replace(kept, name=request), memory)

    def preempt(self, request: str) -> None:
        self._preempted[request] = self._kept(request)
        self._end(request)

    def resume(self, request: str) -> None:
        kept, memory = self._preempted[request]
        self._memory.claim(request, kept.length)
        self._restore(kept, memory)
        del self._preempted[request]

    def finish(self, request: str) -> None:
        self._end(request)

    def abort(self, request: str) -> None:
        if self._preempted.pop(request, None) is None:
            self._end(request)

    def idle(self) -> None:
        return None

    # What it shows; asking changes nothing

    def state(self, request: str) -> RequestState:
        if request in self._preempted:
            kept, memory = self._preempted[request]
            return logical(kept, copied(memory))
        return logical(*self._kept(request))

    def regions(self) -> list[Region]:
        return self._memory.regions()

    def may_change(self, event: Event) -> dict[str, set[int]]:
        saved, preempted = (
            {name: kept.length for name, (kept, _) in aside.items()} for aside in (self._saved, self._preempted)
        )
        touches = footprint.touches(event, self._requests, saved, preempted, self._round.num_steps, self._memory)
        found = changes(self._round.commit.may, touches)
        return {name: units for name, units in found.items() if name in self._memory.pools}

    def slots(self) -> dict[str, int]:
        return self._memory.slots.owned()

    def pages(self) -> dict[str, list[int]]:
        return self._memory.pages.owned()

    def watch(self, see: See) -> None:
        self._ops = around(self._base, see)

    # Between the events

    def _make_room(self, rows: Sequence[Row]) -> None:
        tokens = footprint.tokens_of(rows, self._requests)
        if tokens > self._capacity.max_tokens:
            raise OutOfCapacity(f"a forward of {tokens} tokens; there is room for {self._capacity.max_tokens}")
        self._memory.pages.grow(footprint.forward_wants(rows, self._requests))

    def _picks(self, spans: Sequence[Span], final: torch.Tensor) -> torch.Tensor:
        """The target's argmax at every row that is asked for, in batch order."""
        index = ints(asked_rows(spans, self._requests), self._device)
        return self._trunk.head.pick(self._ops, self._ops.select(x=final, index=index), STAGE) if len(index) else index

    def _extend(self, advances: Sequence[Advance]) -> None:
        if self._drafter is not None:
            extend(self._ops, self._drafter, self._memory, advances)

    def _kept(self, name: str) -> tuple[Request, Kept]:
        """The logical state of a request as copies; a round in flight is not part of it."""
        request = self._requests[name]
        return replace(request, drafts=None, flight=None), read(self._memory, name, request.length)

    def _restore(self, kept: Request, memory: Kept) -> None:
        self._memory.pages.grow([(kept.name, kept.length)])
        write(self._memory, kept.name, kept.length, memory)
        self._requests[kept.name] = replace(kept)

    def _end(self, name: str) -> None:
        self._memory.release(name)
        del self._requests[name]
