"""What a target's logits say when a request samples: probabilities, and one drawn token per row.

Written from the definition in `contract/sampling.py`, with a sort. Leaves out: acceptance, which walks along the
drawn tokens (`acceptance.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .acceptance import draws
from .contract.sampling import Sampling


@dataclass(frozen=True)
class Drawing:
    """What a draw depends on beside the logits: a window (a single row is a window of one node), and the uniforms.

    uniforms  one per node, then the final one; for a window of one node the final one alone
    """

    sampling: Sampling
    tokens: Sequence[int]
    parents: Sequence[int]
    uniforms: Sequence[float]

    @classmethod
    def alone(cls, sampling: Sampling, uniforms: Sequence[float]) -> Drawing:
        """Of a row that has no window: a window of one node."""
        return cls(sampling, (0,), (-1,), uniforms)

    @property
    def final(self) -> float:
        return self.uniforms[-1]

    @property
    def at_nodes(self) -> tuple[float, ...]:
        """One uniform per node. A row without children needs none."""
        return tuple(self.uniforms[:-1]) or (0.0,) * len(self.tokens)


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits (T, vocab) -> the probabilities with which each row's token is drawn."""
    vocab = logits.shape[1]
    falling, ids = logits.sort(dim=-1, descending=True, stable=True)
    first = torch.arange(vocab, device=logits.device) < (vocab if sampling.top_k is None else sampling.top_k)
    scores = torch.where(first, falling / fp32(sampling.temperature, logits), -torch.inf)
    sorted_ = scores.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        before = torch.cat([torch.zeros_like(sorted_[:, :1]), sorted_.cumsum(-1)[:, :-1]], -1)
        sorted_ = torch.where(before < fp32(sampling.top_p, logits), scores, -torch.inf).softmax(-1)
    return torch.zeros_like(sorted_).scatter(-1, ids, sorted_)


def most_probable(logits: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Of each row (T, vocab) the most probable tokens and log_softmax there; of equal logits the lower token first."""
    chances = logits.log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    pairs = zip(order.tolist(), chances.gather(1, order).tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def drawn(logits: torch.Tensor, drawing: Drawing) -> list[int]:
    """The choice of every row of a window, given its logits (T, vocab)."""
    uniforms = logits.new_tensor([*drawing.at_nodes, drawing.final])
    probs = probabilities(logits, drawing.sampling)
    return draws(drawing.tokens, drawing.parents, probs, uniforms[:-1], uniforms[-1])


def fp32(number: float, like: torch.Tensor) -> torch.Tensor:
    """A number of the request as both sides take it: rounded to fp32, then in the width of the logits."""
    return torch.tensor(number, dtype=torch.float32, device=like.device).to(like.dtype)
