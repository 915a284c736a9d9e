"""The gated delta rule token by token: kept tokens run again, then decode or verify rows, in one kernel.

A window may be a tree: then the kernel is compiled a second time, with the same body per token and a path back.
A GPU runs `launches_gluon.py` instead if it fits, with the same bits.

Leaves out: prefill chunks (`chunk16_fp32.py`), and the choice of addresses (the commit strategy makes it).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from instep_reference.contract.capacity import MOST_NODES
from instep_reference.contract.errors import Unsupported

from ...memory_addresses import Inputs, Part, Ring, Updates
from ...ops.op_protocols import GdnInputs
from ..device.masked_loads_and_stores import fetch, put
from ..device.pool_address import PackedRows, Rows, Spans, States, given, row_of, state_of
from ..device.scaled_tiles import ROWS, packed, scale_of, scales_at
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


def window(inputs: GdnInputs, part: Part, core: torch.Tensor, look: int = 0, delta: bool = True) -> None:
    """Run one part's kept tokens and rows through their states; write `core` [N, HV, V] and the memory of the part.

    look: number of its rows to check; those that no request covers become zero
    delta: whether tokens obey the delta rule; without it they write all of their value

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
        PackedRows.of(inputs, core), Spans.of(part),
        *(States.of(one, part.read) for one in (part.read, part.store, part.settled, part.per_row)),
        *map(given, (part.store, part.settled, part.per_row)), *_ring(inputs, part), part.parents,
        None if did is None else Rows(did, *did.stride()[:2]), *by, look, values, keys, heads // inputs.k.shape[1],
        VL=across, VR=rows // across, KT=padded, KI=piece, WHOLE=values % rows == 0 and padded == keys,
        TILED=part.read.scales is not None, DELTA=delta, warps=WARPS,
        registers=REGISTERS if plain and not tree else None,
    )  # fmt: skip


def rows_of(held: int, warps: int, keys: int) -> int:
    """Return the rows of V of a program whose threads hold `held` rows each."""
    return held * warps * 128 // min(KEY_PIECE, keys)


class Kept(NamedTuple):
    """Pools of updates as kernel arguments, [units, entries, ...], and where the entries of each request are.

    k_low, update_low: low parts, with the steps of their high parts; None: the ring is not split
    """

    k: torch.Tensor
    k_per_unit: int
    k_per_entry: int
    k_per_head: int
    decay: torch.Tensor
    decay_per_unit: int
    decay_per_entry: int
    decay_per_head: int
    update: torch.Tensor
    update_per_unit: int
    update_per_entry: int
    update_per_head: int
    units: torch.Tensor
    begin: torch.Tensor
    pending: torch.Tensor
    keep: torch.Tensor
    k_low: torch.Tensor | None = None
    update_low: torch.Tensor | None = None


def ring_of(ring: Ring) -> Kept:
    """Return a ring of updates as a kernel argument."""
    if isinstance(ring.kept, Inputs):
        raise Unsupported("this kernel keeps updates; a ring of inputs is for kernels that give none back")
    flattened: list[Any] = []
    for pool in (ring.kept.k, ring.kept.decay, ring.kept.update):
        assert pool.dim() == 3 or pool.stride(3) == 1, "entries have a contiguous last axis"
        flattened += [pool, *pool.stride()[:3]]
    low = () if isinstance(ring.kept, Updates) else (ring.kept.k_low, ring.kept.update_low)
    assert all(one.stride() == pool.stride() for one, pool in zip(low, (ring.kept.k, ring.own), strict=bool(low)))
    return Kept._make((*flattened, ring.units, ring.begin, ring.pending, ring.keep, *low, *(2 - len(low)) * (None,)))


def _ring(inputs: GdnInputs, part: Part) -> tuple[Kept, int, int, int]:
    """Return a ring with its two sizes, and a flag.

    A part without a ring passes its packed rows, with their own steps, in place of the pools. So the kernel compiles to
    the same code; the flag is 0, and nothing is read there.
    """
    if part.ring is None:
        pools = (y for x in (inputs.k, inputs.log_decay, inputs.v) for y in (x, 0, x.stride(0), x.stride(1)))
        return Kept._make((*pools, *(4 * (part.count,)), None, None)), 1, 1, 0
    return ring_of(part.ring), part.ring.size, part.ring.own.shape[1], 1


