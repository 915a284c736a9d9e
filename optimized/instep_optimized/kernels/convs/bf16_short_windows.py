"""`conv_walk` of rows in bf16: a thread has four adjacent channels and moves 64 bits at once, or two and 32 bits.

It gives the bits of `short_windows.py`: every result is a separate sum, and the taps of a sum have one order. The sum
of a head's squares has one order as well (`gdn_inputs.py`).
Leaves out: other widths than 4, and channels that are no whole tiles (`fits`).
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, misc, var-annotated"
# (device code: Triton's types are not Python's)

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...memory_addresses import Part
from ..device.pool_address import Spans
from ..device.programmatic_dependent_launch import wait
from ..device.zero_uncovered_rows import LANES, covering
from ..rowwise.gdn_inputs import L2_EPS, STEPS, RuleInputs, gates
from ..runtime import ceil_div, launch, power_of_2, tile
from .packed_16_bit_words import WIDTH, in_words, windows, words
from .short_windows import ROWS

CHANNELS, WIDER, WIDEST = tile(256, 32), tile(512, 32), tile(1024, 32)  # channels of a program


class Shape(NamedTuple):
    """Shape of a launch: numbers of a word, and channels of a program. The bits depend on neither.

    On a GPU a program has 32 words a warp, so that every thread has one.
    """

    numbers: int = 4
    channels: int = CHANNELS

    @property
    def warps(self) -> int:
        """Number of warps, one thread per word: with two words a thread, threads would exchange them before storing."""
        return max(1, self.channels // self.numbers // 32)


# Keyed by whether requests have several rows. Each entry: the minimum number of requests, in descending order, and the
# shape to use from there on (LOG.md). A single window of several rows runs in another kernel.
SHAPES: Mapping[bool, tuple[tuple[int, Shape], ...]] = {
    False: ((128, Shape(4, WIDEST)), (96, Shape(4)), (64, Shape(2, WIDER)), (16, Shape(4, WIDEST)), (1, Shape(2))),
    True: ((128, Shape(4, WIDER)), (96, Shape(4, WIDEST)), (40, Shape(2, WIDER)), (32, Shape(4, WIDEST)),
           (16, Shape(2, WIDER)), (2, Shape(2))),
}  # fmt: skip


def fits(x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, columns: int = 0) -> bool:
    """Return whether `walk_words` can run this part. columns: channels of a head, if no `mixed` is stored"""
    channels, width = weight.shape
    shape = shape_for(part, channels)
    if shape is None or part.parents is not None or part.most > ROWS:
        return False
    rows = [one for one in (x, mixed) if one is not None]
    if width != WIDTH or channels % shape.channels or any(one.dtype != torch.bfloat16 for one in (weight, *rows)):
        return False
    if mixed is None and (columns % shape.numbers or shape.channels % columns):
        return False
    addresses = [one for one in (part.read, part.store, part.per_row) if one is not None]
    held = all(one.pool.dtype == x.dtype and one.pool.stride()[-2:] == (WIDTH - 1, 1) for one in addresses)
    held &= all(in_words(one.pool, shape.numbers, 2) for one in addresses)
    taps = weight.is_contiguous() and in_words(weight, WIDTH)  # a channel's taps are one word for any word size of rows
    return held and taps and all(in_words(one, shape.numbers) for one in rows)


def shape_for(part: Part, channels: int) -> Shape | None:
    """Choose the shape of a launch; None if another kernel is as fast, or there is no request."""
    shape = next((shape for least, shape in SHAPES[part.most > 1] if len(part.begin) >= least), None)
    return shape if shape is None or channels % shape.channels == 0 else shape._replace(channels=CHANNELS)


def walk_words(
    x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, look: int,
    rule: RuleInputs | None = None, columns: int = 0,
) -> None:  # fmt: skip
    """Run the conv of a part that `fits`. x, mixed [N, channels]

    look: number of rows to check; those that belong to no request become zero
    rule, columns: instead of `mixed`, the inputs of the delta rule to store, and the channels of a head
    """
    shape, requests = shape_for(part, len(weight)), len(part.begin)
    assert shape is not None
    numbers, channels = shape
    out = (None, None) if mixed is None else (mixed, mixed.stride(0))
    held = part.read, part.store, part.per_row  # an absent argument compiles to no code
    launch(
        conv_walk_words, (len(weight) // channels, requests), words(x, numbers), x.stride(0) // numbers, *out,
        words(weight, WIDTH), Spans.of(part), *(windows(one, numbers) for one in held),
        look, ceil_div(look, requests), rule,
        RT=power_of_2(part.most), CT=channels // numbers, HT=columns // numbers, NUMBERS=numbers, warps=shape.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["look", "share"])
def conv_walk_words(
    x, x_row, mixed, mixed_row, weight, spans, read, store, each, look, share, rule,
    RT: tl.constexpr, CT: tl.constexpr, HT: tl.constexpr, NUMBERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Convolve all rows of one request, at most RT; CT words of a row, HT of a head. Grid (channel tiles, B).

    A word is NUMBERS (2 or 4) numbers in bf16, the first one in its lowest bits. All steps count words, but `mixed_row`
    counts numbers. A window of NUMBERS channels is three words, in which channel c has the numbers 3 c, 3 c + 1 and
    3 c + 2. Only the taps of a channel are 64 bits whatever NUMBERS is.

    A thread has one word of each row, so it reads and writes the same three words of a window. So no thread waits for
    another, even if windows are kept in the memory that they were read from.
    An absent row is masked instead of skipped by a branch, so that the compiler interleaves all rows.
    """
    request = tl.program_id(1)
    c = tl.program_id(0) * CT + tl.arange(0, CT)
    taps = ()  # of each channel of a word
    for channel in tl.static_range(NUMBERS):
        taps = taps + (tl.load(weight + NUMBERS * c + channel),)
    if EARLY:
        wait()
    # All addresses and lengths are loaded at once. 32 bits are enough, and make short products.
    unit, start = tl.load(spans.units + request).to(tl.int32), tl.load(spans.begin + request).to(tl.int32)
    rows, known = tl.load(spans.rows + request).to(tl.int32), tl.load(spans.fresh + request) == 0
    column, kept_unit, goal, goal_column = 0, -1, -1, 0
    if read.columns is not None:
        column = tl.load(read.columns + request).to(tl.int32)
    if each.pool is not None:
        kept_unit = tl.load(each.units + request).to(tl.int32)
    if store.pool is not None:
        goal = tl.load(store.units + request).to(tl.int32)
        if store.columns is not None:
            goal_column = tl.load(store.columns + request).to(tl.int32)
    rows = tl.where(unit >= 0, rows, 0)  # without a unit there are none, and nothing is read or written
    # Masks are bounds: all words are below the first one, none is below 0. One bit for all threads took longer.
    every = tl.num_programs(0) * CT
    busy = tl.minimum(rows, 1) * every
    there = c < tl.where(known, busy, 0)  # a fresh request must not read its history
    history = window_of(read, unit, column, c)
    old = (tl.load(history, mask=there, other=0), tl.load(history + 1, mask=there, other=0),
           tl.load(history + 2, mask=there, other=0))  # fmt: skip
    row = x + start.to(tl.int64) * x_row + c
    new = ()
    for t in tl.static_range(RT):  # after the last row, that row again; the copies are not used
        new = new + (tl.load(row + tl.maximum(tl.minimum(rows - 1, t), 0) * x_row, mask=c < busy, other=0),)
    # Oldest first, each with all channels of a word: the window before row 0, then the rows.
    inputs = turned(old, NUMBERS) + new

    outs = ()
    for t in tl.static_range(RT):
        sums = ()
        for channel in tl.static_range(NUMBERS):
            total = tl.zeros((CT,), tl.float32)
            for tap in tl.static_range(4):
                total += number(inputs[t + tap], channel) * number(taps[channel], tap)
            sums = sums + (total / (1.0 + tl.exp(-total)),)
        outs = outs + (beside(sums, NUMBERS).to(tl.bfloat16),)
    at = NUMBERS * c[:, None] + tl.arange(0, NUMBERS)[None, :]
    for t in tl.static_range(RT):
        if mixed is not None:
            live = c < tl.where(t < rows, every, 0)
            tl.store(mixed + start.to(tl.int64) * mixed_row + (at + t * mixed_row), outs[t], mask=live[:, None])
        elif t < rows:
            consume(outs[t].to(tl.float32), start.to(tl.int64) + t, rule, CT, HT)

    if each.pool is not None:  # the window after every row
        kept = window_of(each, kept_unit, 0, c)
        for t in tl.static_range(RT):
            live = c < tl.where((t < rows) & (kept_unit >= 0), every, 0)
            put_window(kept + t * each.per_column, inputs[t + 1], inputs[t + 2], inputs[t + 3], live, NUMBERS)
    if store.pool is not None:  # the window after the last row
        oldest, middle, newest = inputs[RT], inputs[RT + 1], inputs[RT + 2]
        for t in tl.static_range(RT - 1):
            last = rows == t + 1
            oldest = tl.where(last, inputs[t + 1], oldest)
            middle = tl.where(last, inputs[t + 2], middle)
            newest = tl.where(last, inputs[t + 3], newest)
        target = window_of(store, goal, goal_column, c)
        put_window(target, oldest, middle, newest, c < tl.where(goal >= 0, busy, 0), NUMBERS)

    # Rows without a request. If a request covers its share of all rows, as it mostly does, the program looks for none.
    first, behind = request * share, tl.minimum((request + 1) * share, look)
    if (unit < 0) | (start > first) | (start + rows < behind):
        for other in range(first, behind):
            if (unit < 0) | (other < start) | (other >= start + rows):  # noqa: SIM102 (both tests of an `and` would run)
                if covering(other, tl.arange(0, LANES), spans.units, spans.begin, spans.rows, tl.num_programs(1)) == 0:
                    far, nothing = (start * 0 + other).to(tl.int64), tl.zeros((CT, NUMBERS), tl.float32)
                    if mixed is not None:
                        tl.store(mixed + far * mixed_row + at, nothing.to(tl.bfloat16))
                    else:  # rows without a request still get the gates that a and b give
                        consume(nothing, far, rule, CT, HT)


