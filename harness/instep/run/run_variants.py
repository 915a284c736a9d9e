"""Variants of a run: an op from another set, the reference's tensor at a place or in memory, or no graphs.

On the command line a place is stage.layer.component: trunk.2.core, chain.1.0.query; without a layer if it has none:
extend.fused. Leaves out: running it (`replay.py`), which places are patched, and the conclusions (`instep.diagnose`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from instep_optimized import OptimizedEngine
from instep_optimized.data_parallel.replica_engine import ReplicaEngine
from instep_optimized.memory.tiled_units import Block, Copied
from instep_optimized.ops.fused import wholes
from instep_optimized.ops.op_protocols import ALONG_TREES, Ops
from instep_optimized.ops.plain.scaled_tiles import packed
from instep_optimized.ops.watch_op_calls import OPS, with_ops
from instep_optimized.pipeline.stage_engine import StageEngine
from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import RequestState
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import AFTER_LAYERS, COMPONENTS, STAGE_LEVEL, STAGES, Place, See, draft_stage

from ..adapters import find
from ..oracle.oracle import Oracle
from ..oracle.recomputation_plan import EventPlan
from ..oracle.single_layer_run import Work
from ..subject.declared_rounding import rounded_once
from ..verdict import Comparison
from ..watch.event_context import EventContext, RowSpan
from ..watch.rows_by_request import due, field_of, rows

MEMORY = (*BLOCKS, "keys", "values")  # replaced after the event
BEHIND = ("final", "logits", "pick")  # components after the last layer
FORMS = ("plain", "ledger")  # our sets, which take an op of a commit strategy in the form of the strategy


@dataclass(frozen=True)
class Patch:
    """Replaces the tensor at a place during an event with the rounded reference's (for labels: the ledger's).

    A place in memory (trunk.3.state) is replaced after the event, for every request that is not within a round.
    """

    place: Place
    event: int

    @property
    def until(self) -> int:
        """The last event that the replacement needs."""
        return self.event + in_memory(self.place)

    def __str__(self) -> str:
        return f"{spelled(self.place)}@{self.event}"


@dataclass(frozen=True)
class Variant:
    """The changes of a run; the default changes nothing.

    swap     op -> the op set, or module:attribute, whose op serves instead: {"gdn": "plain"}
    patch    places that get the reference's tensor; the run is then eager, as captured graphs cannot be changed
    eager    no graphs
    calm     no stress
    options  further fields of the engine's `Options`
    """

    swap: Mapping[str, str] = field(default_factory=dict)
    patch: tuple[Patch, ...] = ()
    eager: bool = False
    calm: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def without_graphs(self) -> bool:
        return self.eager or bool(self.patch)


AS_IS = Variant()


def swapped(ops: Ops, swap: Mapping[str, str]) -> Ops:
    """`ops` with some of its ops from other sets, and with its own declarations.

    The products of these ops, and whether all ops serve trees, come from the other sets.
    """
    others, products, trees, once = dict[str, Any](), dict(ops.products), ops.trees, rounded_once(ops.once)
    for name, source in swap.items():
        if name not in (*OPS, *ops.own):
            raise BadInput("--swap", found=name, expected=f"one of the ops {', '.join((*OPS, *ops.own))}")
        found = find(source)
        if not isinstance(found, Ops):
            raise BadInput("--swap", found=source, expected="an op set; an engine has no single ops")
        if _labels(found) != _labels(ops):
            kinds = {True: "labels", False: "numbers"}
            raise BadInput("--swap", found=f"{name}={source}, which moves {kinds[_labels(found)]}",
                           expected=f"an op of a set that moves {kinds[_labels(ops)]}, as {ops.name} does")  # fmt: skip
        own = replace(found, keepers=ops.keepers).own if source in FORMS else found.own
        if name not in OPS and name not in own:
            raise BadInput("--swap", found=f"{name}={source}, which has no such op", expected=f"{name}=plain, or a set "
                           f"that defines {name}")  # fmt: skip
        others[name], form_of = own[name] if name in own else getattr(found, name), name.removeprefix("fused_")
        for whole in wholes(name):
            others.setdefault(whole, None)
        once = once if source == "plain" else once & rounded_once(found.once)  # plain rounds nothing on the way
        trees = trees and (found.trees or name not in ALONG_TREES)
        products = {form: product for form, product in products.items() if form.partition(".")[0] != form_of}
        products |= {form: product for form, product in found.products.items() if form.partition(".")[0] == form_of}
    return replace(with_ops(ops, others), products=products, trees=trees, once=once)


def _labels(ops: Ops) -> bool:
    return not ops.types(torch.float32, torch.float32).hidden.is_floating_point


def patch_of(text: str) -> Patch:
    """Parse PLACE@EVENT."""
    place, at, event = text.partition("@")
    if not at or not event.isdecimal():
        raise BadInput("--graft", found=text, expected="PLACE@EVENT, for example trunk.2.core@17")
    return Patch(place_of(place), int(event))


def swaps_of(texts: Iterable[str]) -> dict[str, str]:
    """Parse all OP=SET."""
    found = dict[str, str]()
    for text in texts:
        op, equals, source = text.partition("=")
        if not (op and equals and source):
            raise BadInput("--swap", found=text, expected="OP=SET, for example gdn=plain")
        if op in found:
            raise BadInput("--swap", found=f"{op}={found[op]} and {text}", expected="each op once")
        found[op] = source
    return found


def place_of(text: str) -> Place:
    """Parse a place that `spelled` wrote."""
    stage, *numbers, component = text.split(".") if "." in text else (text, "")
    known = stage in STAGES and component in COMPONENTS and all(number.isdecimal() for number in numbers)
    step = stage == "chain" or (stage == "extend" and (len(numbers) == 2 or numbers[:1] not in ([], ["0"])))
    if not known or len(numbers) > 1 + step or (stage == "chain" and not numbers):
        raise BadInput("--graft", found=text, expected=f"stage.layer.component: a stage of {', '.join(STAGES)} (chain "
                       f"with its step, chain.1), a layer where there is one, a component of {', '.join(COMPONENTS)}")
    if component in ("length", "root"):
        raise BadInput("--graft", found=text, expected="a tensor; a length or a root is a number")
    if step:
        stage, numbers = f"{stage}.{numbers[0]}", numbers[1:]
    return Place(stage, int(numbers[0]) if numbers else AFTER_LAYERS if component in BEHIND else STAGE_LEVEL, component)


def in_memory(place: Place) -> bool:
    """Whether a place is memory, which a later event reads, and no result of an op."""
    return place.component in MEMORY


def spelled(place: Place) -> str:
    """trunk.2.core, extend.fused, chain.1.0.query, trunk.logits"""
    layer = () if place.layer in (STAGE_LEVEL, AFTER_LAYERS) else (str(place.layer),)
    return ".".join((place.stage, *layer, place.component))


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
