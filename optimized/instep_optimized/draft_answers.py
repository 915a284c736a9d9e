"""The answer of a draft: a table of the drafts in use, and one of the head's own.

Leaves out: trees that the drafter grows, which come as tables (`round_for_step_count.py`).
"""

from collections.abc import Sequence

import torch

from instep_reference.contract.engine import Drafted

from .transfer.to_device import ints

NO_OPINION = -1  # `own` without a draft head


def split_tables(said: torch.Tensor, steps: int, *, headed: bool) -> Drafted:
    """Split `said` into two tables [B, steps], which are side by side in it; without a draft head there is one.

    The caller may keep its tensors.
    """
    if not headed:
        drafts = said[:, :steps].contiguous()
        return Drafted(drafts, torch.full_like(drafts, NO_OPINION))
    drafts, own = said.view(len(said), 2, steps).transpose(0, 1).contiguous()  # one launch; for one request none
    return Drafted(drafts, own)


def cut_to_trees(said: torch.Tensor, trees: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Cut tables [B, width - 1], side by side, to the width of the largest tree; -1 after the drafts of each."""
    most, counts = max(map(len, trees)), ints([len(tree) for tree in trees], said.device)
    behind = torch.arange(most, device=said.device) >= counts[:, None]
    begins = range(0, said.shape[1], width - 1)
    return torch.cat([said[:, begin : begin + most].masked_fill(behind, -1) for begin in begins], dim=1)
