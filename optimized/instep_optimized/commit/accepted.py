"""Verified windows: what the slot table keeps of them until their commit, and what the commit answers.

Leaves out: which units of state memory move (the strategies beside this file). Chains only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep_reference.contract.engine import Committed, Path
from instep_reference.contract.errors import Unsupported

from ..memory.slot_table import SlotTable
from ..ops.base import Acceptance, Ops


def keep_window(
    ops: Ops, slot_table: SlotTable, slots: torch.Tensor, picks: torch.Tensor, final: torch.Tensor, width: int
) -> None:
    """picks [B * width] and final [B * width, D] of verified windows into the slot table; ops and views only."""
    count = len(slots)
    ops.store_rows(rows=picks.view(count, width), pool=slot_table.picks[:, None, :width], locations=slots)
    ops.store_rows(rows=final.view(count, width, -1), pool=slot_table.final[:, None, :width], locations=slots)


def forced_paths(accepted: Sequence[Path] | None, requests: int) -> list[list[int]]:
    """(accepted drafts, bonus) of every request, -1 where the engine accepts by itself."""
    if accepted is None:
        return [[-1, -1]] * requests
    for path in accepted:
        if path.nodes != tuple(range(1, len(path.nodes) + 1)):
            raise Unsupported(f"accepted nodes {path.nodes}: this engine verifies chains, whose paths are 1, 2, ...")
    return [[len(path.nodes), path.bonus] for path in accepted]


def answered(acceptance: Acceptance) -> Committed:
    """What the caller is told. The tensors are copies already, so the caller may keep them."""
    return Committed(**{name: x for name, x in acceptance._asdict().items() if name != "tokens"})
