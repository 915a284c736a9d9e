"""The conv of short windows: a program has some channels of one request and reads every input once.

It gives the bits of `causal_conv.py` and replaces it for windows of at most ROWS rows that are chains.
Leaves out: prompts, long windows and trees.
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, var-annotated"
# (device code: Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl

from ..device.masked_loads_and_stores import fetch, put
from ..device.pool_address import window_of
from ..device.programmatic_dependent_launch import wait
from ..device.zero_uncovered_rows import LANES, covering
from ..rowwise.gdn_inputs import consume_all

ROWS = 8  # at most: all inputs of a channel are in registers
# On a GPU (LOG.md). Many requests with no window kept per row use one warp, also if it normalizes rows as well.
WARPS, MANY = 4, 16


@triton.jit(do_not_specialize=["look", "share"])
def conv_walk(
    x, x_row, mixed, mixed_row, weight, weight_row: tl.constexpr, spans, read, store, each, channels, look, share, rule,
    W: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Convolve all rows of one request, at most RT; CT channels. Grid (1, channel tiles, B)."""
    request = tl.program_id(2)
    c = tl.program_id(1) * CT + tl.arange(0, CT)
    in_c = c < channels
    taps = ()
    if W == 4:  # adjacent in memory: one load
        four = fetch(weight + (c * weight_row)[:, None] + tl.arange(0, 4)[None, :], in_c[:, None], WHOLE)
        even, odd = tl.split(tl.reshape(four.to(tl.float32), (CT, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        taps = (first, second, third, fourth)
    else:
        for tap in tl.static_range(W):
            taps = taps + (fetch(weight + c * weight_row + tap, in_c, WHOLE).to(tl.float32),)
    if EARLY:
        wait()
    # All addresses and lengths are loaded at once: a load that waits for no other costs nothing here.
    unit, start = tl.load(spans.units + request), tl.load(spans.begin + request)
    rows = tl.load(spans.rows + request).to(tl.int32)
    known, column = tl.load(spans.fresh + request) == 0, tl.load(read.columns + request)
    if store is not None:
        goal, goal_column = tl.load(store.units + request), tl.load(store.columns + request)
    if each is not None:
        kept_unit = tl.load(each.units + request)
    requests = tl.num_programs(2)
    behind = tl.minimum((request + 1) * share, look)
    own = (unit >= 0) & (start <= request * share) & (start + rows >= behind)
    for other in range(tl.where(own, behind, request * share), behind):
        if (unit < 0) | (other < start) | (other >= start + rows):  # noqa: SIM102 (both tests of an `and` would run)
            if covering(other, tl.arange(0, LANES), spans.units, spans.begin, spans.rows, requests) == 0:
                if mixed is not None:
                    put(mixed + (start * 0 + other) * mixed_row + c, tl.zeros((CT,), tl.float32), in_c, WHOLE)
                else:  # rows without a request still get the gates that a and b give
                    free = start * 0 + other + tl.arange(0, 1)
                    consume_all(tl.zeros((1, CT), tl.float32), free, free >= 0, rule, CT)
    if (unit < 0) | (rows <= 0):
        return
    # A fresh request must not read its history. Then the bound is 0; no channel index is below 0, so nothing is loaded.
    remembered = tl.where(known, channels, 0)
    history = window_of(read, unit, column) + c * read.per_channel
    # Oldest first: the window before row 0, then the rows; in the stored dtype, so that a window keeps their bits.
    inputs = ()
    for w in tl.static_range(W - 1):
        inputs = inputs + (tl.load(history + w * read.per_entry, mask=c < remembered, other=0.0),)
    row = x + start * x_row + c
    for t in tl.static_range(RT):  # after the last row, that row again; the copies are not used
        inputs = inputs + (fetch(row + tl.minimum(rows - 1, t) * x_row, in_c, WHOLE),)

    outs = ()
    for t in tl.static_range(RT):
        total = tl.zeros((CT,), tl.float32)
        for tap in tl.static_range(W):
            total += inputs[t + tap].to(tl.float32) * taps[tap]
        out = total / (1.0 + tl.exp(-total))
        if mixed is not None:
            if t < rows:
                put(mixed + start * mixed_row + (c + t * mixed_row), out, in_c, WHOLE)
        else:
            outs = outs + (tl.expand_dims(out.to(x.dtype.element_ty).to(tl.float32), 1),)
    if mixed is None:  # all rows at once: threads wait for each other once, not once a row
        t = tl.arange(0, RT)
        consume_all(tl.trans(side_by_side(outs, RT)), start + t, t < rows, rule, CT)

    # Windows may be kept in the memory that the history was read from, and a thread may have read for another one.
    tl.debug_barrier()
    if each is not None:  # the window after every row
        kept = each.pool + kept_unit * each.per_unit + c * each.per_channel
        for t in tl.static_range(RT):
            if (t < rows) & (kept_unit >= 0):
                for w in tl.static_range(W - 1):
                    put(kept + t * each.per_column + w * each.per_entry, inputs[t + 1 + w], in_c, WHOLE)
    if store is not None:  # the window after the last row
        target = window_of(store, goal, goal_column) + c * store.per_channel
        for t in tl.static_range(RT):
            if (t + 1 == rows) & (goal >= 0):
                for w in tl.static_range(W - 1):
                    put(target + w * store.per_entry, inputs[t + 1 + w], in_c, WHOLE)


@triton.jit
def side_by_side(columns, COUNT: tl.constexpr):
    """Combine COUNT columns [CT, 1], at most 8, into [CT, COUNT]."""
    if COUNT == 1:
        return columns[0]
    elif COUNT == 2:
        return between(columns[0], columns[1])
    elif COUNT == 4:
        return between(between(columns[0], columns[2]), between(columns[1], columns[3]))
    else:
        even = between(between(columns[0], columns[4]), between(columns[2], columns[6]))
        odd = between(between(columns[1], columns[5]), between(columns[3], columns[7]))
        return between(even, odd)


@triton.jit
def between(even, odd):
    """Interleave two [CT, N] -> [CT, 2 N]: a column of one, then one of the other."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))
