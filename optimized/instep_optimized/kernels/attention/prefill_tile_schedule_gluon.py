"""Prompts with explicit layouts: the tiles of rows that a program reads, their order, and the copies.

Leaves out: the kernel (`prefill_chunks_gluon.py`) and the functions that windows share
(`warp_specialized_steps_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import (
    TensorDescriptor,
    along,
    barrier,
    fence_async_shared,
    load_box,
    mbarrier,
    seen_as,
    stage_and_phase,
)
from .warp_specialized_steps_gluon import copied, plus

TOLD = gl.constexpr(4)  # maximum number of tiles that are announced to the readers in advance
FEW, EACH = gl.constexpr(16), gl.constexpr(64)  # positions, and numbers of each, of a box where a step is not whole


def few_boxes(pool: torch.Tensor) -> TensorDescriptor:
    """Descriptor of boxes with FEW positions, or with all positions of a page if it has fewer."""
    pages, size, heads, width = pool.shape
    seen = pool.as_strided((pages, size, heads * width), (*pool.stride()[:2], 1))
    tile = gl.NVMMASharedLayout(128, 8 * pool.element_size(), rank=3)
    return TensorDescriptor.from_tensor(seen, [1, min(size, FEW.value), EACH.value], tile)


@gluon.jit
def _position(turn):
    """Index of the tile for a turn: forwards, then backwards, ... so that all programs have equal work."""
    i, n = gl.program_id(0), gl.num_programs(0)
    return turn * n + gl.where(turn % 2 == 0, i, n - 1 - i)


@gluon.jit
def _tiles(work, BT: gl.constexpr):
    """Counts for every request [BT]: its tiles of rows, and the tiles of positions that it has in the end."""
    paged, requests, _, tokens = work
    b = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [gl.num_warps()], [0]))
    there = b < requests
    rows, slot = gl.load(paged.rows + b, mask=there, other=0), gl.load(paged.slots + b, mask=there, other=-1)
    known = gl.load(paged.before + b, mask=there, other=0)
    reads = (slot >= 0) & (rows > paged.window)
    if paged.ancestors is not None:
        row = gl.load(paged.begin + b, mask=reads, other=0)
        reads = reads & (gl.load(paged.ancestors + row * paged.ancestors_step, mask=reads, other=0) == 0)
    high = gl.where(reads, (rows.to(gl.int32) + tokens - 1) // tokens, 0)
    return b, high, gl.where(reads, known.to(gl.int32) // tokens + high, 0)


@gluon.jit
def _longer(level, high, end):
    """Count the tiles of rows that end after `level` tiles of positions."""
    return gl.sum(gl.maximum(gl.minimum(end - level, high), 0), axis=0)


@gluon.jit
def _chosen(position, of, work):
    """Select a tile by its rank, those that see the most first  ->  its request and which tile of it, or -1

    Tiles are sorted by their last position. Programs that walk them forwards and backwards therefore have equal work.
    """
    b, high, end = of
    _, requests, kv_heads, _ = work
    rank, head = position // kv_heads, position % kv_heads
    low, up = -1, gl.max(end, axis=0)  # more than `rank` tiles end after `low`, but not after `up`
    if requests == 1:
        low = up - 1 - rank
    else:
        while up - low > 1:
            middle = (low + up) // 2
            more = _longer(middle, high, end) > rank
            low, up = gl.where(more, middle, low), gl.where(more, up, middle)
    here = ((end - high <= low) & (low < end)).to(gl.int32)
    at = rank - _longer(low + 1, high, end)
    request = gl.sum((gl.associative_scan(here, 0, plus) <= at).to(gl.int32), axis=0)
    tile = low - gl.sum(gl.where(b == request, end - high, 0), axis=0)
    code = request.to(gl.int64) * 4294967296 + tile * kv_heads + head
    return gl.where(rank < gl.sum(high, axis=0), code, -1)


@gluon.jit
def tile_of(code, work):
    """Unpack a tile's code -> its request's first row, slot, KV head, first token, rows, known tokens, its reach."""
    paged, _, kv_heads, tokens = work
    request, item = code // 4294967296, (code % 4294967296).to(gl.int32)
    rows, known = gl.load(paged.rows + request).to(gl.int32), gl.load(paged.before + request).to(gl.int32)
    first = item // kv_heads * tokens
    reach = gl.minimum(known + gl.minimum(first + tokens, rows), paged.held).to(gl.int32)
    return gl.load(paged.begin + request), gl.load(paged.slots + request), item % kv_heads, first, rows, known, reach


@gluon.jit
def told(orders, turn):
    """Wait for the announcement of the tile of a turn and return its code."""
    codes, full = orders
    place, phase = stage_and_phase(turn, TOLD)
    mbarrier.wait(full.index(place), phase)
    return gl.max(codes.index(place).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)


@gluon.jit
def _tell(orders, turn, code):
    """Announce the next tile to the readers. Its place is free: there are two more places than stages."""
    codes, full = orders
    WORD: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    codes.index(turn % TOLD).store(gl.full((1,), 0, gl.int64, WORD) + code)
    barrier()
    mbarrier.arrive(full.index(turn % TOLD), count=1)


@gluon.jit
def _begin_few(
    pool, column, pages, step, stop, full, tile, NT: gl.constexpr, DT: gl.constexpr, PAGE: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Begin to copy the positions of a step in boxes of ROWS. A box past the last position, or without a page, is 0."""
    PIECES: gl.constexpr = NT // ROWS
    line, table_column = pages
    boxes = seen_as(tile, [DT // EACH * PIECES, 1, ROWS, EACH], gl.NVMMASharedLayout(128, 16, rank=3), tile.dtype)
    mbarrier.expect(full, NT * DT * 2)
    for piece in gl.static_range(PIECES):
        at = step + piece * ROWS
        source = gl.load(line + at // PAGE * table_column, mask=at < stop, other=-1).to(gl.int32)
        for part in gl.static_range(DT // EACH):
            load_box(pool, [source, at % PAGE, column + part * EACH], full, boxes.index(part * PIECES + piece))


@gluon.jit
def _clear(tile, some, NT: gl.constexpr, DT: gl.constexpr):
    """Set the rows after the first `some` to 0."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    parts = seen_as(tile, [DT // EACH, NT, EACH], TILE, tile.dtype)
    row = along(0, 8, ROWS)
    for piece in gl.static_range(NT // 8):
        if piece * 8 + 8 > some:
            for part in range(DT // EACH):
                rows = parts.index(part).slice(piece * 8, 8)
                rows.store(gl.where(piece * 8 + row < some, rows.load(ROWS), 0.0).to(tile.dtype))


@gluon.jit
def copy_tiles(
    pools, work, orders, tiles, copied_last,
    NT: gl.constexpr, DT: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of all tiles of this program, and announce these tiles to the readers.

    Values after the last position may be NaN, so they are set to 0. copied_last: barrier for the arrival of such values
    """
    keys, values, few_keys, few_values = pools
    paged = work[0]
    key_tiles, value_tiles, full_keys, full_values, free_keys, free_values = tiles
    ROWS: gl.constexpr = PAGE if PAGE < FEW else FEW
    numbers = _tiles(work, BT)
    done, cleared, turn = 0, 0, 0
    code = _chosen(_position(0), numbers, work)
    _tell(orders, 0, code)
    while code >= 0:
        of = tile_of(code, work)
        pages, column, reach = (paged.table + of[1] * paged.table_row, paged.table_column), of[2] * DT, of[6]
        whole = reach // NT * NT
        done = copied(done, 0, whole, (keys, values), (None, None), column, pages, tiles, None, NT, DT, PAGE, STAGES, 1)
        if whole < reach:
            place, phase = stage_and_phase(done, STAGES)
            mbarrier.wait(free_keys.index(place), phase ^ 1)
            _begin_few(few_keys, column, pages, whole, reach, full_keys.index(place), key_tiles.index(place),
                       NT, DT, PAGE, ROWS)  # fmt: skip
            mbarrier.wait(free_values.index(place), phase ^ 1)
            tile, full = value_tiles.index(place), full_values.index(place)
            if reach % ROWS == 0:
                _begin_few(few_values, column, pages, whole, reach, full, tile, NT, DT, PAGE, ROWS)
            else:
                _begin_few(few_values, column, pages, whole, reach, copied_last, tile, NT, DT, PAGE, ROWS)
                mbarrier.wait(copied_last, cleared & 1)
                _clear(tile, reach - whole, NT, DT)
                fence_async_shared()
                mbarrier.arrive(full, count=1)
                cleared += 1
            done += 1
        turn += 1
        code = _chosen(_position(turn), numbers, work)
        _tell(orders, turn, code)
