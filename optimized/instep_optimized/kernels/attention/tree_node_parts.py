"""Attention of trees alongside explicit layouts: the part in which the window begins, for each node alone.

Leaves out: the earlier parts, which all nodes see (`split_kv_gluon.py`), and joining the units
(`split_kv.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl

from ..device.programmatic_dependent_launch import next_comes, wait_alone
from .online_softmax import joined, nothing, of_head, over, rows_of_heads
from .split_kv import division


@triton.jit(do_not_specialize=["most", "skipped", "few", "room", "requests", "tokens"])
def read_alone(
    query, keys, values, paged, sizes, means, sums, most, skipped, few, room, requests, tokens,
    MT: tl.constexpr, NT: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, GROUP: tl.constexpr, BT: tl.constexpr,
    PAGE: tl.constexpr, WIDEN: tl.constexpr, ORDERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Read the parts of one node that reach into its window. Grid: [nodes, KV heads, requests].

    A program has the heads of one KV head.

    A tile computes exactly what a tile of `read_parts` for one node computes. If a group begins before the window, the
    previous launch has joined the group's earlier parts and stored the result at the group's place. So a program first
    reads a part and then waits for that launch. Everything that the previous launch waited for is finished before any
    program here starts (EARLY).
    """
    if EARLY:
        next_comes()
    token, kv_head, request = skipped + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, rows, slot = tl.load(paged.begin + request), tl.load(paged.rows + request), tl.load(paged.slots + request)
    known, served = tl.load(paged.before + request).to(tl.int32), token < tl.where(slot >= 0, rows, 0)
    path = tl.load(paged.ancestors + (row + token) * paged.ancestors_step, mask=served, other=0)
    if path != 0:
        m, d = tl.arange(0, MT), tl.arange(0, DT)
        live, head = m < sizes.group, kv_head * sizes.group + m % sizes.group
        inside = live[:, None] & (d < sizes.width)[None, :]  # [MT, DT]
        queries = rows_of_heads(query, row + token, head, inside, DT)
        begun = known // PT * PT
        _, first_unit, _, _, each = division(paged, most, skipped, few, requests, PT, GROUP, BT)
        base = tl.sum(tl.where(tl.arange(0, BT) == request, first_unit, 0), axis=0)
        seen = known
        for node in range(paged.nodes):
            seen += ((path >> node) & 1).to(tl.int32)
        line, key_at, value_at = paged.table + slot * paged.table_row, of_head(keys, kv_head), of_head(values, kv_head)
        pools = key_at, value_at, keys, values, paged, sizes, line, kv_head
        size = PT * each
        best, total, mean = nothing(MT, DT)
        for place in range(begun, tl.minimum(seen, paged.held).to(tl.int32), PT):
            more, sum_of_more, mean_of_more = nothing(MT, DT)
            more, sum_of_more, mean_of_more = over(
                more, sum_of_more, mean_of_more, queries, seen - 1 + m * 0, place, tl.minimum(place + PT, seen), known,
                path, pools, NT, DT, PAGE, True, True, WIDEN, True, ORDERED,
            )  # fmt: skip
            unit = base + place // size
            spot = (unit.to(tl.int64) * most + token - skipped) * (sizes.kv_heads * sizes.group) + head
            there = m < tl.where(unit < room, sizes.group, 0)
            behind = m < tl.where(place % size != 0, sizes.group, 0)  # the unit has an earlier part
            at_means, at_sums = means + (spot * sizes.width)[:, None] + d[None, :], sums + spot * 2
            if place == begun:
                if EARLY:
                    wait_alone()
                best = tl.load(at_sums, mask=there & behind, other=float("-inf"))
                total = tl.load(at_sums + 1, mask=there & behind, other=0.0)
                mean = tl.load(at_means, mask=inside & (there & behind)[:, None], other=0.0)
                tl.debug_barrier()  # all threads have loaded it before one thread stores there
            else:
                best, total = tl.where(behind, best, float("-inf")), tl.where(behind, total, 0.0)
                mean = tl.where(behind[:, None], mean, 0.0)
            if each == 1:
                best, total, mean = more, sum_of_more, mean_of_more
            else:
                best, total, mean = joined(best, total, mean, more, sum_of_more, mean_of_more)
            tl.store(at_means, mean, mask=inside & there[:, None])
            tl.store(at_sums, best, mask=there)
            tl.store(at_sums + 1, total, mask=there)
    if EARLY:
        wait_alone()
