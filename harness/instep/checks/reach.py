"""Whether a drawn token can come of logits that are off by some error: bounds of every sum that is cumulated.

Let each logit be off by at most e. Then a score x / temperature is off by d = e / temperature, a weight exp(score) by a
factor within exp(-d) .. exp(d), and whatever part F of a total some tokens hold lies between the parts that they hold
if their weights are the smallest and all others the largest, and the other way round. A uniform decides otherwise than
the truth only where it lies between these two. Tokens at a cut of top-k or top-p, whose logits are nearer to each other
than 2e, may stand on either side: their smallest weight is 0.
Leaves out: which errors there are (`allowance.py`), and what is made of a token that cannot come (`draws.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from instep_reference.acceptance import draws
from instep_reference.sampling import Drawing, fp32, probabilities

from .allowance import SCORE_ULPS, sums_error

FARTHEST = 2.0**20  # times what is allowed: beyond it a token is called impossible
HALVINGS = 10


@dataclass(frozen=True)
class Row:
    """One row of a drawing: its logits [vocab] in fp64, and what is drawn with; children: each token once."""

    logits: torch.Tensor
    drawing: Drawing
    node: int

    @classmethod
    def every(cls, logits: torch.Tensor, drawing: Drawing) -> list[Row]:
        """The rows of a window, whose logits [T, vocab] are given."""
        return [cls(row, drawing, node) for node, row in enumerate(logits)]

    @property
    def drawn(self) -> int:
        """The token that these logits draw. It depends on no other row's."""
        probs, how = probabilities(self.logits[None], self.drawing.sampling), self.drawing
        uniforms = self.logits.new_tensor([*how.at_nodes, how.final])
        return draws(how.tokens, how.parents, probs.expand(len(how.tokens), -1), uniforms[:-1], uniforms[-1])[self.node]

    @property
    def children(self) -> list[int]:
        tokens = (self.drawing.tokens[at] for at, parent in enumerate(self.drawing.parents) if parent == self.node)
        return list(dict.fromkeys(tokens))


def part(row: Row, token: int, error: float, width: torch.dtype) -> float:
    """The smallest multiple of what is allowed with which the token can be drawn; 1 is the limit.

    error: of one logit;  width: in which weights and sums are computed
    """
    if not (0 <= token < len(row.logits) and reachable(row, token, error, width, FARTHEST)):
        return math.inf
    high = 1.0
    while not reachable(row, token, error, width, high):
        high *= 2
    low = high / 2 if high > 1 else 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if reachable(row, token, error, width, middle) else (middle, high)
    return high


def reachable(row: Row, token: int, error: float, width: torch.dtype, factor: float = 1.0) -> bool:
    """Whether the token can be drawn where all errors are at most `factor` times what is allowed."""
    error, eps = error * factor, torch.finfo(width).eps * factor
    weights, heat = _Weights.of(row, error, eps), float(fp32(row.drawing.sampling.temperature, row.logits))
    assert heat > 0, "it is drawn"
    slack = sums_error(len(row.logits), eps)
    first, last = row.drawing.at_nodes[row.node], row.drawing.final
    children = row.children
    if token in children:
        before = children[: children.index(token)]
        _, most = weights.share([*before, token])
        least, _ = weights.share(before)
        return bool(weights.high[token] > 0) and least * (1 - slack) <= first < most * (1 + slack)
    if weights.share(children)[0] * (1 - slack) > first:
        return False
    rest = weights.without(children)
    least, _ = rest.share(slice(0, token))
    _, most = rest.share(slice(0, token + 1))
    return bool(rest.high[token] > 0) and least * (1 - slack) <= last < most * (1 + slack)


def sure(row: Row, error: float, width: torch.dtype) -> bool:
    """Whether one token alone can be drawn where all errors are at most what is allowed."""
    eps = torch.finfo(width).eps
    weights, slack = _Weights.of(row, error, eps), sums_error(len(row.logits), eps)
    children = row.children
    can = sum(reachable(row, child, error, width) for child in children)
    if can < 2 and weights.share(children)[0] * (1 - slack) <= row.drawing.at_nodes[row.node]:
        rest, last = weights.without(children), row.drawing.final
        low, high = (torch.cat([part.new_zeros(1), part.cumsum(0)]) for part in (rest.low, rest.high))
        # Of the tokens up to each: the smallest part that they may hold, and the largest.
        least = low / (low + high[-1] - high).clamp(min=torch.finfo(low.dtype).tiny)
        most = high / (high + low[-1] - low).clamp(min=torch.finfo(low.dtype).tiny)
        there = (rest.high > 0) & (least[:-1] * (1 - slack) <= last) & (last < most[1:] * (1 + slack))
        can += int(there.sum())
    return can == 1


@dataclass(frozen=True)
class _Weights:
    """The smallest and the largest that each weight may be, [vocab] each."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def of(cls, row: Row, error: float, eps: float) -> _Weights:
        sampling, x = row.drawing.sampling, row.logits
        heat = float(fp32(sampling.temperature, x))
        off = error / heat + SCORE_ULPS * eps * (float(x.abs().amax()) / heat + 1)
        bare = ((x - x.amax()) / heat).exp()
        low, high = bare * math.exp(-min(off, 700.0)), bare * math.exp(min(off, 700.0))
        falling, order = x.sort(descending=True, stable=True)
        rank = order.argsort()
        if sampling.top_k is not None:
            sure, may = _before(falling, error)
            low = torch.where((may < sampling.top_k)[rank], low, 0.0)
            high = torch.where((sure < sampling.top_k)[rank], high, 0.0)
        if sampling.top_p is not None and sampling.top_p < 1:
            sure, may = _before(falling, error)
            edge, slack = float(fp32(sampling.top_p, x)), sums_error(len(x), eps)
            some, most = (torch.cat([weight.new_zeros(1), weight[order].cumsum(0)]) for weight in (low, high))
            # The part of those in front of a token: at least, and at most; it belongs to the rest itself.
            least = some[sure] / (some[sure] + most[-1] - most[sure]).clamp(min=torch.finfo(x.dtype).tiny)
            others = (some[-1] - some[(may + 1).clamp(max=len(x))]).clamp(min=0) + low[order]
            largest = most[may] / (most[may] + others).clamp(min=torch.finfo(x.dtype).tiny)
            low = torch.where(((largest * (1 + slack) < edge) | (may == 0))[rank], low, 0.0)
            high = torch.where(((least * (1 - slack) < edge) | (sure == 0))[rank], high, 0.0)
        return cls(low, high)

    def share(self, tokens: list[int] | slice) -> tuple[float, float]:
        """The least and the largest part of the total that these tokens may hold."""
        low, high = float(self.low[tokens].sum()), float(self.high[tokens].sum())
        over, under = float(self.high.sum()) - high, float(self.low.sum()) - low
        return low / (low + over) if low else 0.0, high / (high + max(under, 0.0)) if high else 0.0

    def without(self, tokens: list[int]) -> _Weights:
        low, high = self.low.clone(), self.high.clone()
        low[tokens], high[tokens] = 0.0, 0.0
        return _Weights(low, high)


def _before(falling: torch.Tensor, error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """In order of falling logit: how many tokens stand in front of each for sure, and how many may."""
    if not error:
        rank = torch.arange(len(falling), device=falling.device)
        return rank, rank
    rising = -falling
    sure = torch.searchsorted(rising, rising - 2 * error, right=False)
    may = torch.searchsorted(rising, rising + 2 * error, right=True) - 1
    return sure, may
