"""Cases of the ops on paged KV and of pure data movement: store_rows, attend, move, select.

Leaves out: conv and gdn (`conv_and_gdn.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from instep_optimized.memory_addresses import Address, Pages

from .case import BF16, FP32, Call, Case, Draw, at, seeded
from .guarded_pools import Pool, guarded


@dataclass(frozen=True)
class Reading:
    """Queries over paged KV: per request its page list, positions before, rows; `skip` uncovered rows first.

    slots: the lines of the table that hold the lists, falling numbers if none are given; -1: a request without one.
    """

    tables: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]
    count: tuple[int, ...]
    page_size: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    skip: int = 0
    slots: tuple[int, ...] = ()

    def lines(self) -> tuple[int, ...]:
        return self.slots or tuple(range(len(self.tables), 0, -1))


READINGS: dict[str, Reading] = {
    "decode": Reading(((5, 2), (7, -1), (1, 3)), before=(6, 0, 7), count=(1, 1, 1)),
    "verify": Reading(((2, 6, 1), (-1, -1, -1), (4, -1, -1)), before=(5, 0, 0), count=(4, 0, 3), skip=2),
    "chunk": Reading(((3, 1, -1), (8, 2, 5)), before=(0, 3), count=(6, 8), heads=2, kv_heads=1, head_dim=32),
    "unmapped": Reading(((-1, -1), (2, 4)), before=(2, 3), count=(2, 2), heads=3, kv_heads=3),
    "idle": Reading(((5, 2), (3, 1), (1, 4)), before=(5, 2, 0), count=(2, 3, 1), slots=(2, -1, 5)),
    "ends": Reading(((3, 1), (2, 4)), before=(6, 7), count=(4, 1), slots=(3, 1)),
    "empty": Reading((), before=(), count=(), skip=1),
}


class Latent(NamedTuple):
    """Channels of a latent, of the part of a key that heads share, and of a value."""

    width: int
    shared: int
    value: int


@seeded
def attend_case(draw: Draw, reading: Reading, dtype: torch.dtype) -> Call:
    block = (reading.kv_heads, reading.head_dim)
    return _read(draw, reading, dtype, (block, block))


@seeded
def latents_case(draw: Draw, reading: Reading, latent: Latent, dtype: torch.dtype) -> Call:
    """`attend_latents`, with pools of one head: `Reading.kv_heads` is not used."""
    inputs, pools = _read(draw, reading, dtype, ((1, latent.shared), (1, latent.width)))
    rows = reading.heads * (reading.head_dim - latent.shared + latent.value)
    return Call({**inputs, "up": draw.normal(rows, latent.width, dtype=dtype, scale=latent.width**-0.5)}, pools)


def _read(draw: Draw, reading: Reading, dtype: torch.dtype, blocks: Sequence[tuple[int, int]]) -> Call:
    """Queries over pages. blocks: of an entry of keys and of values"""
    units = 2 + max((page for table in reading.tables for page in table), default=0)
    pools = {name: guarded((units, reading.page_size), block, dtype, device=draw.device)
             for name, block in zip(("keys", "values"), blocks, strict=True)}  # fmt: skip
    begin, row = [], reading.skip
    for table, before, count in zip(reading.tables, reading.before, reading.count, strict=True):
        begin.append(row)
        row += count
        for position in range(before + count):
            number, offset = divmod(position, reading.page_size)
            page = table[number] if number < len(table) else -1
            if page >= 0:
                for pool, block in zip(pools.values(), blocks, strict=True):
                    pool.view[page, offset] = draw.normal(*block).to(dtype)
    width = max((len(table) for table in reading.tables), default=1)
    pages = Pages(
        keys=pools["keys"].view,
        values=pools["values"].view,
        table=_lines(draw, reading, width),
        slots=draw.ints(reading.lines()),
        begin=draw.ints(begin),
        count=draw.ints(reading.count),
        before=draw.ints(reading.before),
        most=max(reading.count, default=0),
    )
    query = draw.normal(row + 1, reading.heads, reading.head_dim, dtype=dtype)
    return Call({"query": query, "pages": pages, "to": at("attended")}, pools)


def _lines(draw: Draw, reading: Reading, width: int) -> torch.Tensor:
    """[slots, width], as in a pool: lines at a pitch, and page 1 in every unused line."""
    pitch = draw.ints([1] * ((max(reading.lines(), default=0) + 2) * (width + 16))).view(-1, width + 16)
    table = pitch[:, :width]
    for slot, pages in zip(reading.lines(), reading.tables, strict=True):
        if slot >= 0:
            table[slot] = draw.ints(pages)
    return table


@seeded
def store_rows_case(draw: Draw, locations: tuple[int, ...], dtype: torch.dtype) -> Call:
    page_size = 4
    pool = guarded((5, page_size), (2, 16), dtype, device=draw.device)
    for location in locations:
        if location >= 0:
            pool.allow(location // page_size, location % page_size)
    rows = draw.normal(len(locations), 2, 16, dtype=dtype)
    return Call({"rows": rows, "pool": pool.view, "locations": draw.ints(locations)}, {"pool": pool})


@dataclass(frozen=True)
class Moving:
    """Units (and columns, or None) on both sides, request by request."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    source_column: tuple[int, ...] | None = None
    target_column: tuple[int, ...] | None = None


