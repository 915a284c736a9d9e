"""The runs that a comparison sets beside each other: truth, rounded, subject. The only place that builds engines.

Leaves out: running them in step (`lockstep.py`).
    truth    the reference in fp64, or for labels the ledger of a right engine
    rounded  the reference in the declared width, rounded where the subject's op set declares it, its sums in another
             order (so that its error is a draw from what an honest engine's may be); not for labels
    subject  the optimized engine with an op set, or somebody else's engine
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch

from instep_optimized import OptimizedEngine, Options
from instep_optimized.layout import StateLayout
from instep_optimized.ops.around import around
from instep_optimized.ops.base import Ops
from instep_reference.adaptive import resolve
from instep_reference.contract.adaptive import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Engine, Event, RequestState, Watched
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place import See, unseen
from instep_reference.engine import ReferenceEngine
from instep_reference.ledger import LedgerEngine
from instep_reference.weights import Weights

from ..adapters import Subject, find
from ..observe.memory import Watch
from ..observe.moment import Side
from ..observe.reorder import Reordered
from ..observe.tape import Tape

DEFAULTS = Options()  # where no strategy is named
WIDTHS = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}


@dataclass(frozen=True)
class Plan:
    """What is run: the model, the room, the step counts, and how the subject is set up.

    strategy, conv  names of the optimized engine's commit strategies; an engine of somebody else has its own
    graphs          whether its bodies are held in graphs: of CUDA on a GPU, of the emulator elsewhere
    """

    checkpoint: Checkpoint
    capacity: Capacity
    num_steps: int
    adaptive: AdaptiveFile | None
    ops: str
    device: str = "cpu"
    dtype: str = "float32"
    layout: StateLayout = "VK"
    strategy: str = DEFAULTS.strategy
    conv: str = DEFAULTS.conv
    graphs: bool = DEFAULTS.graphs

    @property
    def width(self) -> torch.dtype:
        if self.dtype not in WIDTHS:
            raise BadInput("dtype", found=self.dtype, expected=f"one of {', '.join(WIDTHS)}")
        return WIDTHS[self.dtype]


class _Seen(Engine, Watched, Protocol):
    """An engine whose places can be seen."""


@dataclass
class Seat:
    """One side at work: an engine, the tape on it, and the logical states as of the last event.

    Whatever the engine runs on, what is told about it stands on the host, where truth is.
    """

    name: str
    engine: _Seen
    arithmetic: AbstractContextManager[Any] = field(default_factory=nullcontext)
    tape: Tape = field(default_factory=Tape)
    states: dict[str, RequestState] = field(default_factory=dict)

    def step(self, event: Event, live: Iterable[str]) -> Side:
        """Serve one event; `live`: the requests that are there afterwards."""
        before = self.states
        with self.arithmetic:
            answer = on_host(event.on(self.engine))
        places = self.tape.take()
        self.states = {name: on_host(self.engine.state(name)) for name in live}
        return Side(self.name, answer, places, before, self.states, self.engine.next_num_steps())


@dataclass
class Sides:
    """The three runs; `ops` is what the subject declares about itself, None for an engine of somebody else."""

    subject: Seat
    truth: Seat
    rounded: Seat | None
    watch: Watch
    shown: Subject
    ops: Ops | None
    calls: Counter[str]
    rounded_draw: Callable[[int], Seat] | None = None  # the rounded run from its start, as another draw


def seat(plan: Plan) -> Sides:
    """Build all sides of a plan."""
    found, calls = find(plan.ops), Counter[str]()
    if isinstance(found, Ops):
        options = Options(
            device=plan.device, activation=plan.width, state=wide(plan.width), layout=plan.layout,
            strategy=plan.strategy, conv=plan.conv, graphs=plan.graphs,
        )
        counted = around(found, unseen, counting(calls))
        with enough_memory(plan.capacity):
            subject: Subject = OptimizedEngine(
                plan.checkpoint, counted, options, plan.capacity, num_steps=plan.num_steps, adaptive=plan.adaptive
            )
    else:
        subject = found(
            plan.checkpoint, plan.capacity, num_steps=plan.num_steps, adaptive=plan.adaptive, device=plan.device,
            dtype=plan.width, layout=plan.layout,
        )
    ops = found if isinstance(found, Ops) else None
    if moves_labels(ops):
        truth: _Seen = LedgerEngine(plan.checkpoint.config, num_steps=plan.num_steps, adaptive=plan.adaptive)
        rounded = draw = None
    else:
        truth = reference(plan, torch.float64)
        draw = partial(_rounded, plan, ops)
        rounded = draw(0)
    sides = Sides(Seat(plan.ops, subject), Seat("truth", truth), rounded, Watch(subject), subject, ops, calls, draw)
    _watch(sides.subject, unseen)
    _watch(sides.truth, unseen)
    return sides


@contextmanager
def enough_memory(capacity: Capacity) -> Iterator[None]:
    """Pools that do not fit are the fault of whoever asked for them: a trace with slots that no machine has."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        signs = ("allocate memory", "out of memory", "verflow")  # how torch says it, in three places
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in signs):
            raise
        raise BadInput(
            "capacity", found=f"slots up to {max(capacity.slots)}, pages up to {max(capacity.pages)} of "
            f"{capacity.page_size} tokens", expected="pools that fit into the memory of this machine",
        ) from None


