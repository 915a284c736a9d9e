"""`_prepare` of `chunk64.py` with explicit layouts: the same bits, and triangles are solved without waiting.

Leaves out: the method and its reasons (`chunk64.py`); the launch (`chunk64_launches_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="union-attr"
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import smid

from ..device import pool_address
from ..device.gluon_helpers import (
    along,
    along_3,
    barrier,
    barriers,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    load_box,
    mbarrier,
    seen_as,
    store_box,
    stored,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .chunk64 import LOG2E, SOLVED
from .chunk64 import TOKENS as BLOCK
from .signals_between_launches import signal, turn, written

TOKENS = gl.constexpr(BLOCK)
PIECE = gl.constexpr(4)  # numbers of a row that are loaded at a time
WIDTH = gl.constexpr(128)  # numbers of a key; other widths were not measured
SIGNALS = gl.constexpr(2)  # words before the signals of items [blocks, heads]: turns taken, and programs that left

row_of = gluon.jit(pool_address.row_of.fn)


@gluon.jit
def added(a, b):
    return a + b


@gluon.jit
def _blocks_in(count):
    return gl.maximum((count.to(gl.int32) + TOKENS - 1) // TOKENS, 0)


@gluon.jit
def blocks_before(spans, request):
    """Do `_blocks_before` of `chunk64.py`."""
    at, before = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0
    for first in range(0, request, 32):
        there = first + at < request
        served = gl.load(spans.units + first + at, mask=there, other=-1) >= 0
        before += gl.sum(_blocks_in(gl.load(spans.rows + first + at, mask=served, other=0)), axis=0)
    return before


@gluon.jit
def _blocks_of(request, spans):
    return gl.where(gl.load(spans.units + request) < 0, 0, _blocks_in(gl.load(spans.rows + request)))


@gluon.jit
def _request_of(block, request, begins, spans, FORWARD: gl.constexpr):
    """Find the request of a block, searching from `request`, whose blocks begin at `begins`  ->  request, its `begins`

    FORWARD: search forwards; else the block is in `request` or an earlier one
    """
    if FORWARD:
        while block >= begins + _blocks_of(request, spans):
            begins += _blocks_of(request, spans)
            request += 1
    else:
        while block < begins:
            request -= 1
            begins -= _blocks_of(request, spans)
    return request, begins


@gluon.jit
def rows_of_inverses(triangles, NEGATED: gl.constexpr):
    """Invert triangles, given by what follows every token [step, B, SOLVED]  ->  inverses [B * SOLVED, SOLVED].

    A thread has a whole row, so no step waits for another thread. The row is in pieces, because a step changes only
    what follows it.
    NEGATED: triangles come negated. Then a step takes its column from registers, without a sum (LOG.md).
    """
    FOUND: gl.constexpr = gl.BlockedLayout([1, 1, PIECE], [2, SOLVED, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    B: gl.constexpr = triangles.shape[1]
    after = seen_as(triangles, [SOLVED, B, SOLVED], FLAT)
    jj, n = along_3(1, SOLVED, FOUND), along_3(2, PIECE, FOUND)
    found = ()
    for piece in gl.static_range(SOLVED // PIECE):
        found += (gl.where(jj == n + piece * PIECE, 1.0, gl.full((B, 1, 1), 0.0, gl.float32, FOUND)),)  # type: ignore[assignment]
    for step in gl.static_range(SOLVED - 1):
        if NEGATED:
            new = gl.convert_layout(_column(found[step // PIECE], step % PIECE), gl.SliceLayout(2, FOUND))
            new = gl.expand_dims(new, 2)
        else:
            new = -gl.expand_dims(gl.sum(gl.where(n == step % PIECE, found[step // PIECE], -0.0), axis=2), 2)
        new = gl.where(n >= 0, new, 0.0)  # as wide as `found`, and nothing is computed for it
        changed = ()
        for piece in gl.static_range(SOLVED // PIECE):
            if piece >= (step + 1) // PIECE:
                behind = after.index(step).slice(piece * PIECE, PIECE, dim=1).load(gl.SliceLayout(1, FOUND))
                behind = gl.where(jj >= 0, gl.expand_dims(behind, 1), 0.0)
                changed += (gl.fma(new, behind, found[piece]),)  # type: ignore[assignment]
            else:
                changed += (found[piece],)  # type: ignore[assignment]
        found = changed
    first, second, third, fourth = found  # type: ignore[misc]
    rows = gl.join(gl.join(first, second), gl.join(third, fourth))  # [B, SOLVED, PIECE, 2, 2]
    return gl.reshape(gl.permute(rows, (0, 1, 4, 3, 2)), (B * SOLVED, SOLVED))


@gluon.jit
def _column(piece, at: gl.constexpr):
    """Take one column of [B, SOLVED, PIECE]  ->  [B, SOLVED], as it lies in registers"""
    even, odd = gl.split(gl.reshape(piece, (piece.shape[0], SOLVED, 2, 2)))
    low, high = gl.split(odd if at % 2 else even)
    return high if at // 2 else low


@gluon.jit
def inverted(triangles, into):
    """Store `rows_of_inverses` in memory  ->  the memory. Adjacent threads use different banks.

    into: memory [B, SOLVED, SOLVED] for the inverses; None: reuse that of `triangles`
    """
    B: gl.constexpr = triangles.shape[1]
    rows = rows_of_inverses(triangles, False)
    if into is None:
        into = triangles
        barrier()  # all of it is read
    inverses = seen_as(into, [B * SOLVED, SOLVED], gl.SwizzledSharedLayout(PIECE, 2, 4, [1, 0]))
    inverses.store(rows)
    barrier()
    return inverses


@gluon.jit
def decays(high, low, j, i):
    """Decay from token j to token i [j, i]. A sum of log decays is two fp32 numbers, one below the other."""
    OF_J: gl.constexpr = gl.SliceLayout(1, j.type.layout)
    OF_I: gl.constexpr = gl.SliceLayout(0, i.type.layout)
    over = gl.expand_dims(high.load(OF_I), 0) - gl.expand_dims(high.load(OF_J), 1)
    over = over + (gl.expand_dims(low.load(OF_I), 0) - gl.expand_dims(low.load(OF_J), 1))
    return gl.exp2(gl.where(i >= j, over, float("-inf")))


@gluon.jit
def between(inverse, pairs, narrow, none):
    """Compute the blocks of an inverse between its known blocks: its product with `pairs` and with itself, in bf16

    narrow: memory for the inverse in bf16, which is free again after a barrier
    """
    FIRST: gl.constexpr = gl.DotOperandLayout(0, inverse.type.layout, 2)
    part = inverse.to(gl.bfloat16)
    narrow.store(part)
    fence_async_shared()
    barrier()
    part = gl.convert_layout(part, FIRST)
    across = warpgroup_mma(part, pairs, none, use_acc=False, is_async=True)
    across, part = warpgroup_mma_wait(0, deps=[across, part])
    part = gl.convert_layout(across.to(gl.bfloat16), FIRST)
    join = warpgroup_mma(part, narrow, none, use_acc=False, is_async=True)
    join, part = warpgroup_mma_wait(0, deps=[join, part])
    return join


@gluon.jit
def _rows_of(block, request, begins, spans):
    """Return the first row of a block, and its number of rows."""
    first = (block - begins) * TOKENS
    start, rows = gl.load(spans.begin + request) + first, gl.load(spans.rows + request).to(gl.int32)
    return start, gl.minimum(rows - first, TOKENS)


@gluon.jit
def _ask(item, items, heads, start, query_boxes, key_boxes, query, key, full):
    """Begin to copy keys and queries of an item; after the last item do nothing."""
    live, column = item < items, (item % heads * WIDTH).to(gl.int32)
    mbarrier.expect(full, 2 * TOKENS * WIDTH * 2, pred=live)
    load_box(key_boxes, [start.to(gl.int32), column], full, key, pred=live)
    load_box(query_boxes, [start.to(gl.int32), column], full, query, pred=live)


@gluon.jit
def _gates(item, start, rows, given, GROUP: gl.constexpr, MEMBERS: gl.constexpr, LANES: gl.constexpr):
    """Load log decay and beta of an item [MEMBERS, TOKENS]; 0 after its rows, and if it has none."""
    x, heads = given
    member, token = along(0, MEMBERS, LANES), along(1, TOKENS, LANES)
    live, head = (token < rows) & (member < GROUP), (item % heads * GROUP + member).to(gl.int64)
    forget = gl.load(row_of(x.log_decay, start + token, head), mask=live, other=0.0)
    return forget, gl.load(row_of(x.beta, start + token, head), mask=live, other=0.0)


@gluon.jit(do_not_specialize=["requests"])
def prepare_staged(
    x, q16, k16, query_boxes, key_boxes, solved, mixed, gates, spans, requests, heads, signals, apart, programs,
    GROUP: gl.constexpr, MEMBERS: gl.constexpr, NARROW: gl.constexpr, BESIDE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Prepare blocks of all value heads of a key head at a time, without states. Grid: any.

    Rows and gates of a program's next block are copied while it computes. Tiles of token pairs are [j, i], also where
    they
    are stored. heads: of keys
    BESIDE: the next launch carries states at the same time, and `signals` report this launch's progress to it. Only
    `programs` programs prepare; the others leave. If possible these are the programs on multiprocessors whose number is
    divisible by `apart`, which makes room there for the next launch. The right number stays wherever programs run, so
    everything is prepared.
    """
    if EARLY:  # in this order: a concurrent launch relies on what this one has waited for
        gdc_wait()
        gdc_launch_dependents()
    first = gl.program_id(0)
    if BESIDE:
        if smid() % apart == 0:
            leaves = turn(signals + 1) < gl.num_programs(0) - programs
            if leaves:
                return
        first = turn(signals)
        if first >= programs:
            return
    W: gl.constexpr = gl.num_warps()
    B: gl.constexpr = TOKENS // SOLVED
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [W, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [W, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    OF_I: gl.constexpr = gl.SliceLayout(0, TILE)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SOLID: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    key = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, WIDTH], SHARED)
    query = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, WIDTH], SHARED)
    lines = gl.allocate_shared_memory(gl.float32, [3, MEMBERS, TOKENS], FLAT)
    squares = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, TOKENS], SHARED)
    narrow = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, TOKENS], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, TOKENS], SHARED)
    triangles = gl.allocate_shared_memory(gl.float32, [SOLVED, B, SOLVED], SOLID)
    inverses = None
    if MEMBERS <= 2:  # with the gates of more heads, three programs would not fit on a multiprocessor
        inverses = gl.allocate_shared_memory(gl.float32, [B, SOLVED, SOLVED], SOLID)
    full = None
    if NARROW:
        full = barriers(1, 1)
        fence_async_shared()
        barrier()
    each = seen_as(lines, [3 * MEMBERS, TOKENS], LINE)
    none = gl.full((TOKENS, TOKENS), 0.0, gl.float32, TILE)
    SPLIT: gl.constexpr = gl.reshape(none, (TOKENS, B, SOLVED)).type.layout

    # If states are carried after everything is prepared, the blocks that they need first come last: the cache has them.
    blocks, phase = blocks_before(spans, requests), 0
    items = blocks * heads
    if first >= items:
        return
    TOP: gl.constexpr = 0 if BESIDE else 1  # where the search for requests begins
    block = first // heads if BESIDE else blocks - 1 - first // heads
    request, begins = _request_of(block, requests * TOP, blocks * TOP, spans, BESIDE)
    start, rows = _rows_of(block, request, begins, spans)
    if NARROW:
        _ask(first, items, heads, start, query_boxes, key_boxes, query, key, full.index(0))
    forget, write = _gates(first, start, rows, (x, heads), GROUP, MEMBERS, LANES)
    # Loop invariants are computed again for every item, because they would not fit into registers.
    for item in tl.range(first, items, programs, disable_licm=True):
        key_head, next_item = item % heads, item + programs
        row, d = along(0, TOKENS, WIDE), along(1, WIDTH, WIDE)
        member, token = along(0, MEMBERS, LANES), along(1, TOKENS, LANES)
        j, i = along(0, TOKENS, TILE), along(1, TOKENS, TILE)
        block_j, block_i = along_3(0, TOKENS, SPLIT) // SOLVED, along_3(1, B, SPLIT)
        ours = (token >= 0) & (member < GROUP)
        if not NARROW:
            rows_of_k = row_of(x.k, start + row, key_head) + d
            rows_of_q = row_of(x.q, start + row, key_head) + d
            keys = gl.load(rows_of_k, mask=(row < rows) & (d >= 0), other=0.0)
            queries = gl.load(rows_of_q, mask=(row < rows) & (d >= 0), other=0.0)
        at = block.to(gl.int64) * heads + key_head
        total = gl.associative_scan(forget.to(gl.float64) * LOG2E, 1, added)
        until = gl.expand_dims(gl.sum(forget.to(gl.float64) * LOG2E, axis=1), 1) - total
        high = total.to(gl.float32)
        lines.index(0).store(high)
        lines.index(1).store((total - high.to(gl.float64)).to(gl.float32))
        lines.index(2).store(write)
        of_head = gates + (at * GROUP + member) * (3 * TOKENS) + token
        gl.store(of_head, gl.exp2(high), mask=ours)
        gl.store(of_head + TOKENS, gl.exp2(gl.minimum(until.to(gl.float32), 0.0)), mask=ours)
        gl.store(of_head + 2 * TOKENS, write, mask=ours)
        if NARROW:
            mbarrier.wait(full.index(0), phase)
            phase ^= 1
            if rows < TOKENS:  # rows after the last may hold anything
                key.store(gl.where(row < rows, key.load(WIDE), 0.0).to(gl.bfloat16))
        else:
            place = ((block.to(gl.int64) * TOKENS + row) * heads + key_head) * WIDTH + d
            keys, queries = keys.to(gl.bfloat16), queries.to(gl.bfloat16)
            key.store(keys)
            query.store(queries)
            gl.store(k16 + place, keys)
            gl.store(q16 + place, queries)
        fence_async_shared()
        barrier()
        alike = warpgroup_mma(key, key.permute((1, 0)), none, use_acc=False, is_async=True)
        seen = warpgroup_mma(key, query.permute((1, 0)), none, use_acc=False, is_async=True)
        for member_at in gl.static_range(GROUP):
            own = (at * GROUP + member_at).to(gl.int32) * TOKENS
            high, low = each.index(member_at), each.index(MEMBERS + member_at)
            decay = decays(high, low, j, i)
            strength = gl.expand_dims(each.index(2 * MEMBERS + member_at).load(OF_I), 0)
            if member_at == 0:
                alike, seen = warpgroup_mma_wait(0, deps=[alike, seen])
            stored(1)  # the weights of the previous head
            barrier()
            weights.store((seen * decay).to(gl.bfloat16))
            split = gl.reshape(alike * decay * strength, (TOKENS, B, SOLVED))
            for level in gl.static_range(2):
                square = split * gl.where((block_j ^ block_i) // 2**level == 1, 1.0, 0.0)
                square = gl.convert_layout(gl.reshape(square, (TOKENS, TOKENS)), TILE)
                squares.index(level).store(square.to(gl.bfloat16))
            triangle = gl.sum(split * gl.where(block_j == block_i, 1.0, 0.0), axis=1)  # [C, SOLVED]
            within = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, triangle.type.layout)), 1) % SOLVED
            after = gl.expand_dims(gl.arange(0, SOLVED, gl.SliceLayout(0, triangle.type.layout)), 0) > within
            triangle = gl.reshape(gl.where(after, triangle, 0.0), (B, SOLVED, SOLVED))
            triangles.store(gl.permute(triangle, (1, 0, 2)))
            stored(0)  # its inverse
            fence_async_shared()
            barrier()
            store_box(mixed, [own, 0], weights)
            if member_at == 0:  # all warps are done with keys and queries
                if next_item < items:
                    block = next_item // heads if BESIDE else blocks - 1 - next_item // heads
                    request, begins = _request_of(block, request, begins, spans, BESIDE)
                    start, rows = _rows_of(block, request, begins, spans)
                if NARROW:
                    _ask(next_item, items, heads, start, query_boxes, key_boxes, query, key, full.index(0))
                next_rows = gl.where(next_item < items, rows, 0)
                forget, write = _gates(next_item, start, next_rows, (x, heads), GROUP, MEMBERS, LANES)
            found = gl.expand_dims(inverted(triangles, inverses).load(gl.SliceLayout(1, SPLIT)), 1)
            inverse = found * gl.where(block_j == block_i, 1.0, 0.0)
            inverse = gl.convert_layout(gl.reshape(inverse, (TOKENS, TOKENS)), TILE)
            for level in gl.static_range(2):
                inverse = inverse - between(inverse, squares.index(level), narrow, none)
                barrier()  # the tile is written again
            narrow.store(inverse.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            store_box(solved, [own, 0], narrow)
        if BESIDE:
            written()
            barrier()
            signal(signals + SIGNALS + at)
    stored(0)
