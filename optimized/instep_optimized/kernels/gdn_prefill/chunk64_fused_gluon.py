"""Prepare and carry of `chunk64.py` in one launch, for many requests: the same bits; pair tiles stay on the chip.

An item is WIDE columns of a value head of a request. Programs are persistent and walk over items. In a program eight
warps carry states, four warps prepare the following blocks, including the first ones of the next item, and one warp
copies ahead and sums gates.

Preparing is the bottleneck, so its registers must hardly spill. It is the launch's default group of warps, and the
arguments of the other groups come through shared memory, so that they take no registers before they are needed. Both
products of a block run while the group computes something else. Its triangles are joined by products of a warp
(`mma_v2`), which wait for no other warp, read stored data without a fence, and skip zeros.

Leaves out: the method and its reasons (`chunk64.py`); the same for few requests (`chunk64_prepare_gluon.py`,
`chunk64_carry_gluon.py`); the launch (`chunk64_launches_gluon.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.gluon_helpers import (
    along,
    barrier,
    barriers,
    fence_async_shared,
    gdc_wait,
    into_cache,
    load_box,
    mbarrier,
    mma_v2,
    stage_and_phase,
    store_box,
    stored,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .chunk64 import LOG2E, SOLVED
from .chunk64_carry_gluon import clear_rest, columns_at, send
from .chunk64_prepare_gluon import TOKENS, WIDTH, added, decays, row_of, rows_of_inverses

WIDE = gl.constexpr(128)  # columns of V
STAGES = gl.constexpr(3)  # blocks whose keys, queries and values are in shared memory
LAST = gl.constexpr(STAGES.value - 1)  # prepared blocks that are kept; from their number `_prepare` knows a free place
HALF = gl.constexpr(TOKENS.value // 2)


@gluon.jit
def _count(items):
    return items[0] * items[1] * items[2]


@gluon.jit
def _item(at, items):
    """Unpack an item: request and head, its first column, its first row, its number of rows, and the unit."""
    _, heads, tiles, spans = items
    request, head = at // (heads * tiles), at // tiles % heads
    unit, rows = gl.load(spans.units + request), gl.load(spans.rows + request).to(gl.int32)
    rows = gl.where(unit < 0, 0, gl.maximum(rows, 0))  # 0: there is nothing to do
    return request, head, at % tiles * WIDE, gl.load(spans.begin + request), rows, unit


@gluon.jit
def _gates(first, rows, given, LANES: gl.constexpr):
    """Load log decay and beta of a block, 0 after its rows. They bypass L1, which is left to spilled registers."""
    log_decay, log_decay_row, beta, beta_row = given
    token = first + gl.arange(0, TOKENS, LANES)
    at, live = token.to(gl.int64), token < rows
    forget = gl.load(log_decay + at * log_decay_row, mask=live, other=0.0, cache_modifier=".cg")
    return forget, gl.load(beta + at * beta_row, mask=live, other=0.0, cache_modifier=".cg")


@gluon.jit
def _copy(given):
    """Copy keys, queries and values of the blocks as places become free, and sum their gates."""
    boxes, items, log_decay, beta, read, core, look, spans, group, V, tiles, places = given
    q, k, v = boxes
    queries, keys, values, lines, _, _ = tiles
    landed, free, _ = places
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    LINED: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [gl.num_warps(), 1], [1, 0])  # a row of a state, by line
    BYTES: gl.constexpr = TOKENS * (4 * WIDTH + WIDE * (v.dtype.primitive_bitwidth // 8))
    before = 0
    for at in tl.range(gl.program_id(0), _count(items), gl.num_programs(0), disable_licm=True):
        request, head, first, start, rows, unit = _item(at, items)
        wide, column, key_column = head.to(gl.int64), (head * V + first).to(gl.int32), head // group * WIDTH
        if (at >= gl.num_programs(0)) & (rows > 0):  # the carrying warps are at an earlier item: they load it later
            source = columns_at(read, unit, request, wide, first)
            for at_v in range(0, WIDE, 8):
                lane = (at_v + along(0, 8, LINED)) * read.per_v + along(1, 4, LINED) * (WIDTH // 4) * read.per_k
                into_cache(source + lane)
        gates = (row_of(log_decay, start, wide), log_decay.per_row, row_of(beta, start, wide), beta.per_row)
        row, blocks = start.to(gl.int32), (rows + TOKENS - 1) // TOKENS
        forget, write = _gates(0, rows, gates, LANES)
        for n in tl.range(0, blocks, disable_licm=True):
            stage, phase = stage_and_phase(before + n, STAGES)
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(landed.index(stage), BYTES)
            load_box(k, [row + n * TOKENS, key_column], landed.index(stage), keys.index(stage))
            load_box(q, [row + n * TOKENS, key_column], landed.index(stage), queries.index(stage))
            load_box(v, [row + n * TOKENS, column], landed.index(stage), values.index(stage))
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
        before += blocks
        rest = core.at + column, core.per_row, look, spans
        clear_rest(request, items[0], rest, WIDE)  # the last blocks are still being computed


@gluon.jit
def _clear_behind(tile, rows):
    """Set the rows of a tile from `rows` on to zero."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    tile.store(gl.where(along(0, TOKENS, ROWS) < rows, tile.load(ROWS), 0.0).to(tile.dtype))


