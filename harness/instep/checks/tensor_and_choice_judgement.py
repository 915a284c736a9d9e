"""The judgement of tensors (T3) and choices (T4) for all callers, and the count of ties.

Callers are checks, relations, `generate` and the gate. Leaves out: how an error is measured (`error_measurement.py`),
and the constants (`tier_allowances.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from instep_reference.contract.place_names import Place

from ..finding_problem import Problem
from ..tier_allowances import LUCK, TIES_ALWAYS, TIES_CAP, YARDSTICK_FACTOR, granted
from ..verdict import Comparison, Tier
from .check_interface import verb
from .error_measurement import Spot, measured

# A tensor of one draw of the rounded run, and the least error that the draw counts as.
Draw = tuple[torch.Tensor, float]


def judge(
    spot: Spot, truth: torch.Tensor, draws: Iterable[Draw], found: torch.Tensor | None, *, factor: float = 1.0,
    stored: torch.dtype | None = None, least_draws: int = 1,
) -> Comparison:
    """T3: compare an error with the largest error of any draw; further draws are made only for an error over it.

    An error of more than LUCK times its allowance is wrong whatever further draws give, so none are made.
    least_draws: draws that are made before that. factor: how many allowances are granted. stored: the dtype whose
    rounding is granted; None means the found tensor's own.
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
    """T4 of a row of choices.

    margin    the truth's margin between its own choice and the subject's; part: the margin over the allowed margin
    expected  the expected number of choices that the rounded run makes differently from the truth
    """

    margin: torch.Tensor
    part: torch.Tensor
    differs: torch.Tensor
    expected: float = 0.0

    @property
    def row(self) -> int:
        """The choice closest to its limit or farthest beyond it, among those that differ, if any do."""
        return int(torch.where(self.differs, self.part, -1.0).argmax())

    @property
    def worst(self) -> float:
        """The part of the worst choice; 1 is the limit."""
        return float(self.part[self.row])

    @property
    def ties(self) -> int:
        """The number of choices that differ within the allowed margin."""
        return int((self.differs & (self.part <= 1)).sum())


def chosen(
    logits: torch.Tensor, right: torch.Tensor, own: torch.Tensor, noise: float, stored: torch.dtype, *,
    factor: float = 1.0, rounded: torch.Tensor | None = None,
) -> Chosen:
    """Judge choices of the largest logit: one may differ while the truth's margin is within the logits' allowed error.

    Shapes:  logits, the truth's [choices, vocab]   right, own [choices]
    noise: the relative error of the rounded run, from which T3's allowance for logits follows. rounded: its logits.
    """
    margin = (logits.gather(1, right[:, None]) - logits.gather(1, own[:, None])).abs().flatten()
    most, differs = granted(logits.abs().amax(-1), torch.tensor(noise), stored, factor), right != own
    part = torch.where(differs, margin / most, 0.0)
    return Chosen(margin, part, differs, factor * flips(logits, noise, rounded))


def flips(logits: torch.Tensor, noise: float, rounded: torch.Tensor | None = None) -> float:
    """The expected number of choices of the largest of `logits` [choices, vocab] that rounding changes.

    Each logit has an independent normal error. Its deviation is the root mean square error of the rounded run in that
    row, or `noise`. A logit with a margin m below the largest wins if a normal number with sqrt(2) times that deviation
    exceeds m. The actual choices of the sides do not count here, or else ties would allow further ties.
    """
    off = noise * logits if rounded is None else rounded.to(logits) - logits
    error = off.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(logits.dtype).tiny)
    ahead = torch.special.erfc((logits.amax(-1, keepdim=True) - logits) / (2 * error)) / 2
    return float((ahead.sum(-1) - 1 / 2).clamp(max=1).nan_to_num().sum())  # 1/2 is the largest logit itself


@dataclass
class Ties:
    """Counts choices and ties of a run, as too many ties are a divergence. what: the name of the choices."""

    what: str = "choices so far"
    made: int = 0
    ties: int = 0
    expected: float = 0.0

    def add(self, choices: Chosen) -> None:
        self.made += len(choices.part)
        self.ties += choices.ties
        self.expected += choices.expected

    def too_many(self, check: str, event: int, kind: str, place: Place) -> Iterator[Comparison]:
        """A finding once there are more ties than correct rounding explains."""
        cap = max(TIES_ALWAYS + YARDSTICK_FACTOR * self.expected, TIES_CAP * self.made)
        if self.ties > cap:
            yield Comparison(
                check, Tier.DECISIONS, event, kind, place, elements=self.made, worst=float(self.ties), allowed=cap,
                undecided=self.ties,
                problem=Problem("undecided", f"{self.ties} of {self.made} {self.what} "
                                f"{verb(self.ties, 'was a tie', 'were ties')}: too many"),
            )
