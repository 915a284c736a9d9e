"""Drawn choices: weights of each row after temperature, top-k and top-p, and one token drawn by them.

Leaves out: the argmax alone, and acceptance (`argmax_and_acceptance.py`). The `ledger` op set finds the rows' windows
here, too.
"""

from typing import NamedTuple

import torch

from instep_reference.contract.place_names import Place
from instep_reference.contract.sampling import UNIFORM


class Owned(NamedTuple):
    """Owner of each of M rows.

    covered [M]; owner, node [M], 0 if not covered; its window's tokens [M, T]; child [M, T]: the children of its node.
    """

    covered: torch.Tensor
    owner: torch.Tensor
    node: torch.Tensor
    tokens: torch.Tensor
    child: torch.Tensor


def owned(
    window: torch.Tensor, parents: torch.Tensor | None, begin: torch.Tensor, count: torch.Tensor, rows: int
) -> Owned:
    """Find the request that covers each row, and the children of the row's node."""
    inside = torch.arange(rows, device=begin.device)[:, None] - begin
    covers = (inside >= 0) & (inside < count)
    covered, owner = covers.any(dim=1), covers.long().argmax(dim=1)
    node = torch.where(covered, inside.gather(1, owner[:, None])[:, 0], 0)
    place = torch.arange(window.shape[1], device=begin.device)
    above = place - 1 if parents is None else parents[owner]
    child = (above == node[:, None]) & (place > 0) & (place < count[owner][:, None]) & covered[:, None]
    return Owned(covered, owner, node, window[owner], child)


def draw(
    *, logits: torch.Tensor, window: torch.Tensor, parents: torch.Tensor | None, begin: torch.Tensor,
    count: torch.Tensor, sampling: torch.Tensor, uniforms: torch.Tensor, final: torch.Tensor, to: Place,
) -> torch.Tensor:
    """`Draw` of the seam. Sums are made in the width of the logits, in order of ids."""
    if not len(logits):
        return begin.new_empty(0)
    rows = owned(window, parents, begin, count, len(logits))
    heat, top_k, top_p = sampling[rows.owner].to(logits.dtype).unbind(1)
    weights = _weights(logits, torch.where(heat > 0, heat, 1), top_k, top_p)
    first, last = (given.to(logits.dtype) * UNIFORM for given in (uniforms[rows.owner, rows.node], final[rows.owner]))
    # A column after the vocabulary encodes "no child": it has nothing to take or to remove.
    vocab = logits.shape[1]
    token = torch.where(rows.child, rows.tokens, vocab)
    rest = torch.cat([weights, weights.new_zeros(len(weights), 1)], dim=1)
    sums = torch.where(_first_of_its_token(token), rest.gather(1, token), 0).cumsum(dim=1)
    rest = rest.scatter(1, token, 0.0)[:, :vocab]
    taken = rows.child & ((first * (sums[:, -1] + rest.sum(dim=1)))[:, None] < sums)
    along = rest.cumsum(dim=1)
    behind = (along > (last * along[:, -1])[:, None]).long().argmax(dim=1)
    chosen = token.gather(1, taken.long().argmax(dim=1)[:, None])[:, 0]
    drawn = torch.where(taken.any(dim=1), chosen, behind)
    return torch.where(rows.covered, torch.where(heat > 0, drawn, logits.argmax(dim=-1)), 0)


def _weights(logits: torch.Tensor, heat: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """exp((x - largest) / temperature) where top-k and top-p keep the token, else 0; [M, vocab]."""
    order = logits.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    weights = ((logits - logits.amax(dim=1, keepdim=True)) / heat[:, None]).exp()
    weights = torch.where((rank < top_k[:, None]) | (top_k == 0)[:, None], weights, 0)
    falling = weights.gather(1, order).cumsum(dim=1)
    # A token is kept while the sum of the tokens before it has not reached top_p; the first one is always kept.
    reached = (falling >= top_p[:, None] * falling[:, -1:]).roll(1, dims=1)
    reached[:, 0] = False
    return torch.where(reached.gather(1, rank) & (top_p < 1)[:, None], 0, weights)


def _first_of_its_token(token: torch.Tensor) -> torch.Tensor:
    """[M, T]: whether no earlier column has the same token."""
    same = token[:, :, None] == token[:, None, :]
    return ~same.tril(diagonal=-1).any(dim=2)
