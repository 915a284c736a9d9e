"""The kernel of windows with explicit layouts: states and token inputs come through shared memory.

Leaves out: which launches use it, and in which shape (`launches_gluon.py`).
"""

# ruff: noqa: SIM102 (a test for an absent argument is a separate `if`, so that the branch is not compiled)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device import pool_address, zero_uncovered_rows
from ..device.gluon_helpers import (
    LINE,
    NEWER,
    along,
    along_3,
    ask_for,
    async_copy,
    barrier,
    begin_copy,
    copied,
    copied_gates,
    gates,
    gdc_launch_dependents,
    gdc_wait,
    over_rows,
    place,
    shared,
    store_through,
    store_tile,
    whole,
    wrapped,
)
from ..rowwise import gdn_inputs as inputs_file
from . import one_token_update
from .token_inputs_gluon import NUMBERS, conved, length_1, put_windows, rows_at, taps_of, window_at

again, answer, forget, overlap, covering, row_of, softplus = (
    gluon.jit(one.fn) for one in (
        one_token_update.again, one_token_update.answer, one_token_update.forget, one_token_update.overlap,
        zero_uncovered_rows.covering, pool_address.row_of, inputs_file.softplus,
    )
)


class Layouts(NamedTuple):
    """Layouts of a launch, in the order in which `layouts` describes them."""

    tile: Any
    of_v: Any
    of_k: Any
    one: Any
    keys: Any
    rows: Any
    lanes: Any
    span: Any
    mine: Any
    lines: Any


