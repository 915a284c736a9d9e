"""The experts that the rows of a mixture choose: recorded while the reference runs, or forced, so that a run follows.

A choice of experts jumps when a score moves by a rounding. So a yardstick, which must err only as arithmetic does,
follows the choices of the truth; and the truth follows those of the subject if its own margin is too small
(`Route.shortfall`). Leaves out: the effect of such a jump on a free run (`checks/experts.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

    A softmax router decides by its scores, a sigmoid router by those after sigmoid and bias. Only experts of the
    `best` best of `groups` groups serve a row; a group is as good as its two best experts.
    """

    scores: torch.Tensor
    ranking: torch.Tensor
    top: int
    groups: int = 1
    best: int = 1

    @classmethod
    def of(cls, config: ModelConfig, scores: torch.Tensor) -> "Route":
        """Rank like the reference. scores: of `deciding_scores`"""
        ranks = in_best_groups(config, scores) if config.router == "sigmoid" else scores.softmax(-1)
        ranking = ranks.sort(dim=-1, descending=True, stable=True).indices
        return cls(scores, ranking, config.experts_per_token, config.expert_groups, config.groups_per_token)

    def chosen(self, ranking: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E] bool."""
        ranking = self.ranking if ranking is None else ranking
        return torch.zeros_like(ranking, dtype=torch.bool).scatter(-1, ranking[..., : self.top], True)

    def shortfall(self, chosen: torch.Tensor) -> torch.Tensor:
        """[T]: by how much the best excluded expert is ahead of the last one of `chosen`; 0: not at all.

        If a row's experts are chosen in groups, also by how much the best excluded group is ahead of the last one:
        half of that, because a group has the errors of two scores. Groups without a chosen expert may be any.
        """
        if self.best == self.groups:
            return self._lead(self.scores, chosen, torch.ones_like(chosen))
        pairs, used = self._pairs(), self._by_group(chosen).any(-1)
        order = pairs.masked_fill(used, torch.inf).sort(dim=-1, descending=True, stable=True).indices
        leads = []
        for ranking in (order, order[..., _exchanged(self.groups, self.best)]):
            taken = torch.zeros_like(used).scatter(-1, ranking[..., : self.best], True)
            inside = taken.repeat_interleave(self.scores.shape[-1] // self.groups, dim=-1)
            lead = self._lead(self.scores, chosen, inside).maximum(self._lead(pairs, taken, torch.ones_like(taken)) / 2)
            leads.append(lead.masked_fill((used & ~taken).any(-1), torch.inf))
        return torch.minimum(*leads)

    @staticmethod
    def _lead(scores: torch.Tensor, chosen: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
        """By how much the best of `among` that is not chosen is ahead of the last one that is."""
        best = scores.masked_fill(chosen | ~among, -torch.inf).amax(-1)
        least = scores.masked_fill(~chosen, torch.inf).amin(-1)
        return (best - least).clamp(min=0)

    def _by_group(self, experts: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, groups, experts of a group]."""
        return experts.reshape(*experts.shape[:-1], self.groups, -1)

    def _pairs(self) -> torch.Tensor:
        """[T, groups]: how good the groups are."""
        return self._by_group(self.scores).sort(dim=-1, descending=True).values[..., :2].sum(-1)

    def _alternatives(self) -> Iterator[torch.Tensor]:
        """Rankings with the first excluded expert in place of the last included one; then the same of groups."""
        yield self.ranking[..., _exchanged(self.ranking.shape[-1], self.top)]
        if self.best < self.groups:
            order = self._pairs().sort(dim=-1, descending=True, stable=True).indices
            taken = order[..., _exchanged(self.groups, self.best)][..., : self.best]
            inside = torch.zeros_like(self._pairs(), dtype=torch.bool).scatter(-1, taken, True)
            inside = inside.repeat_interleave(self.scores.shape[-1] // self.groups, dim=-1)
            yield self.scores.masked_fill(~inside, -torch.inf).sort(dim=-1, descending=True, stable=True).indices

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

    def following(self, other: "Route", error: torch.Tensor, width: torch.dtype) -> torch.Tensor:
        """The ranking, with another route's ranking in the rows whose scores hardly decide between the two."""
        return self.ranking.where(~self.ties(other.chosen(), error, width)[:, None], other.ranking)

    def served(
        self, again: Callable[[torch.Tensor], R], run: R, own: Mapping[Place, torch.Tensor], width: torch.dtype
    ) -> R:
        """The run on the subject's own rows, in which undecided rows go where the subject's must have gone.

        Such rows are tried with the first excluded expert instead of the last included one, and with the first
        excluded group. again: the run with another ranking
        """
        mixed = next((place for place in run.places if place.component == "mlp" and place in own), None)
        if mixed is None or own[mixed].shape != run.places[mixed].shape:
            return run
        mine, ranking = own[mixed].to(run.places[mixed]), self.ranking
        nearest = (run.places[mixed] - mine).norm(dim=-1)
        for other in self._alternatives():
            tied = self.ties(self.chosen(other), torch.zeros(()), width)
            if bool(tied.any()):
                distance = (again(other).places[mixed] - mine).norm(dim=-1)
                nearer = tied & (distance < nearest)
                ranking, nearest = ranking.where(~nearer[:, None], other), nearest.where(~nearer, distance)
        return run if ranking is self.ranking else again(ranking)


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


def deciding_scores(rows: torch.Tensor, mlp: MoeWeights) -> torch.Tensor:
    """The scores [T, E] of a `Route`, of rows [T, hidden]."""
    scores = scores_of(rows, mlp.router)
    return scores if mlp.bias is None else torch.sigmoid(scores) + mlp.bias


class Routes(TorchFunctionMode):
    """While it is entered, every router that runs is recorded. given: the rankings to follow, in the order of routers.

    A model without experts has no router: nothing is watched there, which would cost as much as small ops do.
    """

    def __init__(self, config: ModelConfig, given: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.config, self.given, self.seen = config, given, list[Route]()
        self._scores: torch.Tensor | None = None

    def __enter__(self) -> "Routes":
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
                self._scores = args[0]
            elif func.__name__ != "sort":
                return out
        elif func.__name__ == "softmax":
            self._scores = args[0] if args[0].shape[-1] == self.config.experts else None
        if func.__name__ == "sort" and self._scores is not None and out.indices.shape == self._scores.shape:
            number, values, ranking = len(self.seen), out.values, out.indices
            if number < len(self.given) and self.given[number].shape == ranking.shape:
                ranking = self.given[number]
                values = args[0].gather(-1, ranking)
            config = self.config
            self.seen.append(Route(self._scores, ranking, config.experts_per_token, config.expert_groups,
                                   config.groups_per_token))  # fmt: skip
            self._scores = None
            return torch.return_types.sort((values, ranking))
        return out
