"""A run of one piece of the reference, and a state with the tokens that are folded into it.

Leaves out: running it (`recomputation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from instep_reference.contract.place import Place

from .routes import Route


@dataclass(frozen=True)
class Run:
    """What a run showed, and the state [HV, K, V] that it left; of several draws, with the draws as first axis.

    onward: what went on from a place where that is not what was computed there: a subject's own rows.
    route: what its rows chose, in a layer with experts.
    """

    places: Mapping[Place, torch.Tensor]
    state: torch.Tensor | None = None
    onward: Mapping[Place, torch.Tensor] = field(default_factory=dict)
    route: Route | None = None

    def of(self, component: str) -> torch.Tensor:
        """What the ops behind this place read."""
        place = next(place for place in self.places if place.component == component)
        return self.onward.get(place, self.places[place])


class Runs(NamedTuple):
    """A piece in fp64, and the declared forms of it, drawn several times."""

    truth: Run
    yardsticks: Run


@dataclass(frozen=True)
class PreviousStep:
    """The step before this one: the state [HV, K, V] that it began with, in fp64, and the few tokens that it committed.

    tokens  the truth's run over exactly these tokens, or None where they were many (a prompt)
    verb    "accepted", "given"
    """

    base: torch.Tensor
    tokens: Run | None
    verb: str


@dataclass(frozen=True)
class Folding:
    """A state and the tokens folded into it: base [HV, K, V] in fp64, and the first `count` tokens.

    tokens    the truth's run over the whole window, which shows what each token folds in
    previous  the step before this one; others: whose, and what they hold
    parents   of the window's nodes, where it is a tree
    """

    base: torch.Tensor
    count: int
    previous: PreviousStep | None
    others: Sequence[tuple[str, torch.Tensor]]
    tokens: Run
    parents: tuple[int, ...] | None = None