@gluon.constexpr_function
def layouts(held, warps, keys, piece, bits):
    """Layouts of a state of numbers of `bits` bits, of which a thread holds `held` rows, and of its tokens.

    A tile [VL, VR, P, KI], its rows [VL, VR], its keys [P, KI], and [1] in every thread. Then of tokens, the keys
    [tokens, P, KI], the rows [tokens, VL, VR], and [tokens]. Rows of a state as they are copied, 16 bytes a lane, and
    as a thread takes them: the tile in two axes. Rows of the conv [tokens, K].
    """
    side, word, vector = piece // 4, 128 // bits, min(held, 4)  # lanes along K; numbers
    tile = gl.BlockedLayout([1, 1, 1, 4], [32 // side, 1, 1, side], [warps, 1, 1, 1], [3, 0, 1, 2])
    of_v = gl.SliceLayout(2, gl.SliceLayout(2, tile))
    constants = map(gl.constexpr, (  # Triton 3.6 passes a function no layout that is not wrapped
        tile, of_v, gl.SliceLayout(0, gl.SliceLayout(0, tile)), gl.SliceLayout(0, of_v),
        gl.BlockedLayout([1, 1, 4], [1, 32 // side, side], [warps, 1, 1], [2, 1, 0]),
        gl.BlockedLayout([1, 1, vector], [8, 4, 1], [1, warps, 1], [2, 1, 0]),
        gl.BlockedLayout([1], [32], [warps], [0]),
        gl.BlockedLayout([1, word], [32 * word // keys, keys // word], [warps, 1], [1, 0]),
        gl.BlockedLayout([held, 4], [32 // side, side], [warps, 1], [1, 0]),
        gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0]),
    ))  # fmt: skip
    return Layouts(*constants)


@gluon.jit
def wait_for_launch(
    read, spans, request, stripe, head, units, ROWS: gl.constexpr, KT: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Wait for the previous launch, which may not have written the tables yet, so their contents are a guess before.

    A state that is only prefetched into the cache may be any of the pool, whose unit is returned. If earlier programs
    prefetch the states of later ones, only those that run first guess: the others would wait for a load of no use.
    """
    near = units - 1
    if read.columns is None and SHAPE.guess > 0:
        if SHAPE.ahead == 0:
            near = ask_for_guess(read, spans, request, stripe, head, units, ROWS, KT, SHAPE)
        elif request * gl.num_programs(1) + gl.program_id(1) < 2 * SHAPE.ahead:
            ask_for_guess(read, spans, request, stripe, head, units, ROWS, KT, SHAPE)
    gdc_wait()
    gdc_launch_dependents()
    return near


@gluon.jit
def ask_for_guess(
    read, spans, request, stripe, head, units, ROWS: gl.constexpr, KT: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Prefetch the state of a guessed unit into the cache, which may be any unit of the pool  ->  the unit"""
    near = gl.minimum(gl.maximum(gl.load(spans.units + request, cache_modifier=".cg"), 0), units - 1)
    ahead = read.pool + near * read.per_unit + head * read.per_head
    ask_for(ahead, read.per_v, stripe * ROWS, ROWS // SHAPE.asked, KT)
    return near


@gluon.jit
def ask_for_later(read, spans, request, stripe, ROWS: gl.constexpr, KT: gl.constexpr, AHEAD: gl.constexpr):
    """Prefetch the same rows of the state that is AHEAD heads later, maybe of a later request."""
    heads = gl.num_programs(1)
    behind = request * heads + gl.program_id(1) + AHEAD
    later = behind // heads
    if later < gl.num_programs(2):
        unit = gl.load(spans.units + later)
        if unit >= 0:
            ahead = place(read.pool, unit, read.columns, later, read.per_unit, read.per_column)
            ahead += (behind % heads).to(gl.int64) * read.per_head
            ask_for(ahead, read.per_v, stripe * ROWS, ROWS, KT)


@gluon.jit
def clear_share(core, head, at_v, spans, request, unit, first, rows, look, LANES: gl.constexpr):
    """Clear a request's share of the rows that no request covers. A request that covers its whole share skips this."""
    requests = gl.num_programs(2)
    share = gl.cdiv(look, requests)
    look_from, look_to = request * share, gl.minimum((request + 1) * share, look)
    if (unit < 0) | (first > look_from) | (first + rows < look_to):
        for other in range(look_from, look_to):
            if (unit < 0) | (other < first) | (other >= first + rows):
                if covering(other, gl.arange(0, 32, LANES), spans.units, spans.begin, spans.rows, requests) == 0:
                    nothing = gl.full(at_v.shape, 0.0, core.at.dtype.element_ty, at_v.type.layout)
                    gl.store(row_of(core, first * 0 + other, head) + at_v, nothing)


@gluon.jit
def room_for_state(DTYPE: gl.constexpr, ROWS: gl.constexpr, VR: gl.constexpr, KT: gl.constexpr, KI: gl.constexpr):
    """Allocate a tile of a state. It comes through shared memory, so that whole lines are requested at once.

    In the layout of the tile a lane has pieces of lines. Pieces of a key are swapped there by row, to avoid bank
    conflicts: lanes load a piece of each of the rows that share a line at the same time.
    """
    TURNS: gl.constexpr = LINE // (KI * DTYPE.primitive_bitwidth)
    return gl.allocate_shared_memory(DTYPE, [ROWS, KT], gl.SwizzledSharedLayout(KI, VR, TURNS, [1, 0]))


@gluon.jit(do_not_specialize=["look"])
def staged_decode(
    x, rule, spans, read, store, look, group, units,
    KT: gl.constexpr, KI: gl.constexpr, SHAPE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Run one row of one request and nothing else, so that only its key and query are shared. As `staged_window`"""
    VR: gl.constexpr = SHAPE.held
    P: gl.constexpr = KT // KI
    DTYPE: gl.constexpr = read.pool.dtype.element_ty  # of states
    VL: gl.constexpr = gl.num_warps() * 128 // KI
    TO: gl.constexpr = layouts(VR, gl.num_warps(), KT, KI, DTYPE.primitive_bitwidth)
    FIRST: gl.constexpr = SHAPE.ahead == 0

    request, stripe, head = gl.program_id(2), gl.program_id(0), gl.program_id(1).to(gl.int64)
    key_head = (gl.program_id(1) // group).to(gl.int64)
    at_v = (stripe * VL + along(0, VL, TO.of_v)) * VR + along(1, VR, TO.of_v)  # [VL, VR]
    span_v = stripe * (VL * VR) + along(0, VL * VR, TO.span)
    source = read.pool + head * read.per_head + (span_v * read.per_v + along(1, KT, TO.span))
    row_k, copied_k = along_3(0, 1, TO.keys), along_3(1, P, TO.keys) * KI + along_3(2, KI, TO.keys)
    k, q = x.k.at + key_head * x.k.per_head, x.q.at + key_head * x.q.per_head
    v = x.v.at + head * x.v.per_head
    if rule is None:
        k, q = k + (row_k * x.k.per_row + copied_k), q + (row_k * x.q.per_row + copied_k)
    else:
        raw, raw_at = along(0, 1, TO.lines), along(1, KT, TO.lines)
        k, q = k + (raw * x.k.per_row + raw_at), q + (raw * x.q.per_row + raw_at)
        bias, rate = gl.load(rule.dt_bias + head).to(gl.float32), gl.exp(gl.load(rule.A_log + head).to(gl.float32))
    v += at_v
    log_decay, beta = x.log_decay.at + head * x.log_decay.per_head, x.beta.at + head * x.beta.per_head
    core = x.core.at + head * x.core.per_head + at_v

    if EARLY:
        wait_for_launch(read, spans, request, stripe, head, units, VL * VR, KT, SHAPE)
    unit, first = gl.load(spans.units + request), gl.load(spans.begin + request)
    rows, known = gl.load(spans.rows + request).to(gl.int32), gl.load(spans.fresh + request) == 0
    if SHAPE.ahead > 0:
        behind, all_heads = request * gl.num_programs(1) + gl.program_id(1) + SHAPE.ahead, gl.num_programs(1)
        later = gl.minimum(behind // all_heads, gl.num_programs(2) - 1)
        later_unit = gl.load(spans.units + later)
    if store.pool is not None:
        goal = gl.load(store.units + request)
    clear_share(x.core, head, at_v, spans, request, unit, first, rows, look, TO.lanes)
    if (unit < 0) | (rows <= 0):
        return

    tile = room_for_state(DTYPE, VL * VR, VR, KT, KI)
    source = place(source, unit, read.columns, request, read.per_unit, read.per_column)
    if rule is not None:  # norms are computed meanwhile
        begin_copy(tile, source, mask=(span_v >= 0) & known)
    if SHAPE.ahead > 0:  # after this program's own state, so that the later program waits less
        if (later_unit >= 0) & (behind < gl.num_programs(2) * all_heads):
            ahead = place(read.pool, later_unit, read.columns, later, read.per_unit, read.per_column)
            ahead += (behind % all_heads).to(gl.int64) * read.per_head
            ask_for(ahead, read.per_v, stripe * VL * VR, VL * VR, KT)
    core += first * x.core.per_row
    k, q, v = k + first * x.k.per_row, q + first * x.q.per_row, v + first * x.v.per_row
    log_decay, beta = log_decay + first * x.log_decay.per_row, beta + first * x.beta.per_row
    if x.channels is None:
        forgets, strength, value = gl.load(log_decay), gl.load(beta), gl.load(v).to(gl.float32)
    else:
        forgets = gl.load(log_decay + copied_k, mask=row_k < rows, other=0.0)
        strength, value = gl.load(beta), gl.load(v).to(gl.float32)
    if rule is None:
        keys, queries = copied(k, row_k < rows, [1, P, KI]), copied(q, row_k < rows, [1, P, KI])
        async_copy.commit_group()
        begin_copy(tile, source, mask=(span_v >= 0) & known)
        async_copy.commit_group()
        async_copy.wait_group(1)  # what overlaps are made of is here, and the state may still be on its way
    else:
        async_copy.commit_group()
        barrier()  # else the compiler makes the state wait for the key, which is used first
        raw_k, raw_q = gl.load(k, mask=raw < rows, other=0.0), gl.load(q, mask=raw < rows, other=0.0)
        raw_k, raw_q = raw_k.to(gl.float32), raw_q.to(gl.float32)
        forgets = -rate * softplus(forgets.to(gl.float32) + bias)
        strength = 1.0 / (1.0 + gl.exp(-strength.to(gl.float32)))
        keys, queries = shared(length_1(raw_k), [1, P, KI]), shared(length_1(raw_q) * rule.scale, [1, P, KI])
    decay = gl.exp(forgets)
    if x.channels is not None:
        decays = shared(decay, [1, P, KI])
    barrier()
    kq = gl.sum(overlap(whole(keys, [1, P, KI]).load(TO.keys), whole(queries, [1, P, KI]).load(TO.keys)), 0)
    async_copy.wait_group(0)
    barrier()
    state = gl.convert_layout(gl.reshape(tile.load(TO.mine).to(gl.float32), [VL, VR, P, KI]), TO.tile)
    if x.channels is not None:
        decay = over_rows(decays.index(0).load(TO.of_k))
    state, _ = token(state, queries.index(0), keys.index(0), kq, value, decay, strength, core, True, True)
    if store.pool is not None:
        if goal >= 0:
            target = place(store.pool, goal, store.columns, request, store.per_unit, store.per_column)
            target += head * store.per_head
            if SHAPE.lined:
                places = target + (span_v * store.per_v + along(1, KT, TO.span))
                tile_of = gl.convert_layout(gl.reshape(state.to(DTYPE), [VL * VR, KT]), TO.mine)
                store_through(tile, places, tile_of, FIRST)
            else:
                store_tile(target, store.per_v, state.to(DTYPE), stripe, False, FIRST)


@gluon.jit(do_not_specialize=["ring_size", "ring_u_size", "look"])
def staged_window(
    x, rule, conv, spans, read, store, settled, each, ring, ring_size, ring_u_size, look, group, units,
    KT: gl.constexpr, KI: gl.constexpr, KEPT: gl.constexpr, MOST: gl.constexpr, STEP: gl.constexpr,
    SHAPE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Run one request, one value head, VL * VR rows of V in a program. Grid (V tiles, HV, B).

    At most KEPT tokens run again, and then at most MOST rows. The pool of an absent address is None, and so are the
    keys of an absent ring; no code is compiled for it. If a rule is given, q, k and v are the conv's rows, and
    log_decay and beta are a and b. If a conv is given, too, q, k and v are its inputs, in words
    (`token_inputs_gluon.py`). Several programs of a key head read the windows before a request's rows from `conv.past`.
    So the windows after its rows are kept in another place.

    STEP: words from a row before the conv to the next one. SHAPE: as in `Shape`
    """
    VR: gl.constexpr = SHAPE.held
    P: gl.constexpr = KT // KI
    DTYPE: gl.constexpr = read.pool.dtype.element_ty  # of states
    W: gl.constexpr = gl.num_warps()
    VL: gl.constexpr = W * 128 // KI
    TO: gl.constexpr = layouts(VR, W, KT, KI, DTYPE.primitive_bitwidth)
    CONV: gl.constexpr = STEP is not None
    GUESSED: gl.constexpr = (SHAPE.guess == 2 or CONV) and rule is not None  # rows are loaded speculatively

    # Weights, and values that depend on no loaded data: computed while the previous launch still runs.
    request, stripe, head = gl.program_id(2), gl.program_id(0), gl.program_id(1).to(gl.int64)
    key_head = (gl.program_id(1) // group).to(gl.int64)
    at_v = (stripe * VL + along(0, VL, TO.of_v)) * VR + along(1, VR, TO.of_v)  # [VL, VR]
    span_v = stripe * (VL * VR) + along(0, VL * VR, TO.span)
    source = read.pool + head * read.per_head + (span_v * read.per_v + along(1, KT, TO.span))
    # Token inputs are copied by lanes, or groups of lanes, one per token.
    copied_k = along_3(1, P, TO.keys) * KI + along_3(2, KI, TO.keys)
    copied_v = (stripe * VL + along_3(1, VL, TO.rows)) * VR + along_3(2, VR, TO.rows)
    row_k, row_v, row = along_3(0, MOST, TO.keys), along_3(0, MOST, TO.rows), gl.arange(0, MOST, TO.lanes)
    k, q = x.k.at + key_head * x.k.per_head, x.q.at + key_head * x.q.per_head
    v = x.v.at + head * x.v.per_head
    if rule is None:
        k, q = k + (row_k * x.k.per_row + copied_k), q + (row_k * x.q.per_row + copied_k)
    else:
        if not CONV:
            raw, raw_at = along(0, MOST, TO.lines), along(1, KT, TO.lines)
        else:
            VALUES: gl.constexpr = VL * VR // NUMBERS  # words of a row of this program's values
            WORDS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])  # [tokens, words of K]
            FEW: gl.constexpr = gl.BlockedLayout([1, 1], [32 // VALUES, VALUES], [W, 1], [1, 0])  # [tokens, VALUES]
            raw, raw_at, heads = along(0, MOST, WORDS), along(1, KT // NUMBERS, WORDS), gl.num_programs(1)
            row_v, word_v = along(0, MOST, FEW), stripe * VALUES + along(1, VALUES, FEW)
            # The same words among those of all channels: q, then k, then v.
            all_q = gl.program_id(1) // group * (KT // NUMBERS) + raw_at
            all_k = heads // group * (KT // NUMBERS) + all_q
            all_v = 2 * (heads // group) * (KT // NUMBERS) + gl.program_id(1) * (gl.num_programs(0) * VALUES) + word_v
            past_q, past_k, past_v = conv.past.pool + 3 * all_q, conv.past.pool + 3 * all_k, conv.past.pool + 3 * all_v
            taps_q, taps_k, taps_v = taps_of(conv.taps, all_q), taps_of(conv.taps, all_k), taps_of(conv.taps, all_v)
        k, q = k + (raw * x.k.per_row + raw_at), q + (raw * x.q.per_row + raw_at)
        bias, rate = gl.load(rule.dt_bias + head).to(gl.float32), gl.exp(gl.load(rule.A_log + head).to(gl.float32))
    v += row_v * x.v.per_row + (word_v if CONV else copied_v)
    log_decay, beta = x.log_decay.at + head * x.log_decay.per_head, x.beta.at + head * x.beta.per_head
    out_at = x.core.at + head * x.core.per_head + at_v
    if ring.k is not None:
        old_k, old_v, old = along_3(0, KEPT, TO.keys), along_3(0, KEPT, TO.rows), gl.arange(0, KEPT, TO.lanes)
        kept_k, kept_u = ring.k + key_head * ring.k_per_head, ring.update + head * ring.update_per_head
        kept_decay = ring.decay + head * ring.decay_per_head
    CHANNELS: gl.constexpr = x.channels is not None
    LEADS: gl.constexpr = SHAPE.leads > 0 and EARLY and rule is None and read.columns is None
    # Decays and betas are copied like the other rows, because loads arrive only after the state. If some programs lead,
    # the others wait for such loads before they copy their state. That helps if all run at the same time (LOG.md).
    GATES_COPIED: gl.constexpr = CHANNELS and rule is None and not (LEADS or SHAPE.apart)

    # Rows are loaded from a guessed place after the wait, and again if their place differs.
    if GUESSED:
        guess = gl.minimum(gl.maximum(gl.load(spans.begin + request, cache_modifier=".cg"), 0), gl.maximum(look - 1, 0))
        if CONV:
            near_k, near_q, near_v = k + guess * x.k.per_row, q + guess * x.q.per_row, v + guess * x.v.per_row
            near_a, near_b = log_decay + guess * x.log_decay.per_row, beta + guess * x.beta.per_row
    if EARLY:
        near = wait_for_launch(read, spans, request, stripe, head, units, VL * VR, KT, SHAPE)
    if LEADS:  # the state of the guessed unit, and another one below if that is wrong
        leads = (request * gl.num_programs(1) + gl.program_id(1)) * gl.num_programs(0) + stripe < SHAPE.leads
        tile = room_for_state(DTYPE, VL * VR, VR, KT, KI)
        if leads:
            begin_copy(tile, source + near * read.per_unit, mask=span_v >= 0)
        async_copy.commit_group()
    if GUESSED and not CONV:
        raw_k, raw_q, raw_v, forgets, strength = rows_at(
            x, k, q, v, log_decay, beta, guess, look - guess, raw, row_v, row, None
        )
    unit, first = gl.load(spans.units + request), gl.load(spans.begin + request)
    rows, known = gl.load(spans.rows + request).to(gl.int32), gl.load(spans.fresh + request) == 0
    pending = 0
    if ring.k is not None:
        kept_by = gl.load(ring.units + request)
        asked = gl.minimum(gl.maximum(gl.load(ring.pending + request), 0), ring_size).to(gl.int32)
        oldest, keep = gl.load(ring.begin + request).to(gl.int32), gl.load(ring.keep + request).to(gl.int32)
        pending = gl.where(known & (kept_by >= 0), asked, 0)
        keeps = (kept_by >= 0) & (keep >= 0)
    if store.pool is not None:
        goal = gl.load(store.units + request)
    if settled.pool is not None:
        settle = gl.load(settled.units + request)
    if each.pool is not None:
        each_to = gl.load(each.units + request)
    if CONV:  # after the tables, because the place of the state depends on them
        kept_to = gl.load(conv.kept.units + request)
        raw_k, raw_q, raw_v, forgets, strength = rows_at(
            x, near_k, near_q, near_v, near_a, near_b, 0, look - guess, raw, row_v, row, STEP
        )
    clear_share(x.core, head, at_v, spans, request, unit, first, rows, look, TO.lanes)
    if (unit < 0) | ((rows <= 0) & (pending <= 0)):
        if LEADS:
            async_copy.wait_group(0)
        return

    if not LEADS:
        tile = room_for_state(DTYPE, VL * VR, VR, KT, KI)
    if CONV:
        before_q = window_at(conv.past, past_q, unit, request, raw, known)
        before_k = window_at(conv.past, past_k, unit, request, raw, known)
        before_v = window_at(conv.past, past_v, unit, request, row_v, known)
    source = place(source, unit, read.columns, request, read.per_unit, read.per_column)
    if rule is not None:  # norms are computed meanwhile
        begin_copy(tile, source, mask=(span_v >= 0) & known)
    if LEADS:
        if leads & ((near != unit) | (known == 0)):
            async_copy.wait_group(0)
            barrier()
            begin_copy(tile, source, mask=(span_v >= 0) & known)
        async_copy.commit_group()

    if ring.k is not None:
        kept_k, kept_decay = kept_k + kept_by * ring.k_per_unit, kept_decay + kept_by * ring.decay_per_unit
        kept_u += kept_by * ring.update_per_unit
        entry_k, entry_v = wrapped(oldest + old_k, ring_size), (oldest + old_v) % ring_u_size
        old_keys = copied(kept_k + entry_k * ring.k_per_entry + copied_k, old_k < pending, [KEPT, P, KI])
        updates = copied(kept_u + entry_v * ring.update_per_entry + copied_v, old_v < pending, [KEPT, VL, VR])
        entry = wrapped(oldest + old, ring_size)
        if CHANNELS:
            aged = copied(kept_decay + entry_k * ring.decay_per_entry + copied_k, old_k < pending, [KEPT, P, KI])
        else:
            aged = gl.load(kept_decay + entry * ring.decay_per_entry, mask=old < pending, other=0.0)
        kept_rows = (kept_decay, ring.decay_per_entry, kept_k, ring.k_per_entry, copied_k, ring_size)
    out_at += first * x.core.per_row
    if GUESSED:
        if (guess != first) | (first + rows > look):
            raw_k, raw_q, raw_v, forgets, strength = rows_at(
                x, k, q, v, log_decay, beta, first, rows, raw, row_v, row, STEP
            )
    else:
        k, q, v = k + first * x.k.per_row, q + first * x.q.per_row, v + first * x.v.per_row
        log_decay, beta = log_decay + first * x.log_decay.per_row, beta + first * x.beta.per_row
        if CHANNELS:
            log_decay += row_k * x.log_decay.per_row + copied_k
        if GATES_COPIED:
            fades = copied(log_decay, row_k < rows, [MOST, P, KI])
            writes = copied_gates(beta + row * x.beta.per_row, row < rows, MOST)
        else:
            if CHANNELS:
                forgets = gl.load(log_decay, mask=row_k < rows, other=0.0)
            else:
                forgets = gl.load(log_decay + row * x.log_decay.per_row, mask=row < rows, other=0.0)
            strength = gl.load(beta + row * x.beta.per_row, mask=row < rows, other=0.0)
    if rule is None:
        keys = copied(k, row_k < rows, [MOST, P, KI])
        queries = copied(q, row_k < rows, [MOST, P, KI])
        values = copied(v, row_v < rows, [MOST, VL, VR])
        async_copy.commit_group()
        if not LEADS or not leads:
            begin_copy(tile, source, mask=(span_v >= 0) & known)
        async_copy.commit_group()
        if SHAPE.ahead > 0:  # after this program's own state, and where nothing waits for the load of a unit
            ask_for_later(read, spans, request, stripe, VL * VR, KT, SHAPE.ahead)
        async_copy.wait_group(1)  # what overlaps are made of is here, and the state may still be on its way
        if GATES_COPIED:
            forgets = whole(fades, [MOST, P, KI]).load(TO.keys)
    else:
        async_copy.commit_group()
        if not GUESSED:
            raw_k = gl.load(k, mask=raw < rows, other=0.0)
            raw_q = gl.load(q, mask=raw < rows, other=0.0)
            raw_v = gl.load(v, mask=row_v < rows, other=0.0)
        if CONV:
            raw_k, window_k = conved(raw_k, before_k, taps_k, raw, TO.lines)
            raw_q, window_q = conved(raw_q, before_q, taps_q, raw, TO.lines)
            raw_v, window_v = conved(raw_v, before_v, taps_v, row_v, None)
        raw_k, raw_q = raw_k.to(gl.float32), raw_q.to(gl.float32)
        values = shared(raw_v.to(gl.float32), [MOST, VL, VR])
        forgets = -rate * softplus(forgets.to(gl.float32) + bias)
        strength = 1.0 / (1.0 + gl.exp(-strength.to(gl.float32)))
        keys, queries = shared(length_1(raw_k), [MOST, P, KI]), shared(length_1(raw_q) * rule.scale, [MOST, P, KI])
    decay = gl.exp(forgets)
    if not GATES_COPIED:
        writes = gates(strength, MOST)
    decays = shared(decay, [MOST, P, KI]) if CHANNELS else gates(decay, MOST)
    if ring.k is not None:
        old_decays = aged if CHANNELS else gates(aged, KEPT)
    barrier()
    every_key, every_query = whole(keys, [MOST, P, KI]).load(TO.keys), whole(queries, [MOST, P, KI]).load(TO.keys)
    overlaps = gates(overlap(every_key, every_query), MOST)
    if CONV:  # while the state is still on its way
        if kept_to >= 0:
            kept = conv.kept.pool + kept_to * conv.kept.per_unit
            put_windows(kept + row_v * conv.kept.per_column, all_v, window_v, row_v < rows)
            if (stripe == 0) & (head % group == 0):
                put_windows(kept + raw * conv.kept.per_column, all_q, window_q, raw < rows)
                put_windows(kept + raw * conv.kept.per_column, all_k, window_k, raw < rows)
    async_copy.wait_group(0)
    barrier()
    state = gl.convert_layout(gl.reshape(tile.load(TO.mine).to(gl.float32), [VL, VR, P, KI]), TO.tile)

    if ring.k is not None:
        if SHAPE.kept_first:  # a 64-bit division is a call, after which ptxas orders both loops differently
            keep_rows(kept_rows, keep, keeps & (stripe == 0), head % group == 0, decay, row, every_key, row_k, rows)
        for age in range(pending):
            again_key = over_rows(old_keys.index(age).load(TO.of_k))
            update = updates.index(age).load(TO.of_v)
            state = again(state, again_key, decay_at(old_decays, age, TO, CHANNELS), update)
        state = state.to(DTYPE).to(gl.float32)  # a state that was only read is rounded already
        own = keep % ring_u_size
    if settled.pool is not None:
        if settle >= 0:
            target = place(settled.pool, settle, settled.columns, request, settled.per_unit, settled.per_column)
            store_tile(target + head * settled.per_head, settled.per_v, state.to(DTYPE), stripe, SHAPE.lined, True)
    # If rings keep first, the address is computed here, for the same reason.
    core = row_of(x.core, first, head) + at_v if SHAPE.kept_first else out_at
    GOES_ON: gl.constexpr = store.pool is not None or each.pool is not None
    if SHAPE.apart and not GOES_ON:
        for t in gl.static_range(MOST):
            faded, write = decay_at(decays, t, TO, CHANNELS), gl.sum(writes.index(t).load(TO.one), 0)
            value, kq = values.index(t).load(TO.of_v), gl.sum(overlaps.index(t).load(TO.one), 0)
            # `token` would do the same in another order, and ptxas would assign other registers than those measured.
            key, live = over_rows(keys.index(t).load(TO.of_k)), (at_v >= 0) & (t < rows)
            if CHANNELS:
                state, faded = forget(state, faded), None
            out, update = answer(state, over_rows(queries.index(t).load(TO.of_k)), key, kq, value, faded, write)
            gl.store(core, out.to(core.dtype.element_ty), mask=live)
            if t + 1 < MOST:
                state = again(state, key, faded, update)
            core += x.core.per_row
            if ring.k is not None:
                gl.store(kept_u + own * ring.update_per_entry + at_v, update, mask=live & keeps)
                own = gl.where(own + 1 == ring_u_size, 0, own + 1)
    else:
        # Without it a newer Triton spills part of a window.
        TWICE: gl.constexpr = MOST == 1 or (NEWER and SHAPE.ends and not GOES_ON)
        for t in range(rows):
            faded, write = decay_at(decays, t, TO, CHANNELS), gl.sum(writes.index(t).load(TO.one), 0)
            value, kq = values.index(t).load(TO.of_v), gl.sum(overlaps.index(t).load(TO.one), 0)
            asked_for = True if GOES_ON or not SHAPE.ends else t + 1 < rows
            state, update = token(
                state, queries.index(t), keys.index(t), kq, value, faded, write, core, TWICE, asked_for
            )
            core += x.core.per_row
            if each.pool is not None:
                if each_to >= 0:
                    column = each.pool + each_to * each.per_unit + t * each.per_column + head * each.per_head
                    store_tile(column, each.per_v, state.to(DTYPE), stripe, False, False)
            if ring.k is not None:
                if keeps:
                    gl.store(kept_u + own * ring.update_per_entry + at_v, update)
                own = gl.where(own + 1 == ring_u_size, 0, own + 1)
    if ring.k is not None:
        if not SHAPE.kept_first:
            leads = head == key_head * group
            keep_rows(kept_rows, keep, keeps & (stripe == 0), leads, decay, row, every_key, row_k, rows)
    if store.pool is not None:
        if goal >= 0:
            target = place(store.pool, goal, store.columns, request, store.per_unit, store.per_column)
            store_tile(target + head * store.per_head, store.per_v, state.to(DTYPE), stripe, SHAPE.lined, True)


@gluon.jit
def decay_at(decays, row, TO: gl.constexpr, CHANNELS: gl.constexpr):
    """Load the decay of a row from shared memory: a scalar, or with CHANNELS one per key channel [1, 1, P, KI]."""
    if CHANNELS:
        return over_rows(decays.index(row).load(TO.of_k))
    else:
        return gl.sum(decays.index(row).load(TO.one), 0)


@gluon.jit
def keep_rows(ring, keep, here, leads, decay, row, keys, row_k, rows):
    """Store keys and decays of a window's rows in the ring, from entry `keep` on.

    leads: whether this head keeps the key, too;  decay: one per row, or [tokens, P, KI] like keys
    """
    kept_decay, decay_entry, kept_k, k_entry, at_k, size = ring
    CHANNELS: gl.constexpr = len(decay.shape) > 1
    decay_row = row_k if CHANNELS else row
    decay_places = kept_decay + wrapped(keep + decay_row, size) * decay_entry
    if CHANNELS:
        decay_places += at_k
    key_places = kept_k + wrapped(keep + row_k, size) * k_entry + at_k
    if here:
        gl.store(decay_places, decay, mask=decay_row < rows)
        if leads:
            gl.store(key_places, keys, mask=row_k < rows)


@gluon.jit
def token(state, query, key, kq, value, decay, beta, core, TWICE: gl.constexpr, asked_for):
    """Do `step` for a row whose query and key are in shared memory, and store its read-out  ->  the state, the update

    decay: a scalar, or one per key channel [1, 1, P, KI]
    TWICE: the key is loaded twice, so that it occupies no registers in between;  asked_for: whether the next state is
    needed
    """
    OF_K: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, state.type.layout))
    if len(decay.shape) > 0:
        state, decay = forget(state, decay), None
    first = over_rows(key.load(OF_K))
    out, update = answer(state, over_rows(query.load(OF_K)), first, kq, value, decay, beta)
    if TWICE:
        barrier()
        first = over_rows(key.load(OF_K))
    gl.store(core, out.to(core.dtype.element_ty))
    if asked_for:
        state = again(state, first, decay, update)
    return state, update
