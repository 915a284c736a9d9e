"""Wrap an op set so that each row is computed alone, for every op whose bits may depend on other rows.

The bits of a matrix product, for example, depend on the number of rows. Two runs that bring the same tokens in
different windows or batches then differ everywhere, which hides errors in the memory ops and their calls. Row by row,
equal rows give equal bits, so the two runs must be equal bit by bit.
Leaves out: the op set's own promise (`Ops.row_invariant`), and whether the ops are right, which the tolerance of the
unwrapped run decides.
"""

from dataclasses import replace
from typing import Any

import torch

from instep_optimized.memory_addresses import Pages
from instep_optimized.ops.fused import wholes
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.rowwise_op_names import BY_ROW
from instep_optimized.ops.watch_op_calls import Op


def row_by_row(ops: Ops) -> Ops:
    """Call every op that does not declare invariant rows once per row."""
    apart: dict[str, Any] = {
        name: _attended(op) if name.startswith("attend") else _apart(op, rows)
        for name, rows in BY_ROW.items() if name not in ops.row_invariant and (op := getattr(ops, name)) is not None
    }
    apart |= dict.fromkeys(wholes(*apart))
    return replace(ops, **apart, captures=False, row_invariant=frozenset(BY_ROW))


def _apart(op: Op, rows: tuple[str, ...]) -> Op:
    def call(**given: Any) -> Any:
        count = len(given[rows[0]])
        if not count:
            return op(**given)
        # A clone is aligned, as a separate row would be.
        made = [op(**given | {name: given[name][row : row + 1].clone() for name in rows}) for row in range(count)]
        if isinstance(made[0], torch.Tensor):
            return torch.cat(made)
        return type(made[0])(*(torch.cat(parts) for parts in zip(*made, strict=True)))

    return call


def _attended(op: Op) -> Op:
    """Attend with one query row at a time, on the pages as they are; rows that belong to no request are zero."""

    def call(**given: Any) -> Any:
        query, pages = given["query"], given["pages"]
        out = torch.zeros_like(query) if (up := given.get("up")) is None else query.new_zeros(pages.expanded(query, up))
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
    """Copy the entries that a tree node sees without gaps, so that the sum has the bits of a chain."""
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
