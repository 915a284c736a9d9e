"""Relations between two engines on the same events, in lock step: answers and memory must have equal bytes after each.

A row has the name, the claim, the two engines, and an example of a wrong engine that it detects. Leaves out: relations
that bring the same tokens through other events (`same_tokens.py`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from instep_optimized.ops.fused import exact_of, in_parts
from instep_optimized.transfer_between_engines import Wire
from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.declared_rounding import RING, Blocked
from instep_reference.contract.engine import AnyEvent, Draft, Forward
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.event_facts import Phase
from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ...adapters import Subject
from ...adapters.strategy_by_name import OPTIONS
from ...player import Player
from ...run.build_compared_engines import participants_of
from ...run.compared_engine import Participant
from ...trace.event_scheduler import own_say
from ...trace.file import Trace
from ...verdict import Comparison, Skipped, Tier
from ...watch.event_context import EventContext
from ...watch.player_observers import OnHost, Watching
from ...watch.rows_by_request import UPDATE, row_spans
from .case import Case, Relation, Results, our_own
from .compare_records import bitwise, different, parts, pools, unserved
from .engine_modifications import MovingEngine, RingRoundedFromOutside, eager_graphs, rounded_from_outside
from .position_record import Server, serving, state_of
from .request_timelines import RewrittenTrace, as_traced
from .rewrites import in_one_page, moved, with_full_caps, without_caps


@dataclass
class Arm:
    """One of the two engines, with its name for messages and its events.

    watched  whether its places are observed and compared
    player   the player that serves the events; None: a new one
    """

    name: str
    engine: Subject
    trace: RewrittenTrace
    watched: bool = True
    player: Player | None = None

    def __post_init__(self) -> None:
        if self.player is None and self.watched:
            self.player = Participant(self.name, self.engine, asked=False)
        elif self.player is None:
            self.player = Player(self.name, self.engine, [OnHost()])
        self.server = Server(self.trace.header, self.player, self.engine)


@dataclass
class ABRun:
    """Compare two engines up to the first event at which they differ; later differences follow from it.

    pools  whether every byte of every pool must be equal as well
    """

    relation: str
    one: Arm
    other: Arm
    pools: bool = False

    def run(self) -> Iterator[Comparison | Skipped]:
        pairs = zip(self.one.trace.events, self.other.trace.events, strict=True)
        for index, (mine, theirs) in enumerate(pairs):
            results = list(self._event(self.one.trace.origins[index], mine, theirs))
            yield from results
            if any(isinstance(result, Comparison) and not result.agrees for result in results):
                return

    def _event(self, origin: int, mine: AnyEvent, theirs: AnyEvent) -> Iterator[Comparison | Skipped]:
        contexts = []
        for arm, event in ((self.one, mine), (self.other, theirs)):
            with serving(origin, event, arm.player) as failed:
                contexts.append(arm.server(event, origin))
            if failed:
                yield unserved(self.relation, failed[0], arm.name)
                return
        one, other = contexts
        yield from (Skipped("played", origin, said) for said in one.shown.said)
        yield from self._places(one, other)
        yield from self._answers(one, other)
        yield from self._states(one, other)
        if self.pools:
            yield from self._pools(one)

    def _places(self, one: EventContext, other: EventContext) -> Iterator[Comparison]:
        mine, theirs = one.subject.places, other.subject.places
        if self.one.watched and self.other.watched:
            for place in sorted(mine.keys() | theirs.keys(), key=Place.order):
                if place.component == UPDATE and not (place in mine and place in theirs):
                    continue  # only one of the two keeps updates
                left, right = mine.get(place), theirs.get(place)
                counts = different(left, right)
                request, rows = self._whose(one, place, left, right) if counts[1] else (None, "")
                yield self._comparison(one, place, counts, request, rows)

    def _whose(
        self, context: EventContext, place: Place, mine: torch.Tensor | None, theirs: torch.Tensor | None
    ) -> tuple[str | None, str]:
        """The first request whose rows differ, and the number of the row."""
        if mine is None or theirs is None or mine.shape != theirs.shape:
            return None, "the rows have different shapes"
        for span in row_spans(context, place.stage):
            begin, count = span.at(place)
            for row in range(begin, begin + count):
                if different(mine[row], theirs[row])[1]:
                    return span.request, f"row {row - begin} of {count} differs"
        return None, "rows that belong to no request differ"

    def _answers(self, one: EventContext, other: EventContext) -> Iterator[Comparison]:
        if not one.shown.has("draft" if isinstance(one.event, Draft) else "logits"):
            return  # the harness derived the answer
        mine, theirs = (own_say(context.event, context.subject.answer) for context in (one, other))
        if mine is not None or theirs is not None:
            stage = "chain.1" if isinstance(one.event, Draft) else "trunk"
            place = Place(stage, AFTER_LAYERS, "pick")
            yield self._comparison(one, place, different(mine, theirs), None, "the engines' own choices differ")

    def _states(self, one: EventContext, other: EventContext) -> Iterator[Comparison]:
        for name, standing in self.one.server.rules.table.live.items():
            if not (_touched(one, name) and one.shown.memory(name) and other.shown.memory(name)):
                continue
            mine, theirs = (state_of(arm.engine, name) for arm in (self.one, self.other))
            for place, left, right in parts(mine, theirs, one.shown.whole):
                if standing.phase is Phase.VERIFIED and place.component in BLOCKS:
                    continue  # undefined until the commit
                yield self._comparison(one, place, different(left, right), name, "the logical state differs")

    def _pools(self, one: EventContext) -> Iterator[Comparison]:
        for place, mine, theirs, says in pools(self.one.engine.regions(), self.other.engine.regions()):
            yield self._comparison(one, place, different(mine, theirs), None, says)

    def _comparison(
        self, context: EventContext, place: Place, counts: tuple[int, int], request: str | None, says: str
    ) -> Comparison:
        slot = None if request is None else context.expected.slots_after.get(request)
        between = f'{says} between "{self.one.name}" and "{self.other.name}"'
        return bitwise(self.relation, context.index, context.kind, place, counts, between, request, slot)


def _touched(context: EventContext, name: str) -> bool:
    """Whether the event names the request. Damage to other requests shows when they are named next."""
    event = context.event
    if isinstance(event, Forward):
        return any(row.request == name for row in event.rows)
    return name in getattr(event, "requests", (getattr(event, "request", None),))


Arms = Callable[[Case], Iterable[tuple[Arm, Arm]]]
FINITE = 12288.0  # exact in every float dtype, and larger than any value in a model


def pairwise(
    name: str, says: str, arms: Arms, catches: str, *, pools: bool = False,
    lacks: Callable[[Case], str | None] = lambda case: None,
) -> Relation:
    """A row of the table; with `pools`, every byte of every pool is compared as well."""

    def hold(case: Case) -> Results:
        for one, other in arms(case):
            yield from ABRun(name, one, other, pools=pools).run()

    return Relation(name, says, catches, (Tier.BITWISE,), hold, lacks)


def with_options(*named: tuple[str, dict[str, Any]]) -> Arms:
    """Two engines that differ in fields of `Options`."""

    def arms(case: Case) -> Iterator[tuple[Arm, Arm]]:
        rewritten = as_traced(case.trace)
        one, other = (Arm(name, case.engine(rewritten.header, **options), rewritten) for name, options in named)
        yield one, other

    return arms


def with_events(*named: tuple[str, Callable[[Trace], RewrittenTrace]]) -> Arms:
    """Two engines with different capacities, on events that are otherwise the same."""

    def arms(case: Case) -> Iterator[tuple[Arm, Arm]]:
        rewritten = [(name, rewrite(case.trace)) for name, rewrite in named]
        one, other = (Arm(name, case.engine(its.header), its) for name, its in rewritten)
        yield one, other

    return arms


def watched_and_not(case: Case) -> Iterator[tuple[Arm, Arm]]:
    """One engine with every probe of a replay attached, and one without any."""
    rewritten, participants = as_traced(case.trace), participants_of(case.plan)
    subject = participants.subject
    looked_at = Player("watched", subject.engine, [Watching(participants.watch), *subject.observers])
    seen = Arm("watched", participants.shown.engine, rewritten, watched=False, player=looked_at)
    yield seen, Arm("unwatched", case.engine(rewritten.header), rewritten, watched=False)


def fused_and_apart(case: Case) -> Iterator[tuple[Arm, Arm]]:
    """The op set with its exact fusions, and with their parts.

    No observer is installed: an observed engine runs the parts in both cases.
    """
    rewritten, ops = as_traced(case.trace), case.ops
    assert ops is not None, "asked before"
    named = ("fused", ops), ("in parts", in_parts(ops))
    one, other = (Arm(name, case.engine(rewritten.header, ops), rewritten, watched=False) for name, ops in named)
    yield one, other


def without_fusions(case: Case) -> str | None:
    if case.ops is None:
        return "an external engine has no op set"
    return None if exact_of(case.ops) else "this op set has no fusion that promises the bits of its parts"


def replayed_and_eager(case: Case) -> Iterator[tuple[Arm, Arm]]:
    """A graph replay and an eager run with the same buckets and padding.

    On a CPU the graph emulator records the body, and poisons memory between replays. Forwards with prompts run in
    graphs if they do in the setting.
    """
    rewritten = as_traced(case.trace)
    eager = eager_graphs(case.engine(rewritten.header, graphs=False), case.plan.setting.prompt_buckets)
    yield Arm("eager", eager, rewritten), Arm("replayed", case.engine(rewritten.header, graphs=True), rewritten)


def other_strategies(case: Case) -> Iterator[tuple[Arm, Arm]]:
    """The commit strategy of the setting against every other one that this engine supports; then the conv forms."""
    rewritten, setting = as_traced(case.trace), case.plan.setting
    named = {"strategy": setting.strategy, "conv": setting.conv}
    others: list[dict[str, Any]] = [{option: name} for option in OPTIONS for name in setting.strategies(option)]
    for changed in others:
        try:
            other = case.engine(rewritten.header, **changed) if named | changed != named else None
        except Unsupported:  # not with this dtype or drafter
            continue
        if other is not None:
            arm = Arm(", ".join((named | changed).values()), other, rewritten)
            yield Arm(", ".join(named.values()), case.engine(rewritten.header), rewritten), arm


def narrow_and_plain(case: Case) -> Iterator[tuple[Arm, Arm]]:
    """Prefixes that the engine keeps narrower, and plain copies of the numbers that are read from them."""
    rewritten, rounds = as_traced(case.trace), case.plan.setting.kept
    plain = case.engine(rewritten.header, kept=None, chunk=None)
    yield (Arm("narrow prefixes", case.engine(rewritten.header), rewritten),
           Arm("plain copies of rounded states", rounded_from_outside(plain, rounds), rewritten))


def moving_and_staying(case: Case) -> Results:
    """One engine, and two with other pools and page sizes between which every request moves after each round."""
    rewritten, wire = as_traced(case.trace), Wire()
    both = MovingEngine(*(
        case.engine(header, wire=wire) for header in (rewritten.header, in_one_page(case.trace).header)))
    one, other = Arm("staying", case.engine(rewritten.header), rewritten), Arm("moving", cast(Subject, both), rewritten)
    results = list(ABRun("moving", one, other).run())
    wrong = any(isinstance(result, Comparison) and not result.agrees for result in results)
    yield from results if both.moves or wrong else [Skipped("moving", 0, "no request of this trace could move")]


def stays(case: Case) -> str | None:
    """Why nothing can move to another engine."""
    if case.ops is None:
        return "an external engine has no second one that fetches what it offloads"
    options = case.plan.setting.options()
    if any(isinstance(one, Blocked) for one in (options.state, options.kv)) or case.plan.setting.kept:
        return "memory in tiles and narrow prefixes do not move to another engine"
    several = case.plan.setting.stages * case.plan.setting.dp > 1
    return "pipeline stages and replicas have no second engine" if several else None


def no_narrow_prefixes(case: Case) -> str | None:
    if case.ops is None:
        return "an external engine keeps its prefixes itself"
    return None if case.reads_narrow_prefixes else "no request continues from a prefix that is kept narrower"


def split_and_wide_rings(case: Case) -> Iterator[tuple[Arm, Arm]]:
    """A ring in two parts, and a wide ring of the sums of both parts. The updates that a verify shows are left out."""
    rewritten, dtype = as_traced(case.trace), case.plan.setting.apart[RING]
    assert isinstance(dtype, torch.dtype), "a setting has no other"
    wide = RingRoundedFromOutside(case.engine(rewritten.header, ring=None), dtype)
    yield (Arm("a ring in two parts", case.engine(rewritten.header), rewritten, watched=False),
           Arm("a wide ring of their sums", cast(Any, wide), rewritten, watched=False))  # fmt: skip


def no_split_ring(case: Case) -> str | None:
    if case.ops is None:
        return "an external engine keeps its ring itself"
    if RING not in case.plan.setting.apart or case.labels:
        return "no ring keeps its numbers in two parts (--ring-dtype)"
    alone = case.plan.setting.ranks * case.plan.setting.stages * case.plan.setting.dp == 1
    return None if alone else "each of several ranks, stages or replicas has a ring"


def its_own_order(case: Case) -> str | None:
    own = case.led is not None and not case.led.asked.exact
    return "this engine chooses slots and pages itself: it does not declare their order" if own else None


PAIRWISE: tuple[Relation, ...] = (
    pairwise(
        "unseen", "watched or not, an engine does the same", watched_and_not,
        "a probe that writes into what it is shown", pools=True,
    ),
    pairwise(
        "fused", "an exact fusion is its parts", fused_and_apart, "a norm of a sum that was never rounded", pools=True,
        lacks=without_fusions,
    ),
    pairwise(
        "poison", "no output depends on the contents of free memory",
        with_options(("poisoned with NaN", {"poison": math.nan}), (f"poisoned with {FINITE:g}", {"poison": FINITE})),
        "a fresh request that reads the conv window of the slot's previous owner",
        lacks=our_own("an external engine fills its memory itself"),
    ),
    # Unaligned pitches are excluded: for these a compiler may choose another order of summation.
    pairwise(
        "pitch", "pools of another aligned pitch give the same bits",
        with_options(("guarded pools", {"guarded": True}), ("packed pools", {"guarded": False})),
        "a kernel that computes a stride instead of reading it",
        lacks=our_own("an external engine sets its pitches itself"),
    ),
    pairwise(
        "slots", "slots and pages in another order give the same bits",
        with_events(("the trace", as_traced), ("other slots", moved)), "a table that ends before the last slot",
        lacks=its_own_order,
    ),
    pairwise(
        "strategies", "every way to commit leaves the same bits", other_strategies,
        "a strategy that keeps its copy of a state in a narrower dtype",
        lacks=our_own("an external engine has only its own commit strategy"),
    ),
    Relation(
        "moving", "a request that moves to another engine and back continues as if it had stayed",
        "a transfer that leaves out the last row of the draft head's KV", (Tier.BITWISE,), moving_and_staying, stays,
    ),
    pairwise(
        "full_caps", "a cap at the number of drafts is no cap",
        with_events(("no caps", without_caps), ("full caps", with_full_caps)), "a cap that counts the bonus",
        lacks=our_own("an external engine may have no caps"),
    ),
    pairwise(
        "graph_is_eager", "a graph's replay is its body, run eagerly", replayed_and_eager,
        "a graph that keeps the address of memory that was reallocated", pools=True,
        lacks=our_own("an external engine captures its graphs itself"),
    ),
    pairwise(
        "kept_once", "a hit on a narrow prefix continues from its state, rounded once and read once", narrow_and_plain,
        "a hit that reads a state with the scales of another prefix", lacks=no_narrow_prefixes,
    ),
    pairwise(
        "ring_parts", "a ring in two parts continues as a wide ring of their sums", split_and_wide_rings,
        "a tree whose commit moves the high parts alone", lacks=no_split_ring,
    ),
)
