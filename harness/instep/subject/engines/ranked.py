"""An engine of several ranks as one engine of the contract: events go to all ranks, and their results are merged.

States and named rows are merged by segment, as `contract/shards.py` declares them; regions are named `state@1`; answers
are those of rank 0. Checks compare what the ranks must have in common (`RankFacts`). The ranks run in lock
step (`instep_optimized.ranks.lockstep`), or each in a process (`ranks.processes`): then this engine has one of them,
and rows, states and decisions come from all. Leaves out: building the ranks (`run/build_compared_engines.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch

from instep_optimized.ranks import Call
from instep_optimized.ranks.lockstep import Lockstep
from instep_optimized.ranks.processes import Processes
from instep_reference.contract import shards
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Committed, Drafted, Event, Forwarded, Region, RequestState
from instep_reference.contract.kept_copies import Copy
from instep_reference.contract.label_algebra import SPREAD
from instep_reference.contract.place_names import AFTER_LAYERS, Place, See, memory_place, unseen

from ...watch.batched_host_copies import brought
from ...watch.digests import bits
from ...watch.event_log import EventLog
from ...watch.gather_event_log import RankedInstrumentation, of_rank
from ...watch.pool_addresses import NO_LAYER
from ...watch.rank_facts import Decision, RankFacts, Replica

T = TypeVar("T")
EVENTS = ("admit", "draft", "forward", "commit", "set_num_steps", "save", "load", "offload", "fetch", "evict",
          "preempt", "resume", "finish", "abort", "idle")  # fmt: skip
NAMES = {"own": "own choices", "own_parents": "parents of the own drafts"}  # of fields of answers, in messages
PICKED = Place("trunk", AFTER_LAYERS, "pick")
PICKS = {Forwarded: PICKED, Committed: PICKED, Drafted: PICKED._replace(stage="chain")}  # where answers are chosen


class RankedEngine:
    """Implements the contract over the engines of n ranks.

    engines: of the ranks in this process;  labels: their rows are labels instead of numbers
    """

    refuses = True

    def __init__(self, group: Lockstep | Processes, engines: Sequence[Any], config: ModelConfig, labels: bool) -> None:
        self.group, self.engines = group, tuple(engines)
        self._merging = Merging(config, group.size, labels)
        self._decisions: list[Decision] = []
        self._replicas: list[tuple[Replica, torch.Tensor]] = []  # with the numbers of differing elements on the device
        self._answers: Sequence[Any] = ()  # of the last event; the host reads them after it
        self._see: See = unseen
        self.log: RankedInstrumentation | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in EVENTS:
            raise AttributeError(name)
        return partial(self._serve, name)

    def _serve(self, name: str, *given: Any) -> Any:
        answers = self.group.run([partial(getattr(engine, name), *given) for engine in self.engines])
        self._answers = answers
        return answers[0]

    def _every(self, ask: Callable[[Any], T]) -> list[T]:
        """The answers of all ranks to a question."""
        return self.group.gather([ask(engine) for engine in self.engines])

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        found: list[int] = self._every(lambda engine: engine.next_num_steps(batch, scheduled))
        self._decide("the next step count", found)
        return found[0]

    def state(self, request: str) -> RequestState:
        return self._state(self._every(lambda engine: engine.state(request)), request)

    def prefix(self, name: str) -> RequestState:
        return self._state(self._every(lambda engine: engine.prefix(name)), None)

    def regions(self) -> list[Region]:
        return [replace(region, name=of_rank(region.name, rank), rank=rank)
                for rank, engine in self._own() for region in engine.regions()]  # fmt: skip

    def may_change(self, event: Event) -> dict[str, set[int]]:
        return {of_rank(name, rank): units for rank, engine in self._own()
                for name, units in engine.may_change(event).items()}  # fmt: skip

    def budget(self) -> Mapping[str, int]:
        return {of_rank(name, rank): size for rank, engine in self._own()
                for name, size in engine.budget().items()}  # fmt: skip

    def copies(self) -> dict[Copy, dict[str, torch.Tensor]]:
        every = {rank: engine.copies() for rank, engine in self._own()}
        self._decide("the kept copies", self.group.gather([sorted(one) for one in every.values()]))
        return {
            copy: {of_rank(part, rank): x for rank, one in every.items() for part, x in one.get(copy, {}).items()}
            for copy in dict.fromkeys(copy for one in every.values() for copy in one)
        }

    def track_slots(self) -> dict[str, int]:
        every = self._every(lambda engine: dict(engine.track_slots()))
        self._decide("the track slots", [sorted(one.items()) for one in every])
        return dict(every[0])

    def slots(self) -> dict[str, int]:
        return self._owned("slot", self._every(lambda engine: engine.slots()))

    def pages(self) -> dict[str, list[int]]:
        return self._owned("pages", self._every(lambda engine: engine.pages()))

    def watch(self, see: See) -> None:
        self._see = see
        for rank, engine in self._own():
            engine.watch(unseen if see is unseen else partial(self._seen, rank))

    def patch(self, request: str, places: Sequence[Place], right: RequestState) -> None:
        """Replace parts of a request's memory on every rank."""
        for rank, engine in self._own():
            engine.patch(request, places, self._merging.cut_state(right, rank))

    def take_facts(self) -> RankFacts:
        """Return the facts since the last call. The log of the event was taken before."""
        for field, values in by_name(self.group.gather([parts_of(one) for one in self._answers])).items():
            self._decide(field, values, place=PICKS[type(self._answers[0])])
        logs = () if self.log is None else self.log.taken
        for what, found in by_name(self.group.gather([rows_of(log) for log in logs])).items():
            self._decide(what, found)
        merging, counts = self._merging, brought([count for _, count in self._replicas])
        replicas = (_compared(one, *map(int, found)) for (one, _), found in zip(self._replicas, counts, strict=True))
        facts = RankFacts(self.group.size, merging.row, merging.memory, tuple(self._decisions), tuple(replicas),
                          tuple(map(tuple, self.group.gather(self.group.take_calls()))))  # fmt: skip
        self._decisions, self._replicas, self._answers = [], [], ()
        return facts

    def _own(self) -> Iterator[tuple[int, Any]]:
        """The ranks of this process, each with its engine."""
        return zip(self.group.ranks, self.engines, strict=True)

    def _decide(
        self, what: str, values: Sequence[object], request: str | None = None, place: Place = NO_LAYER
    ) -> None:
        self._decisions.append(Decision(what, tuple(values), request, place))

    def _owned(self, what: str, owned: Sequence[dict[str, Any]]) -> dict[str, Any]:
        for name in dict.fromkeys(name for one in owned for name in one):
            self._decide(f"the {what}", [one.get(name) for one in owned], name)
        return owned[0]

    def _state(self, states: Sequence[RequestState], request: str | None) -> RequestState:
        for name, place in (("length", NO_LAYER), ("root", PICKED), ("proposal", PICKED._replace(stage="extend"))):
            self._decide(f"the {name}", [getattr(state, name) for state in states], request, place)
        for name, layer, parts in memory_of(states):
            place = Place("extend", 0, "final") if layer is None else memory_place(name, layer)
            self._compare(place, self._merging.memory.get(name), parts, request)
        return self._merging.state(states)

    def _seen(self, rank: int, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        """Show the merged rows of a place once. Every rank continues with its part, replaced or as it was."""
        call = Call("see", tuple(tensor.shape), tensor.dtype, place)
        found: torch.Tensor = self.group.meet(rank, call, tensor, partial(self._show, place))
        return found

    def _show(self, place: Place, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        shard = self._merging.row(place)
        self._compare(place, shard, parts, None)
        merged = self._merging.merge(parts, shard)
        shown = self._see(place, merged)
        return parts if shown is merged else [
            self._merging.cut(shown.to(merged), shard, rank) for rank in range(self.group.size)]  # fmt: skip

    def _compare(
        self, place: Place, shard: shards.Shard | None, parts: Sequence[torch.Tensor], request: str | None
    ) -> None:
        """Compare the bits of everything that several ranks hold with those of the first one that holds it."""
        for rank, other, mine, right in self._merging.replicas(parts, shard):
            same = mine.shape == right.shape
            found = [(bits(mine) != bits(right)).sum() if same else torch.tensor(mine.numel())]
            if shard is not None and not self._merging.labels and len({part.shape for part in parts}) == 1:
                found += [(bits(mine) != bits(one)).sum() for one in (torch.zeros_like(mine), *parts)]
            self._replicas.append((Replica(place, rank, other, mine.numel(), 0, request), torch.stack(found)))


def _compared(replica: Replica, differing: int, zeros: int = 1, *parts: int) -> Replica:
    """A replica with its numbers of differing elements: from its copy; and of a KV head from zeros and every part."""
    alike = (rank for rank, count in enumerate(parts) if rank != replica.rank and not count)
    return replace(replica, differing=differing, zero=not zeros, like=next(alike, None))


class Merging:
    """Merges the ranks' parts of tensors, and cuts whole ones, by the declaration of a model's shards.

    A label block is label + j * SPREAD at its element j, so a part of a block is renumbered when it moves into the
    whole one, and back. A wrong label of a rank stays wrong.
    """

    def __init__(self, config: ModelConfig, size: int, labels: bool) -> None:
        self.size, self.labels = size, labels
        self.memory = shards.memory(config)
        self.row = cache(partial(shards.row, config))

    def merge(self, parts: Sequence[torch.Tensor], shard: shards.Shard | None) -> torch.Tensor:
        """The whole tensor; an entry that several ranks hold is that of the first one."""
        if shard is None:
            return parts[0]
        first = parts[0]
        whole = first.new_empty((*first.shape[: shard.axis], shard.length, *first.shape[shard.axis + 1 :]))
        for rank in reversed(range(self.size)):
            index = self._index(shard, rank, first.device)
            whole.index_copy_(shard.axis, index, self._renumbered(parts[rank], shard, index, 1))
        return whole

    def cut(self, whole: torch.Tensor, shard: shards.Shard | None, rank: int) -> torch.Tensor:
        """The part of a rank."""
        if shard is None:
            return whole
        index = self._index(shard, rank, whole.device)
        return self._renumbered(whole.index_select(shard.axis, index), shard, index, -1)

    def replicas(
        self, parts: Sequence[torch.Tensor], shard: shards.Shard | None
    ) -> list[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(rank, an earlier rank, its tensor, that rank's) for everything that both hold.

        Labels of every rank are compared: a part of a block of labels has the label of the whole.
        """
        if shard is None:
            return [(rank, 0, parts[rank], parts[0]) for rank in range(1, self.size)]
        if self.labels:
            alike = [rank for rank in range(1, self.size) if parts[rank].shape == parts[0].shape]
            return [(rank, 0, parts[rank], parts[0]) for rank in alike]
        (segment, *_) = shard.segments
        return [(rank, rank - 1, parts[rank], parts[rank - 1]) for rank in range(1, self.size)
                if segment.held(rank, self.size) == segment.held(rank - 1, self.size)]  # fmt: skip

    def state(self, states: Sequence[RequestState]) -> RequestState:
        merged: dict[str, Any] = {}
        for name, layer, parts in memory_of(states):
            if layer is not None:
                merged.setdefault(name, {})[layer] = self.merge(parts, self.memory.get(name))
        return replace(states[0], **merged)

    def cut_state(self, state: RequestState, rank: int) -> RequestState:
        cut: dict[str, Any] = {
            name: {layer: self.cut(x, shard, rank) for layer, x in getattr(state, name).items()}
            for name, shard in self.memory.items()}  # fmt: skip
        return replace(state, **cut)

    def _index(self, shard: shards.Shard, rank: int, device: torch.device) -> torch.Tensor:
        return _numbers(shard.spans(rank, self.size), device)

    def _renumbered(self, x: torch.Tensor, shard: shards.Shard, index: torch.Tensor, sign: int) -> torch.Tensor:
        if not self.labels or x.is_floating_point():
            return x
        # In a conv window [C, W-1] each column is a block; in everything else a block ends with the last axis.
        behind = 1 if shard.axis == 0 and x.dim() == 2 else math.prod(x.shape[shard.axis + 1 :])
        moved = (index - torch.arange(len(index), device=index.device)) * behind
        shift = (moved * signed(SPREAD) * sign).view(-1, *[1] * (x.dim() - shard.axis - 1))
        return torch.where(x == 0, 0, x + shift)


@cache
def _numbers(spans: tuple[range, ...], device: torch.device) -> torch.Tensor:
    """The numbers of all spans, once for each device."""
    return torch.tensor([at for span in spans for at in span], dtype=torch.int64, device=device)


@cache
def signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return number - (1 << 64) if number >> 63 else number


def memory_of(states: Sequence[RequestState]) -> list[tuple[str, int | None, list[torch.Tensor]]]:
    """(field, layer, the tensor of every rank) for all tensors of a state; the layer is None for a single tensor."""
    found: list[tuple[str, int | None, list[torch.Tensor]]] = []
    for field in fields(RequestState):
        values = [getattr(state, field.name) for state in states]
        if isinstance(values[0], dict):
            found += [(field.name, layer, [value[layer] for value in values]) for layer in values[0]]
        elif isinstance(values[0], torch.Tensor):
            found.append((field.name, None, values))
    return found


def rows_of(log: EventLog) -> dict[str, object]:
    """The rows that op calls served on a rank, and the graphs that it replayed with their inputs from the host."""
    found: dict[str, object] = {f"the rows of call {number} with memory": one for number, one in enumerate(log.served)}
    for number, replay in enumerate(log.replays):
        given = {name: rows for name, (rows, _, _) in replay.inputs.items()}
        found[f"replay {number}"] = replay.key, replay.rows, given
    return found


def parts_of(answer: Any) -> dict[str, object]:
    """Every field of a rank's answer on the host."""
    if not is_dataclass(answer):
        return {}
    return {f"the {NAMES.get(field.name, field.name)}": host_value(getattr(answer, field.name))
            for field in fields(answer)}  # fmt: skip


def by_name(ranks: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """By name, the values of all ranks; None if a rank has no such value."""
    return {name: [one.get(name) for one in ranks] for name in dict.fromkeys(name for one in ranks for name in one)}


def host_value(value: Any) -> object:
    """Return a value of an answer on the host."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: host_value(inner) for name, inner in value.items()}
    return value
