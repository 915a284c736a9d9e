"""`conv_walk` of rows in bf16: a thread has four channels side by side, and moves 64 bits at once.

It gives the bits of `walk.py`: every result is its own sum, and the taps of a sum have one order. So does the sum of a
head's squares (`inputs.py`).
Leaves out: other widths than 4, and channels that are no whole tiles (`fits`).
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, misc, var-annotated"
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..layout import Address, Part
from .address import flat
from .cover import covering
from .early import wait
from .inputs import L2_EPS, STEPS, gates
from .runtime import ceil_div, launch, power_of_2, tile
from .walk import ROWS
from .window import LANES

WIDTH = 4  # of the conv
MANY = 2  # requests of several rows from which on it pays (LOG.md); of one row it always does
CHANNELS, WARPS = tile(256, 32), 2  # of a program
NUMBERS = 4  # of a word
Rule = tuple[Any, ...]  # a, its row step, b, its row step, A_log, dt_bias; q, k, v, log_decay, beta; H, HV, scale


def fits(x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, columns: int = 0) -> bool:
    """Whether `walk_words` can run this part. columns: of a head, where no `mixed` is stored"""
    channels, width = weight.shape
    if part.parents is not None or part.most > ROWS or (part.most > 1 and len(part.begin) < MANY):
        return False
    rows = [one for one in (x, weight, mixed) if one is not None]
    if width != WIDTH or channels % CHANNELS or any(one.dtype != torch.bfloat16 for one in rows):
        return False
    if mixed is None and (columns % NUMBERS or CHANNELS % columns):
        return False
    addresses = [one for one in (part.read, part.store, part.per_row) if one is not None]
    held = all(one.pool.dtype == x.dtype and one.pool.stride()[-2:] == (WIDTH - 1, 1) for one in addresses)
    return held and all(map(_whole, rows)) and all(_whole(one.pool, 2) for one in addresses)


def _whole(x: torch.Tensor, inner: int = 1) -> bool:
    """Whether every row, of `inner` axes, begins at a word."""
    return x.data_ptr() % 8 == 0 and all(step % NUMBERS == 0 for step in x.stride()[: x.dim() - inner])


def walk_words(
    x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, look: int,
    rule: Rule = (None,) * 14, columns: int = NUMBERS,
) -> None:  # fmt: skip
    """The conv of a part that `fits`. x, mixed [N, channels]; look: of how many rows those of nobody become zero

    rule, columns: instead of `mixed`, what the delta rule consumes of it, and of how many channels a head is
    """
    channels, requests = len(weight), len(part.begin)
    read, store, each = (_address(one, part) for one in (part.read, part.store, part.per_row))
    out = (None, 0) if mixed is None else (_words(mixed), mixed.stride(0) // NUMBERS)
    launch(
        conv_walk_words, (channels // CHANNELS, requests), _words(x), x.stride(0) // NUMBERS, *out, _words(weight),
        part.begin, part.count, part.fresh, *read, *store, *each, look, ceil_div(look, requests), *rule,
        RT=power_of_2(part.most), CT=CHANNELS // NUMBERS, HT=columns // NUMBERS, warps=WARPS,
    )  # fmt: skip


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint64)


def _address(address: Address | None, part: Part) -> tuple[object, ...]:
    """As `flat`, in words; None for a pool that is absent."""
    pool, units, column, *steps = flat(address, 2, part.read)
    flattened = pool.as_strided((*pool.shape[:-2], pool.shape[-2] * (WIDTH - 1)), (*pool.stride()[:-2], 1))
    return None if address is None else _words(flattened), units, column, steps[0] // NUMBERS, steps[1] // NUMBERS


@triton.jit(do_not_specialize=["look", "share"])
def conv_walk_words(
    x, x_row, mixed, mixed_row, weight, begin, count, fresh,
    read, read_units, read_columns, read_unit, read_column,
    store, store_units, store_columns, store_unit, store_column,
    each, each_units, each_columns, each_unit, each_column, look, share,
    a, a_row, b, b_row, A_log, dt_bias, q, k, v, log_decay, beta, H, HV, scale,
    RT: tl.constexpr, CT: tl.constexpr, HT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All rows of one request, at most RT; CT words of a row, HT of a head. Grid (channel tiles, B).

    A word is four numbers in bf16, the first one in its lowest bits; all steps count words. A window of four channels
    is three words, in which channel c has the numbers 3 c, 3 c + 1 and 3 c + 2.
    """
    request = tl.program_id(1)
    c = tl.program_id(0) * CT + tl.arange(0, CT)
    taps = ()  # of each of the four channels
    for channel in tl.static_range(4):
        taps = taps + (tl.load(weight + 4 * c + channel),)
    if EARLY:
        wait()
    unit, start = tl.load(read_units + request), tl.load(begin + request)
    rows = tl.load(count + request).to(tl.int32)
    known, column = tl.load(fresh + request) == 0, tl.load(read_columns + request)
    if store is not None:
        goal, goal_column = tl.load(store_units + request), tl.load(store_columns + request)
    if each is not None:
        kept_unit = tl.load(each_units + request)
    requests = tl.num_programs(1)
    behind = tl.minimum((request + 1) * share, look)
    own = (unit >= 0) & (start <= request * share) & (start + rows >= behind)
    for other in range(tl.where(own, behind, request * share), behind):
        if (unit < 0) | (other < start) | (other >= start + rows):  # noqa: SIM102 (both tests of an `and` would run)
            if covering(other, tl.arange(0, LANES), read_units, begin, count, requests) == 0:
                if mixed is not None:
                    tl.store(mixed + (start * 0 + other) * mixed_row + c, tl.zeros((CT,), tl.uint64))
                else:  # of nobody's rows as well the gates are what a and b say
                    consume(tl.zeros((CT, 4), tl.float32), start * 0 + other, a, a_row, b, b_row, A_log, dt_bias,
                            q, k, v, log_decay, beta, H, HV, scale, CT, HT)  # fmt: skip
    if (unit < 0) | (rows <= 0):
        return
    # A fresh request must not read its history: no word is below the bound then.
    remembered = c < tl.where(known, tl.num_programs(0) * CT, 0)
    history = read + unit * read_unit + column * read_column + 3 * c
    first = tl.load(history, mask=remembered, other=0)
    second = tl.load(history + 1, mask=remembered, other=0)
    third = tl.load(history + 2, mask=remembered, other=0)
    # Oldest first, each with its four channels: the window before row 0, then the rows.
    inputs = (
        four(bits(first, 0), bits(first, 3), bits(second, 2), bits(third, 1)),
        four(bits(first, 1), bits(second, 0), bits(second, 3), bits(third, 2)),
        four(bits(first, 2), bits(second, 1), bits(third, 0), bits(third, 3)),
    )
    row = x + start * x_row + c
    for t in tl.static_range(RT):  # behind the last row that one again, which nobody uses
        inputs = inputs + (tl.load(row + tl.minimum(rows - 1, t) * x_row),)
    for t in tl.static_range(RT):
        outs = ()
        for channel in tl.static_range(4):
            total = tl.zeros((CT,), tl.float32)
            for tap in tl.static_range(4):
                total += number(inputs[t + tap], channel) * number(taps[channel], tap)
            out = total / (1.0 + tl.exp(-total))
            outs = outs + (out.to(tl.bfloat16),)
        if t < rows:
            if mixed is not None:
                stored = four(word(outs[0]), word(outs[1]), word(outs[2]), word(outs[3]))
                tl.store(mixed + start * mixed_row + (c + t * mixed_row), stored)
            else:
                quads = tl.join(tl.join(outs[0], outs[2]), tl.join(outs[1], outs[3]))
                consume(tl.reshape(quads, (CT, 4)).to(tl.float32), start + t, a, a_row, b, b_row, A_log, dt_bias,
                        q, k, v, log_decay, beta, H, HV, scale, CT, HT)  # fmt: skip
    # Windows may be kept in the memory that the history was read from, and a thread may have read for another one.
    tl.debug_barrier()
    if each is not None:  # the window after every row
        kept = each + kept_unit * each_unit + 3 * c
        for t in tl.static_range(RT):
            if (t < rows) & (kept_unit >= 0):
                put_window(kept + t * each_column, inputs[t + 1], inputs[t + 2], inputs[t + 3])
    if store is not None:  # the window after the last row
        target = store + goal * store_unit + goal_column * store_column + 3 * c
        for t in tl.static_range(RT):
            if (t + 1 == rows) & (goal >= 0):
                put_window(target, inputs[t + 1], inputs[t + 2], inputs[t + 3])


