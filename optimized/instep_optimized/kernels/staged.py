"""The chain form of `window.py` with explicit layouts: what the tokens need comes into shared memory beside the state.

It has the body of `window.py`, its contract, and the layout that the compiler chooses there. So it gives the same bits,
and a GPU runs it in place of `window` wherever it fits. Leaves out: what does not fit (`fits`), and interpretation.
"""

# ruff: noqa: SIM102 (what is absent is not compiled: the test for it stands alone)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..layout import Address, Part, Updates
from ..ops.base import GdnInputs
from . import body
from .address import flat
from .runtime import launch, power_of_2
from .window import KEY_PIECE, rows_of

TOKENS = 32  # at most, of a ring and of a window: a lane reads the gates of one token
# On a GPU (LOG.md): rows of V that a thread holds, warps, registers, tiles that a program takes in turn; and how
# many warps of 16 rows a multiprocessor has at least where this is used. The bits depend on none of them.
SHAPES = ((2, 4, 128, 2, 8), (1, 1, 96, 1, 0))

# Two functions and a method have other names in newer versions of Triton (3.9) than in older ones (3.6).
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
NEWER = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
again, overlap, step = (gluon.jit(one.fn) for one in (body.again, body.overlap, body.step))


def fits(inputs: GdnInputs, part: Part, core: torch.Tensor) -> bool:
    """Whether `staged` can run this part."""
    addresses = [one for one in (part.read, part.store, part.settled, part.per_row) if one is not None]
    wide = all(one.pool.dtype == torch.float32 and one.pool.stride(-2) == 1 for one in addresses)
    kept = 0 if part.ring is None else part.ring.size
    keys, values = inputs.k.shape[2], core.shape[2]
    whole = keys in (32, 64, 128, 256) and values % rows_of(*SHAPES[0][:2], keys) == 0
    return wide and whole and part.parents is None and max(kept, part.most) <= TOKENS


