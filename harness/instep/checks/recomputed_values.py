"""T2: every place and every state, compared with the reference's recomputation in fp64 from the subject's own bits.

Leaves out: the recomputation (`oracle/oracle.py`), which wrong state an error points to (`known_wrong_states.py`), and
explanations (`explain/`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from instep_reference.contract.declared_rounding import RING, Blocked, Storage, kept_in, read_as
from instep_reference.contract.place_names import Place

from ..finding_problem import Explained, NamedMistake, Problem, WrongContent
from ..oracle.oracle import Oracle
from ..oracle.recomputation import Recomputation
from ..oracle.reordered_arithmetic import in_two_parts
from ..oracle.states_with_folded_tokens import Run
from ..oracle.storage_rounding import CUT, HEADS, TURNED, State, before_rounding, kept_states, narrower
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.rows_by_request import UPDATE, due, rows
from .check_interface import counted, slot_of
from .error_measurement import Spot, measured
from .prefix_findings import RUNNING, nearest_misrounding, of_prefix

WORD = 0xFFFFFFFF


class Derived:
    """Per request, layer, component and head: e_x <= 3 e_r + 4 ulp."""

    name = "derived"
    tier = Tier.DERIVED

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        for piece in self.oracle.at(context):
            if isinstance(piece, Skipped):
                yield piece
            else:
                yield from self._judged(context, piece)

    def _judged(self, context: EventContext, piece: Recomputation) -> list[Comparison]:
        """Compare by the first draws, and by all of them before anything is called wrong."""
        results = list(self._piece(context, piece))
        if piece.drawn_further is not None and not all(result.agrees for result in results):
            results = list(self._piece(context, piece.with_all_draws()))
        return results

    def _piece(self, context: EventContext, piece: Recomputation, but: Run | None = None) -> Iterator[Comparison]:
        """Compare one recomputation. but: a truth that was judged already; equal bits are not compared twice, unless
        this check allows less.
        """
        for place, truth in piece.truth.places.items():
            if not due(context, place, piece.span):
                continue
            found, scale = rows(context.subject, place, piece.span), scale_of(piece, place)
            sampled = sampled_rows(piece, place, self.oracle.rounds)
            judged = but is not None and torch.equal(truth, but.places[place])
            if judged and (found is None or not self.rounded_once(place.component, found, sampled)):
                continue
            yield self._measured(self._spot(context, piece, place.component), found, truth, sampled, scale)
        state, known = piece.truth.state, None if but is None else but.state
        if piece.writes_state and state is not None and (known is None or not torch.equal(state, known)):
            yield from self._state(context, piece, state)

    def _measured(
        self, spot: Spot, found: torch.Tensor | None, truth: torch.Tensor, sampled: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> Comparison:
        stored = None if found is None else self.stored(spot.place.component, found, sampled)
        result = measured(spot, found, truth, sampled, stored=stored, scale=scale)
        if found is not None and found.dtype != stored and result.problem is not None:
            return replace(result, problem=replace(result.problem, dtypes=(str(found.dtype), str(stored))))
        return result

    def rounded_once(self, component: str, found: torch.Tensor, sampled: torch.Tensor) -> bool:
        """Whether the found tensor is compared before it was rounded. Layers are not: they round on the way."""
        return False

    def stored(self, component: str, found: torch.Tensor, sampled: torch.Tensor) -> torch.dtype:
        """The dtype whose rounding is granted: the found one, but none narrower than declared."""
        declared = read_as(self.oracle.rounds.get(component, sampled.dtype))
        return declared if narrower(found.dtype, declared) else found.dtype

    def _state(self, context: EventContext, piece: Recomputation, truth: torch.Tensor) -> Iterator[Comparison]:
        sampled = piece.yardsticks.state
        if sampled is not None:
            found = piece.left(context.subject).state.get(piece.layer)
            # A prefix may round what the pool, or a chunk, has rounded before.
            *earlier, stored = (self.oracle.rounds.get("state"), *piece.kept_in(self.oracle.rounds))
            x, grants = found, None if stored is None else read_as(stored)
            fits = found if found is not None and found.shape == truth.shape else None
            state = state_of(piece)
            if isinstance(stored, Blocked):  # rounded once: compare the value before rounding (`tier_allowances.py`)
                grants = read_as(earlier[-1]) if earlier and earlier[-1] is not None else sampled.dtype
                if fits is not None:
                    x = before_rounding(fits, truth, stored, state)
            result = measured(self._spot(context, piece, "state"), x, truth, sampled, stored=grants)
            if isinstance(stored, Blocked) and fits is not None and not result.agrees:
                slot, kinds = slot_of(context, piece.request), self.oracle.config.mixers
                for known, other in fell(piece, kinds, stored.seed, slot) if stored.seed is not None else ():
                    x = before_rounding(fits, truth, stored, other)
                    if measured(self._spot(context, piece, "state"), x, truth, sampled, stored=grants).agrees:
                        clause = "" if result.problem is None else result.problem.clause
                        result = replace(result, problem=Problem("identified", clause, Explained.one_of([known])))
                        break
            if fits is not None and not result.agrees and (wrong := self._misrounded(piece, fits, truth)):
                clause = "" if result.problem is None else result.problem.clause
                result = replace(result, problem=Problem("identified", clause, Explained.one_of([wrong])))
            if fits is not None and stored is not None and fits.dtype != read_as(stored):
                problem = replace(result.problem or Problem("missing"), dtypes=(str(fits.dtype), str(stored)))
                result = replace(result, worst=math.inf, problem=problem)
            yield of_prefix(piece.prefix, result)

    def _misrounded(self, piece: Recomputation, found: torch.Tensor, truth: torch.Tensor) -> WrongContent | None:
        """The mistake in the rounding of a prefix's state, or in that of a request, which is not rounded as in one."""
        rounds = self.oracle.rounds
        if piece.prefix:
            return nearest_misrounding(found, truth, rounds, forward=piece.span.kind == "prefill")
        ways = [forward for forward in (True, False) if kept_in(rounds, forward=forward)]
        rounded = any(torch.equal(kept_states(found, rounds, forward=forward).to(found), found) for forward in ways)
        return RUNNING.known() if rounded else None

    def _spot(self, context: EventContext, piece: Recomputation, component: str) -> Spot:
        slot = slot_of(context, piece.request)
        place = piece.place(component)
        return Spot(self.name, self.tier, context.index, context.kind, place, piece.request, slot)


