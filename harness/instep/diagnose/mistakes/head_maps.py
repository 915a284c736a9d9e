"""Wrong head maps: value head h reads key head h % H instead of h // r; likewise in grouped attention.

Leaves out: heads that are rotated or swapped as a whole (`wrong_inputs.py`, `wrong_rows.py`).
"""

from collections.abc import Iterator

import torch

from ...oracle.single_layer_run import LayerWork
from .finding_case import Case, Explanation


def mixing(case: Case) -> Iterator[Explanation]:
    """Permute the value heads so that h reads group h % H, and permute the result back."""
    work, config = case.piece and case.piece.work, None if case.oracle is None else case.weights.config
    if not isinstance(work, LayerWork) or config is None:
        return
    if case.component == "attended" and (query := case.own("query")) is not None:
        groups = config.kv_heads
        places = _places(config.heads, groups)
        wrong = case.again({"query": query[:, places]})
        if wrong is not None and 1 < groups < config.heads:
            yield Explanation(f"query head h reads KV head h % {groups}, not h // {config.heads // groups}",
                              _back(wrong, places, 1))  # fmt: skip


def _places(heads: int, groups: int) -> torch.Tensor:
    """The permutation: place p, of group p // r, takes a head h with h % groups = p // r."""
    return torch.tensor([i * groups + g for g in range(groups) for i in range(heads // groups)])


def _back(tensor: torch.Tensor, places: torch.Tensor, axis: int) -> torch.Tensor:
    back = torch.empty_like(tensor)
    back.index_copy_(axis, places.to(tensor.device), tensor)
    return back
