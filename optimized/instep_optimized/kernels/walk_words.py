"""`conv_walk` of rows in bf16: a thread has four channels side by side and moves 64 bits at once, or two and 32 bits.

It gives the bits of `walk.py`: every result is its own sum, and the taps of a sum have one order. So does the sum of a
head's squares (`inputs.py`).
Leaves out: other widths than 4, and channels that are no whole tiles (`fits`).
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, misc, var-annotated"
# (device code: Triton's types are not Python's)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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
CHANNELS = tile(256, 32)  # of a program
TYPES = {2: torch.uint32, 4: torch.uint64}  # of a word, by its numbers


class Shape(NamedTuple):
    """Of a launch: numbers of a word, and channels of a program. The bits depend on neither."""

    numbers: int = 4
    channels: int = CHANNELS

    @property
    def warps(self) -> int:
        """As many as words need: with two words a thread, threads would exchange them before they are stored."""
        return max(1, self.channels // self.numbers // 32)


# By whether requests have several rows: how many requests there are at least where a shape is used, the most first
# (LOG.md). One window of several rows alone goes another way.
SHAPES: Mapping[bool, tuple[tuple[int, Shape], ...]] = {
    False: ((1, Shape()),), True: ((64, Shape()), (2, Shape(2))),
}  # fmt: skip
Rule = tuple[Any, ...]  # a, its row step, b, its row step, A_log, dt_bias; q, k, v, log_decay, beta; H, HV, scale


def fits(x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, columns: int = 0) -> bool:
    """Whether `walk_words` can run this part. columns: of a head, where no `mixed` is stored"""
    shape, (channels, width) = shape_for(part), weight.shape
    if shape is None or part.parents is not None or part.most > ROWS:
        return False
    rows = [one for one in (x, mixed) if one is not None]
    if width != WIDTH or channels % shape.channels or any(one.dtype != torch.bfloat16 for one in (weight, *rows)):
        return False
    if mixed is None and (columns % shape.numbers or shape.channels % columns):
        return False
    addresses = [one for one in (part.read, part.store, part.per_row) if one is not None]
    held = all(one.pool.dtype == x.dtype and one.pool.stride()[-2:] == (WIDTH - 1, 1) for one in addresses)
    held &= all(_whole(one.pool, shape.numbers, 2) for one in addresses)
    taps = weight.is_contiguous() and _whole(weight, WIDTH)  # those of a channel are one word, whatever rows have
    return held and taps and all(_whole(one, shape.numbers) for one in rows)


def shape_for(part: Part) -> Shape | None:
    """The shape of a launch; None where another kernel is as fast, or there is no request."""
    return next((shape for least, shape in SHAPES[part.most > 1] if len(part.begin) >= least), None)


def _whole(x: torch.Tensor, numbers: int, inner: int = 1) -> bool:
    """Whether every row, of `inner` axes, begins at a word."""
    steps = x.stride()[: x.dim() - inner]
    return x.data_ptr() % (numbers * x.itemsize) == 0 and all(step % numbers == 0 for step in steps)


def walk_words(
    x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, look: int,
    rule: Rule = (None,) * 14, columns: int = 0,
) -> None:  # fmt: skip
    """The conv of a part that `fits`. x, mixed [N, channels]; look: of how many rows those of nobody become zero

    rule, columns: instead of `mixed`, what the delta rule consumes of it, and of how many channels a head is
    """
    shape, requests = shape_for(part), len(part.begin)
    assert shape is not None
    numbers, channels = shape
    read, store, each = (_address(one, part, numbers) for one in (part.read, part.store, part.per_row))
    out = (None, 0) if mixed is None else (_words(mixed, numbers), mixed.stride(0) // numbers)
    launch(
        conv_walk_words, (len(weight) // channels, requests), _words(x, numbers), x.stride(0) // numbers, *out,
        _words(weight, WIDTH), part.begin, part.count, part.fresh, *read, *store, *each, look,
        ceil_div(look, requests), *rule,
        RT=power_of_2(part.most), CT=channels // numbers, HT=columns // numbers, NUMBERS=numbers, warps=shape.warps,
    )  # fmt: skip


def _words(x: torch.Tensor, numbers: int) -> torch.Tensor:
    return x.view(TYPES[numbers])


def _address(address: Address | None, part: Part, numbers: int) -> tuple[object, ...]:
    """As `flat`, in words; None for a pool that is absent."""
    pool, units, column, *steps = flat(address, 2, part.read)
    flattened = pool.as_strided((*pool.shape[:-2], pool.shape[-2] * (WIDTH - 1)), (*pool.stride()[:-2], 1))
    held = None if address is None else _words(flattened, numbers)
    return held, units, column, steps[0] // numbers, steps[1] // numbers


@triton.jit(do_not_specialize=["look", "share"])
def conv_walk_words(
    x, x_row, mixed, mixed_row, weight, begin, count, fresh,
    read, read_units, read_columns, read_unit, read_column,
    store, store_units, store_columns, store_unit, store_column,
    each, each_units, each_columns, each_unit, each_column, look, share,
    a, a_row, b, b_row, A_log, dt_bias, q, k, v, log_decay, beta, H, HV, scale,
    RT: tl.constexpr, CT: tl.constexpr, HT: tl.constexpr, NUMBERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All rows of one request, at most RT; CT words of a row, HT of a head. Grid (channel tiles, B).

    A word is NUMBERS (2 or 4) numbers in bf16, the first one in its lowest bits; all steps count words. A window of as
    many channels is three words, in which channel c has the numbers 3 c, 3 c + 1 and 3 c + 2. Only the taps of a
    channel are 64 bits whatever NUMBERS is.
    """
    WORD: tl.constexpr = x.dtype.element_ty
    request = tl.program_id(1)
    c = tl.program_id(0) * CT + tl.arange(0, CT)
    taps = ()  # of each channel of a word
    for channel in tl.static_range(NUMBERS):
        taps = taps + (tl.load(weight + NUMBERS * c + channel),)
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
                    tl.store(mixed + (start * 0 + other) * mixed_row + c, tl.zeros((CT,), WORD))
                else:  # of nobody's rows as well the gates are what a and b say
                    consume(tl.zeros((CT, NUMBERS), tl.float32), start * 0 + other, a, a_row, b, b_row, A_log, dt_bias,
                            q, k, v, log_decay, beta, H, HV, scale, CT, HT)  # fmt: skip
    if (unit < 0) | (rows <= 0):
        return
    # A fresh request must not read its history: no word is below the bound then.
    remembered = c < tl.where(known, tl.num_programs(0) * CT, 0)
    history = read + unit * read_unit + column * read_column + 3 * c
    # Oldest first, each with all channels of a word: the window before row 0, then the rows.
    inputs = get_window(history, remembered, NUMBERS)
    row = x + start * x_row + c
    for t in tl.static_range(RT):  # behind the last row that one again, which nobody uses
        inputs = inputs + (tl.load(row + tl.minimum(rows - 1, t) * x_row),)
    for t in tl.static_range(RT):
        outs = ()
        for channel in tl.static_range(NUMBERS):
            total = tl.zeros((CT,), tl.float32)
            for tap in tl.static_range(4):
                total += number(inputs[t + tap], channel) * number(taps[channel], tap)
            out = total / (1.0 + tl.exp(-total))
            outs = outs + (out.to(tl.bfloat16).to(tl.uint16, bitcast=True),)
        if t < rows:
            if mixed is not None:
                tl.store(mixed + start * mixed_row + (c + t * mixed_row), word(outs, WORD, NUMBERS))
            else:
                consume(beside(outs, NUMBERS), start + t, a, a_row, b, b_row, A_log, dt_bias,
                        q, k, v, log_decay, beta, H, HV, scale, CT, HT)  # fmt: skip
    # Windows may be kept in the memory that the history was read from, and a thread may have read for another one.
    tl.debug_barrier()
    if each is not None:  # the window after every row
        kept = each + kept_unit * each_unit + 3 * c
        for t in tl.static_range(RT):
            if (t < rows) & (kept_unit >= 0):
                put_window(kept + t * each_column, inputs[t + 1], inputs[t + 2], inputs[t + 3], NUMBERS)
    if store is not None:  # the window after the last row
        target = store + goal * store_unit + goal_column * store_column + 3 * c
        for t in tl.static_range(RT):
            if (t + 1 == rows) & (goal >= 0):
                put_window(target, inputs[t + 1], inputs[t + 2], inputs[t + 3], NUMBERS)


