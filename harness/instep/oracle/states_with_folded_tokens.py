"""A run of one piece of the reference, and a state with the tokens that are folded into it.

Leaves out: running it (`recomputation.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from instep_reference.contract.place_names import Place

from .expert_routes import Route


@dataclass(frozen=True)
class Run:
    """The places of a run, and its final state [HV, K, V]; for several draws, with the draws as first axis.

    onward  values that replaced a computed place for the ops after it: a subject's own rows
    route   the experts that its rows chose, in a layer with experts
    """

    places: Mapping[Place, torch.Tensor]
    state: torch.Tensor | None = None
    onward: Mapping[Place, torch.Tensor] = field(default_factory=dict)
    route: Route | None = None

    def of(self, component: str) -> torch.Tensor:
        """The value that the ops after this place read."""
        place = next(place for place in self.places if place.component == component)
        return self.onward.get(place, self.places[place])

    @property
    def recalls(self) -> bool:
        """Whether its tokens obey the delta rule: such layers name their write gate beta."""
        return any(place.component == "beta" for place in self.places)

    @property
    def skip(self) -> torch.Tensor | None:
        """The weight D [HV] with which values are added to read-outs, as its rows show it; None: they show none."""
        shown = {place.component for place in self.places}
        if not shown >= {"core", "skip", "v"}:
            return None
        v = self.of("v")
        return ((self.of("skip") - self.of("core")) * v).sum((0, -1)) / v.square().sum((0, -1))

    def folded(self) -> tuple[torch.Tensor, ...]:
        """Return what its tokens fold in: k, v, log_decay, and the write gate."""
        return tuple(self.of(name) for name in ("k", "v", "log_decay", "beta" if self.recalls else "write"))


class Runs(NamedTuple):
    """A piece in fp64, and its declared forms, drawn several times."""

    truth: Run
    yardsticks: Run


@dataclass(frozen=True)
class PreviousStep:
    """The step before this one: its initial state [HV, K, V] in fp64, and the few tokens that it committed.

    tokens  the truth's run over exactly these tokens, or None for many tokens (a prompt)
    verb    "accepted", "given"
    recent  the tokens that a ring may hold, the oldest first: those of this step and of the steps before it, back to
            the prompt
    last    the last few tokens of a prompt's chunk, of which `tokens` may be too many; None: the step is none
    """

    base: torch.Tensor
    tokens: Run | None
    verb: str
    recent: tuple[Run, ...] = ()
    last: Run | None = None


@dataclass(frozen=True)
class Folding:
    """A state and the tokens folded into it: base [HV, K, V] in fp64, and the first `count` tokens.

    tokens    the truth's run over the whole window, which shows what each token folds in
    previous  the step before this one
    others    names and contents of other states
    parents   of the window's nodes, if it is a tree
    safe      of a safe gate: its bound, and exp(A_log) [HV]; None: the gate has no bound
    """

    base: torch.Tensor
    count: int
    previous: PreviousStep | None
    others: Sequence[tuple[str, torch.Tensor]]
    tokens: Run
    parents: tuple[int, ...] | None = None
    safe: tuple[float, torch.Tensor] | None = None
