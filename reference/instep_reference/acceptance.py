"""Acceptance: how many drafts of a window the target accepts, along a chain or a tree, greedily or by sampling.

A chain is the tree in which every node's parent is the previous node. Leaves out: the source of the target's picks or
probabilities (`trunk.py`), and the rest of a commit (`speculative_rounds.py`).
"""

from collections.abc import Sequence

import torch

from .contract.engine import Committed, Path


def chain(width: int) -> tuple[int, ...]:
    """Parents of a window of `width` nodes without branches."""
    return tuple(range(-1, width - 1))


def greedy(
    tokens: Sequence[int], parents: Sequence[int], picks: Sequence[int], cap: int | None = None
) -> Path:
    """Walk from the root to the child whose token is the target's own choice, as long as there is such a child.

    Shapes:  tokens, parents, picks (T,): the window, each node's parent, the target's argmax at each node.
    cap: the most drafts of the path; None: no limit. The bonus is the choice at the last node in any case.
    """
    node = 0
    nodes: list[int] = []
    while len(nodes) != cap and (child := _child_with(picks[node], node, tokens, parents)) is not None:
        nodes.append(child)
        node = child
    return Path(tuple(nodes), int(picks[node]))


def sampled(
    tokens: Sequence[int], parents: Sequence[int], probs: torch.Tensor, uniforms: torch.Tensor, final: torch.Tensor,
    cap: int | None = None,
) -> Path:
    """Target-only rejection sampling: path and bonus together have exactly the target's distribution.

    At a node, the target probabilities of its children are cumulated in window order, and one uniform is compared with
    the sums: the first child whose sum is above it is taken. If there is no such child, the bonus is drawn from the
    target's distribution without the children's tokens; at a leaf, from all of it.
    Example: children with probabilities 0.5 and 0.2; a uniform of 0.6 takes the second, a uniform of 0.8 none.

    If a child is taken after `cap` drafts, its token is the bonus, and it is not accepted: this leaves the distribution
    of the text as it is.

    Shapes:  tokens, parents (T,)   probs (T, vocab), the target's at each node
             uniforms (T,) in [0, 1), indexed by the current node, shared by its children   final () in [0, 1)
    Mirrors: sglang's tree_speculative_sampling_target_only with both thresholds at 1. Differs: the uniform must be
             strictly below the sum (so a token of probability 0 is never taken); sums are relative to the row's own
             total; a token that two children have counts once.
    """
    node = 0
    nodes: list[int] = []
    while True:
        child, left = _child_drawn(node, tokens, parents, probs[node], uniforms[node])
        if child is None:
            return Path(tuple(nodes), _draw(left, final))
        if len(nodes) == cap:
            return Path(tuple(nodes), int(tokens[child]))
        nodes.append(child)
        node = child


def draws(
    tokens: Sequence[int], parents: Sequence[int], probs: torch.Tensor, uniforms: torch.Tensor, final: torch.Tensor
) -> list[int]:
    """Make one choice per node: the token of the child that the node's uniform selects, or else one drawn with `final`.

    `greedy` with these choices equals `sampled`: a selected child has the chosen token, and a token that is drawn from
    the rest belongs to no child. So the acceptance of an engine stays as it is; only its choice differs.

    Shapes:  as in `sampled`  ->  (T,)
    """
    said = []
    for node in range(len(tokens)):
        child, left = _child_drawn(node, tokens, parents, probs[node], uniforms[node])
        said.append(_draw(left, final) if child is None else int(tokens[child]))
    return said


def answer(paths: Sequence[Path], own: Sequence[Path], widths: Sequence[int], device: torch.device) -> Committed:
    """Build the answer of a commit: the five results for a batch of paths, and this side's own acceptance."""
    width = max(widths, default=0)

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    index = [[0, *path.nodes] + [-1] * (width - 1 - len(path.nodes)) for path in paths]
    return Committed(
        num_correct_drafts=column([len(path.nodes) for path in paths]),
        accept_lens=column([len(path.nodes) + 1 for path in paths]),
        accept_index=torch.tensor(index, dtype=torch.int64, device=device).reshape(len(paths), width),
        last_correct_step_indices=column([path.nodes[-1] if path.nodes else 0 for path in paths]),
        bonus=column([path.bonus for path in paths]),
        own_num_correct_drafts=column([len(path.nodes) for path in own]),
        own_bonus=column([path.bonus for path in own]),
    )


