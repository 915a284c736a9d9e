"""One piece of the reference run again on the same bits: once in fp64, and many times as it is declared.

Leaves out: which piece, and on which bits (`recomputation_plan.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from instep_reference import gdn
from instep_reference.contract.declared_rounding import NAMED_APART, RING, Blocked, Product, Storage, kept_in
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place_names import Place
from instep_reference.weights import Weights

from ..finding_problem import WrongContent
from ..lru_cache import LAYERS
from ..player import Side
from ..watch.event_context import RowSpan
from .chunked_yardstick import in_chunks, must_be_one_rule
from .declared_product_rounding import CUTS, FOLDED, FOLDED_WHOLE, InChunks, Operands, Squares
from .expert_routes import ROUTER, Routes
from .reordered_arithmetic import Reordered, aside, by_a_unit, in_two_parts, up_or_down
from .single_layer_run import LayerWork, Work
from .states_with_folded_tokens import Folding, Run, Runs
from .storage_rounding import entries, narrower, rounded

Changes = Mapping[str, torch.Tensor]  # component of the piece -> the rows that replace it for later ops
Kept = Callable[[torch.Tensor], torch.Tensor]  # keys or updates -> the numbers that a ring has of them
Store = Callable[[str, torch.Tensor], torch.Tensor]  # writes a component to storage and reads it again

# Number of draws of a piece. The error of a block is measured by the largest of its draws. If the error depends on one
# number (an attention head that wavers between two keys), one error of a correct engine in 31 000 exceeds 3 times the
# largest of 16 draws, and one in 93 that of 4 draws. Over many rows such numbers average out, and fewer draws suffice.
# The fewest draws are made first, and the others only if these do not allow the error. The largest of some draws is at
# most the largest of all, so an error that some allow is allowed by all: no verdict depends on the order.
DRAWS, FEWEST_DRAWS, ROWS_SAMPLED = 16, 4, 64
MOST_EXPERTS = 16  # up to this number all run, with draws as one axis; with more, one draw after another
# Results of ops that round once, with operands no narrower than declared: draws from own inputs show them before that
# rounding (`tier_allowances.py`).
ROUNDED_ONCE = frozenset({"core"})
WAVERS = ("attended",)  # a piece with this place depends on the error of one score
KEPT = (*FOLDED, *FOLDED_WHOLE, "update")  # of a token: the inputs of the delta rule, and its update
REMEMBERED = 16  # maximum tokens of a step that are kept for the next one: a window, not a prompt


@dataclass(frozen=True)
class Recomputation:
    """A piece of one event and request, recomputed.

    yardsticks  the declared forms, drawn several times
    work        the layer that ran; own: the subject's rows of its places (`recomputation_plan.py`), for a commit those
    of the
                verify
    near        the runs with every op on those rows; None for a single op, whose inputs are the boundary
    wrongs      the results of known mistakes, to name a failure, and the piece on other rows
    dithered    number of further draws, in which every declared rounding is stochastic
    narrow      whether something is stored or multiplied narrower than it is summed: yardsticks share those roundings
    leans       whether every second yardstick cuts operands off (`declared_product_rounding.py`)
    prefix      for a tracked state: the name under which it is kept; the span ends with its last token
    all_ops     for a piece that ran to its state alone: the same with every op of the layer; None: it has them
    later_windows  for a chunk that continues a prompt: known mistakes, and the states in fp64 that each leaves
    drawn_further  all draws of the piece, and those of `near`; None: the yardsticks are all of them
    """

    span: RowSpan
    stage: str
    layer: int
    truth: Run
    yardsticks: Run
    work: Work
    own: Mapping[Place, torch.Tensor]
    near: Runs | None = None
    folding: Folding | None = None
    wrongs: tuple[tuple[WrongContent, Work], ...] = ()
    dithered: Callable[[int], Run] | None = None
    narrow: bool = False
    leans: bool = False
    prefix: str = ""
    all_ops: Callable[[], Recomputation] | None = None
    later_windows: Callable[[], Iterable[tuple[WrongContent, torch.Tensor]]] = tuple
    drawn_further: Callable[[], tuple[Run, Run | None]] | None = None

    def with_all_draws(self) -> Recomputation:
        """The same piece with all its yardsticks, not only the first few."""
        if self.drawn_further is None:
            return self
        runs, own = self.drawn_further()
        near = None if self.near is None or own is None else Runs(self.near.truth, own)
        return replace(self, yardsticks=runs, near=near, drawn_further=None)

    def with_all_ops(self) -> Recomputation:
        """The same piece with every op, not only those up to its state."""
        if self.all_ops is None:
            return self
        ran = self.all_ops()
        return replace(self, truth=ran.truth, yardsticks=ran.yardsticks, work=ran.work, own=ran.own, near=ran.near,
                       all_ops=None, drawn_further=ran.drawn_further)  # fmt: skip

    def left(self, side: Side) -> RequestState:
        """The final value of this piece on a side."""
        return side.tracked[self.prefix] if self.prefix else side.after[self.request]

    def kept_in(self, rounds: Mapping[str, Storage]) -> tuple[Storage, ...]:
        """The roundings of the prefix that keeps this state; none if a request has it."""
        return kept_in(rounds, forward=self.span.kind == "prefill") if self.prefix else ()

    @property
    def request(self) -> str:
        return self.span.request

    @property
    def writes_state(self) -> bool:
        return self.folding is not None and self.span.kind != "verify"

    @property
    def from_own_inputs(self) -> Recomputation | None:
        """The same piece with every op on the subject's own rows."""
        return None if self.near is None else replace(
            self, truth=self.near.truth, yardsticks=self.near.yardsticks, near=None, drawn_further=None)

    def place(self, component: str) -> Place:
        return Place(self.stage, self.layer, component)


