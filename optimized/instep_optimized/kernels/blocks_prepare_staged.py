"""`_prepare` of `blocks.py` with explicit layouts: the same bits, and triangles are solved without waiting.

Leaves out: what is computed, and why (`blocks.py`); the launch (`blocks_staged.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .blocks import LOG2E, SOLVED
from .blocks import TOKENS as BLOCK
from .layouts import (
    along,
    along_3,
    barrier,
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

TOKENS = gl.constexpr(BLOCK)
WIDTH = gl.constexpr(128)  # of a key: others were not measured


@gluon.jit
def _added(a, b):
    return a + b


@gluon.jit
def blocks_before(count, request):
    """`_blocks_before` of `blocks.py`"""
    at, before = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0
    for first in range(0, request, 32):
        counts = gl.load(count + first + at, mask=first + at < request, other=0)
        before += gl.sum(((counts + TOKENS - 1) // TOKENS).to(gl.int32), axis=0)
    return before


@gluon.jit
def _substituted(triangles):
    """[step, B, SOLVED]: what follows every token of a triangle  ->  their inverses [B, SOLVED, SOLVED].

    A thread has a whole row, so no step waits for another thread.
    """
    FOUND: gl.constexpr = gl.BlockedLayout([1, 1, SOLVED], [2, SOLVED, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    B: gl.constexpr = TOKENS // SOLVED
    after = seen_as(triangles, [SOLVED, B, SOLVED], FLAT)
    jj, n = along_3(1, SOLVED, FOUND), along_3(2, SOLVED, FOUND)
    found = gl.where(jj == n, 1.0, gl.full((B, 1, 1), 0.0, gl.float32, FOUND))
    for step in gl.static_range(SOLVED - 1):
        behind = gl.expand_dims(after.index(step).load(gl.SliceLayout(1, FOUND)), 1)
        new = gl.expand_dims(gl.sum(gl.where(n == step, found, -0.0), axis=2), 2)
        # Both are as wide as `found` then, and nothing is computed for it.
        found = gl.fma(gl.where(n >= 0, -new, 0.0), gl.where(jj >= 0, behind, 0.0), found)
    return found


@gluon.jit
def prepare_staged(
    q, q_row, q_head, k, k_row, k_head, log_decay, log_decay_row, log_decay_head, beta, beta_row, beta_head,
    q16, k16, query_boxes, key_boxes, solved, mixed, gates, begin, count, units,
    GROUP: gl.constexpr, MEMBERS: gl.constexpr, NARROW: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """What needs no state, of one block of all value heads of a key head. Grid (H, blocks, B).

    Tiles of token pairs are [j, i], also where they are stored.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    # The states are carried from the first block on: what it needs comes last, so that it is still in the cache.
    request, key_head = gl.num_programs(2) - 1 - gl.program_id(2), gl.program_id(0)
    at_block = gl.num_programs(1) - 1 - gl.program_id(1)
    first = at_block * TOKENS
    rows = gl.minimum(gl.load(count + request).to(gl.int32) - first, TOKENS)
    if (gl.load(units + request) < 0) | (rows <= 0):
        return
    W: gl.constexpr = gl.num_warps()
    B: gl.constexpr = TOKENS // SOLVED
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [W, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [W, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    OF_J: gl.constexpr = gl.SliceLayout(1, TILE)
    OF_I: gl.constexpr = gl.SliceLayout(0, TILE)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SOLID: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    # What is loaded is asked for at once.
    start = gl.load(begin + request) + first
    key = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, WIDTH], SHARED)
    query = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, WIDTH], SHARED)
    if NARROW:
        full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(full.index(0), count=1)
        fence_async_shared()
        barrier()
        mbarrier.expect(full.index(0), 2 * TOKENS * WIDTH * 2)
        load_box(key_boxes, [start.to(gl.int32), key_head * WIDTH], full.index(0), key)
        load_box(query_boxes, [start.to(gl.int32), key_head * WIDTH], full.index(0), query)
    row, d = along(0, TOKENS, WIDE), along(1, WIDTH, WIDE)
    rows_of_k = k + (start + row) * k_row + key_head * k_head + d
    rows_of_q = q + (start + row) * q_row + key_head * q_head + d
    member, token = along(0, MEMBERS, LANES), along(1, TOKENS, LANES)
    live, head = (token < rows) & (member < GROUP), (key_head * GROUP + member).to(gl.int64)
    forget = gl.load(log_decay + (start + token) * log_decay_row + head * log_decay_head, mask=live, other=0.0)
    write = gl.load(beta + (start + token) * beta_row + head * beta_head, mask=live, other=0.0)
    if not NARROW:
        keys = gl.load(rows_of_k, mask=(row < rows) & (d >= 0), other=0.0)
        queries = gl.load(rows_of_q, mask=(row < rows) & (d >= 0), other=0.0)
    block = (blocks_before(count, request) + at_block).to(gl.int64)

    forget = forget.to(gl.float64) * LOG2E
    total = gl.associative_scan(forget, 1, _added)
    until = gl.expand_dims(gl.sum(forget, axis=1), 1) - total
    high = total.to(gl.float32)
    lines = gl.allocate_shared_memory(gl.float32, [3, MEMBERS, TOKENS], FLAT)
    lines.index(0).store(high)
    lines.index(1).store((total - high.to(gl.float64)).to(gl.float32))
    lines.index(2).store(write)
    of_head = gates + (block * (gl.num_programs(0) * GROUP) + head) * (3 * TOKENS) + token
    ours = (token >= 0) & (member < GROUP)
    gl.store(of_head, gl.exp2(high), mask=ours)
    gl.store(of_head + TOKENS, gl.exp2(gl.minimum(until.to(gl.float32), 0.0)), mask=ours)
    gl.store(of_head + 2 * TOKENS, write, mask=ours)

    squares = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, TOKENS], SHARED)
    narrow = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, TOKENS], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, TOKENS], SHARED)
    triangles = gl.allocate_shared_memory(gl.float32, [SOLVED, B, SOLVED], SOLID)
    if NARROW:
        mbarrier.wait(full.index(0), 0)
        if rows < TOKENS:  # behind the last row lies anything
            key.store(gl.where(row < rows, key.load(WIDE), 0.0).to(gl.bfloat16))
    else:
        at = ((block * TOKENS + row) * gl.num_programs(0) + key_head) * WIDTH + d
        keys, queries = keys.to(gl.bfloat16), queries.to(gl.bfloat16)
        key.store(keys)
        query.store(queries)
        gl.store(k16 + at, keys)
        gl.store(q16 + at, queries)
    fence_async_shared()
    barrier()
    none = gl.full((TOKENS, TOKENS), 0.0, gl.float32, TILE)
    alike = warpgroup_mma(key, key.permute((1, 0)), none, use_acc=False, is_async=True)
    seen = warpgroup_mma(key, query.permute((1, 0)), none, use_acc=False, is_async=True)
    j, i = along(0, TOKENS, TILE), along(1, TOKENS, TILE)
    SPLIT: gl.constexpr = gl.reshape(none, (TOKENS, B, SOLVED)).type.layout
    block_j, block_i = along_3(0, TOKENS, SPLIT) // SOLVED, along_3(1, B, SPLIT)
    each = seen_as(lines, [3 * MEMBERS, TOKENS], LINE)
    for member in gl.static_range(GROUP):
        own = ((block * gl.num_programs(0) + key_head) * GROUP + member).to(gl.int32) * TOKENS
        high, low = each.index(member), each.index(MEMBERS + member)
        over = gl.expand_dims(high.load(OF_I), 0) - gl.expand_dims(high.load(OF_J), 1)
        over = over + (gl.expand_dims(low.load(OF_I), 0) - gl.expand_dims(low.load(OF_J), 1))
        decay = gl.exp2(gl.where(i >= j, over, float("-inf")))
        strength = gl.expand_dims(each.index(2 * MEMBERS + member).load(OF_I), 0)
        if member == 0:
            alike, seen = warpgroup_mma_wait(0, deps=[alike, seen])
        else:
            stored(0)  # the tiles of the head before this one
            barrier()
        weights.store((seen * decay).to(gl.bfloat16))
        split = gl.reshape(alike * decay * strength, (TOKENS, B, SOLVED))
        for level in gl.static_range(2):
            square = split * gl.where((block_j ^ block_i) // 2**level == 1, 1.0, 0.0)
            squares.index(level).store(gl.convert_layout(gl.reshape(square, (TOKENS, TOKENS)), TILE).to(gl.bfloat16))
        triangle = gl.sum(split * gl.where(block_j == block_i, 1.0, 0.0), axis=1)  # [C, SOLVED]
        within = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, triangle.type.layout)), 1) % SOLVED
        after = gl.expand_dims(gl.arange(0, SOLVED, gl.SliceLayout(0, triangle.type.layout)), 0) > within
        triangle = gl.reshape(gl.where(after, triangle, 0.0), (B, SOLVED, SOLVED))
        triangles.store(gl.permute(triangle, (1, 0, 2)))
        fence_async_shared()
        barrier()
        store_box(mixed, [own, 0], weights)
        found = gl.reshape(_substituted(triangles), (TOKENS, SOLVED))
        found = gl.expand_dims(gl.convert_layout(found, gl.SliceLayout(1, SPLIT)), 1)
        inverse = found * gl.where(block_j == block_i, 1.0, 0.0)
        inverse = gl.convert_layout(gl.reshape(inverse, (TOKENS, TOKENS)), TILE)
        for level in gl.static_range(2):
            part = inverse.to(gl.bfloat16)
            narrow.store(part)
            fence_async_shared()
            barrier()
            part = gl.convert_layout(part, FIRST)
            across = warpgroup_mma(part, squares.index(level), none, use_acc=False, is_async=True)
            across, part = warpgroup_mma_wait(0, deps=[across, part])
            part = gl.convert_layout(across.to(gl.bfloat16), FIRST)
            join = warpgroup_mma(part, narrow, none, use_acc=False, is_async=True)
            join, part = warpgroup_mma_wait(0, deps=[join, part])
            inverse = inverse - join
            barrier()  # the tile is written again
        narrow.store(inverse.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        store_box(solved, [own, 0], narrow)
    stored(0)
