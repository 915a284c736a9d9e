"""An op set in which every row is served by itself, wherever its bits may depend on the rows beside it.

Matrix products, for one, change bits with the number of rows. Two runs that bring the same tokens in other windows or
batches then part everywhere, and what was promised to be exact, the memory ops and how they are called, cannot be told
from that. Served row by row, these ops give equal bits for equal rows, so that two runs must be the same bit by bit.
Leaves out: what the op set promises itself (`Ops.row_invariant`), and whether the ops are right: the same kernels are
held to a tolerance as they are, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from instep_optimized.layout import Pages
from instep_optimized.ops.around import Op
from instep_optimized.ops.base import Ops
from instep_optimized.ops.by_row import BY_ROW
from instep_optimized.ops.fused import wholes


def row_by_row(ops: Ops) -> Ops:
    """`ops`, with every op that does not declare that its rows are invariant called once per row."""
    apart: dict[str, Any] = {
        name: _attended(ops.attend) if name == "attend" else _apart(getattr(ops, name), rows)
        for name, rows in BY_ROW.items() if name not in ops.row_invariant
    }
    apart |= dict.fromkeys(wholes(*apart))
    return replace(ops, **apart, captures=False, row_invariant=frozenset(BY_ROW))


def _apart(op: Op, rows: tuple[str, ...]) -> Op:
    def call(**given: Any) -> Any:
        count = len(given[rows[0]])
        if not count:
            return op(**given)
        # A copy begins where memory is aligned, as a row of its own would.
        made = [op(**given | {name: given[name][row : row + 1].clone() for name in rows}) for row in range(count)]
        if isinstance(made[0], torch.Tensor):
            return torch.cat(made)
        return type(made[0])(*(torch.cat(parts) for parts in zip(*made, strict=True)))

    return call


def _attended(op: Op) -> Op:
    """One query row of one request at a time, on the pages as they are; a row that nobody covers is zeros."""

    def call(**given: Any) -> Any:
        query, pages = given["query"], given["pages"]
        out = torch.zeros_like(query)
        for request, (begin, count) in enumerate(zip(pages.begin.tolist(), pages.count.tolist(), strict=True)):
            for row in range(count):
                at = slice(begin + row, begin + row + 1)
                out[at] = op(**given | {"query": query[at].clone(), "pages": _alone(pages, request, row)})
        return out

    return call


def _alone(pages: Pages, request: int, row: int) -> Pages:
    one, at = slice(request, request + 1), int(pages.begin[request]) + row
    bits = 0 if pages.ancestors is None else int(pages.ancestors[at])
    if bits:
        return _side_by_side(pages, request, bits)
    count = pages.count[one]
    return replace(
        pages, slots=pages.slots[one], begin=torch.zeros_like(count), count=torch.ones_like(count),
        before=pages.before[one] + row, most=1, ancestors=None, nodes=0,
    )


def _side_by_side(pages: Pages, request: int, bits: int) -> Pages:
    """Copies of what a node sees, without gaps: a sum over gaps has other bits than that over the path as a chain."""
    before, size, table = int(pages.before[request]), pages.keys.shape[1], pages.table
    seen = torch.tensor([*range(before), *(before + n for n in range(bits.bit_length()) if bits >> n & 1)])
    seen = seen.to(table.device)
    spots = table[pages.slots[request], seen // size], seen % size
    count = -(-len(seen) // size)
    keys, values, *scales = (
        None if x is None
        else torch.cat((x[spots], x.new_zeros(count * size - len(seen), *x.shape[2:]))).view(count, size, *x.shape[2:])
        for x in (pages.keys, pages.values, pages.key_scales, pages.value_scales)
    )
    assert keys is not None and values is not None, "of a pool there may be no scales"
    none = torch.zeros_like(pages.count[:1])
    return Pages(keys, values, torch.arange(count, device=table.device).to(table)[None], slots=none, begin=none,
                 count=none + 1, before=none + len(seen) - 1, most=1, key_scales=scales[0],
                 value_scales=scales[1])  # fmt: skip