def staged(inputs: GdnInputs, part: Part, core: torch.Tensor, shape: tuple[int, int, int, int] | None = None) -> None:
    """`window` of a part that fits. shape: as one of SHAPES begins; the bits do not depend on it."""
    heads, values, keys = core.shape[1], core.shape[2], inputs.k.shape[2]
    requests = part.begin.numel()
    held, warps, registers, tiles = shape or shape_for(requests * heads * values, str(core.device))
    rows = rows_of(held, warps, keys)
    tiles = tiles if values % (tiles * rows) == 0 else 1
    flattened: list[Any] = []
    for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, core):
        flattened += [x, x.stride(0), x.stride(1)]
    ring, kept = part.ring, part.ring.kept if part.ring is not None else None
    pools: list[Any] = [None] * 18
    if ring is not None:
        assert isinstance(kept, Updates)
        pools = [y for pool in kept for y in (pool, *pool.stride()[:3])]
        pools += [ring.units, ring.begin, ring.pending, ring.keep, ring.size, ring.own.shape[1]]
    launch(
        _staged, (values // (tiles * rows), heads, requests), *flattened,
        part.begin, part.count, part.fresh,
        *held_at(part.read), *held_at(part.store), *held_at(part.settled), *held_at(part.per_row), *pools,
        heads // inputs.k.shape[1],
        VR=held, TILES=tiles, KT=keys, KI=KEY_PIECE, KEPT=power_of_2(ring.size) if ring is not None else 1,
        MOST=power_of_2(part.most), warps=warps, registers=registers,
    )  # fmt: skip


def held_at(address: Address | None) -> tuple[Any, ...]:
    """(pool, units, columns, unit step, column step, head step, V step), each None if there is none"""
    if address is None:
        return 7 * (None,)
    pool, units, _, unit, column, head, _, value = flat(address, 3, address)
    return pool, units, address.column, unit, column, head, value


@cache
def multiprocessors(device: str) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shape_for(rows: int, device: str) -> tuple[int, int, int, int]:
    """The shape for a launch of so many rows of V, those of all heads and requests together."""
    return next(shape for *shape, least in SHAPES if rows >= 16 * least * multiprocessors(device))  # type: ignore[return-value]


@gluon.jit
def along(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """0 .. size-1 along an axis of a tensor of rank 2"""
    return gl.expand_dims(gl.arange(0, size, gl.SliceLayout(1 - axis, layout)), 1 - axis)


@gluon.jit
def along_3(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """0 .. size-1 along an axis of a tensor of rank 3"""
    if axis == 0:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, size, gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2)
    elif axis == 1:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    else:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)


@gluon.jit
def over_rows(key):
    """[P, KI] -> [1, 1, P, KI]"""
    return gl.expand_dims(gl.expand_dims(key, 0), 0)


@gluon.jit
def over_k(rows):
    """[VL or 1, VR or 1] -> [.., .., 1, 1]"""
    return gl.expand_dims(gl.expand_dims(rows, 2), 2)


@gluon.jit
def place(pool, unit, columns, request, unit_step, column_step):
    """Where a unit begins, or its column."""
    if columns is not None:
        return pool + unit * unit_step + gl.load(columns + request) * column_step
    else:
        return pool + unit * unit_step


@gluon.jit
def seen_as(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same numbers in another shape and layout. A layout without the first axis is that of what `index` gives."""
    if NEWER:
        return memory.reinterpret(gl.float32, shape, layout)
    else:
        return memory._reinterpret(gl.float32, shape, layout)


@gluon.jit
def shared(source, inside, shape: gl.constexpr):
    """Begin to copy a tensor of rank 3 to shared memory  ->  the copy, whose index is a tensor of rank 2"""
    memory = gl.allocate_shared_memory(gl.float32, shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    begin_copy(memory, source, mask=inside)
    return seen_as(memory, shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def gates(lanes, size: gl.constexpr):
    """A number per lane, put where every thread can read each  ->  memory whose index is a tensor [1]"""
    memory = gl.allocate_shared_memory(gl.float32, [size], gl.SwizzledSharedLayout(1, 1, 1, [0]), lanes)
    return seen_as(memory, [size, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def wrapped(entry, size):
    """An entry below twice the size of its ring -> the entry that it is"""
    return gl.where(entry >= size, entry - size, entry)


@gluon.jit(do_not_specialize=["ring_size", "ring_u_size"])
def _staged(
    q, q_row, q_head, k, k_row, k_head, v, v_row, v_head,
    log_decay, log_decay_row, log_decay_head, beta, beta_row, beta_head, core, core_row, core_head,
    begin, count, fresh,
    read, read_units, read_columns, read_unit, read_column, read_h, read_v: gl.constexpr,
    store, store_units, store_columns, store_unit, store_column, store_h, store_v: gl.constexpr,
    settled, settled_units, settled_columns, settled_unit, settled_column, settled_h, settled_v: gl.constexpr,
    each, each_units, each_columns, each_unit, each_column, each_h, each_v: gl.constexpr,
    ring_k, ring_k_unit, ring_k_entry, ring_k_head, ring_decay, ring_decay_unit, ring_decay_entry, ring_decay_head,
    ring_u, ring_u_unit, ring_u_entry, ring_u_head,
    ring_units, ring_begin, ring_pending, ring_keep, ring_size, ring_u_size,
    group, VR: gl.constexpr, KT: gl.constexpr, KI: gl.constexpr, KEPT: gl.constexpr, MOST: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """One program: one request, one value head, VL * VR rows of V. Grid (V tiles, HV, B).

    At most KEPT tokens run again, and then at most MOST rows. An address that is absent is None, as a ring is; then
    nothing of it is compiled.
    """
    W: gl.constexpr = gl.num_warps()
    P: gl.constexpr = KT // KI
    SIDE: gl.constexpr = KI // 4  # lanes along K
    VL: gl.constexpr = W * 32 // SIDE
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [32 // SIDE, 1, 1, SIDE], [W, 1, 1, 1], [3, 0, 1, 2])
    OF_V: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(2, TILE))  # [VL, VR]
    OF_K: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, TILE))  # [P, KI]
    ONE: gl.constexpr = gl.SliceLayout(0, OF_V)  # [1], in every thread
    KEYS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // SIDE, SIDE], [W, 1, 1], [2, 1, 0])  # [tokens, P, KI]
    VEC: gl.constexpr = 4 if VR >= 4 else VR
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1, VEC], [8, 4, 1], [1, W, 1], [2, 1, 0])  # [tokens, VL, VR]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])  # [tokens]

    request, stripe, head = gl.program_id(2), gl.program_id(0), gl.program_id(1).to(gl.int64)
    unit, first, rows = gl.load(read_units + request), gl.load(begin + request), gl.load(count + request).to(gl.int32)
    known, key_head, pending = gl.load(fresh + request) == 0, head // group, 0
    if ring_units is not None:
        kept_by = gl.load(ring_units + request)
        asked = gl.minimum(gl.maximum(gl.load(ring_pending + request), 0), ring_size).to(gl.int32)
        oldest, keep = gl.load(ring_begin + request).to(gl.int32), gl.load(ring_keep + request).to(gl.int32)
        pending = gl.where(known & (kept_by >= 0), asked, 0)
        keeps = (kept_by >= 0) & (keep >= 0)
    if store is not None:
        goal = gl.load(store_units + request)
    if settled is not None:
        settle = gl.load(settled_units + request)
    if each is not None:
        each_to = gl.load(each_units + request)
    if (unit < 0) | ((rows <= 0) & (pending <= 0)):
        return  # core is zero there already

    ALL: gl.constexpr = TILES * VL
    at_v = (stripe * ALL + along(0, VL, OF_V)) * VR + along(1, VR, OF_V)  # [VL, VR]
    # Offsets in a tile, those of a lane and those of a register: the latter become part of an instruction.
    lane_v, lane_k = over_k((stripe * ALL + along(0, VL, OF_V)) * VR), over_rows(along(1, KI, OF_K))
    thread_v, thread_k = over_k(along(1, VR, OF_V)), over_rows(along(0, P, OF_K) * KI)
    state = gl.full((VL, VR, P, KI), 0.0, gl.float32, TILE)
    source = place(read, unit, read_columns, request, read_unit, read_column) + head * read_h
    source = source + (lane_v * read_v + lane_k)
    if known:
        state = gl.load(source + (thread_v * read_v + thread_k))

    # What the tokens need is copied by lanes, or groups of lanes, one per token.
    copied_k = along_3(1, P, KEYS) * KI + along_3(2, KI, KEYS)
    copied_v = (stripe * ALL + along_3(1, ALL, ROWS)) * VR + along_3(2, VR, ROWS)
    row_k, row_v, row = along_3(0, MOST, KEYS), along_3(0, MOST, ROWS), gl.arange(0, MOST, LANES)
    if ring_units is not None:
        kept_k = ring_k + kept_by * ring_k_unit + key_head * ring_k_head
        kept_decay = ring_decay + kept_by * ring_decay_unit + head * ring_decay_head
        kept_u = ring_u + kept_by * ring_u_unit + head * ring_u_head
        old_k, old_v, old = along_3(0, KEPT, KEYS), along_3(0, KEPT, ROWS), gl.arange(0, KEPT, LANES)
        entry_k, entry_v = wrapped(oldest + old_k, ring_size), (oldest + old_v) % ring_u_size
        old_keys = shared(kept_k + entry_k * ring_k_entry + copied_k, old_k < pending, [KEPT, P, KI])
        updates = shared(kept_u + entry_v * ring_u_entry + copied_v, old_v < pending, [KEPT, ALL, VR])
        entry = wrapped(oldest + old, ring_size)
        aged = gl.load(kept_decay + entry * ring_decay_entry, mask=old < pending, other=0.0)
    k, q = k + first * k_row + key_head * k_head, q + first * q_row + key_head * q_head
    v, beta = v + first * v_row + head * v_head, beta + first * beta_row + head * beta_head
    keys = shared(k + row_k * k_row + copied_k, row_k < rows, [MOST, P, KI])
    queries = shared(q + row_k * q_row + copied_k, row_k < rows, [MOST, P, KI])
    values = shared(v + row_v * v_row + copied_v, row_v < rows, [MOST, ALL, VR])
    log_decay = log_decay + first * log_decay_row + head * log_decay_head
    decay = gl.exp(gl.load(log_decay + row * log_decay_row, mask=row < rows, other=0.0))
    writes = gates(gl.load(beta + row * beta_row, mask=row < rows, other=0.0), MOST)
    decays = gates(decay, MOST)
    async_copy.commit_group()
    if TILES > 1:
        coming = gl.allocate_shared_memory(gl.float32, [VL, VR, P, KI], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
        if known:
            begin_copy(coming, source + (thread_v * read_v + thread_k) + VL * VR * read_v)
        async_copy.commit_group()
    if ring_units is not None:
        old_decays = gates(aged, KEPT)
        if keeps & (stripe == 0):
            gl.store(kept_decay + wrapped(keep + row, ring_size) * ring_decay_entry, decay, mask=row < rows)
    async_copy.wait_group(0 if TILES == 1 else 1)
    barrier()
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    copied_keys = seen_as(keys, [MOST, P, KI], CUBE).load(KEYS)
    copied_queries = seen_as(queries, [MOST, P, KI], CUBE).load(KEYS)
    overlaps = gates(gl.convert_layout(overlap(copied_keys, copied_queries), LANES), MOST)
    barrier()

    if ring_units is not None:
        if keeps & (stripe == 0) & (head % group == 0):
            target = kept_k + wrapped(keep + row_k, ring_size) * ring_k_entry + copied_k
            gl.store(target, copied_keys, mask=row_k < rows)
        first_own = keep % ring_u_size
    core = core + first * core_row + head * core_head
    for tile in gl.static_range(TILES):
        if tile > 0:
            async_copy.wait_group(0)
            state = gl.full((VL, VR, P, KI), 0.0, gl.float32, TILE)
            if known:
                state = coming.load(TILE)
            if tile + 1 < TILES:
                barrier()
                if known:
                    begin_copy(
                        coming, source + (thread_v * read_v + thread_k) + (tile + 1) * VL * VR * read_v
                    )
                async_copy.commit_group()
        here_v = at_v + tile * VL * VR
        if ring_units is not None:
            for age in range(pending):
                again_key = over_rows(old_keys.index(age).load(OF_K))
                update = updates.index(age).slice(tile * VL, VL).load(OF_V)
                state = again(state, again_key, gl.sum(old_decays.index(age).load(ONE), 0), update)
            own = first_own
        if settled is not None:
            if settle >= 0:
                target = place(settled, settle, settled_columns, request, settled_unit, settled_column)
                target += head * settled_h + tile * VL * VR * settled_v
                gl.store(target + (lane_v * settled_v + lane_k) + (thread_v * settled_v + thread_k), state)
        out_at = core + here_v
        for t in range(rows):
            key, query = over_rows(keys.index(t).load(OF_K)), over_rows(queries.index(t).load(OF_K))
            forget, write = gl.sum(decays.index(t).load(ONE), 0), gl.sum(writes.index(t).load(ONE), 0)
            value = values.index(t).slice(tile * VL, VL).load(OF_V)
            shared_kq = gl.sum(overlaps.index(t).load(ONE), 0)
            state, out, update = step(state, query, key, shared_kq, value, forget, write)
            gl.store(out_at, out.to(core.dtype.element_ty))
            out_at += core_row
            if each is not None:
                if each_to >= 0:
                    column = each + each_to * each_unit + t * each_column + head * each_h + tile * VL * VR * each_v
                    gl.store(column + (lane_v * each_v + lane_k) + (thread_v * each_v + thread_k), state)
            if ring_units is not None:
                if keeps:
                    gl.store(kept_u + own * ring_u_entry + here_v, update)
                own = gl.where(own + 1 == ring_u_size, 0, own + 1)
        if store is not None:
            if goal >= 0:
                target = place(store, goal, store_columns, request, store_unit, store_column)
                target += head * store_h + tile * VL * VR * store_v
                gl.store(target + (lane_v * store_v + lane_k) + (thread_v * store_v + thread_k), state)
