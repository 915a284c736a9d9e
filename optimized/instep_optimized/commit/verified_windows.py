"""Verified windows: what the slot table keeps of them until their commit, and what the commit answers.

Leaves out: which units of state memory move (the strategies in this folder).
"""

from collections.abc import Sequence

import torch

from instep_reference.contract.engine import Committed, Path

from ..memory import Memory
from ..memory.slot_table import SlotTable
from ..memory.tiled_units import SCALES
from ..ops.integer_op_protocols import Acceptance
from ..ops.op_protocols import Ops
from ..packed_batch import Batch, TargetRows


def keep_window(
    ops: Ops, slot_table: SlotTable, slots: torch.Tensor, picks: torch.Tensor, target: TargetRows, width: int
) -> None:
    """Store picks [B * width] and rows [B * width, ..] of verified windows in the slot table. Ops and views only."""
    count = len(slots)
    # `store_rows` addresses [pages, page_size, ...]; a slot is viewed as a page of one entry, which is the whole
    # window.
    ops.store_rows(rows=picks.view(count, width), pool=slot_table.picks[:, None, :width], locations=slots)
    for rows, field in ((target.final, slot_table.final), (target.features, slot_table.features)):
        if rows is not None and field is not None:
            ops.store_rows(rows=rows.view(count, width, -1), pool=field[:, None, :width], locations=slots)


def keep_tail(
    ops: Ops, memory: Memory, batch: Batch, final: torch.Tensor, newest: torch.Tensor | None = None
) -> None:
    """Store the final rows [N, D] of tokens that become committed, if the slot table has a place for them.

    newest: the packed rows that are stored, None: all. No two rows of a request may share a place.
    """
    table = memory.slot_table
    if table.tail is None or table.ring is None:
        return
    locations = ops.place_rows(
        slots=batch.slots, begin=batch.begin, count=batch.count, rows=len(final), length=table.length,
        table=table.ring, page_size=table.tail.shape[1], shift=0).locations
    if newest is not None:
        final, locations = (ops.select(x=x, index=newest) for x in (final, locations))
    ops.store_rows(rows=final, pool=table.tail, locations=locations)


def gather_path(
    ops: Ops, memory: Memory, slots: torch.Tensor, accept_index: torch.Tensor, before: torch.Tensor, begin: torch.Tensor
) -> None:
    """Move the entries of accepted tree nodes together: their KV, and their final rows. Ops and views only.

    before  [B]: committed tokens before the window;  begin [B]: the first packed row, a multiple of the widest window
    """
    table, final = memory.slot_table.table, memory.slot_table.final
    stood = ops.plan_path(accept_index=accept_index, slots=slots, before=before, size=memory.pages.size, table=table)
    for name in ("keys", "values", f"keys{SCALES}", f"values{SCALES}"):
        for layer in memory.layers(name):
            ops.move_rows(pool=memory[name].units(layer), source=stood.source, target=stood.target)
    # A line of final rows is a ring that starts again with each window: position `begin` is in its entry 0.
    rows = ops.plan_path(accept_index=accept_index, slots=slots, before=begin, size=final.shape[1])
    ops.move_rows(pool=final, source=rows.source, target=rows.target)


def forced_paths(accepted: Sequence[Path] | None, requests: int, caps: Sequence[int]) -> list[list[int]]:
    """Return [last accepted node, bonus] of every request, or [-1, -1] if the engine accepts by itself; then its cap.

    caps: none at all, or one number per request. The device cuts the paths there.
    """
    forced = [[-1, -1]] * requests
    if accepted is not None:
        forced = [[(0, *path.nodes)[-1], path.bonus] for path in accepted]
    return [[*path, cap] for path, cap in zip(forced, caps, strict=True)] if caps else forced


def answered(acceptance: Acceptance, widest: int) -> Committed:
    """Build the answer of a commit, with its paths cut to the longest window.

    The caller may keep its tensors: they are new results of an op, or copies out of a graph.

    `tokens` is not part of the answer. The draft extend runs on it.
    """
    told = acceptance._asdict() | {"accept_index": acceptance.accept_index[:, :widest]}
    return Committed(**{name: x for name, x in told.items() if name != "tokens"})
