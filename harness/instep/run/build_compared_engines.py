"""The runs of a comparison: truth, rounded, subject. This is the only module that builds engines.

Leaves out: running them in step (`lockstep.py`).
    truth    the reference in fp64, or for labels the ledger of a right engine
    rounded  the reference in the declared width, rounded where the subject's op set declares it, its sums in another
             order (so that its error is a draw from what a correct engine's may be); not for labels
    subject  the optimized engine with an op set, or an engine of the user
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from instep_optimized import OptimizedEngine
from instep_optimized.commit import OURS
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.watch_op_calls import around
from instep_optimized.options import Options
from instep_optimized.ranks.lockstep import Lockstep
from instep_optimized.ranks.ops_over_ranks import products_of
from instep_optimized.ranks.processes import Processes
from instep_optimized.transfer_between_engines import Wire
from instep_reference.contract import shards
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.declared_rounding import CHUNK, KEPT, Blocked, Storage
from instep_reference.contract.drafters import in_use
from instep_reference.contract.engine import Admit, Capacity, Event, Forward, RequestState, Row
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import See, unseen
from instep_reference.controllers import controller as reference_controller
from instep_reference.engine import ReferenceEngine
from instep_reference.label_ledger import LedgerEngine

from ..adapters import Maker, Subject, takes
from ..options import IN_TURNS
from ..oracle.declared_product_rounding import Operands, Squares
from ..oracle.expert_routes import Routes
from ..oracle.reference_weights import digest_of, weights_of
from ..oracle.reordered_arithmetic import Reordered, stored
from ..oracle.storage_rounding import entries
from ..setting import STATES, Setting, moves_labels
from ..subject.declared_rounding import Declared, declared
from ..subject.engines.callbacks import Asked
from ..subject.engines.engine_from_verbs import DerivedEngine, Standing
from ..subject.engines.ranked import RankedEngine
from ..subject.engines.verbs import ByVerbs, must_have
from ..subject.guarded_calls import MAKES, GuardedSubject, calling, make_subject, said_by
from ..trace.header import Header
from ..trace.request_table import RequestTable
from ..watch.event_log import Room
from ..watch.gather_event_log import Instrumentation, RankedInstrumentation
from ..watch.host_reads import Reads
from ..watch.memory_changes import Watch
from ..watch.visible_places import WHOLE, Shown
from .build_parallel_engines import joins, parallel_engine
from .compared_engine import Participant, RepeatedRuns, guarded
from .patched_tensors import PatchableEngine, Patching
from .reference_cache import Reusing, count
from .reference_with_declared_storage import StoringEngine
from .run_variants import AS_IS, Variant, swapped

AT_ONCE = 512  # tokens of a text that run as one chunk: attention of the reference has a score for each pair
Declares = Ops | Maker | ByVerbs | DerivedEngine | None  # objects that declare rounding


@dataclass(frozen=True)
class Plan:
    """The plan of a run: the model, the sizes, the step counts, and the setting of the subject.

    adaptive, controlled, lag  as in the header of a trace
    group     the processes of the ranks, if each has one
    wire  to the other engine of a trace with a receiver
    """

    checkpoint: Checkpoint
    capacity: Capacity
    num_steps: int
    setting: Setting
    directory: Path | None = None  # the directory of the checkpoint
    adaptive: AdaptiveFile | None = None
    controlled: Controlled | None = None
    lag: int = 0
    group: Processes | None = None
    wire: Wire | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, header: Header, checkpoint: Checkpoint, setting: Setting, field: str, directory: Path | None = None
    ) -> Plan:
        """The plan of a trace. field: the name of its header in errors."""
        if setting.kept and header.capacity.track_interval is None:
            named = "--kept-dtype" if setting.kept_dtype is not None else "--chunk-dtype"
            raise BadInput(named, found=f"{field}, which tracks no prefixes", expected="`track_interval` in the "
                           "capacity, as in fixtures/traces/faults/prefix.jsonl")  # fmt: skip
        return cls(checkpoint, header.room(), setting=setting, directory=directory, **header.steps(field))

    def of_receiver(self, header: Header, field: str) -> tuple[Plan, Plan]:
        """The plans of both engines of a trace with a receiver, with a wire between them."""
        receiver, setting, wire = header.receiver, self.setting, Wire()
        assert receiver is not None
        if setting.led:
            raise BadInput("--engine", found=f"{field}, whose requests move to a second engine",
                           expected="an op set or a maker: callbacks show no copies that could move")  # fmt: skip
        if setting.comm != IN_TURNS:
            raise BadInput("--comm", found=f"{setting.comm} with {field}, which has a receiver",
                           expected=f"{IN_TURNS}: two engines run in one process")  # fmt: skip
        for name in ("stages", "dp"):
            if getattr(setting, name) > 1:
                raise BadInput(f"--{name}", found=f"{getattr(setting, name)} with {field}, which has a receiver",
                               expected="1")  # fmt: skip
        for name, storage in (("state_dtype", STATES.get(setting.state_dtype or "")), ("kv_dtype", setting.kv),
                              ("kept_dtype", setting.kept.get(KEPT)), ("chunk_dtype", setting.kept.get(CHUNK))):
            if isinstance(storage, Blocked) or (storage is not None and name in ("kept_dtype", "chunk_dtype")):
                raise BadInput(f"--{name.replace('_', '-')}", found=f"{getattr(setting, name)} with {field}, which has "
                               "a receiver", expected="no tiles and no narrow prefixes where entries move to another "
                               "engine")  # fmt: skip
        ours = isinstance(setting.subject(), Ops)
        if receiver.ranks == 1 and setting.experts != shards.COLUMNS:
            raise BadInput(f"{field}: receiver.ranks", found=f"1 with --experts {setting.experts}",
                           expected="2 or more")
        if ours and receiver.ranks is not None:
            try:
                shards.config_of(self.checkpoint.config, receiver.ranks, setting.experts)
            except BadInput as wrong:
                raise BadInput(f"{field}: receiver.ranks", found=wrong.found, expected=wrong.expected) from None
        there = replace(setting, ranks=(receiver.ranks or setting.ranks) if ours else 1,
                        state_dtype=receiver.state_dtype or setting.state_dtype)  # fmt: skip
        other = Plan.of(header.of_receiver(), self.checkpoint, there, field, self.directory)
        return replace(self, wire=wire), replace(other, wire=wire)

    @property
    def steps(self) -> dict[str, Any]:
        """The arguments of an engine about step counts; only a trace with a `controller` passes it, and its lag."""
        further = {} if self.controlled is None else {"controlled": self.controlled, "lag": self.lag}
        return {"num_steps": self.num_steps, "adaptive": self.adaptive, **further}

    @property
    def in_use(self) -> Checkpoint:
        """The checkpoint as the drafter of this plan uses it, for the recomputation of layers."""
        return replace(self.checkpoint, config=in_use(self.checkpoint.config, self.setting.mode))


@dataclass(frozen=True)
class BuiltSubject:
    """A subject, as its builder returns it.

    declares         declares its rounding: the op set, the maker, or the engine that calls callbacks
    ops              its op set, None for an engine of the user
    engine           the engine that calls the user's callbacks, None for other engines
    instrumentation  the logger; None if the builder adds no observers, or if callbacks show no memory
    poison           the value of free memory, if it has one
    calls            how often each op was called
    """

    subject: Subject
    declares: Declares
    ops: Ops | None = None
    engine: DerivedEngine | None = None
    instrumentation: Instrumentation | RankedInstrumentation | None = None
    poison: float | None = None
    calls: Counter[str] = field(default_factory=Counter)


@dataclass
class Participants:
    """The three runs. built: the engine that `subject` plays. declared: its declared rounding."""

    built: BuiltSubject
    subject: Participant
    truth: Participant
    rounded: Participant | None
    watch: Watch
    shown: GuardedSubject
    repeated_runs: RepeatedRuns | None  # the rounded run again, for checks that need further draws
    patching: Patching
    overlap: bool  # whether rounds of the subject overlap, so that it reserves pages for the worst case
    declared: Declared
    state: Storage  # of the subject's states
    own: set[str] = field(default_factory=set)  # requests with recurrent states that the reference computed itself

    def ask_with(self, coming: tuple[int, int]) -> None:
        """Request the next step counts with these numbers of requests."""
        for side in (self.subject, self.truth, self.rounded):
            if side is not None:
                side.states.coming = coming

    def begin(self, table: RequestTable, events: Sequence[Event]) -> None:
        """Begin between two rounds. table: the requests there; events: those before, which no side has served.

        The reference runs the text of each request so far as one prompt, which gives it the KV entries. The subject is
        an engine driven through callbacks and has all memory already.
        """
        engine = self.built.engine
        assert engine is not None and isinstance(self.truth, Reusing), "only a recording begins later"
        index = len(events)
        texts = [(self.truth.serve(event), event, self.truth.rankings())[1:] for event in texts_so_far(table)]
        self.truth.count(events)

        def resume(draw: Reusing) -> None:
            for event, rankings in texts:
                draw.serve_following(event, rankings)
            draw.count(events)

        if isinstance(self.rounded, Reusing):
            resume(self.rounded)
        if self.repeated_runs is not None:
            self.repeated_runs.begin_at(index, resume)
        for event in events:
            count(engine.controller, event)
        engine.begin_with({
            name: Standing(one.prompt, (*one.prompt, *one.said)[: one.length], one.root, there=one.length > 0,
                           sampling=one.sampling)
            for name, one in table.live.items()
        }, table.num_steps)
        self.subject.states.live({name: self.subject.engine.state(name) for name in table.live})

    def follow(
        self, wrote: Iterable[str], shown: Mapping[str, RequestState], index: int, *, between_rounds: bool
    ) -> None:
        """Let both sides of the reference continue from the subject's states; further draws begin there.

        wrote: the live requests whose states were just written; shown: the subject's states; index: the next event.
        A state that is not finite is not continued. Draws begin at this event only if the reference has no recurrent
        state of its own, whose roundings they would share; otherwise they continue from the states that are shown.
        """
        assert isinstance(self.truth, Reusing) and isinstance(self.rounded, Reusing), "no labels"
        taken = dict[str, RequestState]()
        for name in wrote:
            state, whole = shown.get(name), False
            parts = () if state is None else (*state.conv.values(), *state.state.values())
            if state is not None and parts and all(bool(part.isfinite().all()) for part in parts):
                self.truth.continue_from(name, state)
                whole, taken[name] = self.rounded.continue_from(name, state), state
            (self.own.discard if whole else self.own.add)(name)
        self.own &= self.rounded.engine.requests.keys()
        if self.repeated_runs is None:
            return
        self.repeated_runs.follow(taken)
        if between_rounds and not self.own:
            self.repeated_runs.begin_at(index, self.rounded.resumption())

    def bring(self, other: Participants, name: str) -> None:
        """Bring a copy that the other engine gave out: both references have it, and inspection knows it."""
        if other.built.instrumentation is not None:
            other.built.instrumentation.copy_left(name)
        pairs = (self.truth, other.truth), (self.rounded, other.rounded), (self.subject, other.subject)
        for mine, its in pairs:
            if mine is not None and its is not None:
                mine.states.bring(its.states, name)
        for mine, its in pairs[:2]:
            if isinstance(mine, Reusing) and isinstance(its, Reusing):
                mine.take(name, its.give(name))
            elif mine is not None and its is not None:
                saved: Any = mine.engine, its.engine  # ledgers
                saved[0].saved[name] = saved[1].saved.pop(name)
        if self.repeated_runs is not None and other.repeated_runs is not None:
            self.repeated_runs.bring(other.repeated_runs, name)

    def says_shown(self) -> Shown:
        """The visible data of the subject for the event that it just served."""
        return WHOLE if self.built.engine is None else self.built.engine.shown()


def texts_so_far(table: RequestTable) -> Iterator[Event]:
    """Events that bring a new engine to these requests: each is admitted with its text, which then runs in chunks."""
    for name, one in table.live.items():
        text, unread = (*one.prompt, *one.said)[: one.length], one.prompt[one.length :]
        yield Admit(name, text + unread, one.sampling)
        for first in range(0, len(text), AT_ONCE):
            count, last = min(AT_ONCE, len(text) - first), first + AT_ONCE >= len(text)
            drawn = (0.0,) if last and one.draws and one.root is not None else ()
            yield Forward((Row(name, "prefill", count, one.root if last else None, drawn),))


def participants_of(plan: Plan, variant: Variant = AS_IS) -> Participants:
    """Build all sides of a plan. variant: changes of the subject."""
    built = build_subject(plan, variant)
    if moves_labels(built.ops):
        return join_sides(plan, built, ledger_participant("truth", plan, plan.checkpoint.config), variant=variant)
    truth, draw = truth_participant(plan), partial(rounded_participant, plan, built.declares)
    repeated_runs = RepeatedRuns(partial(draw, asked=built.engine is not None))
    return join_sides(plan, built, truth, draw(0), repeated_runs, variant=variant)


def ledger_participant(name: str, plan: Plan, config: ModelConfig) -> Participant:
    """The orchestration of a right engine. config: of a model with the same rows."""
    return Participant(name, LedgerEngine(config, **plan.steps, mode=plan.setting.mode, room=plan.capacity))


def join_sides(
    plan: Plan, built: BuiltSubject, truth: Participant, rounded: Participant | None = None,
    repeated_runs: RepeatedRuns | None = None, *, variant: Variant = AS_IS,
) -> Participants:
    """A built subject with its observers, next to the sides that it is compared with."""
    log, labels = built.instrumentation, moves_labels(built.ops)
    shown, patching = GuardedSubject(built.subject), Patching(variant.patch)
    served = guarded(
        plan.setting.name, built.subject, labels=labels, arithmetic=log, first=patching,
        **({} if log is None else {"answered": log.answered}),
    )
    served.proposes = truth.proposes = not labels and built.engine is None  # a label is no token of the trace
    return Participants(
        built, served, truth, rounded, Watch(shown, built.poison), shown, repeated_runs, patching,
        built.ops is not None and plan.setting.overlap, said := declares(plan, built.declares),
        said.rounds.get("state", plan.setting.state),
    )


def bare(plan: Plan) -> Subject:
    """The subject as production runs it, without observers and without wrappers of its ops."""
    return build_subject(plan, observed=False).subject


def build_subject(plan: Plan, variant: Variant = AS_IS, *, observed: bool = True) -> BuiltSubject:
    """The subject of a plan, by the builder of its kind. observed: with loggers and separate configurations."""
    match plan.setting.subject():
        case Ops() as ops:
            return build_from_ops(plan, ops, variant, observed=observed)
        case ByVerbs() as found:
            return _build_from_callbacks(plan, found, variant)
        case maker:
            return _build_from_maker(plan, maker, variant, observed=observed)


def build_from_ops(
    plan: Plan, ops: Ops, variant: Variant = AS_IS, *, batches: tuple[int, ...] | None = None, observed: bool = True,
) -> BuiltSubject:
    """Our engine on these ops. batches: the batch sizes of its graphs."""
    if not observed:
        built = optimized_engine(plan, ops, plan.setting.options(batches=batches))
        return BuiltSubject(built, over(ops, plan.setting), ops)
    ops, calls, handed = swapped(ops, variant.swap), Counter[str](), lent_copies(plan)
    ranks = max(plan.setting.ranks, plan.setting.stages, plan.setting.dp)
    graphs = plan.setting.graphs and not variant.without_graphs
    options = plan.setting.options(graphs=graphs, batches=batches, **variant.options)
    first = instrumentation_of(handed, ops)
    here = ranks if plan.group is None else 1
    logs = [first, *(instrumentation_of(handed, ops, first.reads) for _ in range(1, here))]
    counted = [around(ops, unseen, log.wrapper, counting(calls)) for log in logs]
    with first.making("the optimized engine"):
        ticks = [log.tick for log in logs]
        engine = optimized_engine(handed, counted[0], options, PatchableEngine, counted, ticks)
    for log, one in zip(logs, engine.engines if isinstance(engine, RankedEngine) else (engine,), strict=True):
        log.of(GuardedSubject(one), poison=options.poison, guarded=options.guarded and not ops.packed,
               runners=[runner for runner in (one.graphs, one.prompt_graphs) if runner is not None])  # fmt: skip
    if isinstance(engine, RankedEngine):
        joined = engine.log = joins(engine)(logs, engine.group.ranks)
        return BuiltSubject(engine, over(ops, plan.setting), ops, None, joined, options.poison, calls)
    return BuiltSubject(engine, ops, ops, None, first, options.poison, calls)


def over(ops: Ops, setting: Setting) -> Ops:
    """The op set with the rounding that it declares over the ranks of a setting."""
    return ops if setting.ranks == 1 else replace(
        ops, products=products_of(ops, setting.ranks, setting.activation, setting.experts))


def optimized_engine(
    plan: Plan, ops: Ops, options: Options, kind: type[OptimizedEngine] = OptimizedEngine, each: Sequence[Ops] = (),
    ticks: Sequence[Callable[[int], None]] = (),
) -> OptimizedEngine:
    """Our engine for a plan, without observers. each: the op set of each rank; none: `ops` on every rank.

    ticks: of each pipeline stage, what is called before each tick of its schedule
    """
    size, make = plan.setting.ranks, partial(kind, plan.checkpoint, options=options, capacity=plan.capacity)
    if plan.setting.comm != IN_TURNS and plan.group is None:
        raise BadInput("--comm", found=plan.setting.comm, expected=f"{IN_TURNS}: only a replay starts processes")
    if (parts := plan.setting.stages * plan.setting.dp) > 1:
        with calling(MAKES), enough_memory(plan.capacity):
            return cast("OptimizedEngine", parallel_engine(
                plan.setting, partial(partial, checkpoint=plan.checkpoint, options=options, capacity=plan.capacity,
                                      **plan.steps), plan.checkpoint.config, each or (ops,) * parts, ticks, plan.group,
                patchable=kind is PatchableEngine))  # fmt: skip
    with calling(MAKES), enough_memory(plan.capacity):
        if size == 1:
            return make(ops=ops, wire=plan.wire, **plan.steps)
        group = plan.group or Lockstep(size)
        ranks = group.run([partial(make, ops=own, comm=comm, wire=plan.wire, **plan.steps)
                           for own, comm in zip(each or (ops,) * size, group.comms, strict=False)])  # fmt: skip
        group.take_calls()  # of captures
        # It has every method of the contract, by name.
        return cast("OptimizedEngine", RankedEngine(group, ranks, plan.checkpoint.config, moves_labels(ops)))


def _build_from_maker(plan: Plan, maker: Maker, variant: Variant, *, observed: bool) -> BuiltSubject:
    """An engine of the user. If drafts come from outside, its model has no draft head."""
    setting, plan = plan.setting, replace(plan, checkpoint=plan.in_use)
    if plan.controlled is not None and not takes(maker, "controlled"):
        raise BadInput("--ops", found=f"{setting.name}, whose `make` takes no `controlled`",
                       expected=f"one that does: the trace's controller is {plan.controlled.dialect}")  # fmt: skip
    if observed:
        _must_be_as_it_is(setting, variant)
        plan = lent_copies(plan)
    log = instrumentation_of(plan, None) if observed else None
    with nullcontext() if log is None else log.making("the engine"):
        subject = make_subject(
            maker, plan.checkpoint, plan.capacity, **plan.steps, device=setting.device, dtype=setting.activation,
            layout=setting.layout,
        )
    if log is not None:
        log.of(GuardedSubject(subject))
    return BuiltSubject(subject, maker, instrumentation=log)


def _build_from_callbacks(plan: Plan, found: ByVerbs, variant: Variant) -> BuiltSubject:
    """An engine that calls the user's callbacks and serves the contract, and a logger if memory is visible."""
    setting, room = plan.setting, copy(plan.capacity)
    _must_be_as_it_is(setting, variant)
    if plan.directory is None:
        raise BadInput("--engine", found="no directory of the model", expected="a command that reads one")
    steps, _ = candidates(**plan.steps)
    with calling(MAKES):
        made = found.make(
            plan.directory, room, num_steps=max(steps), widest=max(steps) + 1, device=setting.device,
            dtype=setting.activation,
        )
        asked = Asked(must_have(made, found.name), found.make, plan.checkpoint.config)
    engine = DerivedEngine(asked, plan.in_use, plan.capacity, **plan.steps)
    if "regions" not in asked.feeds:
        return BuiltSubject(engine, engine, engine=engine)
    log = Instrumentation(
        None, {}, setting.device,
        Room(plan.capacity, plan.capacity.widest(max(steps)), plan.capacity.widest(plan.num_steps)),
        {"the capacity": room},
    )
    log.of(GuardedSubject(engine))
    return BuiltSubject(engine, engine, None, engine, log)


