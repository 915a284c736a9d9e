"""An engine of several pipeline stages as one engine of the contract: its answers are those of the last stage.

The memory of a request is in the layers of all stages, and everything else of it on the last stage. Regions are named
`state@1`, as those of ranks. The stages run in lock step, or each in a process: then this engine has one of them, and
after every event it gets rows, states and answers of the others. Leaves out: building the stages
(`run/build_parallel_engines.py`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from instep_optimized.pipeline.stage_engine import StageEngine
from instep_optimized.ranks.lockstep import Lockstep
from instep_optimized.ranks.processes import Processes
from instep_reference.contract import shards
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Event, RequestState
from instep_reference.contract.place_names import Place, See, unseen

from ...trace.micro_batches import MicroBatches
from ...watch.pool_addresses import NO_LAYER
from ...watch.rank_facts import StageFacts
from .ranked import PICKED, RankedEngine

CORE, UPDATE = "core", "update"  # results of the delta rule: its rows, and what its ring keeps of them


class PartedEngine(RankedEngine):
    """An engine that serves the batch of an event in parts: each part shows its rows, which are joined."""

    def __init__(self, group: Lockstep | Processes, engines: Sequence[Any], config: ModelConfig) -> None:
        super().__init__(group, engines, config, labels=False)
        self._updates: dict[Place, torch.Tensor] = {}  # the last ones that each layer showed in this event
        self._without = defaultdict[int, list[int]](list)  # by layer, the rows of the parts after them

    def _serve(self, name: str, *given: Any) -> Any:
        super()._serve(name, *given)
        for place, like in self._updates.items():
            self._fill(place, like, self._without[place.layer])
        self._updates, self._without = {}, defaultdict(list)
        return self._answers[-1]

    def watch(self, see: See) -> None:
        self._see = see
        for engine in self.engines:
            engine.watch(unseen if see is unseen else self._shown)

    def _shown(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        """Show a tensor. A part without windows keeps no updates; its rows are zeros, as in a whole batch."""
        without = self._without[place.layer]
        if place.component == CORE:
            without.append(len(tensor))
        elif place.component == UPDATE:
            self._fill(place, tensor, without[:-1])
            without.clear()
            self._updates[place] = tensor
        return self._see(place, tensor)

    def _fill(self, place: Place, like: torch.Tensor, counts: Sequence[int]) -> None:
        for rows in counts:
            self._see(place, like.new_zeros(rows, *like.shape[1:]))


class StagedEngine(PartedEngine):
    """Implements the contract over the engines of all stages. micro_batches: parts of a batch"""

    def __init__(
        self, group: Lockstep | Processes, engines: Sequence[StageEngine], config: ModelConfig, micro_batches: int
    ) -> None:
        super().__init__(group, engines, config)
        self.micro_batches = micro_batches
        self._layers = shards.layers_of(len(config.layers), group.size)
        self._rows: list[tuple[Place, torch.Tensor]] = []  # of this event, if each stage has a process
        self._outer: See = unseen

    def watch(self, see: See) -> None:
        self._outer, apart = see, len(self.engines) < self.group.size and see is not unseen
        super().watch(self._noted if apart else see)

    def _noted(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        """Show rows of the stage in this process, and keep them for the others."""
        self._rows.append((place, tensor.detach().clone()))
        return self._outer(place, tensor)

    def _serve(self, name: str, *given: Any) -> Any:
        answer = super()._serve(name, *given)
        if len(self.engines) == self.group.size:
            return answer
        (own,) = self.group.ranks
        with nullcontext() if self.log is None else self.log.logs[0].reads.paused():
            every = self.group.gather([(self._rows, readable(answer))])
        self._rows = []
        for stage, (shown, _) in enumerate(every):
            for place, row in shown if stage != own else ():
                self._outer(place, row)
        return answer if own == self.group.size - 1 else every[-1][1]

    def patch(self, request: str, places: Sequence[Place], right: RequestState) -> None:
        for stage, engine in self._own():
            layers = self._layers[stage]
            mine = [place for place in places if (place.stage != "trunk" or place.layer in layers)
                    and (place.stage == "trunk" or engine.stage.last)]  # fmt: skip
            engine.patch(request, mine, right)

    def take_stage_facts(self, event: Event, cut: MicroBatches) -> StageFacts:
        """Return the facts of the event that was served. cut: the micro-batches of the trace"""
        before = dict(cut.verified)
        parts = cut.of(event)
        ran = tuple(self.group.gather([tuple(engine.ran) for engine in self.engines]))
        for engine in self.engines:
            engine.ran.clear()
        facts = StageFacts(self._layers, parts, before, tuple(self._decisions), ran, tuple(self.group.ranks))
        self._decisions = []
        return facts

    def _state(self, states: Sequence[RequestState], request: str | None) -> RequestState:
        for name, place in (("length", NO_LAYER), ("root", PICKED)):
            self._decide(f"the {name}", [getattr(state, name) for state in states], request, place)
        joined: dict[str, Any] = {}
        for field in fields(RequestState):
            values = [getattr(state, field.name) for state in states]
            if isinstance(values[0], Mapping):
                joined[field.name] = {layer: x for value in values for layer, x in value.items()}
        return replace(states[-1], **joined)


def readable(value: Any) -> Any:
    """The answer in mappings that any process can read, which may wait for the device."""
    if isinstance(value, Mapping):
        return {name: readable(inner) for name, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: readable(getattr(value, each.name)) for each in fields(value)})
    return value
