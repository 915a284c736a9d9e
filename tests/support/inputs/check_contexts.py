"""Contexts of a small real run, with the reference in a narrow width standing in as the subject, or of facts alone.

A test takes these contexts, spoils one thing in one of them, and looks at the findings of the checks. Leaves out: an
optimized engine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import structs

from instep.checks import Check
from instep.checks.recomputed_values import Derived
from instep.diagnose import RunHistory, explained
from instep.oracle.declared_product_rounding import Operands
from instep.oracle.reordered_arithmetic import Reordered
from instep.player import Side
from instep.run.build_compared_engines import rounding
from instep.run.compared_engine import Participant
from instep.run.lockstep import expect
from instep.run.reference_with_declared_storage import StoringEngine
from instep.setting import wide
from instep.trace.event_rules import EventRules
from instep.trace.event_scheduler import drive
from instep.trace.header import Header, Model, Room
from instep.trace.policy import Arrival, Policy, ScheduledAction, Steps
from instep.verdict import Verdict
from instep.watch.event_context import EventContext
from instep.watch.facts_for_later_events import left_by
from instep.watch.memory_changes import UNWATCHED
from instep.watch.rows_by_request import cut_down
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Commit, Draft, Event, RequestState
from instep_reference.contract.place_names import COMPONENTS, Place, See, unseen
from instep_reference.engine import ReferenceEngine
from instep_reference.label_ledger import LedgerEngine
from instep_reference.weights import Weights

from .checkpoints import write

NODES = 8  # of a window that is a tree, at most
ROOM = Room(slots=(4, 1, 6), pages=tuple(range(40, 0, -1)), page_size=4, max_tokens=40)
POLICY = Policy(
    name="small", claim="checks see what they look at", capacity=ROOM, num_steps=3,
    arrivals=(
        Arrival("a", "long", chunks=(5, 7), max_new=14), Arrival("b", "one", max_new=12),
        Arrival("c", "short", arrive=1, max_new=9), Arrival("d", "short", arrive=2, max_new=5),
    ),
    steps=(Steps(3, 1), Steps(4, 0), Steps(6, 3)), accept=(2, 0, 3, 1), rounds=12,
    deeds=(ScheduledAction(4, "preempt", "a"), ScheduledAction(5, "resume", "a"), ScheduledAction(5, "idle")),
)  # fmt: skip
ALONE = 31  # events; after them a single request continues, round after round
TWO_AND_ONE = ["linear_attention", "linear_attention", "full_attention"]  # types of layers
PROMPTS = {"long": tuple(range(3, 21)), "one": (7,), "short": (9, 8, 5, 30)}


def checkpoint(directory: Path, **overrides: Any) -> Checkpoint:
    return Checkpoint.open(write(directory / "model", "dense", 3, **overrides))


def header_of(opened: Checkpoint, policy: Policy = POLICY) -> Header:
    model = Model(".", "", "", opened.config.vocab, opened.config.mtp_layers)
    return Header(
        1, policy.name, policy.claim, model, policy.capacity, policy.num_steps, (0, 1, 3), None, 0, 0, None, (), {}
    )


def events_of(opened: Checkpoint, policy: Policy = POLICY) -> list[Event]:
    """A complete trace: every choice filled in by the reference in fp64."""
    engine = ReferenceEngine(Weights.of(opened), num_steps=policy.num_steps)
    return [step.event for step in drive(policy, PROMPTS, header_of(opened, policy), engine)]


def declared(activation: torch.dtype, state: torch.dtype) -> dict[str, torch.dtype]:
    """Rounding points of the fake subject: the activation dtype, except for gates, q, k, v, logits and state."""
    kept = {"q", "k", "v", "log_decay", "beta", "update", "logits"}
    return {c: wide(activation) if c in kept else activation for c in COMPONENTS} | {"state": state}


def reordered(rounds: Mapping[str, torch.dtype], seed: int) -> See:
    """Change the summation order and round each place, so that the fake subject differs from the reference."""
    generator, store = torch.Generator().manual_seed(seed), rounding(rounds)

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        drawn = 2 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) - 1
        return store(place, tensor * (1 + torch.finfo(tensor.dtype).eps * drawn))

    return see


def run(
    opened: Checkpoint, events: Sequence[Event], activation: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32, seed: int = 11,
) -> list[EventContext]:
    """Every context of a run: fp64 truth, rounded, and the fake subject, stored as the engines store."""
    rounds = declared(activation, state)
    truth = _numbers(opened, "truth", torch.float64, torch.float64, unseen)
    subject = _numbers(opened, "subject", wide(activation), state, reordered(rounds, seed))
    rounded = _rounded(opened, activation, state, 0)
    trees = any(isinstance(event, Draft) and event.parents is not None for event in events)
    told = structs.replace(POLICY, capacity=structs.replace(ROOM, num_draft_tokens=NODES if trees else None))
    return list(_contexts(header_of(opened, told), events, subject, truth, rounded, rounds))


def _numbers(
    opened: Checkpoint, name: str, width: torch.dtype, state: torch.dtype, see: See,
    arithmetic: Reordered | None = None, chance: torch.Generator | None = None,
) -> Participant:
    weights = Weights.of(opened, width)
    engine = StoringEngine(weights, num_steps=POLICY.num_steps)
    engine.stored, engine.chance = state, chance
    engine.operands = Operands({}, weights, chance=chance)
    return Participant(name, engine, first=see, arithmetic=arithmetic)


def _rounded(opened: Checkpoint, activation: torch.dtype, state: torch.dtype, draw: int) -> Participant:
    """Draw the rounded run as a replay does: declared roundings are stochastic in every draw but the first."""
    generator = torch.Generator().manual_seed(draw)
    see = rounding(declared(activation, state), chance := generator if draw else None)
    return _numbers(opened, "rounded", wide(activation), state, see, Reordered(generator), chance)


def run_labels(opened: Checkpoint, events: Sequence[Event]) -> list[EventContext]:
    """The same with labels: a right engine as its own truth."""
    subject, truth = (
        Participant(name, LedgerEngine(opened.config, num_steps=POLICY.num_steps))
        for name in ("subject", "truth")
    )
    return list(_contexts(header_of(opened), events, subject, truth, None))


def judge(contexts: Sequence[EventContext], checks: Sequence[Check], *, explain: bool = True) -> Verdict:
    """Everything that the checks say, the findings of the last context with what explains them, as of a replay.

    explain: False where what explains them is no subject.
    """
    verdict, history = Verdict(), RunHistory()
    for context in contexts:
        for check in (*checks, history):
            verdict.add(check(context))
    if explain:
        oracle = next((check.oracle for check in checks if isinstance(check, Derived)), None)
        verdict.compared = explained(verdict.compared, contexts[-1], oracle, history)
    return verdict


def spoiled(
    contexts: Sequence[EventContext], index: int, change: Callable[[EventContext], EventContext]
) -> list[EventContext]:
    """The run up to event `index`, with that context changed."""
    return [*contexts[:index], change(contexts[index])]


def with_state(context: EventContext, request: str, change: Callable[[RequestState], RequestState]) -> EventContext:
    """Another logical state of the subject after the event."""
    after = dict(context.subject.after)
    after[request] = change(after[request])
    return replace(context, subject=replace(context.subject, after=after))


def with_rows(context: EventContext, place: Place, change: Callable[[torch.Tensor], torch.Tensor]) -> EventContext:
    """Another tensor at a place of the subject."""
    places = dict(context.subject.places)
    places[place] = change(places[place].clone())
    return replace(context, subject=replace(context.subject, places=places))


def without(context: EventContext, place: Place) -> EventContext:
    """A subject that does not show a place."""
    places = {shown: rows for shown, rows in context.subject.places.items() if shown != place}
    return replace(context, subject=replace(context.subject, places=places))


def commit_of(contexts: Sequence[EventContext], accepted: int) -> tuple[int, str]:
    """A commit after a window of 4: the event, and a request with that many accepted drafts."""
    return next(
        (context.index, name) for context in contexts if isinstance(context.event, Commit)
        for name, path in zip(context.event.requests, context.event.accepted or (), strict=True)
        if len(path.nodes) == accepted and len(context.expected.windows[name]) == 4
    )


def _contexts(
    header: Header, events: Sequence[Event], subject: Participant, truth: Participant,
    rounded: Participant | None, stored: Mapping[str, torch.dtype] | None = None,
) -> Iterator[EventContext]:
    rules, context = EventRules(header), None
    for index, event in enumerate(events):
        before = rules.table.as_it_stands()
        rules.apply(event)
        other = None if rounded is None else rounded.serve(event)
        expected = expect(before, rules.table)
        side = subject.serve(event) if stored is None else _stored(subject.serve(event), stored)
        context = cut_down(EventContext(
            index, event, expected, side, truth.serve(event), other, UNWATCHED,
            dict(expected.slots_after), {name: list(pages) for name, pages in expected.pages_after.items()},
            updates=True, earlier=left_by(context),
        ))  # fmt: skip
        yield context


class Redrawn:
    """Further draws of the rounded run. Each begins once, and continues as far as a test needs it."""

    def __init__(
        self, opened: Checkpoint, events: Sequence[Event], activation: torch.dtype = torch.float32,
        state: torch.dtype = torch.float32,
    ) -> None:
        self._drawn, self._events = cache(partial(_rounded, opened, activation, state)), events
        self._sides: dict[int, list[Side]] = {}

    @torch.inference_mode()
    def side(self, index: int, draw: int) -> Side:
        sides = self._sides.setdefault(draw, [])
        for event in self._events[len(sides) : index + 1]:
            sides.append(self._drawn(draw).serve(event))
        return sides[index]


def _stored(side: Side, rounds: Mapping[str, torch.dtype]) -> Side:
    """Places and memory in the dtypes that are declared, as an engine would keep them."""
    places = {p: t.to(rounds[p.component]) if t.is_floating_point() else t for p, t in side.places.items()}
    before, after = ({name: _state(s, rounds) for name, s in states.items()} for states in (side.before, side.after))
    return replace(side, places=places, before=before, after=after)


def _state(state: RequestState, rounds: Mapping[str, torch.dtype]) -> RequestState:
    def all_of(component: str, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {layer: tensor.to(rounds[component]) for layer, tensor in tensors.items()}

    hidden = state.proposal_hidden
    return replace(
        state, proposal_hidden=None if hidden is None else hidden.to(rounds["final"]),
        conv=all_of("conv", state.conv), state=all_of("state", state.state),
        keys=all_of("keys", state.keys), values=all_of("values", state.values),
        draft_keys=all_of("keys", state.draft_keys), draft_values=all_of("values", state.draft_values),
    )  # fmt: skip


def of_facts(**given: Any) -> Any:
    """An event context of these facts alone. No request has a slot, unless they say so."""
    nobody, log = SimpleNamespace(slots_after={}, slots_before={}), SimpleNamespace(poison=None)
    return SimpleNamespace(**{"index": 4, "kind": "forward", "log": log, "expected": nobody, **given})