def _must_be_as_it_is(setting: Setting, variant: Variant) -> None:
    """Refuse options that only our engine has."""
    if variant.swap or variant.options:
        raise BadInput("--swap", found=setting.name, expected="an op set; an --engine has no ops to swap")
    for named in ("graphs", "prompt_graphs", "overlap", "state_dtype", "state_rounding", "kv_dtype", "kept_dtype",
                  "chunk_dtype", "ring_dtype", "snapshot_layout"):
        if getattr(setting, named):
            expected = "an op set; an --engine decides that itself"
            raise BadInput(f"--{named.replace('_', '-')}", found=setting.name, expected=expected)


def lent_copies(plan: Plan) -> Plan:
    """The plan with a separate configuration, so that no other side reads what the subject writes into it."""
    checkpoint = replace(plan.checkpoint, config=copy(plan.checkpoint.config))
    return replace(plan, checkpoint=checkpoint, capacity=copy(plan.capacity), adaptive=copy(plan.adaptive),
                   controlled=deepcopy(plan.controlled))


def instrumentation_of(plan: Plan, found: Ops | None, reads: Reads | None = None) -> Instrumentation:
    """The logger of a subject's op calls, host reads, graphs and configurations. reads: as in `Instrumentation`"""
    steps, _ = candidates(**plan.steps)
    handed = {
        "the model's configuration": plan.checkpoint.config, "the adaptive file": plan.adaptive,
        "the controller": plan.controlled,
        "the capacity": plan.capacity,
    }
    layouts = plan.setting.layout, plan.setting.snapshot_layout or plan.setting.layout
    told = found is not None and plan.setting.strategy in OURS["state"]  # other strategies choose their layout
    widest, first = (plan.capacity.widest(count) for count in (max(steps), plan.num_steps))
    room = Room(plan.capacity, widest, first, layouts if told else None)
    return Instrumentation(found, declares(plan, found).rounds, plan.setting.device, room, handed, reads)


