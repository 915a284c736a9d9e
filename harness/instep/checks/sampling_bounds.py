"""Whether logits within some error can draw a token: bounds of all cumulative sums.

Let each logit have an error of at most e. Then a score x / temperature has an error of d = e / temperature, and a
weight exp(score) a factor within exp(-d) .. exp(d). The part F of some tokens in the total is smallest if their weights
are the smallest and all others the largest, and largest in the opposite case. A uniform can draw another token than the
truth only between these two. Tokens at a cut of top-k or top-p whose logits are closer than 2e may be on either side of
the cut, so their smallest weight is 0.
Leaves out: the allowed errors (`tier_allowances.py`), and the judgement of a token that cannot be drawn
(`sampled_tokens.py`).
"""

import math
from dataclasses import dataclass

import torch

from instep_reference.acceptance import draws
from instep_reference.sampling import Drawing, fp32, probabilities

from ..tier_allowances import SCORE_ULPS, sums_error

FARTHEST = 2.0**20  # multiple of the allowance beyond which a token counts as impossible
HALVINGS = 10


@dataclass(frozen=True)
class Row:
    """One row of a draw: its logits [vocab] in fp64, its sampling and uniforms. children: each token once."""

    logits: torch.Tensor
    drawing: Drawing
    node: int

    @classmethod
    def every(cls, logits: torch.Tensor, drawing: Drawing) -> "list[Row]":
        """The rows of a window with logits [T, vocab]."""
        return [cls(row, drawing, node) for node, row in enumerate(logits)]

    @property
    def drawn(self) -> int:
        """The token that these logits draw, which depends on no other row."""
        probs, how = probabilities(self.logits[None], self.drawing.sampling), self.drawing
        uniforms = self.logits.new_tensor([*how.at_nodes, how.final])
        return draws(how.tokens, how.parents, probs.expand(len(how.tokens), -1), uniforms[:-1], uniforms[-1])[self.node]

    @property
    def children(self) -> list[int]:
        tokens = (self.drawing.tokens[at] for at, parent in enumerate(self.drawing.parents) if parent == self.node)
        return list(dict.fromkeys(tokens))


def part(row: Row, token: int, error: float, width: torch.dtype) -> float:
    """The smallest multiple of the allowance with which the token can be drawn; 1 is the limit.

    error: the error of one logit.  width: the dtype of weights and sums
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
    """Whether the token can be drawn if all errors are at most `factor` times the allowance."""
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
    """Whether only one token can be drawn within the allowance."""
    eps = torch.finfo(width).eps
    weights, slack = _Weights.of(row, error, eps), sums_error(len(row.logits), eps)
    children = row.children
    can = sum(reachable(row, child, error, width) for child in children)
    if can < 2 and weights.share(children)[0] * (1 - slack) <= row.drawing.at_nodes[row.node]:
        rest, last = weights.without(children), row.drawing.final
        low, high = (torch.cat([part.new_zeros(1), part.cumsum(0)]) for part in (rest.low, rest.high))
        # The smallest and the largest part of all tokens up to each one.
        least = low / (low + high[-1] - high).clamp(min=torch.finfo(low.dtype).tiny)
        most = high / (high + low[-1] - low).clamp(min=torch.finfo(low.dtype).tiny)
        there = (rest.high > 0) & (least[:-1] * (1 - slack) <= last) & (last < most[1:] * (1 + slack))
        can += int(there.sum())
    return can == 1


@dataclass(frozen=True)
class _Weights:
    """The smallest and the largest value of each weight, [vocab] each."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def of(cls, row: Row, error: float, eps: float) -> "_Weights":
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
            # The least and the largest part of all tokens before a token, which itself belongs to the rest.
            least = some[sure] / (some[sure] + most[-1] - most[sure]).clamp(min=torch.finfo(x.dtype).tiny)
            others = (some[-1] - some[(may + 1).clamp(max=len(x))]).clamp(min=0) + low[order]
            largest = most[may] / (most[may] + others).clamp(min=torch.finfo(x.dtype).tiny)
            low = torch.where(((largest * (1 + slack) < edge) | (may == 0))[rank], low, 0.0)
            high = torch.where(((least * (1 - slack) < edge) | (sure == 0))[rank], high, 0.0)
        return cls(low, high)

    def share(self, tokens: list[int] | slice) -> tuple[float, float]:
        """The smallest and the largest part of these tokens in the total."""
        low, high = float(self.low[tokens].sum()), float(self.high[tokens].sum())
        over, under = float(self.high.sum()) - high, float(self.low.sum()) - low
        return low / (low + over) if low else 0.0, high / (high + max(under, 0.0)) if high else 0.0

    def without(self, tokens: list[int]) -> "_Weights":
        low, high = self.low.clone(), self.high.clone()
        low[tokens], high[tokens] = 0.0, 0.0
        return _Weights(low, high)


def _before(falling: torch.Tensor, error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """In the order of falling logits: how many tokens are certainly before each one, and how many may be."""
    if not error:
        rank = torch.arange(len(falling), device=falling.device)
        return rank, rank
    rising = -falling
    sure = torch.searchsorted(rising, rising - 2 * error, right=False)
    may = torch.searchsorted(rising, rising + 2 * error, right=True) - 1
    return sure, may