@triton.jit(do_not_specialize=["has_store", "has_settled", "has_each", "ring_size", "ring_u_size", "has_ring", "look",
                             "layer", "seed_low", "seed_high"])
def _window(
    x, spans, read, store, settled, each, has_store, has_settled, has_each, ring, ring_size, ring_u_size, has_ring,
    parents, did, before, layer, seed_low, seed_high, look, V, K, group,
    VL: tl.constexpr, VR: tl.constexpr, KT: tl.constexpr, KI: tl.constexpr, WHOLE: tl.constexpr, TILED: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """Run one request, one value head, VL * VR rows of V in a program. Grid (V tiles, HV, B).

    A tile is [VL, VR, P, KI]. The compiler lays the first axis and the last across lanes, the other two into registers.
    K is split into P = KT // KI pieces of KI numbers, so that a row's numbers are in few lanes. V is split so that a
    thread has each number of a key once, for all its rows.

    Several programs read the same keys and decays of the ring, and none waits for another. That is safe: one program
    writes an entry, and by contract never while the entry is pending. An update u is read only by the program that
    wrote it.

    In a tree row t continues row parents[begin + t], and `did` [N, HV, V] is scratch for the rows' updates. Else both
    arguments are None, and Triton compiles no code for them.
    """
    TREE: tl.constexpr = parents is not None
    # First, because Triton carries the names of a loop in the order of their definition.
    q, k, v, log_decay, beta, core = x.q.at, x.k.at, x.v.at, x.log_decay.at, x.beta.at, x.core.at
    request, stripe, head = tl.program_id(2), tl.program_id(0), tl.program_id(1).to(tl.int64)
    unit, rows = tl.load(spans.units + request), tl.load(spans.rows + request)
    known = tl.load(spans.fresh + request) == 0
    kept_by = tl.where(has_ring != 0, tl.load(ring.units + request), -1)
    asked = tl.minimum(tl.maximum(tl.load(ring.pending + request), 0), ring_size)
    # A fresh request runs nothing again: its ring may still hold entries of the slot's last owner.
    pending = tl.where(known & (kept_by >= 0), asked, 0)
    at_v = (stripe * VL + tl.arange(0, VL)[:, None]) * VR + tl.arange(0, VR)[None, :]  # [VL, VR]
    row = tl.load(spans.begin + request)
    share, requests = tl.cdiv(look, tl.num_programs(2)), tl.num_programs(2)
    for other in range(request * share, tl.minimum((request + 1) * share, look)):
        if (unit < 0) | (other < row) | (other >= row + rows):  # noqa: SIM102 (both tests of an `and` would run)
            if covering(other, tl.arange(0, LANES), spans.units, spans.begin, spans.rows, requests) == 0:
                nothing = tl.zeros((VL, VR), tl.float32)
                put(row_of(x.core, row * 0 + other, head) + at_v, nothing, at_v < V, WHOLE)
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
        source = state_of(read, unit, tl.load(read.columns + request), head)
        state = fetch(source + (tile_v * read.per_v + tile_k * read.per_k), inside, WHOLE).to(tl.float32)
        if TILED:
            scales = scales_at(read, unit, tl.load(read.columns + request), head, at_v, V)
            state = state * tl.load(scales, mask=in_v, other=0.0)[:, :, None, None]

    # Pointers to entry 0 of this request's rings. All heads of one key head share its k; u has V rows per program.
    kept_k = ring.k + kept_by * ring.k_per_unit + key_head * ring.k_per_head
    kept_decay = ring.decay + kept_by * ring.decay_per_unit + head * ring.decay_per_head
    kept_u = ring.update + kept_by * ring.update_per_unit + head * ring.update_per_head + at_v
    entry = tl.load(ring.begin + request).to(tl.int32)  # within a unit 32 bits are enough, and registers are scarce
    if ring.k_low is not None:
        low_k = ring.k_low + kept_by * ring.k_per_unit + key_head * ring.k_per_head
        low_u = ring.update_low + kept_by * ring.update_per_unit + head * ring.update_per_head + at_v
    for _age in range(pending):
        if ring.k_low is not None:
            # Numbers of 16 bits in fours, as those of 32: in eights they would change the layout of the tile, and with
            # it the order of the sums over K.
            place_k = tl.max_contiguous(entry * ring.k_per_entry + every_k, (1, 1, 1, 4))
            place_u = (entry % ring_u_size) * ring.update_per_entry
            state = again(
                state,
                joined(fetch(kept_k + place_k, in_k, WHOLE), fetch(low_k + place_k, in_k, WHOLE)),
                decay_at(kept_decay + entry * ring.decay_per_entry, every_k, in_k, x.channels, WHOLE),
                joined(fetch(kept_u + place_u, in_v, WHOLE), fetch(low_u + place_u, in_v, WHOLE)),
            )
        else:
            state = again(
                state,
                fetch(kept_k + entry * ring.k_per_entry + every_k, in_k, WHOLE),  # [VL, 1, P, KI]
                decay_at(kept_decay + entry * ring.decay_per_entry, every_k, in_k, x.channels, WHOLE),
                fetch(kept_u + (entry % ring_u_size) * ring.update_per_entry, in_v, WHOLE),  # [VL, VR]
            )
        entry = tl.where(entry + 1 == ring_size, 0, entry + 1)
    if before is not None:
        tokens, piece = tl.load(before + request), KI * V
        element = (head.to(tl.int32) * K + tl.arange(0, KI)[None, None, None, :]) * V + tile_v  # [VL, VR, 1, KI]
        if pending > 0:  # a state that was only read is rounded already
            by = (element, tokens, layer, seed_low, seed_high, piece)
            state = as_stored(state, by, read.pool.dtype.element_ty, TILED)
    else:
        state = as_stored(state, None, read.pool.dtype.element_ty, TILED)
    tl.debug_barrier()  # a store below may go to memory that another warp still reads above

    goal = tl.load(settled.units + request)
    if (has_settled != 0) & (goal >= 0):
        place = tl.load(settled.columns + request)
        target = state_of(settled, goal, place, head) + (tile_v * settled.per_v + tile_k * settled.per_k)
        scales = scales_at(settled, goal, place, head, at_v, V)
        put_tile(target, scales, state, inside, at_v, V, WHOLE, TILED)

    # Address of the state after row t of this head, if a state is stored per row: column t of unit `each_to`.
    each_to = tl.load(each.units + request)
    aside = (has_each != 0) & (each_to >= 0)
    column = each.pool + each_to * each.per_unit + head * each.per_head
    # Every V tile keeps its part of u. The first tile keeps the decay. The first tile of a key head's first value head
    # keeps k.
    entry = tl.load(ring.keep + request).to(tl.int32)
    keeps = (kept_by >= 0) & (entry >= 0)
    keeps_k = (stripe == 0) & (head % group == 0)

    k, q, v = row_of(x.k, row, key_head), row_of(x.q, row, key_head), row_of(x.v, row, head)
    core, log_decay, beta = row_of(x.core, row, head), row_of(x.log_decay, row, head), row_of(x.beta, row, head)
    base = state  # [VL, VR, P, KI], before row 0; only a tree needs it again
    if TREE:
        parents, updates = parents + row, row_of(did, row, head) + at_v
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
                            fetch(k + back * x.k.per_row + every_k, in_k, WHOLE),
                            tl.exp(decay_at(log_decay + back * x.log_decay.per_row, every_k, in_k, x.channels, WHOLE)),
                            fetch(updates + node * did.per_row, in_v, WHOLE),
                        )
        key = fetch(k + every_k, in_k, WHOLE)  # [VL, 1, P, KI]
        value = fetch(v + at_v, in_v, WHOLE)  # [VL, VR]
        decay, write = tl.exp(decay_at(log_decay, every_k, in_k, x.channels, WHOLE)), tl.load(beta)
        query = fetch(q + every_k, in_k, WHOLE)  # [VL, 1, P, KI]
        kq = overlap(fetch(k + tile_k, tile_k < K, WHOLE), fetch(q + tile_k, tile_k < K, WHOLE))  # scalar
        state, out, update = step(state, query, key, kq, value, decay, write, DELTA)  # and [VL, VR] twice
        put(core + at_v, out, in_v, WHOLE)
        if TREE:
            put(updates + t * did.per_row, update, in_v, WHOLE)
        if aside:
            scales = scales_at(each, each_to, t, head, at_v, V)
            by = None
            if before is not None:
                depth = depth_of(parents, t) if TREE else t + 1
                by = (element, tokens + depth, layer, seed_low, seed_high, piece)
            target = column + t * each.per_column + (tile_v * each.per_v + tile_k * each.per_k)
            put_tile(target, scales, state, inside, at_v, V, WHOLE, TILED, by)
        if keeps:
            if keeps_k:
                once = in_k & (tl.arange(0, VL)[:, None, None, None] == 0)
                place_k = entry * ring.k_per_entry + every_k
                if ring.k_low is not None:
                    place_k = tl.max_contiguous(entry * ring.k_per_entry + every_k, (1, 1, 1, 4))
                    tl.store(low_k + place_k, low_part(key, ring.k.dtype.element_ty), mask=once)
                tl.store(kept_k + place_k, key.to(ring.k.dtype.element_ty), mask=once)
            put(kept_u + (entry % ring_u_size) * ring.update_per_entry, update, in_v, WHOLE)
            if ring.k_low is not None:
                rest = low_part(update, ring.update.dtype.element_ty)
                put(low_u + (entry % ring_u_size) * ring.update_per_entry, rest, in_v, WHOLE)
            if x.channels is None:
                tl.store(
                    kept_decay + entry * ring.decay_per_entry, decay.to(ring.decay.dtype.element_ty), mask=stripe == 0
                )
            else:
                first = in_k & (tl.arange(0, VL)[:, None, None, None] == 0) & (stripe == 0)
                places = kept_decay + entry * ring.decay_per_entry + every_k
                tl.store(places, decay.to(ring.decay.dtype.element_ty), mask=first)
        entry = tl.where(entry + 1 == ring_size, 0, entry + 1)
        k, q, v, core = k + x.k.per_row, q + x.q.per_row, v + x.v.per_row, core + x.core.per_row
        log_decay, beta = log_decay + x.log_decay.per_row, beta + x.beta.per_row

    tl.debug_barrier()  # `settled` and `store` may be the same memory
    goal = tl.load(store.units + request)
    if (has_store != 0) & (goal >= 0):
        place = tl.load(store.columns + request)
        target = state_of(store, goal, place, head) + (tile_v * store.per_v + tile_k * store.per_k)
        scales = scales_at(store, goal, place, head, at_v, V)
        by = None
        if before is not None:
            by = (element, tokens + rows, layer, seed_low, seed_high, piece)
        put_tile(target, scales, state, inside, at_v, V, WHOLE, TILED, by)


@triton.jit
def decay_at(source, every_k, in_k, CHANNELS, WHOLE: tl.constexpr):
    """Load a decay, or a log decay: a scalar, or with CHANNELS one number per key channel [VL, 1, P, KI]."""
    if CHANNELS is None:
        return tl.load(source)
    else:
        return fetch(source + every_k, in_k, WHOLE)


@triton.jit
def joined(high, low):
    """Add the two parts of kept numbers: exact in fp32."""
    return high.to(tl.float32) + low.to(tl.float32)


@triton.jit
def low_part(x, DTYPE: tl.constexpr):
    """Return what the high part of x, rounded to nearest, lacks."""
    return (x - x.to(DTYPE).to(tl.float32)).to(DTYPE)


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