def moves_labels(ops: Ops | None) -> bool:
    """Whether the op set moves labels instead of computing: its hidden rows are integers."""
    return ops is not None and not ops.types(torch.float32, torch.float32).hidden.is_floating_point


def reference(plan: Plan, dtype: torch.dtype) -> ReferenceEngine:
    """The reference in some width; on the CPU, whatever the subject runs on."""
    weights = Weights.of(plan.checkpoint, dtype, torch.device("cpu"))
    return ReferenceEngine(weights, num_steps=plan.num_steps, adaptive=plan.adaptive)


def _rounded(plan: Plan, ops: Ops | None, draw: int) -> Seat:
    """One draw of the reference in the declared width."""
    seat = Seat("rounded", reference(plan, wide(plan.width)), Reordered(torch.Generator().manual_seed(draw)))
    _watch(seat, rounding(rounds(plan, ops)))
    return seat


def candidates(num_steps: int, adaptive: AdaptiveFile | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """All step counts that may come into force, as the reference resolves them, and its messages."""
    resolved = resolve(adaptive, num_steps)
    return tuple(sorted({n for steps in resolved.by_bracket.values() for n in steps})), resolved.messages


def wide(activation: torch.dtype) -> torch.dtype:
    """The width in which something declared to be stored in `activation` is computed."""
    return torch.float64 if activation is torch.float64 else torch.float32


def rounds(plan: Plan, ops: Ops | None) -> Mapping[str, torch.dtype]:
    """Component -> dtype at which the subject stores it; a foreign engine declares none."""
    return {} if ops is None else ops.rounds(plan.width, wide(plan.width))


def rounding(at: Mapping[str, torch.dtype]) -> See:
    """A hook that casts a place to its declared dtype and back."""

    def see(place: Any, tensor: torch.Tensor) -> torch.Tensor:
        dtype = at.get(place.component)
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype).to(tensor.dtype)

    return see


T = TypeVar("T")


def on_host(value: T) -> T:
    """The same answer or state with every tensor on the host."""
    if isinstance(value, torch.Tensor):
        return cast(T, value.cpu())
    if isinstance(value, dict):
        return cast(T, {key: on_host(inner) for key, inner in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        return cast(T, replace(value, **{each.name: on_host(getattr(value, each.name)) for each in fields(value)}))
    return value


def _watch(seat: Seat, first: See) -> None:
    """Put the tape on an engine, behind another hook."""
    seat.engine.watch(lambda place, tensor: seat.tape(place, first(place, tensor)))


def counting(calls: Counter[str]) -> Any:
    """A wrapper for `around` that counts how often each op is called."""

    def wrapper(name: str, op: Any) -> Any:
        def call(**given: Any) -> Any:
            calls[name] += 1
            return op(**given)

        return call

    return wrapper