@contextmanager
def enough_memory(capacity: Capacity) -> Iterator[None]:
    """Report pools that do not fit into memory as bad input of the trace."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        signs = ("allocate memory", "out of memory", "verflow")  # words of torch's messages
        if not isinstance(error, MemoryError) and not any(sign in said_by(error) for sign in signs):
            raise
        raise BadInput(
            "capacity", found=f"slots up to {max(capacity.slots)}, pages up to {max(capacity.pages)} of "
            f"{capacity.page_size} tokens", expected="pools that fit into the memory of this machine",
            hint="; ".join(getattr(error, "__notes__", ())),
        ) from None


def reference(plan: Plan, dtype: torch.dtype) -> ReferenceEngine:
    """The reference in some width, always on the CPU."""
    weights = weights_of(plan.checkpoint, dtype)
    return ReferenceEngine(weights, **plan.steps, mode=plan.setting.mode, room=plan.capacity)


def truth_participant(plan: Plan, *, asked: bool = True) -> Participant:
    """The reference in fp64. asked: whether its states are read."""
    of = digest_of(plan.checkpoint, "truth", *plan.steps.values(), plan.setting.mode, asked, _room(plan))
    routes = Routes(plan.checkpoint.config)
    return Reusing("truth", reference(plan, torch.float64), of, arithmetic=routes, asked=asked)


def rounded_participant(plan: Plan, found: Declares, draw: int, *, asked: bool = True) -> Participant:
    """One draw of the reference in the declared width.

    found: declares the rounding.  asked: whether the states of this participant are read.
    draw: 0 rounds as declared. Every other draw rounds stochastically: another order of sums hardly changes numbers
    that are rounded to 16 bits, so draws with rounding to nearest would all be equal
    """
    said, generator = declares(plan, found), torch.Generator().manual_seed(draw)
    chance = generator if draw else None
    weights = weights_of(plan.checkpoint, plan.setting.width)
    engine = StoringEngine(weights, **plan.steps, mode=plan.setting.mode, room=plan.capacity)
    engine.stored, engine.chance = said.rounds.get("state", plan.setting.state), chance
    engine.rounds = said.rounds
    engine.operands = Operands(said.products, weights, chance=chance, squares=Squares(weights))
    # The first draw, which T4 uses, too, truncates, and inverts in the form with the larger error in repetitive texts.
    engine.operands.begin(cut=True, by_substitution=draw % 2 == 0)
    arithmetic = Reordered(generator, engine.operands, following=Routes(plan.checkpoint.config))
    of = digest_of(
        plan.checkpoint, draw, said, plan.setting.width, plan.setting.state, *plan.steps.values(),
        plan.setting.mode, asked, _room(plan))
    return Reusing(
        "rounded", engine, of, arithmetic=arithmetic, first=rounding(said.rounds, chance), asked=asked)


def _room(plan: Plan) -> tuple[int | None, ...]:
    """The fields of a capacity that the reference uses."""
    return plan.capacity.topk, plan.capacity.num_draft_tokens, plan.capacity.track_interval


def candidates(
    num_steps: int, adaptive: AdaptiveFile | None = None, controlled: Controlled | None = None, lag: int = 0
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """All step counts that may come into force, 0 aside, as the reference resolves them, and its messages."""
    made = reference_controller(controlled, num_steps, adaptive, lag)
    return made.counts, tuple(made.messages)


def declares(plan: Plan, found: Declares) -> Declared:
    """The declared rounding of an op set or of an engine's maker under this plan."""
    setting = plan.setting
    return declared(found, setting.activation, setting.state, setting.kv, setting.apart)


def rounding(at: Mapping[str, Storage], chance: torch.Generator | None = None) -> See:
    """A hook that casts a place to its declared dtype and back; with `chance`, to either neighbour."""

    def see(place: Any, tensor: torch.Tensor) -> torch.Tensor:
        dtype = at.get(place.component)
        if dtype is not None and tensor.is_floating_point():
            tensor = stored(tensor, dtype, chance)
        return entries(place.component, tensor, at)

    return see


def counting(calls: Counter[str]) -> Any:
    """A wrapper for `around` that counts how often each op is called."""

    def wrapper(name: str, op: Any) -> Any:
        def call(**given: Any) -> Any:
            calls[name] += 1
            return op(**given)

        return call

    return wrapper
