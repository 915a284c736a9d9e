"""Attention of requests with many rows, as prefill chunks: a program reads all positions of its rows.

Leaves out: the arithmetic (`online_softmax.py`), windows and trees (`split_kv.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl

from .online_softmax import across, joined, nothing, of_head, rows_of_heads


@triton.jit
def read_chunk(
    query, keys, values, paged, sizes, attended, tokens,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    WIDEN: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Attend `tokens` rows of one request, for the query heads of one KV head. Grid (KV heads, row tiles, B).

    Tiles that see the most positions run first. `split_kv.py` reads requests of at most `paged.window` rows, and trees.
    """
    request, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(0)
    rows, slot, row = tl.load(paged.rows + request), tl.load(paged.slots + request), tl.load(paged.begin + request)
    first = ((tl.num_programs(1) - 1 - tl.program_id(1)) * tokens).to(tl.int64)
    if (first >= rows) | (slot < 0) | (rows <= paged.window):
        return
    if paged.ancestors is not None and tl.load(paged.ancestors + row * paged.ancestors_step) != 0:
        return
    m, d = tl.arange(0, MT), tl.arange(0, DT)
    token, head = first + m // sizes.group, kv_head * sizes.group + m % sizes.group
    inside = ((m // sizes.group < tokens) & (token < rows))[:, None] & (d < sizes.width)[None, :]  # [MT, DT]
    queries = rows_of_heads(query, row + token, head, inside, DT)
    known = tl.load(paged.before + request).to(tl.int32)
    # last [MT]: the last position that each row sees; reach: one past the last position that any row of the tile sees
    last = known + token.to(tl.int32)
    reach = tl.minimum(known + tl.minimum(first + tokens, rows), paged.held).to(tl.int32)
    line, key_at, value_at = paged.table + slot * paged.table_row, of_head(keys, kv_head), of_head(values, kv_head)
    pools = key_at, value_at, keys, values, paged, sizes, line, kv_head
    full = known + first.to(tl.int32) + 1
    if PT == 0:
        _, total, mean = across(
            queries, last, 0, full, reach, known, 0, pools, MT, NT, DT, PAGE, False, WIDEN, False, ORDERED,
        )  # fmt: skip
        mean *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    else:
        best, total, mean = nothing(MT, DT)
        for begun in range(0, reach, PT * GROUP):
            best_of, total_of, mean_of = nothing(MT, DT)
            for start in range(begun, tl.minimum(begun + PT * GROUP, reach), PT):
                more, sum_of_more, mean_of_more = across(
                    queries, last, start, full, tl.minimum(start + PT, reach), known, 0, pools,
                    MT, NT, DT, PAGE, False, WIDEN, True, ORDERED,
                )  # fmt: skip
                best_of, total_of, mean_of = joined(best_of, total_of, mean_of, more, sum_of_more, mean_of_more)
            best, total, mean = joined(best, total, mean, best_of, total_of, mean_of)
        mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]  # as parts are, to the last bit
    tl.store(
        attended.at + ((row + token) * attended.per_row + head * attended.per_head)[:, None] + d[None, :],
        mean.to(attended.at.dtype.element_ty), mask=inside,
    )  # fmt: skip
