"""Prepare and carry of `blocks.py` in one launch, for many requests: the same bits, and no tile of pairs leaves a chip.

A program has one value head of a request. Eight warps carry its states; four others prepare the blocks behind; one
copies what comes next, and sums gates.

Who prepares binds, so it spills next to nothing: it is the launch's own group, for arguments of the other groups come
through shared memory, and take no registers before they are needed. What it keeps between its steps has memory of its
own, and needs no barrier before it is written. Its products leave out what is zero.

Leaves out: what is computed, and why (`blocks.py`); the same for few requests (`blocks_prepare_staged.py`,
`blocks_carry_staged.py`); the launch (`blocks_staged.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.layouts import (
    along,
    along_3,
    barrier,
    fence_async_shared,
    gdc_wait,
    load_box,
    mbarrier,
    place,
    stage_and_phase,
    store_box,
    stored,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .blocks import LOG2E, SOLVED
from .blocks_carry_staged import clear_rest, send
from .blocks_prepare_staged import TOKENS, WIDTH, added, decays, inverted

WIDE = gl.constexpr(128)  # columns of V
STAGES = gl.constexpr(3)  # blocks whose keys, queries and values are there
LAST = gl.constexpr(STAGES.value - 1)  # blocks that are prepared; `_prepare` knows by their number when one is free


@gluon.jit
def _gates(first, rows, given, LANES: gl.constexpr):
    """log decay and beta of a block; behind its rows: 0. They leave the near cache to what is spilled."""
    log_decay, log_decay_row, beta, beta_row = given
    token = first + gl.arange(0, TOKENS, LANES)
    at, live = token.to(gl.int64), token < rows
    forget = gl.load(log_decay + at * log_decay_row, mask=live, other=0.0, cache_modifier=".cg")
    return forget, gl.load(beta + at * beta_row, mask=live, other=0.0, cache_modifier=".cg")


@gluon.jit
def _copy(given):
    """Copy keys, queries and values of the blocks as places become free, and sum their gates."""
    boxes, gates, rows, start, key_column, column, tiles, places, rest = given
    q, k, v = boxes
    queries, keys, values, lines, _, _ = tiles
    landed, free, _ = places
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    BYTES: gl.constexpr = TOKENS * (4 * WIDTH + WIDE * (v.dtype.primitive_bitwidth // 8))
    forget, write = _gates(0, rows, gates, LANES)
    for n in range((rows + TOKENS - 1) // TOKENS):
        stage, phase = stage_and_phase(n, STAGES)
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(landed.index(stage), BYTES)
        load_box(k, [start + n * TOKENS, key_column], landed.index(stage), keys.index(stage))
        load_box(q, [start + n * TOKENS, key_column], landed.index(stage), queries.index(stage))
        load_box(v, [start + n * TOKENS, column], landed.index(stage), values.index(stage))
        total = gl.associative_scan(forget.to(gl.float64) * LOG2E, 0, added)
        until = gl.sum(forget.to(gl.float64) * LOG2E, axis=0) - total
        high = total.to(gl.float32)
        lines.index(stage * 5).store(gl.exp2(high))
        lines.index(stage * 5 + 1).store(gl.exp2(gl.minimum(until.to(gl.float32), 0.0)))
        lines.index(stage * 5 + 2).store(write)
        lines.index(stage * 5 + 3).store(high)
        lines.index(stage * 5 + 4).store((total - high.to(gl.float64)).to(gl.float32))
        mbarrier.arrive(landed.index(stage), count=1)
        forget, write = _gates((n + 1) * TOKENS, rows, gates, LANES)
    clear_rest(rest, WIDE)  # the last blocks are still being computed


@gluon.jit
def _clear_behind(tile, rows):
    """Zeros in the rows of a tile behind so many"""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    tile.store(gl.where(along(0, TOKENS, ROWS) < rows, tile.load(ROWS), 0.0).to(tile.dtype))


@gluon.jit
def _prepare(given):
    """What needs no state, of all blocks in order. Tiles of token pairs are [j, i]."""
    rows, tiles, scratch, places = given
    queries, keys, values, lines, solved, mixed = tiles
    square, triangles, inverses, spare = scratch
    landed, free, full = places
    W: gl.constexpr = gl.num_warps()
    B: gl.constexpr = TOKENS // SOLVED
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    OF_I: gl.constexpr = gl.SliceLayout(0, TILE)
    none = gl.full((TOKENS, TOKENS), 0.0, gl.float32, TILE)
    SPLIT: gl.constexpr = gl.reshape(none, (TOKENS, B, SOLVED)).type.layout
    # As in `prepare_staged`: what is the same in every turn would not fit into registers.
    for n in tl.range(0, (rows + TOKENS - 1) // TOKENS, disable_licm=True):
        stage, phase = stage_and_phase(n, STAGES)
        last, _ = stage_and_phase(n, LAST)
        key, narrow = keys.index(stage), solved.index(last)
        j, i = along(0, TOKENS, TILE), along(1, TOKENS, TILE)
        mbarrier.wait(landed.index(stage), phase)
        if n * TOKENS + TOKENS > rows:  # behind the last row lies anything
            _clear_behind(key, rows - n * TOKENS)
            _clear_behind(values.index(stage), rows - n * TOKENS)
            fence_async_shared()
            barrier()
        # One product after the other: both and the decays would not fit into registers.
        seen = warpgroup_mma(key, queries.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        decay = decays(lines.index(stage * 5 + 3), lines.index(stage * 5 + 4), j, i)
        seen = warpgroup_mma_wait(0, deps=[seen])
        seen = (seen * decay).to(gl.bfloat16)
        alike = warpgroup_mma(key, key.permute((1, 0)), none, use_acc=False, is_async=True)
        place, taken = stage_and_phase(n + 1, STAGES)
        mbarrier.wait(free.index(place), taken ^ 1)  # by block n - LAST, which was prepared in the same memory
        mixed.index(last).store(seen)
        strength = gl.expand_dims(lines.index(stage * 5 + 2).load(OF_I), 0)
        alike = warpgroup_mma_wait(0, deps=[alike])
        alike = alike * decay * strength
        square.store(alike.to(gl.bfloat16))
        triangle = _of_diagonal(alike)
        within = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, triangle.type.layout)), 1) % SOLVED
        after = gl.expand_dims(gl.arange(0, SOLVED, gl.SliceLayout(0, triangle.type.layout)), 0) > within
        triangle = gl.reshape(gl.where(after, triangle, 0.0), (B, SOLVED, SOLVED))
        triangles.store(gl.permute(triangle, (1, 0, 2)))
        fence_async_shared()
        barrier()
        found = gl.expand_dims(inverted(triangles, inverses).load(gl.SliceLayout(1, SPLIT)), 1)
        block_j, block_i = along_3(0, TOKENS, SPLIT) // SOLVED, along_3(1, B, SPLIT)
        inverse = gl.where(block_j == block_i, found, 0.0)
        inverse = gl.convert_layout(gl.reshape(inverse, (TOKENS, TOKENS)), TILE)
        for level in gl.static_range(2):
            join = _joined(inverse, square, narrow if level == 0 else spare, none, level)
            # `square` has all pairs, so the product has more than what this level joins. Only that is right.
            ours = ((j // SOLVED ^ i // SOLVED) // 2**level == 1) & (i // (SOLVED * 2**level) % 2 == 1)
            inverse = inverse - gl.where(ours, join, 0.0)
        narrow.store(inverse.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(full.index(last), count=1)  # the compiler lets all warps come before it


@gluon.jit
def _joined(inverse, pairs, narrow, none, LEVEL: gl.constexpr):
    """`between` of `blocks_prepare_staged.py`, but right only in the blocks that this level joins

    Of the first product they need what stands before the pairs, of the second what stands behind them. All else that
    they would be summed of is zero.
    """
    FIRST: gl.constexpr = gl.DotOperandLayout(0, inverse.type.layout, 2)
    part = inverse.to(gl.bfloat16)
    narrow.store(part)
    fence_async_shared()
    barrier()
    if LEVEL == 0:
        one, _, other, _ = _blocks(part, FIRST)
        across = warpgroup_mma(one, pairs.slice(0, SOLVED), none, use_acc=False, is_async=True)
        across = warpgroup_mma(other, pairs.slice(2 * SOLVED, SOLVED), across, is_async=True)
        across, one, other = warpgroup_mma_wait(0, deps=[across, one, other])
        _, one, _, other = _blocks(across.to(gl.bfloat16), FIRST)
        join = warpgroup_mma(one, narrow.slice(SOLVED, SOLVED), none, use_acc=False, is_async=True)
        join = warpgroup_mma(other, narrow.slice(3 * SOLVED, SOLVED), join, is_async=True)
        join, one, other = warpgroup_mma_wait(0, deps=[join, one, other])
    else:
        HALF: gl.constexpr = TOKENS // 2
        left, _ = gl.split(gl.permute(gl.reshape(part, (TOKENS, 2, HALF)), (0, 2, 1)))
        left = gl.convert_layout(left, FIRST)
        across = warpgroup_mma(left, pairs.slice(0, HALF), none, use_acc=False, is_async=True)
        across, left = warpgroup_mma_wait(0, deps=[across, left])
        _, right = gl.split(gl.permute(gl.reshape(across.to(gl.bfloat16), (TOKENS, 2, HALF)), (0, 2, 1)))
        right = gl.convert_layout(right, FIRST)
        join = warpgroup_mma(right, narrow.slice(HALF, HALF), none, use_acc=False, is_async=True)
        join, right = warpgroup_mma_wait(0, deps=[join, right])
    return join


@gluon.jit
def _blocks(pairs, LAYOUT: gl.constexpr):
    """[C, C]  ->  its columns, block by block, each [C, SOLVED], in this layout; None: as they come"""
    even, odd = gl.split(gl.permute(gl.reshape(pairs, (TOKENS, 2, 2, SOLVED)), (0, 1, 3, 2)))
    first, third = gl.split(gl.permute(even, (0, 2, 1)))
    second, fourth = gl.split(gl.permute(odd, (0, 2, 1)))
    if LAYOUT is not None:
        first, second = gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)
        third, fourth = gl.convert_layout(third, LAYOUT), gl.convert_layout(fourth, LAYOUT)
    return first, second, third, fourth


@gluon.jit
def _of_diagonal(pairs):
    """[C, C]  ->  of each row its numbers in the triangular block on the diagonal [C, SOLVED]"""
    first, second, third, fourth = _blocks(pairs, None)
    block = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, first.type.layout)), 1) // SOLVED
    return gl.where(block < 2, gl.where(block == 0, first, second), gl.where(block == 2, third, fourth))


@gluon.jit
def _carry(given):
    """All blocks in order. Tiles are transposed: [V, K] of states, [V, C] of tokens."""
    rows, memory, tiles, tile, places = given
    boxes, core, core_row, start, column, source, known, target, kept, read_k, read_v, store_k, store_v = memory
    queries, keys, values, lines, solved, mixed = tiles
    landed, free, full = places
    W: gl.constexpr = gl.num_warps()
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, WIDTH, 16])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    OF_I: gl.constexpr = gl.SliceLayout(0, TILE)
    none = gl.full((WIDE, TOKENS), 0.0, gl.float32, TILE)
    at_k, at_v = along(1, WIDTH, STATE), along(0, WIDE, STATE)
    state = gl.load(source + at_v * read_v + at_k * read_k, mask=(at_v + at_k >= 0) & known, other=0.0).to(gl.float32)
    for n in tl.range(0, (rows + TOKENS - 1) // TOKENS, disable_licm=True):
        stage, phase = stage_and_phase(n, STAGES)
        last, phase_last = stage_and_phase(n, LAST)
        mbarrier.wait(full.index(last), phase_last)
        mbarrier.wait(landed.index(stage), phase)  # boxes are seen by who waits for them
        narrow = gl.convert_layout(state.to(gl.bfloat16), FIRST)
        recalled = warpgroup_mma(narrow, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        out = warpgroup_mma(narrow, queries.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        if n > 0:  # no block before the last one shares its box
            fence_async_shared()
            barrier()
            store_box(boxes, [start + (n - 1) * TOKENS, column], tile)
        recalled, out, narrow = warpgroup_mma_wait(0, deps=[recalled, out, narrow])
        # Line by line, or registers would not do.
        since = gl.expand_dims(lines.index(stage * 5).load(OF_I), 0)
        recalled = recalled * since
        out = out * since
        given_value = values.index(stage).permute((1, 0)).load(TILE).to(gl.float32)
        write = gl.expand_dims(lines.index(stage * 5 + 2).load(OF_I), 0)
        residual = gl.convert_layout(((given_value - recalled) * write).to(gl.bfloat16), FIRST)
        update = warpgroup_mma(residual, solved.index(last), none, use_acc=False, is_async=True)
        whole = lines.index(stage * 5).slice(TOKENS - 1, 1).load(gl.SliceLayout(0, STATE))
        state = state * gl.expand_dims(whole, 0)
        update, residual = warpgroup_mma_wait(0, deps=[update, residual])
        until = gl.expand_dims(lines.index(stage * 5 + 1).load(OF_I), 0)
        leaving = gl.convert_layout((update * until).to(gl.bfloat16), FIRST)
        state = warpgroup_mma(leaving, keys.index(stage), state, is_async=True)
        update = gl.convert_layout(update.to(gl.bfloat16), FIRST)
        out = warpgroup_mma(update, mixed.index(last), out, is_async=True)
        state, leaving, out, update = warpgroup_mma_wait(0, deps=[state, leaving, out, update])
        mbarrier.arrive(free.index(stage), count=1)
        stored(0)  # the block before this one
        barrier()
        tile.permute((1, 0)).store(out.to(tile.dtype))
    send(tile, (rows - 1) // TOKENS, rows, boxes, core, core_row, start, column)
    into = target + at_v * store_v + at_k * store_k
    gl.store(into, state.to(target.dtype.element_ty), mask=(at_v + at_k >= 0) & kept)
    stored(0)


@gluon.jit(do_not_specialize=["has_store", "look"])
def fused_staged(
    q, k, v, log_decay, log_decay_row, log_decay_head, beta, beta_row, beta_head,
    boxes, core, core_row, look, begin, count, units, fresh,
    read, read_units, read_columns, read_unit, read_column, read_h, read_k, read_v,
    store, store_units, store_columns, store_unit, store_column, store_h, store_k, store_v, has_store, group, V,
    EARLY: gl.constexpr, CARRY_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One request, one value head, WIDE columns of V, all blocks in order. Grid (V tiles, HV, B)."""
    if EARLY:
        gdc_wait()
    request, head = gl.program_id(2), gl.program_id(1)
    unit, rows = gl.load(units + request), gl.load(count + request).to(gl.int32)
    wide, first = head.to(gl.int64), gl.program_id(0) * WIDE
    column = (head * V + first).to(gl.int32)
    rest = core + column, core_row, look, begin, count, units
    if (unit < 0) | (rows <= 0):
        clear_rest(rest, WIDE)
        return
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SOLID: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, WIDTH], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, WIDTH], SHARED)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, TOKENS, WIDE], SHARED)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES * 5, TOKENS], LINE)  # since, until, beta, sums, their rests
    solved = gl.allocate_shared_memory(gl.bfloat16, [LAST, TOKENS, TOKENS], SHARED)
    mixed = gl.allocate_shared_memory(gl.bfloat16, [LAST, TOKENS, TOKENS], SHARED)
    square = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, TOKENS], SHARED)
    spare = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, TOKENS], SHARED)
    triangles = gl.allocate_shared_memory(gl.float32, [SOLVED, TOKENS // SOLVED, SOLVED], SOLID)
    inverses = gl.allocate_shared_memory(gl.float32, [TOKENS // SOLVED, SOLVED, SOLVED], SOLID)
    tile = gl.allocate_shared_memory(core.dtype.element_ty, [TOKENS, WIDE], SHARED)
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [LAST, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(landed.index(stage), count=2)  # boxes, and gates
        mbarrier.init(free.index(stage), count=1)
    for last in gl.static_range(LAST):
        mbarrier.init(full.index(last), count=1)
    fence_async_shared()
    barrier()

    start = gl.load(begin + request)
    source = place(read, unit, read_columns, request, read_unit, read_column) + wide * read_h + first * read_v
    own = gl.load(store_units + request)
    target = place(store, own, store_columns, request, store_unit, store_column) + wide * store_h + first * store_v
    known, kept = gl.load(fresh + request) == 0, (has_store != 0) & (own >= 0)
    start_row = start.to(gl.int32)
    memory = (boxes, core + start * core_row + column, core_row, start_row, column, source, known, target, kept,
              read_k, read_v, store_k, store_v)  # fmt: skip
    gates = (log_decay + start * log_decay_row + wide * log_decay_head, log_decay_row,
             beta + start * beta_row + wide * beta_head, beta_row)  # fmt: skip
    tiles = (queries, keys, values, lines, solved, mixed)
    places = (landed, free, full)
    carried = (rows, memory, tiles, tile, places)
    prepared = (rows, tiles, (square, triangles, inverses, spare), places)
    copied = ((q, k, v), gates, rows, start_row, head // group * WIDTH, column, tiles, places, rest)
    gl.warp_specialize(
        [(_prepare, (prepared,)), (_carry, (carried,)), (_copy, (copied,))],
        [8, 1], [CARRY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
