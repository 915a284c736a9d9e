"""Replaced tensors: the subject, and the oracle after it, continue from the reference's tensor at a place or in memory.

Leaves out: which tensors a run replaces (`Patch` of `run_variants.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from instep_optimized import OptimizedEngine
from instep_optimized.data_parallel.replica_engine import ReplicaEngine
from instep_optimized.memory.tiled_units import Block, Copied
from instep_optimized.ops.plain.scaled_tiles import packed
from instep_optimized.pipeline.stage_engine import StageEngine
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import RequestState
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place, See, draft_stage

from ..oracle.oracle import Oracle
from ..oracle.recomputation_plan import EventPlan
from ..oracle.single_layer_run import Work
from ..verdict import Comparison
from ..watch.event_context import EventContext, RowSpan
from ..watch.rows_by_request import due, field_of, rows
from .run_variants import Patch, in_memory, spelled


class Patching:
    """Replaces tensors of one event: call `begin` with the reference's places, run the subject, call `end`.

    In between it is a `See`. A place that is seen in several parts gets the tensor in parts, in the same order. Memory
    is replaced between the event and the next one (`memory`), so it is not compared at the event itself (`replaces`).
    """

    def __init__(self, patches: Sequence[Patch] = ()) -> None:
        self._patches = patches
        self._now: dict[Place, torch.Tensor] = {}
        self._put: dict[Place, int] = {}  # rows so far

    def begin(self, event: int, places: Mapping[Place, torch.Tensor]) -> None:
        wanted = [g.place for g in self._patches if g.event == event and not in_memory(g.place)]
        self._now, self._put = {place: places[place] for place in wanted if place in places}, dict.fromkeys(wanted, 0)

    def __call__(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if place not in self._now:
            return tensor
        begin = self._put[place]
        part = self._now[place][begin : begin + len(tensor)]
        if part.shape != tensor.shape:
            return tensor
        self._put[place] = begin + len(tensor)
        return part.to(tensor)

    def end(self, event: int, kind: str) -> None:
        """Require that all replacements of this event were made."""
        for place, put in self._put.items():
            if place not in self._now or put != len(self._now[place]):
                has = "other rows there" if place in self._now else "no such place"
                raise BadInput(
                    "--graft", found=f"{spelled(place)}@{event}, where the event, {kind}, has {has}",
                    expected="a place of that event, with as many rows on both sides",
                )

    def memory(self, event: int) -> list[Place]:
        """The memory to replace after the event."""
        return [g.place for g in self._patches if g.event == event and in_memory(g.place)]

    def replaces(self, result: Comparison, patched: Collection[str]) -> bool:
        """Whether the finding is about memory that is replaced before it is read. patched: the requests."""
        return result.request in patched and result.place in self.memory(result.event)


def must_fit(patches: Sequence[Patch], config: ModelConfig, last: int) -> None:
    """Refuse replacements that have no effect. last: the last event of the run."""
    for patch in patches:
        place, memory = patch.place, in_memory(patch.place)
        if patch.until > last:
            room = f"an event before {last}, the last one that is run" if memory else f"an event from 0 to {last}"
            hint = "memory is replaced between two events" if memory else "no other event is run"
            raise BadInput("--graft", found=patch, expected=room, hint=hint)
        if memory and place not in (has := _remembers(place.component, config)):
            raise BadInput("--graft", found=patch, expected=f"one of {', '.join(map(spelled, has))}"
                           if has else f"a model that has layers with {place.component}")  # fmt: skip


def _remembers(component: str, config: ModelConfig) -> list[Place]:
    """The places of the model with this component of memory."""
    paged = component in ("keys", "values")
    layers = config.attending if paged else config.convolving if component == "conv" else config.recurrent
    trunk = [Place("trunk", layer, component) for layer in layers]
    drafts = [Place(draft_stage(layer), layer, component) for layer in range(config.mtp_layers if paged else 0)]
    blocks = 0 if config.block is None or not paged else config.block.num_hidden_layers
    return trunk + drafts + [Place("extend", layer, component) for layer in range(blocks)]


class PatchableEngine(OptimizedEngine):
    """The engine under test with a method that replaces parts of a request's memory."""

    def patch(self, request: str, places: Sequence[Place], right: RequestState) -> None:
        kept, memory = self._kept(request)
        changed: dict[str, Any] = {}
        for place in places:
            name = field_of(place, right)
            layers = changed.setdefault(name, dict(memory[name]))
            layers[place.layer] = as_kept(getattr(right, name)[place.layer], layers[place.layer])
        self._restore(kept, memory.changed(**changed))


class PatchableStage(PatchableEngine, StageEngine):
    """One pipeline stage under test, in which parts of a request's memory can be replaced."""


class PatchableReplica(PatchableEngine, ReplicaEngine):
    """One replica under test, in which parts of a request's memory can be replaced."""


def as_kept(x: torch.Tensor, like: Copied) -> Copied:
    """x as the engine stores a copy of such memory: narrower, and in tiles if the memory is."""
    if isinstance(like, torch.Tensor):
        return x.to(like)
    return Block(*packed(x.to(like.scales), like.values.dtype, like.scales.shape[-2:]))


class PatchedOracle(Oracle):
    """An oracle that also recomputes from the replaced tensor, as the subject does."""

    patches: frozenset[Patch] = frozenset()

    def plan(self, context: EventContext) -> EventPlan:
        plan = super().plan(context)
        if not any(g.event == context.index for g in self.patches):
            return plan
        return replace(plan, spans=tuple(
            replace(part, tasks=tuple(task.map(partial(self._with, context, task.span)) for task in part.tasks))
            for part in plan.spans
        ))

    def _with(self, context: EventContext, span: RowSpan, work: Work) -> Work:
        here = {g.place for g in self.patches if g.event == context.index and g.place in context.subject.places
                and due(context, g.place, span)}
        if not here:
            return work

        def patched(weights: Any, see: See) -> torch.Tensor | None:
            def goes_on(place: Place, tensor: torch.Tensor) -> torch.Tensor:
                put = rows(context.subject, place, span) if place in here else None
                fits = put is not None and put.shape == tensor.shape
                return see(place, put.to(tensor.device, tensor.dtype) if put is not None and fits else tensor)

            return work(weights, goes_on)

        return patched