@gluon.jit
def _prepare(given):
    """Compute what needs no state, for all blocks in order. Tiles of token pairs are [j, i]."""
    items, tiles, scratch, places = given
    queries, keys, values, lines, solved, mixed = tiles
    beside, far, triangles, diagonal, halves = scratch
    landed, free, full = places
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    none = gl.full((TOKENS, TOKENS), 0.0, gl.float32, TILE)
    before = 0
    # As in `prepare_staged`: loop invariants would not fit into registers.
    for at in tl.range(gl.program_id(0), _count(items), gl.num_programs(0), disable_licm=True):
        rows = _item(at, items)[4]
        for n in tl.range(0, (rows + TOKENS - 1) // TOKENS, disable_licm=True):
            stage, phase = stage_and_phase(before + n, STAGES)
            last, _ = stage_and_phase(before + n, LAST)
            key = keys.index(stage)
            j, i = along(0, TOKENS, TILE), along(1, TOKENS, TILE)
            mbarrier.wait(landed.index(stage), phase)
            alike = warpgroup_mma(key, key.permute((1, 0)), none, use_acc=False, is_async=True)
            if n * TOKENS + TOKENS > rows:  # rows after the last may hold anything
                alike = warpgroup_mma_wait(0, deps=[alike])
                _clear_behind(key, rows - n * TOKENS)
                _clear_behind(values.index(stage), rows - n * TOKENS)
                fence_async_shared()
                barrier()
                alike = warpgroup_mma(key, key.permute((1, 0)), none, use_acc=False, is_async=True)
            decay = decays(lines.index(stage * 5 + 3), lines.index(stage * 5 + 4), j, i)
            strength = gl.expand_dims(lines.index(stage * 5 + 2).load(gl.SliceLayout(0, TILE)), 0)
            alike = warpgroup_mma_wait(0, deps=[alike])
            alike = alike * decay * strength
            seen = warpgroup_mma(key, queries.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            _hand_out(alike, beside, far, triangles)
            place, taken = stage_and_phase(before + n + 1, STAGES)
            mbarrier.wait(free.index(place), taken ^ 1)  # by block n - LAST, which was prepared in the same memory
            seen = warpgroup_mma_wait(0, deps=[seen])
            mixed.index(last).store((seen * decay).to(gl.bfloat16))
            barrier()
            diagonal.store(rows_of_inverses(triangles, True).to(gl.bfloat16))
            barrier()
            inverse = _joined(beside, far, diagonal, halves)
            solved.index(last).store(gl.convert_layout(inverse, TILE).to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(full.index(last), count=1)  # the compiler makes all warps wait for each other before it
        before += (rows + TOKENS - 1) // TOKENS


@gluon.jit
def _hand_out(alike, beside, far, triangles):
    """Store the needed parts of all pairs [C, C]: triangles of SOLVED tokens, negated, and the blocks between them.

    beside: [C, SOLVED]: in rows of the first and third triangle, the block between it and the next triangle
    far: [C, C / 2]: in its first half, the blocks between the first two triangles and the others
    """
    B: gl.constexpr = TOKENS // SOLVED
    even, odd = gl.split(gl.permute(gl.reshape(alike, (TOKENS, 2, 2, SOLVED)), (0, 1, 3, 2)))
    first, third = gl.split(gl.permute(even, (0, 2, 1)))
    second, fourth = gl.split(gl.permute(odd, (0, 2, 1)))
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, first.type.layout)
    block = gl.expand_dims(gl.arange(0, TOKENS, OF_ROWS), 1) // SOLVED
    beside.store(gl.where(block < 2, second, fourth).to(gl.bfloat16))
    far.store(_abreast(third, fourth).to(gl.bfloat16))
    triangle = gl.where(block < 2, gl.where(block == 0, first, second), gl.where(block == 2, third, fourth))
    within = gl.expand_dims(gl.arange(0, TOKENS, OF_ROWS), 1) % SOLVED
    after = gl.expand_dims(gl.arange(0, SOLVED, gl.SliceLayout(0, triangle.type.layout)), 0) > within
    triangle = gl.reshape(gl.where(after, 0.0 - triangle, 0.0), (B, SOLVED, SOLVED))
    triangles.store(gl.permute(triangle, (1, 0, 2)))


@gluon.jit
def _joined(beside, far, diagonal, halves):
    """Join inverses of triangles [C, SOLVED], in bf16  ->  the inverse of all [C, C], by `between` of two levels

    A warp has separate rows, and each level changes only some of them; it computes unused numbers for the others.
    """
    SMALL: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SMALL, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SMALL, 2)
    row = along(0, TOKENS, SMALL)
    none = gl.full((TOKENS, SOLVED), 0.0, gl.float32, SMALL)
    own = diagonal.load(LEFT)
    one = mma_v2(own, beside.slice(0, SOLVED).load(RIGHT), none)
    other = mma_v2(own, beside.slice(2 * SOLVED, SOLVED).load(RIGHT), none)
    across = gl.convert_layout(gl.where(row < HALF, one, other).to(gl.bfloat16), LEFT)
    one = mma_v2(across, diagonal.slice(SOLVED, SOLVED).load(RIGHT), none)
    other = mma_v2(across, diagonal.slice(3 * SOLVED, SOLVED).load(RIGHT), none)
    join = gl.where(row < HALF, one, other)
    bits = gl.convert_layout(own, SMALL).to(gl.uint16, bitcast=True).to(gl.uint32) << 16
    whole = _with(bits.to(gl.float32, bitcast=True), join, row // SOLVED % 2, SMALL)
    half = whole.to(gl.bfloat16)
    halves.store(half)
    barrier()
    none = gl.full((TOKENS, HALF), 0.0, gl.float32, SMALL)
    across = mma_v2(gl.convert_layout(half, LEFT), far.slice(0, HALF).load(RIGHT), none)
    across = gl.convert_layout(across.to(gl.bfloat16), LEFT)
    join = mma_v2(across, halves.slice(HALF, HALF).load(RIGHT), none)
    return _with(whole, join, row // HALF, SMALL)


@gluon.jit
def _with(inverse, join, lower, LAYOUT: gl.constexpr):
    """Join blocks [C, n] on the diagonal  ->  blocks of twice the size. lower: 1 in a block's lower half

    Bits are cleared instead of selecting numbers: selected numbers would be rounded one by one, slowly, not in pairs.
    """
    left = (inverse.to(gl.uint32, bitcast=True) & (lower - 1).to(gl.uint32)).to(gl.float32, bitcast=True)
    return gl.convert_layout(_abreast(left, gl.where(lower == 0, 0.0 - join, inverse)), LAYOUT)


@gluon.jit
def _abreast(left, right):
    """Concatenate [C, n], [C, n]  ->  [C, 2 n]"""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@gluon.jit
def _carry(given):
    """Carry states through all blocks in order. Tiles are transposed: [V, K] of states, [V, C] of tokens."""
    items, boxes, core, fresh, read, store, has_store, V, tiles, tile, places = given
    queries, keys, values, lines, solved, mixed = tiles
    landed, free, full = places
    W: gl.constexpr = gl.num_warps()
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, WIDTH, 16])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, TOKENS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    OF_I: gl.constexpr = gl.SliceLayout(0, TILE)
    none = gl.full((WIDE, TOKENS), 0.0, gl.float32, TILE)
    before = 0
    for at in tl.range(gl.program_id(0), _count(items), gl.num_programs(0), disable_licm=True):
        request, head, first, begins, rows, unit = _item(at, items)
        if rows > 0:
            wide, column, start = head.to(gl.int64), (head * V + first).to(gl.int32), begins.to(gl.int32)
            source = columns_at(read, unit, request, wide, first)
            known = gl.load(fresh + request) == 0
            at_k, at_v = along(1, WIDTH, STATE), along(0, WIDE, STATE)
            state = gl.load(source + at_v * read.per_v + at_k * read.per_k, mask=(at_v + at_k >= 0) & known, other=0.0)
            state = state.to(gl.float32)
            for n in tl.range(0, (rows + TOKENS - 1) // TOKENS, disable_licm=True):
                stage, phase = stage_and_phase(before + n, STAGES)
                last, phase_last = stage_and_phase(before + n, LAST)
                mbarrier.wait(full.index(last), phase_last)
                mbarrier.wait(landed.index(stage), phase)  # a warp sees boxes only after it has waited for them
                narrow = gl.convert_layout(state.to(gl.bfloat16), FIRST)
                recalled = warpgroup_mma(narrow, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
                out = warpgroup_mma(narrow, queries.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
                if n > 0:  # no block before the last one shares its box
                    fence_async_shared()
                    barrier()
                    store_box(boxes, [start + (n - 1) * TOKENS, column], tile)
                recalled, out, narrow = warpgroup_mma_wait(0, deps=[recalled, out, narrow])
                # Line by line, because there are too few registers for all at once.
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
            into = core.at + begins * core.per_row + column
            send(tile, (rows - 1) // TOKENS, rows, boxes, into, core.per_row, start, column)
            own = gl.load(store.units + request)
            target = columns_at(store, own, request, wide, first)
            at_k, at_v = along(1, WIDTH, STATE), along(0, WIDE, STATE)
            kept = (at_v + at_k >= 0) & (has_store != 0) & (own >= 0)
            gl.store(target + at_v * store.per_v + at_k * store.per_k, state.to(target.dtype.element_ty), mask=kept)
            before += (rows + TOKENS - 1) // TOKENS
    stored(0)


@gluon.jit(do_not_specialize=["has_store", "look", "requests"])
def fused_staged(
    q, k, v, log_decay, beta, boxes, core, look, spans, read, store, has_store, requests, heads, group, V,
    EARLY: gl.constexpr, CARRY_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Run items in order: WIDE columns of V of a value head of a request, all of its blocks. Grid: any."""
    if EARLY:
        gdc_wait()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SOLID: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    OF_16: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])  # 16 columns
    OF_32: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, WIDTH], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, WIDTH], SHARED)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, TOKENS, WIDE], SHARED)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES * 5, TOKENS], LINE)  # since, until, beta, sums, their rests
    solved = gl.allocate_shared_memory(gl.bfloat16, [LAST, TOKENS, TOKENS], SHARED)
    mixed = gl.allocate_shared_memory(gl.bfloat16, [LAST, TOKENS, TOKENS], SHARED)
    beside = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, SOLVED], OF_16)
    far = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, HALF], OF_32)
    triangles = gl.allocate_shared_memory(gl.float32, [SOLVED, TOKENS // SOLVED, SOLVED], SOLID)
    diagonal = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, SOLVED], OF_16)
    halves = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, HALF], OF_32)
    tile = gl.allocate_shared_memory(core.at.dtype.element_ty, [TOKENS, WIDE], SHARED)
    landed, free, full = barriers(STAGES, 2), barriers(STAGES, 1), barriers(LAST, 1)  # landed: boxes, and gates
    fence_async_shared()
    barrier()

    items = (requests, heads, V // WIDE, spans)
    tiles = (queries, keys, values, lines, solved, mixed)
    places = (landed, free, full)
    prepared = (items, tiles, (beside, far, triangles, diagonal, halves), places)
    carried = (items, boxes, core, spans.fresh, read, store, has_store, V, tiles, tile, places)
    copied = ((q, k, v), items, log_decay, beta, read, core, look, spans, group, V, tiles, places)
    gl.warp_specialize(
        [(_prepare, (prepared,)), (_carry, (carried,)), (_copy, (copied,))],
        [8, 1], [CARRY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
