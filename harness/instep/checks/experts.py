"""T4 of routers: rows go to the truth's experts, except in near ties of the router.

The subject's choice follows from its own rows before the router; T2 judges the result of these. After such a tie the
two runs compute different things, so T3 and T4 skip the request until it is admitted again, and every request that
continues from a copy of it. Leaves out: near ties on the subject's own rows, where T2 follows the subject
(`oracle/expert_routes.py`).
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from instep_reference.contract.engine import Admit, Event
from instep_reference.contract.event_facts import facts, named, restores, tracks
from instep_reference.weights import MoeWeights

from ..finding_problem import Problem
from ..oracle.expert_routes import Route, deciding_scores
from ..oracle.oracle import Oracle
from ..oracle.recomputation import Recomputation
from ..tier_allowances import granted
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.rows_by_request import parted, rows
from .accumulated_errors import carried, family
from .check_interface import compared
from .sampled_tokens import PICK
from .tensor_and_choice_judgement import Chosen, Ties


class Experts:
    """Per request and layer: the truth's margin between the experts that were taken and the others."""

    name = "experts"
    tier = Tier.DECISIONS

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.ties = Ties("choices of experts so far")
        self.parted, self.kept = set[str](), set[str]()  # requests; names of their copies and prefixes

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        if isinstance(context.event, Admit):
            self.parted.discard(context.event.request)
        name, request = getattr(context.event, "name", ""), restores(context.event)
        if request and name in self.kept:
            self.parted.add(request)
        if facts(context.event).copy == "drop":
            self.kept.discard(name)
        if context.rounded is None or not self.oracle.config.experts:
            return
        noise = carried(context)
        for piece in self.oracle.at(context):
            if not isinstance(piece, Recomputation) or piece.near is None or piece.near.truth.route is None:
                continue
            if piece.request not in self.parted and not parted(context, piece.stage, piece.span):
                yield from self._piece(context, piece, piece.near.truth.route, noise)
        self.kept.update(name for request, name in _keeps(context.event) if request in self.parted)
        yield from self.ties.too_many(self.name, context.index, context.kind, PICK)

    def _piece(
        self, context: EventContext, piece: Recomputation, mine: Route, noise: Mapping[tuple[str, bool], float]
    ) -> Iterator[Comparison]:
        place, width = piece.place("post_normed"), self.oracle.runner.rounded.embedding.dtype
        truth, rounded = (None if side is None else rows(side, place, piece.span)
                          for side in (context.truth, context.rounded))  # fmt: skip
        mlp, config = self._mixture(piece), self.oracle.config
        if truth is None or rounded is None or mlp is None or len(truth) != len(mine.scores):
            return
        route = Route.of(config, deciding_scores(truth, mlp))
        error = route.off(deciding_scores(rounded.to(truth), mlp)).clamp(min=noise[family(place, piece.span)])
        margin, own = route.shortfall(mine.chosen()), mine.chosen()
        differs = (own != route.chosen()).any(-1)
        part = torch.where(differs, margin / granted(route.largest(), error, width), 0.0)
        choices = Chosen(margin, part, differs)
        self.ties.add(choices)
        row, said = choices.row, ""
        if bool(differs.any()):
            self.parted.add(piece.request)
            other, right = (sorted(chosen[row].nonzero().flatten().tolist()) for chosen in (own, route.chosen()))
            said = f"row {row} goes to the experts {other}, the truth's to {right} by a margin of {margin[row]:.3g}"
        yield compared(self, context, piece.place("mlp"), len(differs), choices.worst, Problem.of(said), allowed=1.0,
                       request=piece.request, blocks=len(differs), undecided=choices.ties)  # fmt: skip

    def _mixture(self, piece: Recomputation) -> MoeWeights | None:
        weights = self.oracle.runner.truth
        layers = weights.layers if piece.stage == "trunk" else weights.draft.layers if weights.draft else ()
        mlp = layers[piece.layer].mlp
        return mlp if isinstance(mlp, MoeWeights) else None


def _keeps(event: Event) -> Iterable[tuple[str, str]]:
    """The requests whose memory an event keeps under a name, and these names."""
    if facts(event).copy == "keep":
        return [(name, event.name) for name in named(event) if hasattr(event, "name")]
    return [(request, under) for under, request in tracks(event).items()]
