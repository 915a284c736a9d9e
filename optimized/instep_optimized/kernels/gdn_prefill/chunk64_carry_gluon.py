"""`_carry` of `chunk64.py` with explicit layouts: the same bits, states in registers, and blocks copied ahead.

Leaves out: the method and its reasons (`chunk64.py`); the launch (`chunk64_launches_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device import zero_uncovered_rows
from ..device.gluon_helpers import (
    along,
    barrier,
    barriers,
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
from .chunk64_prepare_gluon import SIGNALS, TOKENS, WIDTH, blocks_before
from .signals_between_launches import signalled

COLUMNS = gl.constexpr(64)  # of V per group of warps that carries states
CLEARED = gl.constexpr(32)  # rows at a time

uncovered = gluon.jit(zero_uncovered_rows.uncovered.fn)


@gluon.jit
def clear_rest(own, requests, rest, WIDE: gl.constexpr):
    """Do `zero_uncovered_rows.clear_rest` for WIDE columns. own: the request whose program clears"""
    core, core_row, look, spans = rest
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [W, 1], [1, 0])
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [W], [0]))
    if uncovered(lane, spans.units, spans.rows, requests, look) > 0:
        for first in range(own * CLEARED, look, requests * CLEARED):
            row, at_v = first + along(0, CLEARED, ROWS), along(1, WIDE, ROWS)
            free = (row < look) & (at_v >= 0)
            for request in range(requests):
                past = row - gl.load(spans.begin + request)
                rows = gl.where(gl.load(spans.units + request) < 0, 0, gl.load(spans.rows + request))
                free = free & ((past < 0) | (past >= rows))
            nothing = gl.full((CLEARED, WIDE), 0.0, core.dtype.element_ty, ROWS)
            gl.store(core + row.to(gl.int64) * core_row + at_v, nothing, mask=free)


@gluon.jit
def _gates(source, more):
    """Load the decay since a block's start and until its end, and beta."""
    until, write = gl.load(source + TOKENS, mask=more), gl.load(source + 2 * TOKENS, mask=more)
    return gl.load(source, mask=more), until, write


@gluon.jit
def _clear_behind(keys, rows):
    """Set the rows of a tile of keys from `rows` on to zero."""
    PART: gl.constexpr = 8
    SOME: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    nothing = gl.full((PART, WIDTH), 0.0, keys.dtype, SOME)
    for first in gl.static_range(0, TOKENS, PART):
        if first + PART > rows:
            part = keys.slice(first, PART)
            part.store(gl.where(first + along(0, PART, SOME) < rows, part.load(SOME), nothing))
    fence_async_shared()
    barrier()


