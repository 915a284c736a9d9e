"""The experts that the rows of a mixture choose: recorded while the reference runs, or forced, so that a run follows.

A choice of experts jumps when a score moves by a rounding. So a yardstick, which must err only as arithmetic does,
follows the choices of the truth; and the truth follows those of the subject if its own margin is too small
(`Route.shortfall`). Leaves out: the effect of such a jump on a free run (`checks/experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place
from instep_reference.mlp import in_best_groups
from instep_reference.weights import MoeWeights

from ..tier_allowances import granted

ROUTER = Place("", 0, "router")  # inside the reference alone: the scores of experts


class Shown(Protocol):
    """A run whose places count here."""

    @property
    def places(self) -> Mapping[Place, torch.Tensor]: ...


R = TypeVar("R", bound=Shown)


@dataclass(frozen=True)
class Route:
    """scores [T, E] that decide; ranking [T, E]: the experts of each row, the `top` that serve it first.

    A softmax router decides by its scores, a sigmoid router by those after sigmoid and bias. An expert
    outside of a row's best groups has a score below all others there.
    """

    scores: torch.Tensor
    ranking: torch.Tensor
    top: int

    @classmethod
    def of(cls, config: ModelConfig, scores: torch.Tensor) -> Route:
        """Rank like the reference. scores: of `deciding_scores`"""
        ranking = (scores if config.router == "sigmoid" else scores.softmax(-1)).sort(
            dim=-1, descending=True, stable=True).indices
        return cls(scores, ranking, config.experts_per_token)

    def chosen(self, ranking: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E] bool."""
        ranking = self.ranking if ranking is None else ranking
        return torch.zeros_like(ranking, dtype=torch.bool).scatter(-1, ranking[..., : self.top], True)

    def shortfall(self, chosen: torch.Tensor) -> torch.Tensor:
        """[T]: by how much the best excluded expert is ahead of the last one of `chosen`; 0: not at all."""
        best = self.scores.masked_fill(chosen, -torch.inf).amax(-1)
        least = self.scores.masked_fill(~chosen, torch.inf).amin(-1)
        return (best - least).clamp(min=0)

    def ties(self, chosen: torch.Tensor, error: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
        """[T] bool: rows whose `chosen` differs although the scores, off by `error`, hardly decide: T4's margin."""
        differs = (chosen != self.chosen()).any(-1)
        return differs & (self.shortfall(chosen) <= granted(self.largest(), error, stored))

    def largest(self) -> torch.Tensor:
        return self.scores.abs().amax(-1)

    def off(self, other: torch.Tensor) -> torch.Tensor:
        """[T]: the largest error of other scores [.., T, E], relative to the largest score of the row."""
        error = (other.to(self.scores) - self.scores).abs().amax(-1).reshape(-1, len(self.scores)).amax(0)
        return error / self.largest()

    def following(self, other: Route, error: torch.Tensor, width: torch.dtype) -> torch.Tensor:
        """The ranking, with another route's ranking in the rows whose scores hardly decide between the two."""
        return self.ranking.where(~self.ties(other.chosen(), error, width)[:, None], other.ranking)

    def served(
        self, again: Callable[[torch.Tensor], R], run: R, own: Mapping[Place, torch.Tensor], width: torch.dtype
    ) -> R:
        """The run on the subject's own rows, in which undecided rows go where the subject's must have gone.

        Such rows are tried with the first excluded expert instead of the last included one.
        again: the run with another ranking
        """
        mixed = next((place for place in run.places if place.component == "mlp" and place in own), None)
        swapped = self.ranking[..., _exchanged(self.ranking.shape[-1], self.top)]
        tied = self.ties(self.chosen(swapped), torch.zeros(()), width)
        if mixed is None or own[mixed].shape != run.places[mixed].shape or not bool(tied.any()):
            return run
        other, mine = again(swapped), own[mixed].to(run.places[mixed])
        nearer = (other.places[mixed] - mine).norm(dim=-1) < (run.places[mixed] - mine).norm(dim=-1)
        return again(self.ranking.where(~(tied & nearer)[:, None], swapped))


def _exchanged(experts: int, top: int) -> list[int]:
    """A ranking with the last expert that serves a row and the first that does not exchanged."""
    at = list(range(experts))
    at[top - 1 : top + 1] = at[top - 1 : top + 1][::-1]
    return at


def scores_of(rows: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """[T, hidden], [E, hidden] -> [T, E], expert by expert, as the reference calls a router.

    Equal experts then have equal scores, to the last bit. The columns of one product may differ there.
    """
    return torch.stack([rows @ expert for expert in router], dim=-1)


def deciding_scores(config: ModelConfig, rows: torch.Tensor, mlp: MoeWeights) -> torch.Tensor:
    """The scores [T, E] of a `Route`, of rows [T, hidden]."""
    scores = scores_of(rows, mlp.router)
    if mlp.bias is None:
        return scores
    ranks = torch.sigmoid(scores) + mlp.bias
    return _finite(in_best_groups(config, ranks), ranks)


def _finite(inside: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Give experts outside of the best groups the score below all others of the row, instead of -inf."""
    return inside.maximum(ranks.amin(-1, keepdim=True) - 1)


class Routes(TorchFunctionMode):
    """While it is entered, every router that runs is recorded. given: the rankings to follow, in the order of routers.

    A model without experts has no router: nothing is watched there, which would cost as much as small ops do.
    """

    def __init__(self, config: ModelConfig, given: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.config, self.given, self.seen = config, given, list[Route]()
        self._scores: torch.Tensor | None = None

    def __enter__(self) -> Routes:
        self.seen, self._scores = [], None
        if self.config.experts:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failed: Any) -> None:
        if self.config.experts:
            super().__exit__(*failed)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.config.router == "sigmoid":  # `mlp.in_best_groups` ends in a mask; the next sort is that of experts
            if func.__name__ == "masked_fill" and args[0].shape[-1] == self.config.experts:
                self._scores = _finite(out, args[0])
            elif func.__name__ != "sort":
                return out
        elif func.__name__ == "softmax":
            self._scores = args[0] if args[0].shape[-1] == self.config.experts else None
        if func.__name__ == "sort" and self._scores is not None and out.indices.shape == self._scores.shape:
            number, values, ranking = len(self.seen), out.values, out.indices
            if number < len(self.given) and self.given[number].shape == ranking.shape:
                ranking = self.given[number]
                values = args[0].gather(-1, ranking)
            self.seen.append(Route(self._scores, ranking, self.config.experts_per_token))
            self._scores = None
            return torch.return_types.sort((values, ranking))
        return out
