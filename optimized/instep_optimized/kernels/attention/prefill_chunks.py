"""Attention of requests with many rows, as prefill chunks: a program reads all positions of its rows.

Leaves out: the arithmetic (`online_softmax.py`), windows and trees (`split_kv.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl

from .online_softmax import across, joined, nothing


@triton.jit
def read_chunk(
    query, query_row, query_head,
    keys, keys_page, keys_entry, keys_head, values, values_page, values_entry, values_head,
    key_scales, key_scales_page, value_scales, value_scales_page,
    table, table_row, table_column, held, slots, begin, count, before, ancestors, ancestors_step, nodes, window,
    group, width, scale, attended, attended_row, attended_head, tokens,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    WIDEN: tl.constexpr, ORDERED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Attend `tokens` rows of one request, for the `group` query heads of one KV head. Grid (KV heads, row tiles, B).

    Tiles that see the most positions run first. `split_kv.py` reads requests of at most `window` rows, and trees.
    """
    request, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(0)
    rows, slot, row = tl.load(count + request), tl.load(slots + request), tl.load(begin + request)
    first = ((tl.num_programs(1) - 1 - tl.program_id(1)) * tokens).to(tl.int64)
    if (first >= rows) | (slot < 0) | (rows <= window):
        return
    if ancestors is not None and tl.load(ancestors + row * ancestors_step) != 0:
        return
    m, d = tl.arange(0, MT), tl.arange(0, DT)
    token, head = first + m // group, kv_head * group + m % group
    inside = ((m // group < tokens) & (token < rows))[:, None] & (d < width)[None, :]  # [MT, DT]
    queries = tl.load(
        query + ((row + token) * query_row + head * query_head)[:, None] + d[None, :], mask=inside, other=0.0
    )
    known = tl.load(before + request).to(tl.int32)
    # last [MT]: the last position that each row sees; reach: one past the last position that any row of the tile sees
    last = known + token.to(tl.int32)
    reach = tl.minimum(known + tl.minimum(first + tokens, rows), held).to(tl.int32)
    line = table + slot * table_row
    keys += kv_head.to(tl.int64) * keys_head
    values += kv_head.to(tl.int64) * values_head
    full = known + first.to(tl.int32) + 1
    pools = (keys, keys_page, keys_entry, values, values_page, values_entry, key_scales, key_scales_page,
             value_scales, value_scales_page, table_column, held, width)  # fmt: skip
    if PT == 0:
        _, total, mean = across(
            queries, last, 0, full, reach, known, 0, 0, line, pools, kv_head, tl.num_programs(0), scale,
            MT, NT, DT, PAGE, False, WIDEN, False, ORDERED, TILED,
        )  # fmt: skip
        mean *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    else:
        best, total, mean = nothing(MT, DT)
        for begun in range(0, reach, PT * GROUP):
            best_of, total_of, mean_of = nothing(MT, DT)
            for start in range(begun, tl.minimum(begun + PT * GROUP, reach), PT):
                more, sum_of_more, mean_of_more = across(
                    queries, last, start, full, tl.minimum(start + PT, reach), known, 0, 0, line, pools, kv_head,
                    tl.num_programs(0), scale, MT, NT, DT, PAGE, False, WIDEN, True, ORDERED, TILED,
                )  # fmt: skip
                best_of, total_of, mean_of = joined(best_of, total_of, mean_of, more, sum_of_more, mean_of_more)
            best, total, mean = joined(best, total, mean, best_of, total_of, mean_of)
        mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]  # as parts are, to the last bit
    tl.store(
        attended + ((row + token) * attended_row + head * attended_head)[:, None] + d[None, :],
        mean.to(attended.dtype.element_ty), mask=inside,
    )  # fmt: skip