def block_greedy(
    block: torch.Tensor, picks: torch.Tensor, caps: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a block drafter's block greedily: the number of right drafts, and the bonus after them.

    caps (B,): the most drafts of each request; None: no limits.

    Shapes:  block (B, T): root, then the drafts   picks (B, T), the target's argmax at each place
             ->  correct_len (B,), bonus (B,)
    Mirrors: DFlash's accept length and bonus, greedy.
    """
    right = (block[:, 1:] == picks[:, :-1]).to(torch.int64)
    correct_len = _capped(right.cumprod(1).sum(1), caps)
    return correct_len, picks.gather(1, correct_len[:, None])[:, 0]


def block_sampled(
    block: torch.Tensor, probs: torch.Tensor, uniforms: torch.Tensor, final: torch.Tensor,
    caps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a block by sampling: keep drafts while the uniform is below the draft's target probability.

    caps (B,): the most drafts of each request; None: no limits. A draft that is kept after them is the bonus.

    Shapes:  block (B, T)   probs (B, T, vocab)   uniforms (B, T)   final (B,)   ->  correct_len, bonus (B,)
    Mirrors: DFlash, sampled; equals `sampled` along a chain, written for whole batches.
    """
    drafts = block[:, 1:, None]
    drafted = probs[:, :-1].gather(2, drafts)[:, :, 0]
    total = drafted + probs[:, :-1].scatter(2, drafts, 0.0).sum(2)
    kept = (uniforms[:, :-1] * total < drafted).to(torch.int64)
    right_len = kept.cumprod(1).sum(1)
    correct_len = _capped(right_len, caps)
    left = probs.gather(1, correct_len[:, None, None].expand(-1, 1, probs.shape[2]))[:, 0]
    # The refused draft of each request; if all were accepted or a cap ended it, nothing was refused: `whole`.
    refused = torch.cat([block[:, 1:], block[:, :1]], 1).gather(1, correct_len[:, None])
    whole = ((correct_len == block.shape[1] - 1) | (correct_len < right_len))[:, None]
    left = torch.where(whole, left, left.scatter(1, refused, 0.0))
    bonus = [_draw(row, at) for row, at in zip(left, final, strict=True)]
    drawn = torch.tensor(bonus, dtype=torch.int64, device=block.device)
    return correct_len, torch.where(correct_len < right_len, refused[:, 0], drawn)


def _capped(correct_len: torch.Tensor, caps: torch.Tensor | None) -> torch.Tensor:
    return correct_len if caps is None else torch.minimum(correct_len, caps)


def _children(node: int, parents: Sequence[int]) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node and child > 0]


def _child_with(token: int, node: int, tokens: Sequence[int], parents: Sequence[int]) -> int | None:
    return next((child for child in _children(node, parents) if tokens[child] == token), None)


def _child_drawn(
    node: int, tokens: Sequence[int], parents: Sequence[int], probs: torch.Tensor, uniform: torch.Tensor
) -> tuple[int | None, torch.Tensor]:
    """The child that the uniform selects, if any, and the target's probabilities without the children's tokens.

    The total is summed in the same order as the children's sums. So if the children hold all the probability, rounding
    leaves no gap in which no child is selected.
    """
    sums, left = [torch.zeros_like(uniform)], probs.clone()
    children = _children(node, parents)
    for child in children:
        sums.append(sums[-1] + left[tokens[child]])
        left[tokens[child]] = 0.0
    limit = uniform * (sums[-1] + left.sum())
    return next((child for child, passed in zip(children, sums[1:], strict=True) if limit < passed), None), left


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> int:
    """Return the first token at which the cumulated weights are above `uniform` times their total."""
    cumulated = weights.cumsum(0)
    return int(torch.nonzero(cumulated > uniform * cumulated[-1])[0])