@gluon.jit
def _copy(
    given, STAGES: gl.constexpr, LAST: gl.constexpr, CHAINS: gl.constexpr, BESIDE: gl.constexpr, CHANNELS: gl.constexpr,
):  # fmt: skip
    """Copy the inputs of the blocks as places become free. Rows after the last row of v are not cleared.

    BESIDE: each block as soon as it is prepared
    """
    W: gl.constexpr = gl.num_warps()
    boxes, gates, signals, rows, start, of_keys, key_column, at, heads, group, column, tiles, places, rest = given
    full, free, full_last, free_last, landed = places
    if CHANNELS:
        q, k, v, solved, mixed, left = boxes
        queries, keys, values, inverses, weights, lines, lefts, wholes = tiles
        WIDE: gl.constexpr = gl.BlockedLayout([4], [32], [W], [0])
        channel = gl.arange(0, WIDTH, WIDE)
    else:
        q, k, v, solved, mixed = boxes
        queries, keys, values, inverses, weights, lines = tiles
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [W], [0])
    lane, at_32 = gl.arange(0, TOKENS, LANES), gl.arange(0, 32, gl.BlockedLayout([1], [32], [W], [0]))
    VALUES: gl.constexpr = CHAINS * COLUMNS * (v.dtype.primitive_bitwidth // 8)
    KEYS: gl.constexpr = 2 * TOKENS * WIDTH
    BYTES: gl.constexpr = TOKENS * (2 * WIDTH + 2 * TOKENS + VALUES)
    source = gates + at.to(gl.int64) * 3 * TOKENS + lane  # as many with a decay per channel: TOKENS + WIDTH
    blocks, ready = (rows + TOKENS - 1) // TOKENS, 0
    if CHANNELS:
        of_channels = gates + at.to(gl.int64) * 3 * TOKENS + TOKENS + channel
        write, whole = gl.load(source), gl.load(of_channels)
    elif not BESIDE:
        since, until, write = _gates(source, lane < TOKENS)
    for n in range(blocks):
        if BESIDE:
            if n >= ready:
                behind = gl.minimum(at_32, blocks - 1 - n)  # offsets of the blocks after this one
                ready = n + signalled(signals + SIGNALS + at // group + behind * (heads // group))
            since, until, write = _gates(source, lane < TOKENS)
        stage, phase = stage_and_phase(n, STAGES)
        mbarrier.wait(free.index(stage), phase ^ 1)
        full_block = n * TOKENS + TOKENS <= rows
        if CHANNELS:  # rows after the last row are zero
            mbarrier.expect(full.index(stage), 2 * KEYS + BYTES)
            load_box(k, [at * TOKENS, 0], full.index(stage), keys.index(stage))
            load_box(left, [at * TOKENS, 0], full.index(stage), lefts.index(stage))
            load_box(q, [at * TOKENS, 0], full.index(stage), queries.index(stage))
        else:
            if full_block:
                mbarrier.expect(full.index(stage), KEYS + BYTES)
                load_box(k, [of_keys + n * TOKENS, key_column], full.index(stage), keys.index(stage))
            else:
                mbarrier.expect(full.index(stage), BYTES)
                mbarrier.expect(landed.index(0), KEYS)
                load_box(k, [of_keys + n * TOKENS, key_column], landed.index(0), keys.index(stage))
            load_box(q, [of_keys + n * TOKENS, key_column], full.index(stage), queries.index(stage))
        for chain in gl.static_range(CHAINS):
            tile = values.index(stage * CHAINS + chain)
            load_box(v, [start + n * TOKENS, column + chain * COLUMNS], full.index(stage), tile)
        load_box(solved, [at * TOKENS, 0], full.index(stage), inverses.index(stage))
        if CHANNELS:
            lines.index(stage).store(write)
            wholes.index(stage).store(whole)
        else:
            lines.index(stage * 3).store(since)
            lines.index(stage * 3 + 1).store(until)
            lines.index(stage * 3 + 2).store(write)
            if not full_block:
                mbarrier.wait(landed.index(0), 0)
                _clear_behind(keys.index(stage), rows - n * TOKENS)
        mbarrier.arrive(full.index(stage), count=1)
        last, phase = stage_and_phase(n, LAST)
        mbarrier.wait(free_last.index(last), phase ^ 1)
        mbarrier.expect(full_last.index(last), 2 * TOKENS * TOKENS)
        load_box(mixed, [at * TOKENS, 0], full_last.index(last), weights.index(last))
        at += heads
        source += heads * 3 * TOKENS
        if CHANNELS:
            of_channels += heads * 3 * TOKENS
            first = (n + 1) * TOKENS
            write = gl.load(source, mask=first + lane * 0 < rows)
            whole = gl.load(of_channels, mask=first + channel * 0 < rows)
        elif not BESIDE:
            since, until, write = _gates(source, (n + 1) * TOKENS + lane * 0 < rows)
    clear_rest(gl.program_id(2), gl.num_programs(2), rest, CHAINS * COLUMNS)  # the last blocks are still being computed


@gluon.jit
def columns_at(states, unit, request, head, first):
    """Return the address of a head's state, from column `first` of V on."""
    pool = place(states.pool, unit, states.columns, request, states.per_unit, states.per_column)
    return pool + head * states.per_head + first * states.per_v


@gluon.jit
def send(tile, n, rows, boxes, core, core_row, start, column):
    """Store the read-outs of a block. A block that is not full shares its box with rows of others."""
    COUNT: gl.constexpr = tile.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COUNT, COUNT // 8], [gl.num_warps(), 1], [1, 0])
    fence_async_shared()
    barrier()
    if n * TOKENS + TOKENS <= rows:
        store_box(boxes, [start + n * TOKENS, column], tile)
    else:
        row, at_v = along(0, TOKENS, WIDE), along(1, COUNT, WIDE)
        into = core + (n * TOKENS).to(gl.int64) * core_row + (row * core_row + at_v)
        gl.store(into, tile.load(WIDE), mask=(n * TOKENS + row < rows) & (at_v >= 0))


@gluon.jit
def _carry(
    given, STAGES: gl.constexpr, LAST: gl.constexpr, CHAIN: gl.constexpr, CHAINS: gl.constexpr, CHANNELS: gl.constexpr,
):  # fmt: skip
    """Carry COLUMNS columns of V through all blocks. Tiles are transposed: [V, K] of states, [V, C] of tokens."""
    rows, memory, tiles, outs, places = given
    full, free, full_last, free_last, _ = places
    tile = outs.index(CHAIN)
    boxes, core, core_row, start, column, source, known, target, kept, read, store = memory
    if CHANNELS:
        queries, keys, values, inverses, weights, lines, lefts, wholes = tiles
    else:
        queries, keys, values, inverses, weights, lines = tiles
    W: gl.constexpr = gl.num_warps()
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, WIDTH, 16])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    OF_I: gl.constexpr = gl.SliceLayout(0, TILE)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    core += CHAIN * COLUMNS
    column += CHAIN * COLUMNS
    at_k, at_v = along(1, WIDTH, STATE), along(0, COLUMNS, STATE) + CHAIN * COLUMNS
    state = gl.load(source + at_v * read.per_v + at_k * read.per_k, mask=(at_v + at_k >= 0) & known, other=0.0)
    state = state.to(gl.float32)
    none = gl.full((COLUMNS, TOKENS), 0.0, gl.float32, TILE)
    # As in `prepare_staged`: loop invariants would not fit into registers.
    for n in tl.range(0, (rows + TOKENS - 1) // TOKENS, disable_licm=True):
        stage, phase = stage_and_phase(n, STAGES)
        mbarrier.wait(full.index(stage), phase)
        value = values.index(stage * CHAINS + CHAIN)
        if n * TOKENS + TOKENS > rows:
            some = n * TOKENS + along(0, TOKENS, WIDE) < rows
            value.store(gl.where(some, value.load(WIDE), 0.0).to(value.dtype))
            fence_async_shared()
            barrier()
        narrow = gl.convert_layout(state.to(gl.bfloat16), FIRST)
        recalled = warpgroup_mma(narrow, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        out = warpgroup_mma(narrow, queries.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        if n > 0:
            send(tile, n - 1, rows, boxes, core, core_row, start, column)
        if CHANNELS:  # pairs of tokens are stored as [i, j]
            inverse = inverses.index(stage).permute((1, 0))
            write = gl.expand_dims(lines.index(stage).load(OF_I), 0)
            given_value = value.permute((1, 0)).load(TILE).to(gl.float32)
            recalled, narrow = warpgroup_mma_wait(1, deps=[recalled, narrow])
            residual = gl.convert_layout(((given_value - recalled) * write).to(gl.bfloat16), FIRST)
        else:
            since = gl.expand_dims(lines.index(stage * 3).load(OF_I), 0)
            write = gl.expand_dims(lines.index(stage * 3 + 2).load(OF_I), 0)
            given_value = value.permute((1, 0)).load(TILE).to(gl.float32)
            recalled, narrow = warpgroup_mma_wait(1, deps=[recalled, narrow])
            residual = gl.convert_layout(((given_value - recalled * since) * write).to(gl.bfloat16), FIRST)
            inverse = inverses.index(stage)
        update = warpgroup_mma(residual, inverse, none, use_acc=False, is_async=True)
        if CHANNELS:
            whole = wholes.index(stage).load(gl.SliceLayout(0, STATE))
        else:
            whole = lines.index(stage * 3).slice(TOKENS - 1, 1).load(gl.SliceLayout(0, STATE))
        state = state * gl.expand_dims(whole, 0)
        if CHANNELS:
            out = warpgroup_mma_wait(1, deps=[out])
        else:
            until = gl.expand_dims(lines.index(stage * 3 + 1).load(OF_I), 0)
            out = warpgroup_mma_wait(1, deps=[out]) * since
        last, phase = stage_and_phase(n, LAST)
        mbarrier.wait(full_last.index(last), phase)
        update, residual = warpgroup_mma_wait(0, deps=[update, residual])
        if CHANNELS:
            update = gl.convert_layout(update.to(gl.bfloat16), FIRST)
            leaving = update
            state = warpgroup_mma(leaving, lefts.index(stage), state, is_async=True)
            out = warpgroup_mma(update, weights.index(last).permute((1, 0)), out, is_async=True)
        else:
            leaving = gl.convert_layout((update * until).to(gl.bfloat16), FIRST)
            update = gl.convert_layout(update.to(gl.bfloat16), FIRST)
            state = warpgroup_mma(leaving, keys.index(stage), state, is_async=True)
            out = warpgroup_mma(update, weights.index(last), out, is_async=True)
        state, leaving = warpgroup_mma_wait(1, deps=[state, leaving])
        mbarrier.arrive(free.index(stage), count=1)
        out, update = warpgroup_mma_wait(0, deps=[out, update])
        mbarrier.arrive(free_last.index(last), count=1)
        stored(0)  # the block before this one
        barrier()
        tile.permute((1, 0)).store(out.to(core.dtype.element_ty))
    send(tile, (rows - 1) // TOKENS, rows, boxes, core, core_row, start, column)
    into = target + at_v * store.per_v + at_k * store.per_k
    gl.store(into, state.to(target.dtype.element_ty), mask=(at_v + at_k >= 0) & kept)
    stored(0)


@gluon.jit(do_not_specialize=["has_store", "narrow", "look"])
def carry_staged(
    q, k, left, v, solved, mixed, gates, signals, boxes, core, look, spans, read, store, has_store, group, V, narrow,
    STAGES: gl.constexpr, LAST: gl.constexpr, CHAINS: gl.constexpr, BESIDE: gl.constexpr, EARLY: gl.constexpr,
    CARRY_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Carry one request, one value head, COLUMNS columns of V through all blocks in order. Grid (V tiles, HV, B).

    BESIDE: while the previous launch prepares the blocks
    left: None, or keys that are decayed by channel until their block's end. Then q and k are decayed since its start,
    each block has its own, and `gates` has beta and the decay of the block by channel.
    """
    CHANNELS: gl.constexpr = left is not None
    gl.static_assert(WIDTH == 2 * TOKENS)
    if BESIDE:  # a program that prepares has waited for everything before both launches
        signalled(signals + 0 * gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    elif EARLY:
        gdc_wait()
    request, head = gl.program_id(2), gl.program_id(1)
    unit, rows = gl.load(spans.units + request), gl.load(spans.rows + request).to(gl.int32)
    wide, first = head.to(gl.int64), gl.program_id(0) * (CHAINS * COLUMNS)
    column = (head * V + first).to(gl.int32)
    rest = core.at + column, core.per_row, look, spans
    if (unit < 0) | (rows <= 0):
        clear_rest(request, gl.num_programs(2), rest, CHAINS * COLUMNS)
        if BESIDE and EARLY:
            gdc_wait()
        return
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    OF_VALUES: gl.constexpr = gl.NVMMASharedLayout(128, v.dtype.primitive_bitwidth, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, WIDTH], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, WIDTH], SHARED)
    values = gl.allocate_shared_memory(v.dtype, [STAGES * CHAINS, TOKENS, COLUMNS], OF_VALUES)
    inverses = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, TOKENS], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [LAST, TOKENS, TOKENS], SHARED)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES if CHANNELS else STAGES * 3, TOKENS], LINE)
    tile = gl.allocate_shared_memory(core.at.dtype.element_ty, [CHAINS, TOKENS, COLUMNS], SHARED)
    full, free = barriers(STAGES, 2), barriers(STAGES, CHAINS)  # full of boxes, and of gates
    full_last, free_last = barriers(LAST, 1), barriers(LAST, CHAINS)
    # Keys of a last block that is not full. Where nothing waits for it, the compiler would overlay it.
    landed = full if CHANNELS else barriers(1, 1)
    fence_async_shared()
    barrier()

    start, heads = gl.load(spans.begin + request), gl.num_programs(1)
    source, own = columns_at(read, unit, request, wide, first), gl.load(store.units + request)
    target = columns_at(store, own, request, wide, first)
    known, kept = gl.load(spans.fresh + request) == 0, (has_store != 0) & (own >= 0)
    block = blocks_before(spans, request)
    at = block * heads + head
    of_keys = gl.where(narrow != 0, start, block.to(gl.int64) * TOKENS).to(gl.int32)
    start_row = start.to(gl.int32)
    out = core.at + start * core.per_row + column
    memory = (boxes, out, core.per_row, start_row, column, source, known, target, kept, read, store)
    tiles = (queries, keys, values, inverses, weights, lines)
    inputs = (q, k, v, solved, mixed)
    if CHANNELS:
        lefts = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, WIDTH], SHARED)
        wholes = gl.allocate_shared_memory(gl.float32, [STAGES, WIDTH], LINE)
        tiles += (lefts, wholes)  # type: ignore[assignment]
        inputs += (left,)  # type: ignore[assignment]
    places = (full, free, full_last, free_last, landed)
    carried = (rows, memory, tiles, tile, places)
    copied = (inputs, gates, signals, rows, start_row, of_keys, head // group * WIDTH, at, heads,
              group, column, tiles, places, rest)  # fmt: skip
    if CHAINS == 1:
        gl.warp_specialize(
            [(_carry, (carried, STAGES, LAST, 0, 1, CHANNELS)), (_copy, (copied, STAGES, LAST, 1, BESIDE, CHANNELS))],
            [1], [COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_carry, (carried, STAGES, LAST, 0, 2, False)), (_carry, (carried, STAGES, LAST, 1, 2, False)),
             (_copy, (copied, STAGES, LAST, 2, BESIDE, False))],
            [4, 1], [CARRY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    if BESIDE and EARLY:  # a launch that waits for this one also waits for the previous one
        gdc_wait()
