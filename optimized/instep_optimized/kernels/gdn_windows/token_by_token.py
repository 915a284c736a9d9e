"""The gated delta rule token by token: kept tokens run again, then decode or verify rows, in one kernel.

A window may be a tree: then the kernel is compiled a second time, with the same body per token and a path back.
A GPU runs `launches_gluon.py` instead if it fits, with the same bits.

Leaves out: prefill chunks (`chunk16_fp32.py`), and the choice of addresses (the commit strategy makes it).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from instep_reference.contract.capacity import MOST_NODES
from instep_reference.contract.errors import Unsupported

from ...memory_addresses import Part, Ring, Updates
from ...ops.op_protocols import GdnInputs
from ..device.masked_loads_and_stores import fetch, put
from ..device.pool_address import flat, given
from ..device.scaled_tiles import ROWS, beside, packed, scale_of, scales_at
from ..device.stochastic_rounding import counters, fallen
from ..device.zero_uncovered_rows import LANES, covering
from ..runtime import ceil_div, launch, power_of_2, tile
from .one_token_update import again, overlap, step

# On a GPU (LOG.md): adjacent numbers of a key across lanes, 4 a lane, and warps. The bits depend on both, so they are
# pinned. A piece is small, so that each thread sums most of a row by itself and few shuffles between threads remain.
KEY_PIECE, WARPS = 16, 1
# Rows of V that a thread holds, and registers. The bits of fp32 states do not depend on them; those of 16-bit states
# depend on the rows (LOG.md).
THREAD_ROWS, REGISTERS = 2, 128


def window(inputs: GdnInputs, part: Part, core: torch.Tensor, look: int = 0) -> None:
    """Run one part's kept tokens and rows through their states; write `core` [N, HV, V] and the memory of the part.

    look: number of its rows to check; those that no request covers become zero

    Every part runs the same compiled code: whether an address is absent, and how many rows there are, are run-time
    values. So a window of T tokens gives the bits of T one-token decodes, and so do T tokens that are run again.
    This holds for a state in fp32. A narrower state is rounded when it is stored, and also once between the tokens
    that are run again and row 0. Stochastic rounding is compiled separately; its sums are the same.

    A part whose windows are trees runs a second compiled form of the kernel, in the same tiles. Per token it has the
    same operations, so the rows of a path have the bits of that chain. It holds two states, so it has no limit on
    registers.
    """
    heads, values, keys = core.shape[1], core.shape[2], inputs.k.shape[2]
    padded = power_of_2(keys)
    piece = min(KEY_PIECE, padded)
    across = rows_of(1, WARPS, padded)
    rows = across * tile(THREAD_ROWS, ceil_div(64, across))
    each, each_units, _, *each_steps = flat(part.per_row, 3, part.read)  # row t is its column
    tree = part.parents is not None
    assert part.parents is None or (part.most <= MOST_NODES and part.parents.is_contiguous()), "trees of few nodes"
    assert part.read.scales is None or rows % ROWS.value == 0 or rows >= values, "a program has whole tiles of a state"
    by = counters(part, part.store, part.per_row)
    plain = part.read.scales is None and by[0] is None  # states go to memory as a dtype rounds them
    # In a tree the update of every row is kept until the launch ends: rows that go back run it again.
    did = core.new_empty(core.shape, dtype=torch.float32) if tree else None
    launch(
        _window,
        (ceil_div(values, rows), heads, part.begin.numel()),
        *packed_rows(inputs, core),
        part.begin, part.count, part.fresh,
        *flat(part.read, 3, part.read),
        *flat(part.store, 3, part.read), given(part.store),
        *flat(part.settled, 3, part.read), given(part.settled),
        each, each_units, *each_steps, given(part.per_row),
        *_ring(inputs, part),
        part.parents, did, *(did.stride()[:2] if did is not None else (None, None)),
        *beside(part.read, part.read), *beside(part.store, part.read), *beside(part.settled, part.read),
        *beside(part.per_row, part.read), *by,
        values, keys, heads // inputs.k.shape[1], look,
        VL=across, VR=rows // across, KT=padded, KI=piece, WHOLE=values % rows == 0 and padded == keys,
        TREE=tree, TILED=part.read.scales is not None, warps=WARPS,
        registers=REGISTERS if plain and not tree else None,
    )  # fmt: skip


def rows_of(held: int, warps: int, keys: int) -> int:
    """Return the rows of V of a program whose threads hold `held` rows each."""
    return held * warps * 128 // min(KEY_PIECE, keys)


def packed_rows(inputs: GdnInputs, core: torch.Tensor) -> tuple[Any, ...]:
    """Return the packed rows as (tensor, row step, head step); their last axis is contiguous."""
    flattened: list[Any] = []
    for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, core):
        assert x.dim() == 2 or x.stride(2) == 1, "rows have a contiguous last axis"
        flattened += [x, x.stride(0), x.stride(1)]
    return tuple(flattened)


def _ring(inputs: GdnInputs, part: Part) -> tuple[Any, ...]:
    """Return the arguments of `ring_of`, and a flag.

    A part without a ring passes its packed rows, with their own steps, in place of the pools. So the kernel compiles to
    the same code; the flag is 0, and nothing is read there.
    """
    ring = part.ring
    if ring is None:
        pools = tuple(y for x in (inputs.k, inputs.log_decay, inputs.v) for y in (x, 0, x.stride(0), x.stride(1)))
        return (*pools, *(4 * (part.count,)), 1, 1, 0)
    return (*ring_of(ring), 1)


def ring_of(ring: Ring) -> tuple[Any, ...]:
    """Return k, decay, update as (pool, unit step, entry step, head step); units, begin, pending, keep; sizes."""
    if not isinstance(ring.kept, Updates):
        raise Unsupported("this kernel keeps updates; a ring of inputs is for kernels that give none back")
    flattened: list[Any] = []
    for pool in ring.kept:
        assert pool.dim() == 3 or pool.stride(3) == 1, "entries have a contiguous last axis"
        flattened += [pool, *pool.stride()[:3]]
    return (*flattened, ring.units, ring.begin, ring.pending, ring.keep, ring.size, ring.own.shape[1])


@triton.jit(do_not_specialize=["has_store", "has_settled", "has_each", "ring_size", "ring_u_size", "has_ring", "look",
                             "layer", "seed_low", "seed_high"])
def _window(
    q, q_row, q_head, k, k_row, k_head, v, v_row, v_head,
    log_decay, log_decay_row, log_decay_head, beta, beta_row, beta_head, core, core_row, core_head,
    begin, count, fresh,
    read, read_units, read_columns, read_unit, read_column, read_h, read_k, read_v,
    store, store_units, store_columns, store_unit, store_column, store_h, store_k, store_v, has_store,
    settled, settled_units, settled_columns, settled_unit, settled_column, settled_h, settled_k, settled_v, has_settled,
    each, each_units, each_unit, each_column, each_h, each_k, each_v, has_each,
    ring_k, ring_k_unit, ring_k_entry, ring_k_head, ring_decay, ring_decay_unit, ring_decay_entry, ring_decay_head,
    ring_u, ring_u_unit, ring_u_entry, ring_u_head,
    ring_units, ring_begin, ring_pending, ring_keep, ring_size, ring_u_size, has_ring,
    parents, did, did_row, did_head,
    read_scales, read_scales_unit, read_scales_column, store_scales, store_scales_unit, store_scales_column,
    settled_scales, settled_scales_unit, settled_scales_column, each_scales, each_scales_unit, each_scales_column,
    before, layer, seed_low, seed_high, V, K, group, look,
    VL: tl.constexpr, VR: tl.constexpr, KT: tl.constexpr, KI: tl.constexpr, WHOLE: tl.constexpr, TREE: tl.constexpr,
    TILED: tl.constexpr,
):  # fmt: skip
    """Run one request, one value head, VL * VR rows of V in a program. Grid (V tiles, HV, B).

    A tile is [VL, VR, P, KI]. The compiler lays the first axis and the last across lanes, the other two into registers.
    K is split into P = KT // KI pieces of KI numbers, so that a row's numbers are in few lanes. V is split so that a
    thread has each number of a key once, for all its rows.

    Several programs read the same keys and decays of the ring, and none waits for another. That is safe: one program
    writes an entry, and by contract never while the entry is pending. An update u is read only by the program that
    wrote it.

    TREE: row t continues row parents[begin + t], and `did` [N, HV, V] is scratch for the rows' updates. Without TREE
    all four arguments are None, and Triton compiles no code for them.
    """
    request, stripe, head = tl.program_id(2), tl.program_id(0), tl.program_id(1).to(tl.int64)
    unit, rows = tl.load(read_units + request), tl.load(count + request)
    known = tl.load(fresh + request) == 0
    kept_by = tl.where(has_ring != 0, tl.load(ring_units + request), -1)
    asked = tl.minimum(tl.maximum(tl.load(ring_pending + request), 0), ring_size)
    # A fresh request runs nothing again: its ring may still hold entries of the slot's last owner.
    pending = tl.where(known & (kept_by >= 0), asked, 0)
    at_v = (stripe * VL + tl.arange(0, VL)[:, None]) * VR + tl.arange(0, VR)[None, :]  # [VL, VR]
    row = tl.load(begin + request)
    share, requests = tl.cdiv(look, tl.num_programs(2)), tl.num_programs(2)
    for other in range(request * share, tl.minimum((request + 1) * share, look)):
        if (unit < 0) | (other < row) | (other >= row + rows):  # noqa: SIM102 (both tests of an `and` would run)
            if covering(other, tl.arange(0, LANES), read_units, begin, count, requests) == 0:
                nothing = tl.zeros((VL, VR), tl.float32)
                put(core + (row * 0 + other) * core_row + head * core_head + at_v, nothing, at_v < V, WHOLE)
    if (unit < 0) | ((rows <= 0) & (pending <= 0)):
        return
    tile_v = at_v[:, :, None, None]  # [VL, VR, 1, 1]
    tile_k = tl.arange(0, KT // KI)[:, None] * KI + tl.arange(0, KI)[None, :]  # [P, KI]
    # A key is read once per row across lanes, so that no thread has to pass numbers on.
    every_k = tile_k + tl.zeros((VL, 1, 1, 1), tl.int32)  # [VL, 1, P, KI]
    in_v, in_k, key_head = at_v < V, every_k < K, head // group  # [VL, VR], [VL, 1, P, KI], scalar
    inside = (tile_v < V) & in_k  # [VL, VR, P, KI]

    state = tl.zeros((VL, VR, KT // KI, KI), tl.float32)  # [VL, VR, P, KI]
    if known:
        source = read + unit * read_unit + tl.load(read_columns + request) * read_column + head * read_h
        state = fetch(source + (tile_v * read_v + tile_k * read_k), inside, WHOLE).to(tl.float32)
        if TILED:
            place = tl.load(read_columns + request)
            scales = scales_at(read_scales, read_scales_unit, read_scales_column, unit, place, head, at_v, V)
            state = state * tl.load(scales, mask=in_v, other=0.0)[:, :, None, None]

    # Pointers to entry 0 of this request's rings. All heads of one key head share its k; u has V rows per program.
    kept_k = ring_k + kept_by * ring_k_unit + key_head * ring_k_head
    kept_decay = ring_decay + kept_by * ring_decay_unit + head * ring_decay_head
    kept_u = ring_u + kept_by * ring_u_unit + head * ring_u_head + at_v
    entry = tl.load(ring_begin + request).to(tl.int32)  # within a unit 32 bits are enough, and registers are scarce
    for _age in range(pending):
        state = again(
            state,
            fetch(kept_k + entry * ring_k_entry + every_k, in_k, WHOLE),  # [VL, 1, P, KI]
            tl.load(kept_decay + entry * ring_decay_entry),  # scalar
            fetch(kept_u + (entry % ring_u_size) * ring_u_entry, in_v, WHOLE),  # [VL, VR]
        )
        entry = tl.where(entry + 1 == ring_size, 0, entry + 1)
    if before is not None:
        tokens, piece = tl.load(before + request), KI * V
        element = (head.to(tl.int32) * K + tl.arange(0, KI)[None, None, None, :]) * V + tile_v  # [VL, VR, 1, KI]
        if pending > 0:  # a state that was only read is rounded already
            by = (element, tokens, layer, seed_low, seed_high, piece)
            state = as_stored(state, by, read.dtype.element_ty, TILED)
    else:
        state = as_stored(state, None, read.dtype.element_ty, TILED)
    tl.debug_barrier()  # a store below may go to memory that another warp still reads above

    goal = tl.load(settled_units + request)
    if (has_settled != 0) & (goal >= 0):
        target = settled + goal * settled_unit + tl.load(settled_columns + request) * settled_column + head * settled_h
        place = tl.load(settled_columns + request)
        scales = scales_at(settled_scales, settled_scales_unit, settled_scales_column, goal, place, head, at_v, V)
        put_tile(target + (tile_v * settled_v + tile_k * settled_k), scales, state, inside, at_v, V, WHOLE, TILED)

    # Address of the state after row t of this head, if a state is stored per row: column t of unit `each_to`.
    each_to = tl.load(each_units + request)
    aside = (has_each != 0) & (each_to >= 0)
    column = each + each_to * each_unit + head * each_h
    # Every V tile keeps its part of u. The first tile keeps the decay. The first tile of a key head's first value head
    # keeps k.
    entry = tl.load(ring_keep + request).to(tl.int32)
    keeps = (kept_by >= 0) & (entry >= 0)
    keeps_k = (stripe == 0) & (head % group == 0)

    k, q = k + row * k_row + key_head * k_head, q + row * q_row + key_head * q_head
    v, core = v + row * v_row + head * v_head, core + row * core_row + head * core_head
    log_decay, beta = log_decay + row * log_decay_row + head * log_decay_head, beta + row * beta_row + head * beta_head
    base = state  # [VL, VR, P, KI], before row 0; only a tree needs it again
    if TREE:
        parents, did = parents + row, did + row * did_row + head * did_head + at_v
    for t in range(rows):
        if TREE:
            parent = tl.load(parents + t)
            if parent != t - 1:  # the same in all threads of the program, as the barrier asks
                # One lane stores an update, and all lanes of that row of V load it: wait until it is written.
                tl.debug_barrier()
                path = ancestry(parents, parent, t)
                state = base
                for node in range(t):
                    if (path >> node) & 1 != 0:
                        back = node - t  # the pointers are at row t
                        state = again(
                            state,
                            fetch(k + back * k_row + every_k, in_k, WHOLE),
                            tl.exp(tl.load(log_decay + back * log_decay_row)),
                            fetch(did + node * did_row, in_v, WHOLE),
                        )
        key = fetch(k + every_k, in_k, WHOLE)  # [VL, 1, P, KI]
        value = fetch(v + at_v, in_v, WHOLE)  # [VL, VR]
        decay, write = tl.exp(tl.load(log_decay)), tl.load(beta)  # scalars
        query = fetch(q + every_k, in_k, WHOLE)  # [VL, 1, P, KI]
        kq = overlap(fetch(k + tile_k, tile_k < K, WHOLE), fetch(q + tile_k, tile_k < K, WHOLE))  # scalar
        state, out, update = step(state, query, key, kq, value, decay, write)  # [VL, VR, P, KI], [VL, VR], [VL, VR]
        put(core + at_v, out, in_v, WHOLE)
        if TREE:
            put(did + t * did_row, update, in_v, WHOLE)
        if aside:
            scales = scales_at(each_scales, each_scales_unit, each_scales_column, each_to, t, head, at_v, V)
            by = None
            if before is not None:
                depth = depth_of(parents, t) if TREE else t + 1
                by = (element, tokens + depth, layer, seed_low, seed_high, piece)
            put_tile(column + t * each_column + (tile_v * each_v + tile_k * each_k), scales, state, inside, at_v, V,
                     WHOLE, TILED, by)  # fmt: skip
        if keeps:
            if keeps_k:
                once = in_k & (tl.arange(0, VL)[:, None, None, None] == 0)
                tl.store(kept_k + entry * ring_k_entry + every_k, key.to(ring_k.dtype.element_ty), mask=once)
            put(kept_u + (entry % ring_u_size) * ring_u_entry, update, in_v, WHOLE)
            tl.store(kept_decay + entry * ring_decay_entry, decay.to(ring_decay.dtype.element_ty), mask=stripe == 0)
        entry = tl.where(entry + 1 == ring_size, 0, entry + 1)
        k, q, v, core = k + k_row, q + q_row, v + v_row, core + core_row
        log_decay, beta = log_decay + log_decay_row, beta + beta_row

    tl.debug_barrier()  # `settled` and `store` may be the same memory
    goal = tl.load(store_units + request)
    if (has_store != 0) & (goal >= 0):
        target = store + goal * store_unit + tl.load(store_columns + request) * store_column + head * store_h
        place = tl.load(store_columns + request)
        scales = scales_at(store_scales, store_scales_unit, store_scales_column, goal, place, head, at_v, V)
        by = None
        if before is not None:
            by = (element, tokens + rows, layer, seed_low, seed_high, piece)
        put_tile(target + (tile_v * store_v + tile_k * store_k), scales, state, inside, at_v, V, WHOLE, TILED, by)


@triton.jit
def ancestry(parents, node, t):
    """The nodes from the root to `node`, as bits; 0 for the node -1. Row t comes after all of them."""
    path = node * 0  # int64
    at = tl.minimum(node, t - 1)
    while at >= 0:
        path = path | ((path * 0 + 1) << at)
        at = tl.minimum(tl.load(parents + at), at - 1)  # decreases, so the loop ends whatever the numbers are
    return path


@triton.jit
def depth_of(parents, t):
    """Count the nodes that lead from the memory before the window to row t, that one included."""
    depth, at = t * 0 + 1, tl.minimum(tl.load(parents + t), t - 1)
    while at >= 0:
        depth += 1
        at = tl.minimum(tl.load(parents + at), at - 1)  # decreases, so the loop ends whatever the numbers are
    return depth


@triton.jit
def tile_scale(state):
    """Return the scale of every number of a tile [VL, VR, P, KI], which has all of K."""
    largest = tl.max(tl.max(tl.abs(state), axis=3), axis=2)  # [VL, VR], the rows in their order
    scale = tl.reshape(scale_of(tl.reshape(largest, (state.shape[0] * state.shape[1],))), largest.shape)
    return tl.broadcast_to(scale[:, :, None, None], state.shape)


@triton.jit
def as_stored(state, by, DTYPE: tl.constexpr, TILED: tl.constexpr):
    """Round a tile of a state as a store and a load would."""
    if TILED:
        scale = tile_scale(state)
        return packed(state, scale, by).to(tl.float32) * scale
    else:
        if by is not None:
            state = fallen(state, by, DTYPE)
        return state.to(DTYPE).to(tl.float32)


@triton.jit
def put_tile(target, scales, state, inside, at_v, V, WHOLE: tl.constexpr, TILED: tl.constexpr, by=None):
    """Store a tile of a state [VL, VR, P, KI]; a tiled state is stored with its scales, one per ROWS rows."""
    if TILED:
        scale = tile_scale(state)
        put(target, packed(state, scale, by), inside, WHOLE)
        tl.store(scales, tl.max(tl.max(scale, axis=3), axis=2), mask=(at_v < V) & (at_v % ROWS == 0))
    else:
        if by is not None:
            state = fallen(state, by, target.dtype.element_ty)
        put(target, state, inside, WHOLE)
