"""A tree that the drafter grows: best tokens of a row, best candidates of a step, and the window of the best.

Nothing here waits for the host. The `ledger` op set uses the last two. Leaves out: the head's rows (`draft/eagle.py`).
"""

import torch

from ..integer_op_protocols import Beams, GrownTree, TopkTokens
from .compute_width import wide


def topk_tokens(*, logits: torch.Tensor, topk: int) -> TopkTokens:
    """`MakeTopkTokens` of the seam.

    Shapes:  logits (M, vocab)  ->  (M, topk) each
    """
    chances = wide(logits).log_softmax(dim=-1)
    tokens = best(logits, topk)
    return TopkTokens(tokens, chances.gather(1, tokens))


def select_beams(
    *, tokens: torch.Tensor, log_probs: torch.Tensor, before: Beams | None, step: int, num_steps: int
) -> Beams:
    """`SelectBeams` of the seam.

    Shapes:  tokens, log_probs (B, k) or (B * k, k)  ->  tokens, parents, scores (B, M)   the others (B * k)
    """
    topk = tokens.shape[1]
    if before is None:
        requests, first, many = len(tokens), 0, topk
        most = topk + (num_steps - 1) * topk**2
        all_tokens = tokens.new_zeros(requests, most)
        all_parents = torch.full_like(all_tokens, -1)
        all_scores = log_probs.new_full((requests, most), -torch.inf)
        scores, parents = log_probs, torch.full_like(tokens, -1)
    else:
        requests, first, many = len(before.tokens), topk + (step - 2) * topk**2, topk**2
        all_tokens, all_parents, all_scores = before.tokens.clone(), before.parents.clone(), before.scores.clone()
        beams = before.beams.view(requests, topk)
        above = before.scores.gather(1, beams).repeat_interleave(topk, dim=1)
        scores, parents = above + log_probs.reshape(requests, many), beams.repeat_interleave(topk, dim=1)
    new = slice(first, first + many)
    all_tokens[:, new], all_parents[:, new] = tokens.reshape(requests, many), parents
    all_scores[:, new] = scores
    kept = best(scores, topk)  # [B, k], among the new ones
    request = torch.arange(requests, device=tokens.device)[:, None]
    row = request.repeat(1, topk) if before is None else request * topk + kept // topk
    seen = torch.ones_like(kept) if before is None else before.ancestors[row]
    own = torch.arange(topk, device=tokens.device) + 1 + (step - 1) * topk
    return Beams(
        all_tokens, all_parents, all_scores, (first + kept).flatten(), all_tokens.gather(1, first + kept).flatten(),
        torch.full_like(kept, step).flatten(), row.flatten(), (seen + (1 << own)).flatten(),
    )


def build_tree(*, tokens: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor, nodes: int) -> GrownTree:
    """`BuildTree` of the seam. A parent has a lower number than its children and no lower score, so it is chosen, too.

    Shapes:  tokens, parents, scores (B, M)  ->  tokens (B, nodes - 1)   parents (B, nodes)
    """
    requests, most = tokens.shape
    chosen = best(scores, min(nodes - 1, most)).sort(dim=1).values
    node = torch.zeros(requests, most + 1, dtype=torch.int64, device=tokens.device)  # column 0: no candidate, the root
    number = torch.arange(1, chosen.shape[1] + 1, device=tokens.device).expand_as(chosen)
    node.scatter_(1, chosen + 1, number)
    drafts, shape = tokens.new_zeros(requests, nodes - 1), tokens.new_full((requests, nodes), -1)
    drafts[:, : chosen.shape[1]] = tokens.gather(1, chosen)
    shape[:, 1 : chosen.shape[1] + 1] = node.gather(1, parents.gather(1, chosen) + 1)
    return GrownTree(drafts, shape)


def best(x: torch.Tensor, count: int) -> torch.Tensor:
    """[N, M] -> [N, count]: indices of the largest, the largest first; on a tie the first."""
    return x.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()