@dataclass
class Runner:
    """Runs a piece in fp64, and in the declared width: rounded at the declared points, summed in any order.

    rounds: component -> how it is stored; products: form of an op -> how it multiplies (`declared_product_rounding.py`)
    once: components whose op rounds its result alone; promised: those of them by the subject's own declaration
    """

    truth: Weights
    rounded: Weights
    rounds: Mapping[str, Storage]
    products: Mapping[str, Product] = field(default_factory=dict)
    once: frozenset[str] = ROUNDED_ONCE
    promised: frozenset[str] = frozenset()
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.rounded.embedding.device).manual_seed(0)

    @cached_property
    def _squares(self) -> Squares:
        return Squares(self.rounded)

    def __call__(
        self, work: Work, rows: int, base: torch.Tensor | None = None,
        own: Mapping[Place, torch.Tensor] = MappingProxyType({}),
    ) -> Sampled:
        """Truth and draws; and both again with every op on the subject's `own` rows, if the piece has several ops.

        base: the state before a prefill chunk, whose delta rule has a second form. This is the declared one, or without
        a declaration one of fp32 products next to the token-by-token one.
        """
        most = min(DRAWS, max(FEWEST_DRAWS, -(-ROWS_SAMPLED // rows)))
        draws = most if self.rounded.config.experts else FEWEST_DRAWS  # routers are judged by the error of all draws
        truth, width = self.true(work), self.rounded.embedding.dtype
        near = true(work, self.truth, own) if own and (len(truth.places) > 1 or self._sharper(truth)) else None
        if near is not None and near.route is not None:
            near = near.route.served(lambda ranking: true(work, self.truth, own, ranking), near, own, width)
        both = self._draws(work, draws, base, truth, near, own)
        if truth.route is not None and near is not None and near.route is not None:
            ranking = truth.route.following(near.route, truth.route.off(both[0].places[ROUTER]), width)
            if not torch.equal(ranking, truth.route.ranking):
                truth = true(work, self.truth, ranking=ranking)
                both = self._draws(work, draws, base, truth, near, own)
        if base is not None and self.forms[1] not in self.products:
            both = [self._in_chunks(sampled, base, once) for sampled, once in zip(both, (False, True), strict=False)]
        sampled = Sampled(Runs(truth, both[0]), None if near is None else Runs(near, both[1]))
        if draws == most:
            return sampled
        later = copy(self)  # its numbers do not depend on what else is drawn
        later.generator = torch.Generator(self.generator.device).set_state(self.generator.get_state())
        return sampled._replace(further=cache(partial(later._further, sampled, work, most - draws, base, own)))

    @torch.inference_mode()
    def _further(
        self, first: Sampled, work: Work, draws: int, base: torch.Tensor | None, own: Mapping[Place, torch.Tensor]
    ) -> tuple[Run, Run | None]:
        """The first draws of both runs and this many more; of a run whose first draws are all, these."""
        truth, near = first.runs.truth, None if first.near is None else first.near.truth
        wavers = any(place.component in WAVERS for place in truth.places)
        more = self._draws(work, draws, base, truth, near if wavers else None, own)
        return joined(first.runs.yardsticks, more[0]), None if first.near is None else (
            joined(first.near.yardsticks, more[1]) if wavers else first.near.yardsticks)

    def _draws(
        self, work: Work, draws: int, base: torch.Tensor | None, truth: Run, near: Run | None,
        own: Mapping[Place, torch.Tensor],
    ) -> list[Run]:
        """Draws of both runs, whose rows choose the experts of that run."""
        experts = self.rounded.config.experts > 0
        return self._sampled(
            work, draws, self._store, base, experts=experts, own=None if near is None else own,
            further=draws if experts or any(place.component in WAVERS for place in truth.places) else FEWEST_DRAWS,
            rankings=[run.route.ranking for run in (truth, near) if run is not None and run.route is not None],
        )

    def _sharper(self, truth: Run) -> bool:
        """Whether a single op is judged before its result is rounded."""
        width = self.rounded.embedding.dtype
        return any(place.component in self.once and narrower(self.rounds.get(place.component, width), width)
                   for place in truth.places)  # fmt: skip

    @property
    def forms(self) -> tuple[str, str]:
        return self.truth.config.recurrence.forms

    def true(self, work: Work) -> Run:
        """Only the fp64 run."""
        return true(work, self.truth)

    def fold(self, piece: Recomputation, folding: Folding, nodes: Sequence[int]) -> Recomputation:
        """The piece after a commit: only the tokens at the accepted nodes are folded in."""
        if (near := piece.from_own_inputs) is not None:
            near = self.fold(near, folding, nodes)
        truth = settled(piece.truth, folding.base, nodes, read=False)
        with self._folding(None, torch.arange(len(piece.yardsticks.of("k"))) % 2 == 1):
            # A piece that was run to its state alone reads nothing from a state; the draws of others stay as they were.
            sampled = settled(piece.yardsticks, folding.base, nodes, read=piece.all_ops is None, ring=self._ring())
        runs = Run({}, truth[0]), Run({}, self._store("state", sampled))
        dithered = None if piece.dithered is None else partial(self._folded, piece.dithered, folding.base, nodes)
        folded = replace(
            piece, truth=runs[0], yardsticks=runs[1], folding=folding, dithered=dithered,
            narrow=piece.narrow or RING in self.rounds,
            near=None if near is None else Runs(near.truth, near.yardsticks), drawn_further=None,
        )
        if piece.drawn_further is None:
            return folded
        return replace(folded, drawn_further=cache(partial(self._folded_further, piece, folded, folding, nodes)))

    @torch.inference_mode()
    def _folded_further(
        self, piece: Recomputation, folded: Recomputation, folding: Folding, nodes: Sequence[int]
    ) -> tuple[Run, Run | None]:
        """All draws of a folded piece: the first ones as they are, and the others folded. Own rows have no others."""
        first, full = piece.yardsticks, piece.with_all_draws()
        others = {place: x[len(first.places[place]) :] for place, x in full.yardsticks.places.items()}
        later = self.fold(replace(full, yardsticks=Run(others), near=None), folding, nodes)
        near = folded.near
        return joined(folded.yardsticks, later.yardsticks), None if near is None else near.yardsticks

    def kept(self, piece: Recomputation) -> Recomputation:
        """The piece as its state is kept in a tracked prefix: further draws are rounded as it is, too."""
        storages, drawn = piece.kept_in(self.rounds), piece.dithered
        if not storages or drawn is None:
            return piece

        def dithered(draws: int) -> Run:
            run = drawn(draws)
            assert run.state is not None, "a piece that writes a state leaves it"
            state = run.state
            for storage in storages:
                state = up_or_down(state, storage, self.generator)
            return replace(run, state=state)

        return replace(piece, dithered=dithered, narrow=True)

    def _folded(self, dithered: Callable[[int], Run], base: torch.Tensor, nodes: Sequence[int], draws: int) -> Run:
        verified = dithered(draws)
        with self._folding(self.generator):
            return Run({}, self._shake("state", settled(verified, base, nodes, ring=self._ring(self.generator))))

    def _ring(self, chance: torch.Generator | None = None) -> Kept | None:
        """How a ring keeps keys and updates; None: with all their bits. chance: as in `in_two_parts`."""
        dtype = self.rounds.get(RING)
        return partial(in_two_parts, dtype=dtype, chance=chance) if isinstance(dtype, torch.dtype) else None

    def _folding(self, chance: torch.Generator | None, cut: torch.Tensor | bool = False) -> Reordered:
        """The context of a fold, which is the delta rule token by token, and shows no place. cut: which of the draws
        cut.
        """
        operands = Operands(self.products, self.rounded, chance=chance, squares=self._squares)
        operands.begin(cut)
        operands.form = self.forms[0]
        return Reordered(self.generator, operands)

    def dithered(self, work: Work, draws: int, base: torch.Tensor | None = None) -> Run:
        """Draws with stochastic declared roundings: they differ like correct engines whose ties are broken differently.

        Numbers that are not stored narrower were rounded as well, and move within one ulp.
        """
        return self._sampled(work, draws, self._shake, base, experts=False, chance=self.generator)[0]

    def narrow(self, chunk: bool) -> bool:
        """Whether draws of a piece that ends in a state share roundings: of stored numbers, or of operands."""
        multiplied = self._formats(chunk) - {"ieee"}
        return bool(multiplied) or any(narrower(storage, self.rounded.embedding.dtype)
                                       for name, storage in self.rounds.items() if name not in NAMED_APART)

    def leans(self, chunk: bool) -> bool:
        """Whether every second draw of such a piece cuts operands off, which moves a state to one side."""
        return not self._formats(chunk).isdisjoint(CUTS)

    def _formats(self, chunk: bool) -> set[str]:
        """The formats of the products between a layer's rows and its state."""
        forms = ("linear", "conv", self.forms[chunk])
        return {self.products[form].format for form in forms if form in self.products}

    def _sampled(
        self, work: Work, draws: int, store: Store, base: torch.Tensor | None, *, experts: bool,
        chance: torch.Generator | None = None, own: Mapping[Place, torch.Tensor] | None = None, further: int = 0,
        rankings: Sequence[torch.Tensor] = (),
    ) -> list[Run]:
        """All draws at once, as a further axis; one by one if rows choose among more than `MOST_EXPERTS`.

        base: the state before a prefill chunk; None: the delta rule runs token by token.
        own: rows that replace their places in `further` draws, which are a separate run.
        rankings: the experts of the rows of either run; ROUTER is then a place of the draws, with the router's scores.
        """
        operands = Operands(
            self.products, self.rounded, chunk=base is not None, chance=chance, squares=self._squares)

        def draw(number: torch.Tensor) -> tuple[dict[Place, torch.Tensor], tuple[torch.Tensor, ...]]:
            first = number < draws
            operands.begin_draw(number)
            rule = InChunks(operands, base) if base is not None and self.forms[1] in self.products else None
            places: dict[Place, torch.Tensor] = {}

            @aside
            def keep(place: Place, x: torch.Tensor) -> torch.Tensor:
                places[place] = goes = store(place.component, x)
                if own is not None and place.component in self.once:
                    places[place] = torch.where(first, goes, x)
                mine = None if own is None or place.component == "update" else own.get(place)
                if mine is not None and mine.shape == x.shape:
                    goes = torch.where(first, goes, store(place.component, mine.to(x)))
                return goes

            def see(place: Place, x: torch.Tensor) -> torch.Tensor:
                if rule is not None and place.component == "core":
                    x = rule.core()
                goes = keep(place, operands.added_up(place, x))
                if rule is not None:
                    rule.keep(place, goes)
                operands.seen(place)
                return entries(place.component, goes, self.rounds)

            given = [rankings[0].where(first, rankings[-1])] if rankings else []
            with Routes(self.rounded.config, given) as routes:
                state = work(self.rounded, see)
            if given and routes.seen:
                places[ROUTER] = routes.seen[0].scores
            if rule is not None:
                state = rule.state
            return places, () if state is None else (store("state", state),)

        one_by_one = experts and self.rounded.config.experts > MOST_EXPERTS
        count = (draws,) if own is None else (draws, further)
        with Reordered(self.generator, operands, together=not one_by_one, runs=count):
            numbers = torch.arange(sum(count))
            if one_by_one:
                places, state = _stacked([draw(number) for number in numbers])
            else:
                places, state = torch.func.vmap(draw, randomness="different")(numbers)
        runs = [Run({place: x[:draws] for place, x in places.items()}, state[0][:draws] if state else None)]
        if own is not None:
            left = state[0][draws:] if state else None
            runs.append(Run({place: x[draws:] for place, x in places.items()}, left, {
                place: store(place.component, mine.to(places[place])).expand(further, *mine.shape)
                for place, mine in own.items() if place in places and mine.shape == places[place].shape[1:]
            }))  # fmt: skip
        return runs

    def _in_chunks(self, sampled: Run, base: torch.Tensor, own: bool) -> Run:
        """The read-out and the state in their second form as well; the ops after them use the first one.

        own: the draws are from own inputs
        """
        place = next(place for place in sampled.places if place.component == "core")
        inputs = [part[:1] for part in rule_inputs(sampled)]
        forms = in_chunks(inputs, base)
        if not own:
            must_be_one_rule(inputs, base, forms)
        cores = [sampled.places[place], *(core if own else self._store("core", core) for core, _ in forms)]
        assert sampled.state is not None, "a layer with a delta rule leaves a state"
        states = [sampled.state, *(self._store("state", state) for _, state in forms)]
        return Run({**sampled.places, place: torch.cat(cores)}, torch.cat(states), sampled.onward)

    def _store(self, component: str, tensor: torch.Tensor) -> torch.Tensor:
        """Round to the storage, in the width that it came in."""
        storage = self.rounds.get(component)
        # Stochastically rounded values are judged by their actual rounding, so draws of them are not rounded.
        falls = isinstance(storage, Blocked) and storage.seed is not None
        return tensor if storage is None or falls or not tensor.is_floating_point() else rounded(tensor, storage)

    def _shake(self, component: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.rounds.get(component)
        if not tensor.is_floating_point():
            return tensor
        if dtype is None or not narrower(dtype, tensor.dtype):
            return by_a_unit(tensor, self.generator)
        return up_or_down(tensor, dtype, self.generator)


class Sampled(NamedTuple):
    """The runs of a piece, `near` on own rows. further: all draws of both; None: there are no more."""

    runs: Runs
    near: Runs | None
    further: Callable[[], tuple[Run, Run | None]] | None = None


def joined(some: Run, more: Run) -> Run:
    """The draws of two runs as one."""
    state = None if some.state is None or more.state is None else torch.cat([some.state, more.state])
    places, onward = (
        {place: torch.cat([x, y[place]]) for place, x in each.items()}
        for each, y in ((some.places, more.places), (some.onward, more.onward))
    )
    return Run(places, state, onward)


class LayerCache:
    """A cache of recomputed layers, for runs with the same bits and the same draws.

    Runs of a trace that diverge late (a fault, the runs of the ladder) compute the same before: the subject's rows have
    the same bits, and the draws have the same number. The key contains everything that a layer's runs depend on; a
    cached result also advances the draws as the computation would.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.of = hashlib.sha256(type(runner).__name__.encode())
        # One width of the weights is enough for the key, as it is no narrower than the stored one.
        _add_to_key(self.of, (runner.rounded, runner.rounds, runner.products, sorted(runner.once)))

    def __call__(
        self, work: LayerWork, rows: int, base: torch.Tensor | None, own: Mapping[Place, torch.Tensor]
    ) -> Sampled:
        key = self.of.copy()
        _add_to_key(key, (work, rows, base, own, self.runner.generator.get_state()))
        found: tuple[Sampled, torch.Tensor] | None = LAYERS.get(key.digest())
        if found is not None:
            self.runner.generator.set_state(found[1])
            return found[0]
        both = self.runner(work, rows, base, own)
        LAYERS.put(key.digest(), (both, self.runner.generator.get_state()))
        return both


def true(
    work: Work, weights: Weights, own: Mapping[Place, torch.Tensor] | None = None, ranking: torch.Tensor | None = None
) -> Run:
    """One run with the weights' width. own: rows that replace their places, if they have the same shape. ranking: the
    experts of the rows, instead of those that they choose.
    """
    places: dict[Place, torch.Tensor] = {}
    onward: dict[Place, torch.Tensor] = {}

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        places[place] = tensor
        mine = None if own is None else own.get(place)
        if mine is None or mine.shape != tensor.shape:
            return tensor
        onward[place] = mine.to(tensor)
        return onward[place]

    with Routes(weights.config, () if ranking is None else (ranking,)) as routes:
        state = work(weights, see)
    return Run(places, state, onward, routes.seen[0] if routes.seen else None)


def rerun(piece: Recomputation, weights: Weights, changes: Changes | None = None) -> Run:
    """Run the piece once more from the subject's own rows; for a commit, the state alone.

    changes: rows that replace some components for later ops, such as another row's key, a gate of 1, or a rounded
    operand.
    The computed value of a place is in `places`, the one that later ops used in `of` its component.
    Other weights, another configuration (`replace(weights, config=..)`) and another piece (`replace(piece, work=..)`,
    with another `start`, `memory` or `hidden`; for a commit `folding=..`, `span=..`) give the results of those.
    """
    own = {**piece.own, **{piece.place(component): put for component, put in (changes or {}).items()}}
    run = true(piece.work, weights, own)
    if piece.span.kind != "commit" or piece.folding is None:
        return run
    return replace(run, places={}, state=settled(run, piece.folding.base, piece.span.nodes)[0])


def fold(run: Run, base: torch.Tensor, nodes: Sequence[int], *, read: bool = True) -> torch.Tensor:
    """The states [draws, HV, K, V] after the tokens at `nodes` of a run were folded into `base`, token by token.

    read: whether each is read as well, which uses random numbers of a run with draws
    """
    q, k, v, log_decay, erase, write = (part[:, list(nodes)] for part in rule_inputs(run))
    state = base.to(k).expand(len(k), *base.shape)
    if not read:
        return gdn.left_by(k, v, log_decay, erase, write, state)
    return gdn.recur(q, k, v, log_decay=log_decay, erase=erase, write=write, state=state).state


def settled(
    run: Run, base: torch.Tensor, nodes: Sequence[int], *, read: bool = True, ring: Kept | None = None
) -> torch.Tensor:
    """The same, but with the updates that replaced this run's, if any: those that an engine keeps.

    ring: how the engine keeps keys and updates, if not with all their bits
    """
    kept = next((update for place, update in run.onward.items() if place.component == "update"), None)
    if kept is None and ring is None:
        return fold(run, base, nodes, read=read)
    _, k, _, log_decay, _, _ = (part[:, list(nodes)] for part in rule_inputs(run))
    update = run.of("update") if kept is None else kept
    update = (update if update.dim() == 4 else update[None])[:, list(nodes)]
    if ring is not None:
        k, update = ring(k), ring(update)
    return gdn.absorb(k, log_decay, update, base.to(k).expand(len(k), *base.shape))


def again(run: Run, base: torch.Tensor) -> torch.Tensor:
    """The state [HV, K, V] after all tokens of a run once more, with their updates from that run."""
    _, k, _, log_decay, _, _ = rule_inputs(run)
    return gdn.absorb(k, log_decay, run.of("update")[None], base.to(k)[None])[0]


def only(run: Run, nodes: Sequence[int]) -> Run:
    """The rows that the tokens at `nodes` fold in, as a separate run."""
    folded = {place: rows for place, rows in run.places.items() if place.component in KEPT}
    return Run({place: rows[list(nodes)] for place, rows in folded.items()})


def rule_inputs(run: Run) -> tuple[torch.Tensor, ...]:
    """q, k, v, log_decay, erase, write, draws first, heads repeated: value head h reads key head h // r."""
    q, k, v, log_decay, gate = run.of("q"), *run.folded()
    if v.dim() == 3:
        q, k, v, log_decay, gate = (x[None] for x in (q, k, v, log_decay, gate))
    repeats = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    write = gate[..., None]
    return q, k, v, gdn.by_channel(log_decay, v), write if run.recalls else torch.zeros_like(write), write


_Shown = tuple[dict[Place, torch.Tensor], tuple[torch.Tensor, ...]]


def _stacked(shown: Sequence[_Shown]) -> _Shown:
    """The places and the state of several draws, draws first."""
    places = {place: torch.stack([one[place] for one, _ in shown]) for place in shown[0][0]}
    return places, tuple(torch.stack(each) for each in zip(*(state for _, state in shown), strict=True))


def _add_to_key(key: Any, value: Any) -> None:
    """Add a value to a key: tensors by their bits, other values by their text."""
    if isinstance(value, torch.Tensor):
        key.update(repr((value.dtype, tuple(value.shape))).encode())
        key.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif is_dataclass(value):
        key.update(type(value).__name__.encode())
        _add_to_key(key, [getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Mapping):
        _add_to_key(key, [*value.keys(), *value.values()])
    elif isinstance(value, (tuple, list)):
        key.update(f"{len(value)} of".encode())
        for inner in value:
            _add_to_key(key, inner)
    else:
        said = repr(value)
        assert " at 0x" not in said, f"{said} is identified only by its address, which another object may have later"
        key.update(f"{said}, ".encode())