@triton.jit
def window_of(windows, unit, column, c):
    """Return the address at which the windows of the words c begin."""
    first = windows.pool + unit.to(tl.int64) * windows.per_unit
    return first + (unit * 0 + column).to(tl.int64) * windows.per_column + 3 * c


@triton.jit
def turned(words, NUMBERS: tl.constexpr):
    """Turn the window of the channels of a word, as it is stored  ->  three inputs, each of all these channels"""
    inputs = ()
    for w in tl.static_range(3):
        numbers = ()
        for channel in tl.static_range(NUMBERS):
            numbers = numbers + (bits(words[(3 * channel + w) // NUMBERS], (3 * channel + w) % NUMBERS),)
        inputs = inputs + (word(numbers, words[0].dtype, NUMBERS),)
    return inputs


@triton.jit
def put_window(target, old, middle, new, there, NUMBERS: tl.constexpr):
    """Store three inputs, each of all channels of a word, as the window of these channels, where `there` is true."""
    inputs = (old, middle, new)
    for at in tl.static_range(3):
        numbers = ()
        for n in tl.static_range(NUMBERS):
            numbers = numbers + (bits(inputs[(NUMBERS * at + n) % 3], (NUMBERS * at + n) // 3),)
        tl.store(target + at, word(numbers, target.dtype.element_ty, NUMBERS), mask=there)


@triton.jit
def consume(mixed, row, rule, CT: tl.constexpr, HT: tl.constexpr):
    """Store the delta rule's inputs of one row, from CT words [CT, NUMBERS] of it, for the heads of this program."""
    NUMBERS: tl.constexpr = mixed.shape[1]
    heads: tl.constexpr = CT // HT
    first, keys, width = tl.program_id(0) * heads, rule.H * HT * NUMBERS, NUMBERS * HT
    channel = (tl.program_id(0) * CT + tl.arange(0, CT))[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
    head = first + tl.arange(0, heads)
    if first < 2 * rule.H:
        unit = normed(mixed, HT)
        tl.store(rule.q + row * keys + channel, unit * rule.scale, mask=channel < keys)
        tl.store(rule.k + row * keys + channel - keys, unit, mask=(channel >= keys) & (channel < 2 * keys))
    if first + heads > 2 * rule.H:
        tl.store(rule.v + row * rule.HV * width + channel - 2 * keys, mixed, mask=channel >= 2 * keys)
        gates(rule, row + head * 0, head - 2 * rule.H, head >= 2 * rule.H)


@triton.jit
def normed(mixed, HT: tl.constexpr):
    """Normalize words [CT, NUMBERS] of a row, HT of a head  ->  every head of length 1

    Neighbours are added, then pairs of neighbours, and so on, as `unit` does.
    """
    CT: tl.constexpr = mixed.shape[0]
    heads: tl.constexpr = CT // HT
    even, odd = tl.split(tl.reshape(mixed * mixed, (CT, mixed.shape[1] // 2, 2)))
    total = tl.reshape(tl.sum(even + odd, axis=1), (heads, HT))
    for _ in tl.static_range(STEPS):
        if total.shape[1] > 1:
            total = tl.sum(tl.reshape(total, (heads, total.shape[1] // 2, 2)), axis=2)
    length = tl.rsqrt(total + L2_EPS)  # [heads, 1]
    return mixed * tl.reshape(tl.broadcast_to(length, (heads, HT)), (CT,))[:, None]


@triton.jit
def bits(word, at: tl.constexpr):
    """Return number `at` of a word, as it is stored."""
    return (word >> (16 * at)) & 0xFFFF


@triton.jit
def number(word, at: tl.constexpr):
    """Return number `at` of a word in fp32, which is exact: the upper half of an fp32 number is a bf16 number."""
    return (bits(word, at) << 16).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def word(numbers, WORD: tl.constexpr, NUMBERS: tl.constexpr):
    """Pack NUMBERS numbers, as they are stored  ->  a word of the type WORD"""
    made = numbers[0].to(WORD)
    for at in tl.static_range(1, NUMBERS):
        made = made | (numbers[at].to(WORD) << (16 * at))
    return made


@triton.jit
def beside(numbers, NUMBERS: tl.constexpr):
    """Stack NUMBERS numbers [CT], of one channel each  ->  [CT, NUMBERS], in the same threads

    So the compiler rounds two of them in one step. Rounding a single number runs at a quarter of the speed.
    """
    if NUMBERS == 2:
        pairs = tl.join(numbers[0], numbers[1])
    else:
        pairs = tl.join(tl.join(numbers[0], numbers[2]), tl.join(numbers[1], numbers[3]))
    return tl.reshape(pairs, (numbers[0].shape[0], NUMBERS))
