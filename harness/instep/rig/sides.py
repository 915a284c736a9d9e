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
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch

from instep_optimized import OptimizedEngine
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

from ..adapters import Maker, Subject
from ..observe.memory import Watch
from ..observe.moment import Side
from ..observe.noted import Room
from ..observe.notes import Notes, replays_of
from ..observe.products import Operands
from ..observe.reorder import Reordered
from ..observe.tape import Tape
from .declared import NOTHING, Declared, declared
from .grafting import Grafting, Mendable
from .guard import (
    MAKES,
    SERVES,
    GuardedSubject,
    calling,
    checked_answer,
    checked_num_steps,
    checked_state,
    make_subject,
    materialized,
)
from .setting import Setting, moves_labels
from .stored import StoringEngine
from .variant import AS_IS, Variant, swapped


@dataclass(frozen=True)
class Plan:
    """What is run: the model, the room, the step counts, and how the subject is set up."""

    checkpoint: Checkpoint
    capacity: Capacity
    num_steps: int
    adaptive: AdaptiveFile | None
    setting: Setting


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
    told: Callable[[object], None] = lambda said: None  # the answer as it was given, before it is brought to the host
    guard: Callable[[str], AbstractContextManager[None]] = lambda call: nullcontext()  # around every call to it

    def step(self, event: Event, live: Iterable[str]) -> Side:
        """Serve one event; `live`: the requests that are there afterwards."""
        before = self.states
        with self.arithmetic:
            with self.guard(SERVES):
                said = checked_answer(event, event.on(self.engine))
            self.told(said)
            answer = on_host(said)
        with self.guard(SERVES):
            answer = materialized(answer)
        places = self.tape.take()
        self.states = {name: self._state(name) for name in live}
        with self.guard("next_num_steps"):
            wish = checked_num_steps(self.engine)
        return Side(self.name, answer, places, before, self.states, wish)

    def look(self, name: str) -> None:
        """The state of a request once more: something has changed it from outside."""
        self.states = {**self.states, name: self._state(name)}

    def _state(self, name: str) -> RequestState:
        with self.guard("state"):
            found = checked_state(self.engine, name)
        return on_host(found)


@dataclass
class Sides:
    """The three runs; `ops` is what the subject serves with, None for an engine of somebody else. declared: what it
    says of its rounding."""

    subject: Seat
    truth: Seat
    rounded: Seat | None
    watch: Watch
    shown: GuardedSubject
    ops: Ops | None
    calls: Counter[str]
    rounded_draw: Callable[[int], Seat] | None = None  # the rounded run from its start, as another draw
    grafting: Grafting = field(default_factory=Grafting)
    notes: Notes | None = None
    overlap: bool = False  # whether rounds of the subject overlap, so that it reserves pages for the worst case
    declared: Declared = NOTHING


def seat(plan: Plan, variant: Variant = AS_IS) -> Sides:
    """Build all sides of a plan; `variant`: what is otherwise at the subject."""
    setting, calls, handed = plan.setting, Counter[str](), lent(plan)
    found = setting.subject()
    if isinstance(found, Ops):
        found = swapped(found, variant.swap)
        options = setting.options(graphs=setting.graphs and not variant.without_graphs, **variant.options)
        notes = noting(handed, found)
        counted = around(found, unseen, notes.wrapper, counting(calls))
        with calling(MAKES), enough_memory(plan.capacity), notes.making("the optimized engine"):
            engine = Mendable(
                handed.checkpoint, counted, options, handed.capacity, num_steps=plan.num_steps, adaptive=handed.adaptive
            )
        replays = None if engine.graphs is None else replays_of(engine.graphs)
        subject: Subject = engine
        poison = options.poison
        notes.of(GuardedSubject(subject), poison=poison, guarded=options.guarded, replays=replays)
    else:
        if variant.swap or variant.options:
            raise BadInput("--swap", found=setting.ops, expected="an op set: somebody else's engine has no ops to swap")
        for named in ("graphs", "overlap"):
            if getattr(setting, named):
                expected = "an op set: somebody else's engine decides that itself"
                raise BadInput(f"--{named}", found=setting.ops, expected=expected)
        notes, poison = noting(handed, None), None
        with notes.making("the engine"):
            subject = make_subject(
                found, handed.checkpoint, handed.capacity, num_steps=plan.num_steps, adaptive=handed.adaptive,
                device=setting.device, dtype=setting.activation, layout=setting.layout,
            )
        notes.of(GuardedSubject(subject))
    ops = found if isinstance(found, Ops) else None
    if moves_labels(ops):
        truth: _Seen = LedgerEngine(
            plan.checkpoint.config, num_steps=plan.num_steps, adaptive=plan.adaptive, mode=setting.mode
        )
        rounded = draw = None
    else:
        truth = reference(plan, torch.float64)
        draw = partial(rounded_seat, plan, found)
        rounded = draw(0)
    shown = GuardedSubject(subject)
    sides = Sides(
        Seat(setting.ops, subject, notes, told=notes.answered, guard=calling), Seat("truth", truth), rounded,
        Watch(shown, poison), shown, ops, calls, draw, Grafting(variant.graft), notes,
        ops is not None and setting.overlap, declares(plan, found),
    )
    with calling("watch"):
        watched(sides.subject, sides.grafting)
    watched(sides.truth, unseen)
    return sides


