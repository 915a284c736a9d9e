"""The oracle for an engine that shows no rows between its layers: states from the truth's free run.

The subject's states cannot be recomputed from its own bits, because their inputs are not shown. So the data about a
state (the state before, the contribution of each token, the results of known mistakes) are the truth's own. The errors
of a correct engine are then those of whole runs: the yardsticks are the states of the rounded run, which is drawn again
before anything is reported, as in T3. A declared rounding is stochastic in these draws, and then there are more of
them: `tier_allowances.py` derives the value of 16 such draws.
Leaves out: the comparison (`checks/known_wrong_states.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Protocol, cast

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import Product, Storage, read_as
from instep_reference.contract.place_names import Place

from ..player import Side
from ..verdict import Skipped
from ..watch.event_context import EventContext
from .recomputation import Recomputation, Runner, Sampled, settled
from .recomputation_plan import EventPlan
from .single_layer_run import Work
from .state_oracle import StateOracle
from .states_with_folded_tokens import Folding, Run, Runs
from .storage_rounding import narrower


class Redraws(Protocol):
    """Further draws of the rounded run."""

    def side(self, index: int, draw: int) -> Side:
        """The rounded run at event `index`, as the draw with this number, which is not 0. Costly."""
        ...

    def side_of(self, index: int, draw: int, request: str) -> Side:
        """The same; only the memory of this request is read."""
        ...


class TrueRunner(Runner):
    """Runs a piece in fp64 alone."""

    def __call__(
        self, work: Work, rows: int, base: torch.Tensor | None = None,
        own: Mapping[Place, torch.Tensor] = MappingProxyType({}),
    ) -> Sampled:
        truth = self.true(work)
        return Sampled(Runs(truth, truth), None)

    def fold(self, piece: Recomputation, folding: Folding, nodes: Sequence[int]) -> Recomputation:
        return replace(piece, truth=Run({}, settled(piece.truth, folding.base, nodes)[0]), folding=folding)


class FreeOracle(StateOracle):
    """redraws: maximum number of further draws of the rounded run; dithered: the same with declared roundings; memory:
    whether the subject shows its pools; repeated_runs: these draws, None means none.
    """

    def __init__(
        self, checkpoint: Checkpoint, rounds: Mapping[str, Storage], width: torch.dtype,
        products: Mapping[str, Product], *, redraws: int, dithered: int, memory: bool = False,
        repeated_runs: Redraws | None = None,
    ) -> None:
        super().__init__(checkpoint, rounds, torch.float64, torch.device("cpu"))
        self.runner = TrueRunner(self.runner.truth, self.runner.truth, {})
        self.width, self.memory, self.repeated_runs = width, memory, repeated_runs
        stored = any(narrower(dtype, width) for dtype in rounds.values())
        self.numbers = range(1, 1 + (dithered if stored or products else redraws))

    def stored(self, component: str, found: torch.Tensor) -> torch.dtype:
        """The dtype whose rounding is allowed: that of the found tensor, but none narrower than declared."""
        declared = read_as(self.rounds.get(component, self.width))
        return declared if narrower(found.dtype, declared) else found.dtype

    def plan(self, context: EventContext) -> EventPlan:
        return super().plan(replace(context, subject=context.truth))

    def _walk(self, context: EventContext) -> Iterator[Recomputation | Skipped]:
        for one in super()._walk(context):
            yield one if isinstance(one, Skipped) else self._by(context, one)

    def _by(self, context: EventContext, piece: Recomputation) -> Recomputation:
        """The piece with the yardsticks of whole runs."""
        if not piece.writes_state or context.rounded is None:
            return piece
        left = _left(context.rounded, piece)
        return replace(piece, yardsticks=Run({}, left[None]), dithered=self._redrawn(context, piece), narrow=False)

    def _redrawn(self, context: EventContext, piece: Recomputation) -> Callable[[int], Run] | None:
        if self.repeated_runs is None:
            return None
        redrawn = partial(self.repeated_runs.side_of, context.index, request=piece.request)
        return partial(_drawn, piece, redrawn, iter(self.numbers))


def _drawn(piece: Recomputation, redrawn: Callable[[int], Side], numbers: object, draws: int) -> Run:
    """This many of the further draws, as far as they last."""
    some = [number for number, _ in zip(cast("Sequence[int]", numbers), range(draws), strict=False)]
    states = [_left(redrawn(number), piece) for number in some]
    like = cast(torch.Tensor, piece.truth.state)
    return Run({}, torch.stack(states) if states else like.new_empty(0, *like.shape))


def _left(side: Side, piece: Recomputation) -> torch.Tensor:
    return piece.left(side).state[piece.layer].to(cast(torch.Tensor, piece.truth.state))
