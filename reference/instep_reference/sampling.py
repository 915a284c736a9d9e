"""Probabilities of a sampling request from the target's logits, and one drawn token per row.

Written from the definition in `contract/sampling.py`, with a sort. Leaves out: acceptance, which walks along the
drawn tokens (`acceptance.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .acceptance import draws
from .contract.sampling import Sampling


@dataclass(frozen=True)
class Drawing:
    """Inputs of a draw in addition to the logits: a window (a single row is a window of one node), and the uniforms.

    uniforms  one per node, then the final one; for a window of one node the final one alone
    """

    sampling: Sampling
    tokens: Sequence[int]
    parents: Sequence[int]
    uniforms: Sequence[float]

    @classmethod
    def alone(cls, sampling: Sampling, uniforms: Sequence[float]) -> "Drawing":
        """Make the inputs for a row without a window: a window of one node."""
        return cls(sampling, (0,), (-1,), uniforms)

    @property
    def final(self) -> float:
        return self.uniforms[-1]

    @property
    def at_nodes(self) -> tuple[float, ...]:
        """One uniform per node. A row without children needs none."""
        return tuple(self.uniforms[:-1]) or (0.0,) * len(self.tokens)


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Turn logits (T, vocab) into the probabilities with which each row's token is drawn."""
    vocab = logits.shape[1]
    falling, ids = logits.sort(dim=-1, descending=True, stable=True)
    first = torch.arange(vocab, device=logits.device) < (vocab if sampling.top_k is None else sampling.top_k)
    scores = torch.where(first, falling / fp32(sampling.temperature, logits), -torch.inf)
    sorted_ = scores.softmax(-1)
    if sampling.top_p is not None and (limit := fp32(sampling.top_p, logits)) < 1:
        before = torch.cat([torch.zeros_like(sorted_[:, :1]), sorted_.cumsum(-1)[:, :-1]], -1)
        sorted_ = torch.where(before < limit, scores, -torch.inf).softmax(-1)
    return torch.zeros_like(sorted_).scatter(-1, ids, sorted_)


def most_probable(logits: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the most probable tokens of each row (T, vocab) and log_softmax there; on a tie the lower token first."""
    chances = logits.log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    pairs = zip(order.tolist(), chances.gather(1, order).tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def drawn(logits: torch.Tensor, drawing: Drawing) -> list[int]:
    """Draw the choice of every row of a window, given its logits (T, vocab)."""
    uniforms = logits.new_tensor([*drawing.at_nodes, drawing.final])
    probs = probabilities(logits, drawing.sampling)
    return draws(drawing.tokens, drawing.parents, probs, uniforms[:-1], uniforms[-1])


def fp32(number: float, like: torch.Tensor) -> torch.Tensor:
    """Round a number of the request as both sides do: to fp32, then to the width of the logits."""
    return torch.tensor(number, dtype=torch.float32, device=like.device).to(like.dtype)