@triton.jit
def put_window(target, old, middle, new):
    """Three inputs of four channels each, as the window of these channels"""
    tl.store(target, four(bits(old, 0), bits(middle, 0), bits(new, 0), bits(old, 1)))
    tl.store(target + 1, four(bits(middle, 1), bits(new, 1), bits(old, 2), bits(middle, 2)))
    tl.store(target + 2, four(bits(new, 2), bits(old, 3), bits(middle, 3), bits(new, 3)))


@triton.jit
def consume(
    mixed, row, a, a_row, b, b_row, A_log, dt_bias, q, k, v, log_decay, beta, H, HV, scale,
    CT: tl.constexpr, HT: tl.constexpr,
):  # fmt: skip
    """What the delta rule consumes of one row: CT words [CT, 4] of it, of the heads of this program."""
    heads: tl.constexpr = CT // HT
    first, keys, width = tl.program_id(0) * heads, H * HT * 4, 4 * HT
    channel = (tl.program_id(0) * CT + tl.arange(0, CT))[:, None] * 4 + tl.arange(0, 4)[None, :]
    head = first + tl.arange(0, heads)
    if first < 2 * H:  # neighbours are added, then pairs of neighbours, and so on, as `unit` does
        even, odd = tl.split(tl.reshape(mixed * mixed, (CT, 2, 2)))
        total = tl.reshape(tl.sum(even + odd, axis=1), (heads, HT))
        for _ in tl.static_range(STEPS):
            if total.shape[1] > 1:
                total = tl.sum(tl.reshape(total, (heads, total.shape[1] // 2, 2)), axis=2)
        length = tl.rsqrt(total + L2_EPS)  # [heads, 1]
        of_head = tl.reshape(tl.broadcast_to(length, (heads, HT)), (CT,))[:, None]
        unit = mixed * of_head
        tl.store(q + row * keys + channel, unit * scale, mask=channel < keys)
        tl.store(k + row * keys + channel - keys, unit, mask=(channel >= keys) & (channel < 2 * keys))
    if first + heads > 2 * H:
        tl.store(v + row * HV * width + channel - 2 * keys, mixed, mask=channel >= 2 * keys)
        gates(a, a_row, b, b_row, A_log, dt_bias, log_decay, beta, row + head * 0, head - 2 * H, HV, head >= 2 * H)


@triton.jit
def word(x):
    """Numbers in bf16, as they are stored"""
    return x.to(tl.uint16, bitcast=True).to(tl.uint64)


@triton.jit
def bits(word, at: tl.constexpr):
    """Number `at` (0 to 3) of a word, as it is stored"""
    return (word >> (16 * at)) & 0xFFFF


@triton.jit
def number(word, at: tl.constexpr):
    """Number `at` of a word in fp32, which is exact: the upper half of an fp32 number is one in bf16"""
    return (bits(word, at) << 16).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def four(a, b, c, d):
    """Four numbers, as they are stored  ->  a word"""
    return a | (b << 16) | (c << 32) | (d << 48)
