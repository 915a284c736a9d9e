"""Scores of paths from the logits of a side, and the allowed error of their order.

Let each logit of row r have an error of at most e_r. Then the difference of two candidates of one row changes by at
most 2 e_r, as the logarithm of the sum is the same for both. Below the node where two paths diverge each row changes a
score by at most 2 e_r, for its logit and its logarithm. Rows that both paths share change nothing. The roundings of
both sums are added (`log_prob_error`). Leaves out: the judgement of an order (`grown.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..allowance import granted, log_prob_error
from ..watch.grown_tree import Growth

Path = tuple[int, ...]  # tokens from the root's child on


@dataclass(frozen=True)
class Scores:
    """Scores of paths from a side's logits, and the allowed error of their differences.

    noise  the relative error that T3 allows these logits; None means no error, for the engine's own logits
    """

    growth: Growth
    noise: float | None
    stored: torch.dtype

    def disorder(self, kept: Sequence[Path], among: Sequence[Path], *, ordered: bool) -> float:
        """The distance of the scores from the kept paths in units of the allowance. ordered: the order counts, too."""
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
        """The score of a path from the root on; minus infinity if a row of it is unknown."""
        total = 0.0
        for at, token in enumerate(path):
            row = self._row(path[:at])
            if row is None or not 0 <= token < len(row):
                return -math.inf
            total += float(row.log_softmax(-1)[token])
        return total

    def _row(self, path: Path) -> torch.Tensor | None:
        """The logits after a path, which is empty or a beam."""
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
        """The rounding of the log-probabilities of a path and of their sum."""
        row, eps = self._row(path), torch.finfo(_width(self.stored)).eps
        if row is None:
            return 0.0
        return log_prob_error(float(row.abs().amax()), len(row), eps) + eps * abs(self._score(path))


def paths_of(growth: Growth, numbers: Sequence[int]) -> list[Path]:
    return [growth.growing.path(number) for number in numbers]


def _width(stored: torch.dtype) -> torch.dtype:
    """The dtype in which scores are computed, also for narrower logits."""
    return torch.float64 if stored is torch.float64 else torch.float32
