"""Decisions: the argmax of the logits, and acceptance along a chain or a tree.

Both ops are exact. The `ledger` op set uses them too. Leaves out: choices that are drawn (`top_k_top_p_sampling.py`).
"""

import torch

from instep_reference.contract.place_names import Place

from ..integer_op_protocols import Acceptance


def pick(*, logits: torch.Tensor, to: Place) -> torch.Tensor:
    """Return the lowest index among the largest logits."""
    return logits.argmax(dim=-1)


def accept(
    *, window: torch.Tensor, picks: torch.Tensor, count: torch.Tensor, forced_last: torch.Tensor,
    forced_bonus: torch.Tensor, parents: torch.Tensor | None = None, caps: torch.Tensor | None = None,
) -> Acceptance:
    """Drafts are accepted while each equals the target's pick one node before; the pick after them is the bonus.

    Shapes:  window, picks, parents (B, T)   the others (B)  ->  accept_index, tokens (B, T), everything else (B)
    """
    if parents is not None:
        return _along_trees(window, picks, count, forced_last, forced_bonus, parents, caps)
    node, busy = torch.arange(window.shape[1], device=window.device), count > 0
    right = (window[:, 1:] == picks[:, :-1]) & (node[1:] < count[:, None])
    # A forced path that is too long must not read beyond the window.
    most = (count - 1).clamp(min=0)
    if caps is not None:
        most = torch.where(caps >= 0, torch.minimum(caps, most), most)
    own = torch.minimum(right.long().cumprod(dim=1).sum(dim=1), most)
    correct = torch.where(forced_last >= 0, torch.minimum(forced_last, most), own)
    said = torch.where(forced_bonus >= 0, forced_bonus, picks.gather(1, correct[:, None])[:, 0])
    bonus, own_bonus = (torch.where(busy, x, 0) for x in (said, picks.gather(1, own[:, None])[:, 0]))
    lens = torch.where(busy, correct + 1, 0)
    path = torch.where(node < lens[:, None], node, -1)
    # Node t of the path is followed by draft t + 1, the last one by the bonus.
    tokens = torch.where(node < correct[:, None], window.roll(-1, dims=1), 0)
    tokens = torch.where((node == correct[:, None]) & busy[:, None], bonus[:, None], tokens)
    return Acceptance(correct, lens, path, correct.clone(), bonus, own, own_bonus, tokens)


def _along_trees(
    window: torch.Tensor, picks: torch.Tensor, count: torch.Tensor, forced_last: torch.Tensor,
    forced_bonus: torch.Tensor, parents: torch.Tensor, caps: torch.Tensor | None,
) -> Acceptance:
    """Accept along trees: a walk ends at a node that no child continues; a forced path leads back to the root."""
    node, busy = torch.arange(window.shape[1], device=window.device), count > 0
    width, there = len(node), node < count[:, None]
    at = torch.zeros_like(count)  # the walk's node, per request
    for _ in range(width):
        fits = there & (node > 0) & (parents == at[:, None]) & (window == picks.gather(1, at[:, None]))
        at = torch.where(fits.any(dim=1), fits.long().argmax(dim=1), at)
    # A forced node after the window's end must not be read.
    last = torch.where(forced_last >= 0, torch.minimum(forced_last, (count - 1).clamp(min=0)), at)
    path, own = (_path(end, parents, busy) for end in (last, at))  # [B, T], root first, -1 padded
    if caps is not None:
        beyond = (node > caps[:, None]) & (caps >= 0)[:, None]
        path, own = (x.masked_fill(beyond, -1) for x in (path, own))
        last, at = (x.max(dim=1).values.clamp(min=0) for x in (path, own))
    lens, own_lens = ((x >= 0).sum(dim=1) for x in (path, own))
    said, own_bonus = (torch.where(busy, picks.gather(1, end[:, None])[:, 0], 0) for end in (last, at))
    bonus = torch.where(busy & (forced_bonus >= 0), forced_bonus, said)
    following = window.gather(1, path.roll(-1, dims=1).clamp(min=0))
    tokens = torch.where(node + 1 < lens[:, None], following, 0)
    tokens = torch.where(node + 1 == lens[:, None], bonus[:, None], tokens)
    drafts, own_drafts = ((x - 1).clamp(min=0) for x in (lens, own_lens))
    return Acceptance(drafts, lens, path, torch.where(busy, last, 0), bonus, own_drafts, own_bonus, tokens)


def _path(last: torch.Tensor, parents: torch.Tensor, busy: torch.Tensor) -> torch.Tensor:
    """Follow the nodes from the root to `last` [B] -> [B, T], root first, -1 padded. Node numbers rise along a path."""
    on = torch.zeros_like(parents, dtype=torch.bool)
    at = torch.where(busy, last, -1)
    for _ in range(parents.shape[1]):
        on.scatter_(1, at.clamp(min=0)[:, None], on.gather(1, at.clamp(min=0)[:, None]) | (at >= 0)[:, None])
        at = torch.where(at >= 0, parents.gather(1, at.clamp(min=0)[:, None])[:, 0], -1)
    node = torch.arange(parents.shape[1], device=parents.device)
    return torch.where(on, node, parents.shape[1]).sort(dim=1).values.masked_fill_((~on).sort(dim=1).values, -1)