def sampled_rows(piece: Recomputation, place: Place, rounds: Mapping[str, Storage]) -> torch.Tensor:
    """The rows of a place in all draws, as a subject shows them: of updates, what its ring has."""
    ring = rounds.get(RING)
    shown = piece.yardsticks.places[place]
    return in_two_parts(shown, ring) if place.component == UPDATE and isinstance(ring, torch.dtype) else shown


def state_of(piece: Recomputation) -> State:
    """The state in which a recomputation ends."""
    return State(piece.layer, piece.span.start + piece.span.count)


BITS = "is rounded with the random bits of"
FELL = (
    NamedMistake("rounded-to-nearest", "is rounded to nearest, not stochastically"),
    NamedMistake("truncated", "is truncated, not rounded stochastically"),
    NamedMistake("random-bits-of-one-head", f"{BITS} its first head in every head"),
    NamedMistake("random-bits-transposed", f"{BITS} a transposed state"),
    NamedMistake("random-bits-of-half-a-seed", f"{BITS} the seed {{}}, the lower word of {{}}"),
    NamedMistake("random-bits-of-another-length", f"{BITS} a state of {{}}{{}}; it has {{}}"),
    NamedMistake("random-bits-of-another-layer", f"{BITS} layer {{}}"),
)


def fell(
    piece: Recomputation, layers: Sequence[object], seed: int, slot: int | None
) -> Iterator[tuple[WrongContent, State | None]]:
    """Mistakes of stochastic rounding, and the state whose random bits each uses (None: to nearest)."""
    right = state_of(piece)
    nearest, cut, heads, turned, half, of_tokens, of_layer = FELL
    yield nearest.known(), None
    yield cut.known(), right._replace(order=CUT)
    yield heads.known(), right._replace(order=HEADS)
    yield turned.known(), right._replace(order=TURNED)
    yield half.known(seed & WORD, seed), right._replace(seed=seed & WORD)
    for tokens in range(right.tokens + piece.span.count + 8):
        if tokens != right.tokens:
            its = ", the number of its slot" * (tokens == slot)
            yield of_tokens.known(counted(tokens), its, right.tokens), right._replace(tokens=tokens)
    for layer in range(len(layers)):
        if layer != right.layer:
            yield of_layer.known(layer), right._replace(layer=layer)


def scale_of(piece: Recomputation, place: Place) -> torch.Tensor | None:
    """The scale of an update beta (v - S'k), a difference that nearly vanishes for known tokens: beta (|v| + |S'k|).

    Without the delta rule it is |update|: nothing is subtracted.
    """
    if place.component != UPDATE:
        return None
    _, v, _, gate = piece.truth.folded()
    written = gate[..., None] * v
    return written.abs() + (written - piece.truth.places[place]).abs()
