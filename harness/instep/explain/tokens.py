"""An embedding of another token: the whole table is looked at.

Leaves out: rows of the event's other tokens, which `rows.py` names when the table has no such row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .case import Case, Explanation
from .rows import SHOWN


def tokens(case: Case) -> Iterator[Explanation]:
    if case.component != "embedding" or case.oracle is None or case.granted is None:
        return
    table = case.weights.embedding.to("cpu", torch.float64)
    found, right = case.found.to("cpu", torch.float64), case.right.to("cpu", torch.float64)
    ours, due = _nearest(found, table), _nearest(right, table)
    wrong = (ours != due).nonzero().flatten().tolist()
    if not wrong:
        return
    told = [f"row {row} is the embedding of token {int(ours[row])}; the trace has {int(due[row])}"
            for row in wrong[:SHOWN]]  # fmt: skip
    more = [f"and {len(wrong) - SHOWN} more rows"] if len(wrong) > SHOWN else []
    yield Explanation(", ".join(told + more), table[ours], float(len(table)) ** len(wrong))


def _nearest(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    nearest: torch.Tensor = torch.cdist(rows, table).argmin(1)
    return nearest
