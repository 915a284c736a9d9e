"""Decisions: the argmax of the logits, and greedy acceptance along a chain.

Both ops are exact. The `ledger` op set uses them too. Leaves out: sampling.
"""

from __future__ import annotations

import torch

from instep_reference.contract.place import Place

from ..placing import Acceptance


def pick(*, logits: torch.Tensor, to: Place) -> torch.Tensor:
    """The lowest index among the largest logits."""
    return logits.argmax(dim=-1)


def accept(
    *, window: torch.Tensor, picks: torch.Tensor, count: torch.Tensor, forced_correct: torch.Tensor,
    forced_bonus: torch.Tensor,
) -> Acceptance:
    """Drafts are accepted while each equals the target's pick one node before; the pick after them is the bonus.

    Shapes:  window, picks (B, T)   the others (B)  ->  accept_index, tokens (B, T), everything else (B)
    """
    node, busy = torch.arange(window.shape[1], device=window.device), count > 0
    right = (window[:, 1:] == picks[:, :-1]) & (node[1:] < count[:, None])
    own = right.long().cumprod(dim=1).sum(dim=1)
    # A forced path that is too long must not read beyond the window.
    correct = torch.where(forced_correct >= 0, torch.minimum(forced_correct, (count - 1).clamp(min=0)), own)
    said = torch.where(forced_bonus >= 0, forced_bonus, picks.gather(1, correct[:, None])[:, 0])
    bonus, own_bonus = (torch.where(busy, x, 0) for x in (said, picks.gather(1, own[:, None])[:, 0]))
    lens = torch.where(busy, correct + 1, 0)
    path = torch.where(node < lens[:, None], node, -1)
    # Node t of the path is followed by draft t + 1, the last one by the bonus.
    tokens = torch.where(node < correct[:, None], window.roll(-1, dims=1), 0)
    tokens = torch.where((node == correct[:, None]) & busy[:, None], bonus[:, None], tokens)
    return Acceptance(correct, lens, path, correct.clone(), bonus, own, own_bonus, tokens)
