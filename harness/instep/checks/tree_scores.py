"""Scores of paths by the logits that a side shows, and how far an order of them may be from another one.

Let each logit of row r be off by at most e_r. Then two candidates of one row change their difference by at most 2 e_r
(the logarithm of the sum is the same for both), and below the node where two paths part each row changes a sum by at
most 2 e_r: its logit, and its logarithm. Rows that both paths have in common change nothing. To that come the roundings
of both sums (`log_prob_error`). Leaves out: what is made of an order that is closer than this (`grown.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..observe.growth import Growth
from .allowance import log_prob_error
from .judge import granted

Path = tuple[int, ...]  # tokens from the root's child on


@dataclass(frozen=True)
class Scores:
    """Scores of paths by a side's logits, and what their differences may be off by.

    noise  the relative error that T3 grants these logits; None: none, they are the engine's own
    """

    growth: Growth
    noise: float | None
    stored: torch.dtype

    def disorder(self, kept: Sequence[Path], among: Sequence[Path], *, ordered: bool) -> float:
        """How far the scores are from giving what was kept, in units of what is allowed; ordered: in this order."""
        others = [path for path in among if path not in kept]
        pairs = [(one, other) for one in kept for other in others]
        if ordered:
            pairs += [(one, other) for at, one in enumerate(kept) for other in kept[at + 1 :]]
        return max((self._part(one, other) for one, other in pairs), default=0.0)

    def _part(self, kept: Path, other: Path) -> float:
        short = self._score(other) - self._score(kept)
        if short <= 0:
            return 0.0
        most = self._error(kept, other)
        return short / most if most else math.inf

    def _score(self, path: Path) -> float:
        """From the root on; a path of which a row is unknown is impossible."""
        total = 0.0
        for at, token in enumerate(path):
            row = self._row(path[:at])
            if row is None or not 0 <= token < len(row):
                return -math.inf
            total += float(row.log_softmax(-1)[token])
        return total

    def _row(self, path: Path) -> torch.Tensor | None:
        """The logits behind a path: it is empty, or a beam."""
        if not path:
            return self.growth.logits[0][0]
        if len(path) >= len(self.growth.logits):
            return None
        beams = paths_of(self.growth, self.growth.growing.beams[len(path)])
        return self.growth.logits[len(path)][beams.index(path)] if path in beams else None

    def _error(self, one: Path, other: Path) -> float:
        common = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                      min(len(one), len(other)))  # fmt: skip
        apart = {path[:at] for path in (one, other) for at in range(common, len(path))}
        total = sum(self._granted(path) for path in apart)
        for path in (one, other):
            total += sum(self._rounding(path[:at]) for at in range(len(path)))
        return total

    def _granted(self, path: Path) -> float:
        row = self._row(path)
        if row is None or self.noise is None:
            return 0.0
        return float(granted(row.abs().amax(), torch.tensor(self.noise), self.stored))

    def _rounding(self, path: Path) -> float:
        """Of one log-probability, and of adding it."""
        row, eps = self._row(path), torch.finfo(_width(self.stored)).eps
        if row is None:
            return 0.0
        return log_prob_error(float(row.abs().amax()), len(row), eps) + eps * abs(self._score(path))


def paths_of(growth: Growth, numbers: Sequence[int]) -> list[Path]:
    return [growth.growing.path(number) for number in numbers]


def _width(stored: torch.dtype) -> torch.dtype:
    """In which scores are computed, whatever logits are stored in."""
    return torch.float64 if stored is torch.float64 else torch.float32