def bare(plan: Plan) -> Engine:
    """The subject as production runs it: nothing watches it, and nothing stands around its ops."""
    found, setting = plan.setting.subject(), plan.setting
    with calling(MAKES), enough_memory(plan.capacity):
        if isinstance(found, Ops):
            return OptimizedEngine(
                plan.checkpoint, found, setting.options(), plan.capacity, num_steps=plan.num_steps,
                adaptive=plan.adaptive,
            )
    return make_subject(
        found, plan.checkpoint, plan.capacity, num_steps=plan.num_steps, adaptive=plan.adaptive,
        device=setting.device, dtype=setting.activation, layout=setting.layout,
    )


def lent(plan: Plan) -> Plan:
    """The plan with a configuration of its own: what the subject writes into it, no other side reads."""
    checkpoint = replace(plan.checkpoint, config=copy(plan.checkpoint.config))
    return replace(plan, checkpoint=checkpoint, capacity=copy(plan.capacity), adaptive=copy(plan.adaptive))


def noting(plan: Plan, found: Ops | None) -> Notes:
    """What notes the op calls, host reads and graphs of a subject, and what was handed to whoever is made."""
    steps, _ = candidates(plan.num_steps, plan.adaptive)
    handed = {
        "the model's configuration": plan.checkpoint.config, "the adaptive file": plan.adaptive,
        "the capacity": plan.capacity,
    }
    room = Room(plan.capacity, max(steps) + 1)
    return Notes(found, declares(plan, found).rounds, plan.setting.device, room, handed)


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


def reference(plan: Plan, dtype: torch.dtype) -> ReferenceEngine:
    """The reference in some width; on the CPU, whatever the subject runs on."""
    weights = Weights.of(plan.checkpoint, dtype, torch.device("cpu"))
    return ReferenceEngine(weights, num_steps=plan.num_steps, adaptive=plan.adaptive, mode=plan.setting.mode)


def rounded_seat(plan: Plan, found: Ops | Maker | None, draw: int) -> Seat:
    """One draw of the reference in the declared width. found: who declares it."""
    said = declares(plan, found)
    weights = Weights.of(plan.checkpoint, plan.setting.state, torch.device("cpu"))
    engine = StoringEngine(weights, num_steps=plan.num_steps, adaptive=plan.adaptive, mode=plan.setting.mode)
    engine.stored = said.rounds.get("state", plan.setting.state)
    engine.operands = Operands(said.products, weights)
    engine.operands.begin(cut=draw % 2 == 0)  # the first draw errs most: it is also what T4 goes by
    seat = Seat("rounded", engine, Reordered(torch.Generator().manual_seed(draw), engine.operands))
    watched(seat, rounding(said.rounds))
    return seat


def candidates(num_steps: int, adaptive: AdaptiveFile | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """All step counts that may come into force, as the reference resolves them, and its messages."""
    resolved = resolve(adaptive, num_steps)
    return tuple(sorted({n for steps in resolved.by_bracket.values() for n in steps})), resolved.messages


def declares(plan: Plan, found: Ops | Maker | None) -> Declared:
    """What an op set, or the maker of somebody else's engine, says of its rounding under this plan."""
    return declared(found, plan.setting.activation, plan.setting.state)


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


def watched(seat: Seat, first: See) -> None:
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
