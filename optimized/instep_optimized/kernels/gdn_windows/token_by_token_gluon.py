"""The kernel of windows with explicit layouts: states and token inputs come through shared memory.

Leaves out: which launches use it, and in which shape (`launches_gluon.py`).
"""

# ruff: noqa: SIM102 (a test for an absent argument is a separate `if`, so that the branch is not compiled)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device import zero_uncovered_rows
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

again, answer, overlap, covering, softplus = (
    gluon.jit(one.fn) for one in (
        one_token_update.again, one_token_update.answer, one_token_update.overlap, zero_uncovered_rows.covering,
        inputs_file.softplus,
    )
)


@gluon.jit(do_not_specialize=["ring_size", "ring_u_size", "look"])
def staged_window(
    q, q_row, q_head, k, k_row, k_head, v, v_row, v_head,
    log_decay, log_decay_row, log_decay_head, beta, beta_row, beta_head, core, core_row, core_head,
    A_log, dt_bias, scale, taps, past, past_columns, past_unit, past_column, kept, kept_units, kept_unit, kept_column,
    begin, count, fresh,
    read, read_units, read_columns, read_unit, read_column, read_h, read_v: gl.constexpr,
    store, store_units, store_columns, store_unit, store_column, store_h, store_v: gl.constexpr,
    settled, settled_units, settled_columns, settled_unit, settled_column, settled_h, settled_v: gl.constexpr,
    each, each_units, each_columns, each_unit, each_column, each_h, each_v: gl.constexpr,
    ring_k, ring_k_unit, ring_k_entry, ring_k_head, ring_decay, ring_decay_unit, ring_decay_entry, ring_decay_head,
    ring_u, ring_u_unit, ring_u_entry, ring_u_head,
    ring_units, ring_begin, ring_pending, ring_keep, ring_size, ring_u_size,
    group, look, units, VR: gl.constexpr, KT: gl.constexpr, KI: gl.constexpr, KEPT: gl.constexpr, MOST: gl.constexpr,
    ALONE: gl.constexpr, AHEAD: gl.constexpr, LINED: gl.constexpr, ENDS: gl.constexpr, APART: gl.constexpr,
    GUESS: gl.constexpr, KEPT_FIRST: gl.constexpr, ASKED: gl.constexpr, STEP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Run one request, one value head, VL * VR rows of V in a program. Grid (V tiles, HV, B).

    At most KEPT tokens run again, and then at most MOST rows. An absent address is None, and so is an absent ring; no
    code is compiled for it. If A_log is given, q, k and v are the conv's rows, and log_decay and beta are a and b. If
    taps are given, too, q, k and v are inputs of the conv, in words (`token_inputs_gluon.py`). Several programs of a
    key head
    read the windows before a request's rows from `past`. So the windows after its rows are kept in another place.

    ALONE: one row and nothing else, so that only its key and query are shared.
    AHEAD: prefetch distance of states, in heads.
    STEP: words from a row before the conv to the next one. The others: as in `Shape`.
    """
    W: gl.constexpr = gl.num_warps()
    P: gl.constexpr = KT // KI
    DTYPE: gl.constexpr = read.dtype.element_ty  # of states
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
    # Rows of a state as they are copied, 16 bytes a lane, and as a thread takes them: TILE in two axes.
    WORD: gl.constexpr = 128 // DTYPE.primitive_bitwidth
    SPAN: gl.constexpr = gl.BlockedLayout([1, WORD], [32 * WORD // KT, KT // WORD], [W, 1], [1, 0])
    MINE: gl.constexpr = gl.BlockedLayout([VR, 4], [32 // SIDE, SIDE], [W, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])  # [tokens, K], rows of the conv
    CONV: gl.constexpr = taps is not None
    GUESSED: gl.constexpr = (GUESS == 2 or CONV) and A_log is not None and not ALONE  # rows are loaded speculatively

    # Weights, and values that depend on no loaded data: computed while the previous launch still runs.
    request, stripe, head = gl.program_id(2), gl.program_id(0), gl.program_id(1).to(gl.int64)
    key_head = (gl.program_id(1) // group).to(gl.int64)
    at_v = (stripe * VL + along(0, VL, OF_V)) * VR + along(1, VR, OF_V)  # [VL, VR]
    span_v = stripe * (VL * VR) + along(0, VL * VR, SPAN)
    source = read + head * read_h + (span_v * read_v + along(1, KT, SPAN))
    # Token inputs are copied by lanes, or groups of lanes, one per token.
    copied_k = along_3(1, P, KEYS) * KI + along_3(2, KI, KEYS)
    copied_v = (stripe * VL + along_3(1, VL, ROWS)) * VR + along_3(2, VR, ROWS)
    row_k, row_v, row = along_3(0, MOST, KEYS), along_3(0, MOST, ROWS), gl.arange(0, MOST, LANES)
    k, q, v = k + key_head * k_head, q + key_head * q_head, v + head * v_head
    if A_log is None:
        k, q = k + (row_k * k_row + copied_k), q + (row_k * q_row + copied_k)
    else:
        if not CONV:
            raw, raw_at = along(0, MOST, LINES), along(1, KT, LINES)
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
            past_q, past_k, past_v = past + 3 * all_q, past + 3 * all_k, past + 3 * all_v
            taps_q, taps_k, taps_v = taps_of(taps, all_q), taps_of(taps, all_k), taps_of(taps, all_v)
        k, q = k + (raw * k_row + raw_at), q + (raw * q_row + raw_at)
        bias, rate = gl.load(dt_bias + head).to(gl.float32), gl.exp(gl.load(A_log + head).to(gl.float32))
    if ALONE:
        v += at_v
    elif CONV:
        v += row_v * v_row + word_v
    else:
        v += row_v * v_row + copied_v
    log_decay, beta = log_decay + head * log_decay_head, beta + head * beta_head
    out_at = core + head * core_head + at_v
    if ring_units is not None:
        old_k, old_v, old = along_3(0, KEPT, KEYS), along_3(0, KEPT, ROWS), gl.arange(0, KEPT, LANES)
        kept_k, kept_u = ring_k + key_head * ring_k_head, ring_u + head * ring_u_head
        kept_decay = ring_decay + head * ring_decay_head

    # The previous launch may not have written the tables yet, so their contents are a guess. A state that is only
    # prefetched into the cache may be any of the pool. Rows are loaded after the wait, and again if their place
    # differs.
    if GUESSED:
        guess = gl.minimum(gl.maximum(gl.load(begin + request, cache_modifier=".cg"), 0), gl.maximum(look - 1, 0))
        if CONV:
            near_k, near_q, near_v = k + guess * k_row, q + guess * q_row, v + guess * v_row
            near_a, near_b = log_decay + guess * log_decay_row, beta + guess * beta_row
    if EARLY:  # code before the wait may run while the previous launch still does
        if read_columns is None and GUESS > 0:
            said = gl.load(read_units + request, cache_modifier=".cg")
            ahead = read + gl.minimum(gl.maximum(said, 0), units - 1) * read_unit + head * read_h
            ask_for(ahead, read_v, stripe * VL * VR, VL * VR // ASKED, KT)
        gdc_wait()
        gdc_launch_dependents()
    if GUESSED and not CONV:
        raw_k, raw_q, raw_v, forgets, strength = rows_at(
            guess, look - guess, k, k_row, q, q_row, v, v_row, log_decay, log_decay_row, beta, beta_row,
            raw, row_v, row, None,
        )  # fmt: skip
    unit, first, rows = gl.load(read_units + request), gl.load(begin + request), gl.load(count + request).to(gl.int32)
    known, pending = gl.load(fresh + request) == 0, 0
    if AHEAD > 0:
        behind, all_heads = request * gl.num_programs(1) + gl.program_id(1) + AHEAD, gl.num_programs(1)
        later = gl.minimum(behind // all_heads, gl.num_programs(2) - 1)
        later_unit = gl.load(read_units + later)
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
    if CONV:  # after the tables, because the place of the state depends on them
        kept_to = gl.load(kept_units + request)
        raw_k, raw_q, raw_v, forgets, strength = rows_at(
            0, look - guess, near_k, k_row, near_q, q_row, near_v, v_row, near_a, log_decay_row, near_b, beta_row,
            raw, row_v, row, STEP,
        )  # fmt: skip
    requests = gl.num_programs(2)
    share = gl.cdiv(look, requests)
    look_from, look_to = request * share, gl.minimum((request + 1) * share, look)
    if (unit < 0) | (first > look_from) | (first + rows < look_to):  # a request that covers its whole share skips this
        for other in range(look_from, look_to):
            if (unit < 0) | (other < first) | (other >= first + rows):
                if covering(other, gl.arange(0, 32, LANES), read_units, begin, count, requests) == 0:
                    nothing = gl.full((VL, VR), 0.0, core.dtype.element_ty, OF_V)
                    gl.store(core + (first * 0 + other) * core_row + head * core_head + at_v, nothing)
    if (unit < 0) | ((rows <= 0) & (pending <= 0)):
        return

    # A state comes through shared memory, so that whole lines are requested at once: in TILE a lane has pieces of them.
    # Pieces of a key are swapped there by row, to avoid bank conflicts: lanes load a piece of each of the rows that
    # share a line at the same time.
    TURNS: gl.constexpr = LINE // (KI * DTYPE.primitive_bitwidth)
    tile = gl.allocate_shared_memory(DTYPE, [VL * VR, KT], gl.SwizzledSharedLayout(KI, VR, TURNS, [1, 0]))
    if CONV:
        before_q = window_at(place(past_q, unit, past_columns, request, past_unit, past_column), raw, known)
        before_k = window_at(place(past_k, unit, past_columns, request, past_unit, past_column), raw, known)
        before_v = window_at(place(past_v, unit, past_columns, request, past_unit, past_column), row_v, known)
    source = place(source, unit, read_columns, request, read_unit, read_column)
    if A_log is not None:  # norms are computed meanwhile
        begin_copy(tile, source, mask=(span_v >= 0) & known)

    if AHEAD > 0:  # after this program's own state, so that the later program waits less
        if (later_unit >= 0) & (behind < gl.num_programs(2) * all_heads):
            ahead = place(read, later_unit, read_columns, later, read_unit, read_column)
            ask_for(ahead + (behind % all_heads).to(gl.int64) * read_h, read_v, stripe * VL * VR, VL * VR, KT)

    if ring_units is not None:
        kept_k, kept_decay = kept_k + kept_by * ring_k_unit, kept_decay + kept_by * ring_decay_unit
        kept_u += kept_by * ring_u_unit
        entry_k, entry_v = wrapped(oldest + old_k, ring_size), (oldest + old_v) % ring_u_size
        old_keys = copied(kept_k + entry_k * ring_k_entry + copied_k, old_k < pending, [KEPT, P, KI])
        updates = copied(kept_u + entry_v * ring_u_entry + copied_v, old_v < pending, [KEPT, VL, VR])
        entry = wrapped(oldest + old, ring_size)
        aged = gl.load(kept_decay + entry * ring_decay_entry, mask=old < pending, other=0.0)
        ring = (kept_decay, ring_decay_entry, kept_k, ring_k_entry, copied_k, ring_size)
    out_at += first * core_row
    if GUESSED:
        if (guess != first) | (first + rows > look):
            raw_k, raw_q, raw_v, forgets, strength = rows_at(
                first, rows, k, k_row, q, q_row, v, v_row, log_decay, log_decay_row, beta, beta_row,
                raw, row_v, row, STEP if CONV else None,
            )  # fmt: skip
    else:
        k, q, v = k + first * k_row, q + first * q_row, v + first * v_row
        log_decay, beta = log_decay + first * log_decay_row, beta + first * beta_row
        if ALONE:
            forgets, strength, value = gl.load(log_decay), gl.load(beta), gl.load(v).to(gl.float32)
        else:
            forgets = gl.load(log_decay + row * log_decay_row, mask=row < rows, other=0.0)
            strength = gl.load(beta + row * beta_row, mask=row < rows, other=0.0)
    if A_log is None:
        keys = copied(k, row_k < rows, [MOST, P, KI])
        queries = copied(q, row_k < rows, [MOST, P, KI])
        if not ALONE:
            values = copied(v, row_v < rows, [MOST, VL, VR])
        async_copy.commit_group()
        begin_copy(tile, source, mask=(span_v >= 0) & known)
        async_copy.commit_group()
        async_copy.wait_group(1)  # what overlaps are made of is here, and the state may still be on its way
    else:
        async_copy.commit_group()
        if ALONE:  # else the compiler makes the state wait for the key, which is used first
            barrier()
        if not GUESSED:
            raw_k = gl.load(k, mask=raw < rows, other=0.0)
            raw_q = gl.load(q, mask=raw < rows, other=0.0)
            if not ALONE:
                raw_v = gl.load(v, mask=row_v < rows, other=0.0)
        if CONV:
            raw_k, window_k = conved(raw_k, before_k, taps_k, raw, LINES)
            raw_q, window_q = conved(raw_q, before_q, taps_q, raw, LINES)
            raw_v, window_v = conved(raw_v, before_v, taps_v, row_v, None)
        raw_k, raw_q = raw_k.to(gl.float32), raw_q.to(gl.float32)
        if not ALONE:
            values = shared(raw_v.to(gl.float32), [MOST, VL, VR])
        forgets = -rate * softplus(forgets.to(gl.float32) + bias)
        strength = 1.0 / (1.0 + gl.exp(-strength.to(gl.float32)))
        keys, queries = shared(length_1(raw_k), [MOST, P, KI]), shared(length_1(raw_q) * scale, [MOST, P, KI])
    decay = gl.exp(forgets)
    if not ALONE:
        writes, decays = gates(strength, MOST), gates(decay, MOST)
    if ring_units is not None:
        old_decays = gates(aged, KEPT)
    barrier()
    every_key, every_query = whole(keys, [MOST, P, KI]).load(KEYS), whole(queries, [MOST, P, KI]).load(KEYS)
    products = overlap(every_key, every_query)
    if not ALONE:
        overlaps = gates(products, MOST)
    if CONV:  # while the state is still on its way
        if kept_to >= 0:
            kept += kept_to * kept_unit
            put_windows(kept + row_v * kept_column, all_v, window_v, row_v < rows)
            if (stripe == 0) & (head % group == 0):
                put_windows(kept + raw * kept_column, all_q, window_q, raw < rows)
                put_windows(kept + raw * kept_column, all_k, window_k, raw < rows)
    async_copy.wait_group(0)
    barrier()
    state = gl.convert_layout(gl.reshape(tile.load(MINE).to(gl.float32), [VL, VR, P, KI]), TILE)

    if ring_units is not None:
        if KEPT_FIRST:  # a 64-bit division is a call, after which ptxas orders both loops differently
            keep_rows(ring, keep, keeps & (stripe == 0), head % group == 0, decay, row, every_key, row_k, rows)
        for age in range(pending):
            again_key = over_rows(old_keys.index(age).load(OF_K))
            update = updates.index(age).load(OF_V)
            state = again(state, again_key, gl.sum(old_decays.index(age).load(ONE), 0), update)
        state = state.to(DTYPE).to(gl.float32)  # a state that was only read is rounded already
        own = keep % ring_u_size
    if settled is not None:
        if settle >= 0:
            target = place(settled, settle, settled_columns, request, settled_unit, settled_column)
            store_tile(target + head * settled_h, settled_v, state.to(DTYPE), stripe, LINED, AHEAD == 0)
    # If rings keep first, the address is computed here, for the same reason.
    core = core + first * core_row + head * core_head + at_v if KEPT_FIRST else out_at
    if ALONE:  # the program has a row, or it would have returned
        kq = gl.sum(products, 0)
        state, _ = token(state, queries.index(0), keys.index(0), kq, value, decay, strength, core, True, True)
    else:
        GOES_ON: gl.constexpr = store is not None or each is not None
        if APART and not GOES_ON:
            for t in gl.static_range(MOST):
                forget, write = gl.sum(decays.index(t).load(ONE), 0), gl.sum(writes.index(t).load(ONE), 0)
                value, kq = values.index(t).load(OF_V), gl.sum(overlaps.index(t).load(ONE), 0)
                # `token` would do the same in another order, and ptxas would assign other registers than those
                # measured.
                key, live = over_rows(keys.index(t).load(OF_K)), (at_v >= 0) & (t < rows)
                out, update = answer(state, over_rows(queries.index(t).load(OF_K)), key, kq, value, forget, write)
                gl.store(core, out.to(core.dtype.element_ty), mask=live)
                if t + 1 < MOST:
                    state = again(state, key, forget, update)
                core += core_row
                if ring_units is not None:
                    gl.store(kept_u + own * ring_u_entry + at_v, update, mask=live & keeps)
                    own = gl.where(own + 1 == ring_u_size, 0, own + 1)
        else:
            # Without it a newer Triton spills part of a window.
            TWICE: gl.constexpr = MOST == 1 or (NEWER and ENDS and not GOES_ON)
            for t in range(rows):
                forget, write = gl.sum(decays.index(t).load(ONE), 0), gl.sum(writes.index(t).load(ONE), 0)
                value, kq = values.index(t).load(OF_V), gl.sum(overlaps.index(t).load(ONE), 0)
                asked_for = True if GOES_ON or not ENDS else t + 1 < rows
                state, update = token(
                    state, queries.index(t), keys.index(t), kq, value, forget, write, core, TWICE, asked_for
                )
                core += core_row
                if each is not None:
                    if each_to >= 0:
                        column = each + each_to * each_unit + t * each_column + head * each_h
                        store_tile(column, each_v, state.to(DTYPE), stripe, False, False)
                if ring_units is not None:
                    if keeps:
                        gl.store(kept_u + own * ring_u_entry + at_v, update)
                    own = gl.where(own + 1 == ring_u_size, 0, own + 1)
    if ring_units is not None:
        if not KEPT_FIRST:
            keep_rows(ring, keep, keeps & (stripe == 0), head == key_head * group, decay, row, every_key, row_k, rows)
    if store is not None:
        if goal >= 0:
            target = place(store, goal, store_columns, request, store_unit, store_column) + head * store_h
            if ALONE and LINED:
                places = target + (span_v * store_v + along(1, KT, SPAN))
                tile_of = gl.convert_layout(gl.reshape(state.to(DTYPE), [VL * VR, KT]), MINE)
                store_through(tile, places, tile_of, AHEAD == 0)
            else:
                store_tile(target, store_v, state.to(DTYPE), stripe, LINED, AHEAD == 0)


@gluon.jit
def keep_rows(ring, keep, here, leads, decay, row, keys, row_k, rows):
    """Store keys and decays of a window's rows in the ring, from entry `keep` on.

    leads: whether this head keeps the key, too
    """
    kept_decay, decay_entry, kept_k, k_entry, at_k, size = ring
    decay_places = kept_decay + wrapped(keep + row, size) * decay_entry
    key_places = kept_k + wrapped(keep + row_k, size) * k_entry + at_k
    if here:
        gl.store(decay_places, decay, mask=row < rows)
        if leads:
            gl.store(key_places, keys, mask=row_k < rows)


@gluon.jit
def token(state, query, key, kq, value, decay, beta, core, TWICE: gl.constexpr, asked_for):
    """Do `step` for a row whose query and key are in shared memory, and store its read-out  ->  the state, the update

    TWICE: the key is loaded twice, so that it occupies no registers in between;  asked_for: whether the next state is
    needed
    """
    OF_K: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, state.type.layout))
    first = over_rows(key.load(OF_K))
    out, update = answer(state, over_rows(query.load(OF_K)), first, kq, value, decay, beta)
    if TWICE:
        barrier()
        first = over_rows(key.load(OF_K))
    gl.store(core, out.to(core.dtype.element_ty))
    if asked_for:
        state = again(state, first, decay, update)
    return state, update