MOVINGS: dict[str, Moving] = {
    "commit": Moving((0, 1, 2, 3), (6, -1, 2, 9), source_column=(2, 0, 3, 1)),
    "skips": Moving((-1, 4, -1), (3, 5, -1)),
    "to_column": Moving((1, 3), (2, 0), target_column=(1, 0)),
    "empty": Moving((), ()),
}


@seeded
def move_case(draw: Draw, moving: Moving, block: tuple[int, ...], dtype: torch.dtype, swaps: tuple[bool, bool]) -> Call:
    def side(units: tuple[int, ...], columns: tuple[int, ...] | None, swap: bool, draw: Draw) -> tuple[Pool, Address]:
        leading = (2 + max(units, default=0),) + (() if columns is None else (1 + max(columns, default=0),))
        pool = guarded(leading, block, dtype, swap=swap, device=draw.device)
        return pool, Address(pool.view, draw.ints(units), None if columns is None else draw.ints(columns))
    source, here = side(moving.source, moving.source_column, swaps[0], draw)
    target, there = side(moving.target, moving.target_column, swaps[1], draw)
    source.view.copy_(draw.normal(*source.view.shape).to(dtype))
    for request, (unit, goal) in enumerate(zip(moving.source, moving.target, strict=True)):
        if unit >= 0 and goal >= 0:
            column = () if moving.target_column is None else (moving.target_column[request],)
            target.allow(goal, *column)
    return Call({"source": here, "target": there}, {"source": source, "target": target})


@seeded
def select_case(draw: Draw, shape: tuple[int, ...], index: tuple[int, ...], dtype: torch.dtype) -> Call:
    return Call({"x": draw.normal(*shape, dtype=dtype), "index": draw.ints(index)}, {})


ATTEND = [
    Case("attend", f"{name}-{str(dtype)[6:]}", attend_case(300 + i, READINGS[name], dtype))
    for i, (name, dtype) in enumerate(
        [("decode", FP32), ("decode", BF16), ("verify", FP32), ("chunk", FP32), ("chunk", BF16), ("unmapped", FP32),
         ("idle", FP32), ("ends", FP32), ("empty", FP32)]
    )
]
LATENTS = {"wide values": Latent(12, 4, 24), "wide keys": Latent(20, 8, 8)}
ATTEND += [
    Case("attend_latents", f"{name}-{str(dtype)[6:]}",
         latents_case(320 + i, READINGS[name], LATENTS["wide keys" if i % 2 else "wide values"], dtype))
    for i, (name, dtype) in enumerate(
        [("decode", FP32), ("verify", BF16), ("verify", FP32), ("chunk", BF16), ("chunk", FP32), ("unmapped", FP32),
         ("idle", FP32), ("ends", FP32), ("empty", FP32)]
    )
]

MOVEMENT = [
    Case("store_rows", "sparse-fp32", store_rows_case(400, (7, -1, 18, 4, 0), FP32), exact=True),
    Case("store_rows", "sparse-bf16", store_rows_case(401, (19, 3, -1), BF16), exact=True),
    Case("store_rows", "empty", store_rows_case(402, (), FP32), exact=True),
    Case("move", "commit-state", move_case(410, MOVINGS["commit"], (4, 16, 32), FP32, (True, True)), exact=True),
    Case("move", "commit-conv", move_case(411, MOVINGS["commit"], (48, 3), BF16, (False, False)), exact=True),
    Case("move", "other-layout", move_case(412, MOVINGS["commit"], (2, 32, 16), FP32, (False, True)), exact=True),
    Case("move", "skips", move_case(413, MOVINGS["skips"], (2, 16, 16), BF16, (True, False)), exact=True),
    Case("move", "to-column", move_case(414, MOVINGS["to_column"], (48, 3), FP32, (True, True)), exact=True),
    Case("move", "empty", move_case(415, MOVINGS["empty"], (2, 16, 16), FP32, (True, True)), exact=True),
    Case("select", "rows", select_case(420, (5, 32), (3, -1, 0, 3), FP32), exact=True),
    Case("select", "blocks", select_case(421, (4, 2, 16), (1, 2), BF16), exact=True),
    Case("select", "none", select_case(422, (4, 32), (), FP32), exact=True),
]
