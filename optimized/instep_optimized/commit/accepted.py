"""Verified windows: what the slot table keeps of them until their commit, and what the commit answers.

Leaves out: which units of state memory move (the strategies beside this file). Chains only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep_reference.contract.engine import Committed, Path
from instep_reference.contract.errors import Unsupported

from ..memory.slot_table import SlotTable
from ..ops.base import Ops
from ..ops.placing import Acceptance


def keep_window(
    ops: Ops, slot_table: SlotTable, slots: torch.Tensor, picks: torch.Tensor, final: torch.Tensor, width: int
) -> None:
    """Store picks [B * width] and final [B * width, D] of verified windows in the slot table. Ops and views only."""
    count = len(slots)
    # `store_rows` addresses [pages, page_size, ...]; a slot is seen as a page of one entry, which is the whole window.
    ops.store_rows(rows=picks.view(count, width), pool=slot_table.picks[:, None, :width], locations=slots)
    ops.store_rows(rows=final.view(count, width, -1), pool=slot_table.final[:, None, :width], locations=slots)


def forced_paths(accepted: Sequence[Path] | None, requests: int) -> list[list[int]]:
    """[accepted drafts, bonus] of every request; [-1, -1] where the engine does its own greedy acceptance."""
    if accepted is None:
        return [[-1, -1]] * requests
    for path in accepted:
        if path.nodes != tuple(range(1, len(path.nodes) + 1)):
            raise Unsupported(f"accepted nodes {path.nodes}: this engine verifies chains, whose paths are 1, 2, ...")
    return [[len(path.nodes), path.bonus] for path in accepted]


def answered(acceptance: Acceptance) -> Committed:
    """The answer of a commit. The caller may keep its tensors: they are new results of an op, or copies out of a graph.

    `tokens` is not part of the answer. It is what the draft extend runs on.
    """
    return Committed(**{name: x for name, x in acceptance._asdict().items() if name != "tokens"})