@triton.jit
def get_window(source, there, NUMBERS: tl.constexpr):
    """The window of the channels of a word  ->  three inputs, each of all these channels; 0 where none is `there`"""
    words = ()
    for at in tl.static_range(3):
        words = words + (tl.load(source + at, mask=there, other=0),)
    inputs = ()
    for w in tl.static_range(3):
        numbers = ()
        for channel in tl.static_range(NUMBERS):
            numbers = numbers + (bits(words[(3 * channel + w) // NUMBERS], (3 * channel + w) % NUMBERS),)
        inputs = inputs + (word(numbers, source.dtype.element_ty, NUMBERS),)
    return inputs


@triton.jit
def put_window(target, old, middle, new, NUMBERS: tl.constexpr):
    """Three inputs, each of all channels of a word, as the window of these channels"""
    inputs = (old, middle, new)
    for at in tl.static_range(3):
        numbers = ()
        for n in tl.static_range(NUMBERS):
            numbers = numbers + (bits(inputs[(NUMBERS * at + n) % 3], (NUMBERS * at + n) // 3),)
        tl.store(target + at, word(numbers, target.dtype.element_ty, NUMBERS))


@triton.jit
def consume(
    mixed, row, a, a_row, b, b_row, A_log, dt_bias, q, k, v, log_decay, beta, H, HV, scale,
    CT: tl.constexpr, HT: tl.constexpr,
):  # fmt: skip
    """What the delta rule consumes of one row: CT words [CT, NUMBERS] of it, of the heads of this program."""
    NUMBERS: tl.constexpr = mixed.shape[1]
    heads: tl.constexpr = CT // HT
    first, keys, width = tl.program_id(0) * heads, H * HT * NUMBERS, NUMBERS * HT
    channel = (tl.program_id(0) * CT + tl.arange(0, CT))[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
    head = first + tl.arange(0, heads)
    if first < 2 * H:  # neighbours are added, then pairs of neighbours, and so on, as `unit` does
        even, odd = tl.split(tl.reshape(mixed * mixed, (CT, NUMBERS // 2, 2)))
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
def bits(word, at: tl.constexpr):
    """Number `at` of a word, as it is stored"""
    return (word >> (16 * at)) & 0xFFFF


@triton.jit
def number(word, at: tl.constexpr):
    """Number `at` of a word in fp32, which is exact: the upper half of an fp32 number is one in bf16"""
    return (bits(word, at) << 16).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def word(numbers, WORD: tl.constexpr, NUMBERS: tl.constexpr):
    """NUMBERS numbers, as they are stored  ->  a word of the type WORD"""
    made = numbers[0].to(WORD)
    for at in tl.static_range(1, NUMBERS):
        made = made | (numbers[at].to(WORD) << (16 * at))
    return made


@triton.jit
def beside(numbers, NUMBERS: tl.constexpr):
    """NUMBERS numbers [CT] as they are stored, of one channel each  ->  [CT, NUMBERS] in fp32, in the same threads"""
    if NUMBERS == 2:
        pairs = tl.join(numbers[0], numbers[1])
    else:
        pairs = tl.join(tl.join(numbers[0], numbers[2]), tl.join(numbers[1], numbers[3]))
    every = tl.reshape(pairs, (numbers[0].shape[0], NUMBERS))
    return every.to(tl.bfloat16, bitcast=True).to(tl.float32)
