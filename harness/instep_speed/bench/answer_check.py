"""Whether an answer is right: compared with plain in fp64, as T2 judges an op from its own inputs, or bit by bit.

Truth is `plain` in fp64 on the arm's own numbers; the yardstick is `plain` in the width in which the arm computes.
Leaves out: the constants (`tier_allowances.py`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from instep.checks.error_measurement import relative_error
from instep.tier_allowances import allowed

FOLDERS = re.compile(r"(?<![\w.~])/(?:[^\s/:'\"]+/)+")


@dataclass(frozen=True)
class Judged:
    """The fault of an answer in words (empty: none), and the error of its tensors relative to fp64, by name."""

    finding: str
    errors: Mapping[str, float] = field(default_factory=dict)

    def above(self, other: "Judged") -> str:
        """Which errors are larger than another answer's to the same question, in words."""
        return "; ".join(f"{what} is off by {error:.4g}, there by {other.errors[what]:.4g}"
                         for what, error in self.errors.items() if error > other.errors.get(what, math.inf))


def off(what: str, found: torch.Tensor, truth: torch.Tensor, yardstick: torch.Tensor, axis: int | None = None) -> str:
    """Describe what is wrong with a tensor; empty: nothing. Each head is a separate block along `axis`."""
    if found.shape != truth.shape:
        return f"{what} has the shape {list(found.shape)}; expected {list(truth.shape)}"
    x, o, r = (_blocks(one, axis) for one in (found, truth, yardstick))
    error, drawn = relative_error(x, o), relative_error(r, o)
    limit = allowed(drawn, found.dtype)
    parts = torch.where(error == 0, 0.0, error / limit)
    metric, block = divmod(int(parts.argmax()), len(o))  # argmax returns a NaN as the largest
    if parts[metric, block] <= 1:
        return ""
    where = f" of head {block}" if axis is not None else ""
    return f"{what}{where} is off by {float(error[metric, block]):.1e}, {float(limit[metric, block]):.1e} allowed"


def errors(**pairs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Compute for name=(found, truth) the relative error by the norm over all heads; not for NaN or infinity.

    `off` judges every head. This is one number for comparison with others.
    """
    told = {what: float(relative_error(_blocks(x, None), _blocks(o, None))[0, 0])
            for what, (x, o) in pairs.items() if x.shape == o.shape}  # fmt: skip
    return {what: error for what, error in told.items() if math.isfinite(error)}


def fallen(raised: Exception) -> str:
    """Describe an exception of foreign code in one line, with file names only, because results are read on other
    machines.
    """
    return f"{type(raised).__name__}: {FOLDERS.sub('', ' '.join(str(raised).split()))[:300]}"


def first(*findings: str) -> str:
    """The first non-empty text."""
    return next(filter(None, findings), "")


def same(what: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    """Compare the bits of two tensors and describe a difference."""
    if found.shape == expected.shape and torch.equal(found, expected):
        return ""
    count = int((found != expected).sum()) if found.shape == expected.shape else found.numel()
    return f"{what}: {count:,} of {expected.numel():,} numbers have other bits"


def _blocks(x: torch.Tensor, axis: int | None) -> torch.Tensor:
    return x.double().reshape(1, -1) if axis is None else x.double().movedim(axis, 0).flatten(1)
