"""The judgement of what a run computes and chooses, for every caller: T3 of a tensor, T4 of choices, and their ties.

Leaves out: where truth, draws and findings come from (checks, relations, what was decoded, the gate), how an error is
measured (`measure.py`), and the constants (`allowance.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from instep_reference.contract.place import Place

from ..problem import Problem
from ..verdict import Comparison, Tier
from .allowance import LUCK, MARGIN_ERRORS, TIES_ALWAYS, TIES_CAP, YARDSTICK_FACTOR, allowed
from .measure import Spot, measured

# A tensor of one draw of the rounded run, and the least error that this draw counts as.
Draw = tuple[torch.Tensor, float]


def judge(
    spot: Spot, truth: torch.Tensor, draws: Iterable[Draw], found: torch.Tensor | None, *, factor: float = 1.0,
    stored: torch.dtype | None = None, least_draws: int = 1,
) -> Comparison:
    """T3: an error is held to the largest that any draw makes; the next draw is made only before it is called wrong.

    An error of more than LUCK times its allowance is no bad luck of one draw, so it is called wrong at once.
    least_draws: how many are made before that. factor: how many allowances are granted; stored: the dtype whose
    rounding is granted, None: the found tensor's own.
    """
    yardsticks, noise, result = list[torch.Tensor](), 0.0, None
    for yardstick, least in draws:
        yardsticks.append(yardstick)
        noise = max(noise, least)
        result = measured(spot, found, truth, yardsticks, noise, stored, factor)
        if result.agrees or (len(yardsticks) >= least_draws and not result.used <= LUCK):
            break
    assert result is not None, "there is a first draw"
    return result


@dataclass(frozen=True)
class Chosen:
    """T4 of a row of choices. margin: the truth's, between the two; part: the same as a part of what is allowed.

    expected  how many of them the rounded run makes otherwise than the truth, in the mean
    """

    margin: torch.Tensor
    part: torch.Tensor
    differs: torch.Tensor
    expected: float = 0.0

    @property
    def row(self) -> int:
        """The choice that stands nearest to its limit, or beyond it; of those that differ, where any does."""
        return int(torch.where(self.differs, self.part, -1.0).argmax())

    @property
    def worst(self) -> float:
        """Its part; 1 is the limit."""
        return float(self.part[self.row])

    @property
    def ties(self) -> int:
        """How many choices differ where the truth itself hardly chose."""
        return int((self.differs & (self.part <= 1)).sum())


def chosen(
    logits: torch.Tensor, right: torch.Tensor, own: torch.Tensor, noise: float, stored: torch.dtype, *,
    factor: float = 1.0, rounded: torch.Tensor | None = None,
) -> Chosen:
    """A choice may differ while the truth's margin is under what the two logits may be off by.

    Shapes:  logits, the truth's [choices, vocab]   right, own [choices]
    noise: the relative error of the rounded run, from which T3's allowance for logits follows; rounded: its logits.
    """
    margin = (logits.gather(1, right[:, None]) - logits.gather(1, own[:, None])).abs()[:, 0]
    most, differs = granted(logits.abs().amax(-1), torch.tensor(noise), stored, factor), right != own
    part = torch.where(differs, margin / most, 0.0)
    return Chosen(margin, part, differs, factor * flips(logits, noise, rounded))


def flips(logits: torch.Tensor, noise: float, rounded: torch.Tensor | None = None) -> float:
    """How many choices of the largest of `logits` [choices, vocab] fall to another one, in the mean.

    Each logit is off by a draw of its own, as large as those of the rounded run are off in that row by the root mean
    square, or else as `noise` says. Then another one, which is a margin m behind, comes out ahead where a normal number
    of sqrt(2) times that deviation is above m. What anybody chose counts nothing here: else ties would grant ties.
    """
    off = noise * logits if rounded is None else rounded.to(logits) - logits
    error = off.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(logits.dtype).tiny)
    ahead = torch.special.erfc((logits.amax(-1, keepdim=True) - logits) / (2 * error)) / 2
    return float((ahead.sum(-1) - 1 / 2).clamp(0, 1).nan_to_num().sum())  # 1/2: itself


def granted(largest: torch.Tensor, noise: torch.Tensor, stored: torch.dtype, factor: float = 1.0) -> torch.Tensor:
    """The margin of the truth up to which a choice may differ; largest: its largest logit, by its size."""
    return MARGIN_ERRORS * factor * largest * allowed(noise, stored)


@dataclass
class Ties:
    """Choices so far, and how many of them were ties: so many ties are no ties. what: how choices are called."""

    what: str = "choices so far"
    made: int = 0
    ties: int = 0
    expected: float = 0.0

    def add(self, choices: Chosen) -> None:
        self.made += len(choices.part)
        self.ties += choices.ties
        self.expected += choices.expected

    def too_many(self, check: str, event: int, kind: str, place: Place) -> Iterator[Comparison]:
        """A finding once there are more of them than correct rounding leaves."""
        cap = max(TIES_ALWAYS + YARDSTICK_FACTOR * self.expected, TIES_CAP * self.made)
        if self.ties > cap:
            yield Comparison(
                check, Tier.DECISIONS, event, kind, place, elements=self.made, worst=float(self.ties), allowed=cap,
                undecided=self.ties,
                problem=Problem("undecided", f"{self.ties} of {self.made} {self.what} were ties: too many"),
            )
