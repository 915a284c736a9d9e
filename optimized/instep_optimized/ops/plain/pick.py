"""Decisions: the argmax of the logits, and greedy acceptance along a chain.

Leaves out: sampling. Both ops are exact; label sets use them as they are.
"""

from __future__ import annotations

import torch

from instep_reference.contract.place import Place

from ..base import Acceptance


def pick(*, logits: torch.Tensor, to: Place) -> torch.Tensor:
    """The lowest index among the largest logits."""
    return logits.argmax(dim=-1)


def accept(*, window: torch.Tensor, picks: torch.Tensor, count: torch.Tensor) -> Acceptance:
    """Drafts are accepted while each equals the target's pick one node before; the pick after them is the bonus.

    Shapes:  window, picks (B, T)   count (B)  ->  accept_index (B, T), everything else (B)
    """
    node = torch.arange(window.shape[1], device=window.device)
    right = (window[:, 1:] == picks[:, :-1]) & (node[1:] < count[:, None])
    correct = right.long().cumprod(dim=1).sum(dim=1)
    lens = torch.where(count > 0, correct + 1, 0)
    bonus = torch.where(count > 0, picks.gather(1, correct[:, None])[:, 0], 0)
    path = torch.where(node < lens[:, None], node, -1)
    return Acceptance(correct, lens, path, correct.clone(), bonus)
