"""The conv of prompts in bf16: a thread has four channels side by side and walks some rows of one request.

It gives the bits of `conv.py`, whose launches it takes over for chunks of more rows than `walk_words.py` takes.
Leaves out: trees, windows that are kept after every row, and channels that are no whole tiles (`fits`).
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, var-annotated"
# (device code: Triton's types are not Python's)

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...layout import Part
from ..device.address import flat
from ..device.cover import LANES, covered, covering
from ..device.early import wait
from ..rowwise.inputs import gates
from ..runtime import INTERPRETED, ceil_div, launch, tile
from .walk import ROWS as WALKED
from .walk_words import Rule, bits, consume, norms, number, word
from .words import WIDTH, in_words, words


class Shape(NamedTuple):
    """Of a launch: the rows that a program walks, channels of a thread (4 or 8), and warps. No bit depends on them."""

    rows: int
    numbers: int = 4
    warps: int = 4

    @property
    def channels(self) -> int:
        """Of a program"""
        return 32 * self.warps * self.numbers


# How many programs of the first shape's size there are at least where a shape is used, the most first (LOG.md).
SHAPES: Sequence[tuple[int, Shape]] = ((0, Shape(tile(16, 4))),)


def fits(x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, columns: int = 0) -> bool:
    """Whether `walk_prompt` can run this part. columns: of a head, where no `mixed` is stored"""
    channels, width = weight.shape
    if part.parents is not None or part.per_row is not None or part.most <= WALKED or not len(part.begin):
        return False
    rows, shape = [one for one in (x, mixed) if one is not None], shape_for(part, channels)
    if width != WIDTH or channels % shape.channels or any(one.dtype != torch.bfloat16 for one in (weight, *rows)):
        return False
    if mixed is None and (columns % shape.numbers or shape.channels % columns):
        return False
    held = all(one.pool.dtype == x.dtype for one in (part.read, part.store) if one is not None)
    taps = weight.is_contiguous() and in_words(weight, WIDTH)  # those of a channel are one word
    return held and taps and all(in_words(one, shape.numbers) for one in rows)


def shape_for(part: Part, channels: int) -> Shape:
    """The shape of a launch"""
    return SHAPES[-1][1]


def walk_prompt(
    x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, look: int,
    rule: Rule = (None,) * 14, columns: int = 0,
) -> None:  # fmt: skip
    """The conv of a part that `fits`. x, mixed [N, channels]; look: of how many rows those of nobody become zero

    rule, columns: instead of `mixed`, what the delta rule consumes of it, and of how many channels a head is
    """
    shape, requests = shape_for(part, len(weight)), len(part.begin)
    blocks = ceil_div(part.most, shape.rows)
    read, store = ((words(pool, 1), *steps) for pool, *steps in (flat(one, 2, part.read) for one in (part.read, part.store)))
    store = store if part.store is not None else (None, *store[1:])
    out = (None, 0) if mixed is None else (mixed, mixed.stride(0))
    launch(
        conv_walk_prompt, (len(weight) // shape.channels, blocks, requests),
        words(x, 2), x.stride(0) // 2, *out, words(weight, WIDTH), part.begin, part.count, part.fresh,
        *read, *store, look, ceil_div(look, blocks * requests), *rule,
        RT=shape.rows, CT=shape.channels // shape.numbers, HT=columns // shape.numbers, NUMBERS=shape.numbers,
        FAST=not INTERPRETED, warps=shape.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["look", "share"])
def conv_walk_prompt(
    x, x_row, mixed, mixed_row, weight, begin, count, fresh,
    read, read_units, read_columns, read_unit, read_column, read_c, read_w,
    store, store_units, store_columns, store_unit, store_column, store_c, store_w, look, share,
    a, a_row, b, b_row, A_log, dt_bias, q, k, v, log_decay, beta, H, HV, scale,
    RT: tl.constexpr, CT: tl.constexpr, HT: tl.constexpr, NUMBERS: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """RT rows of one request, at least 3; CT times NUMBERS channels, HT times as many of a head.

    Grid (channel tiles, row blocks, B). x is in words of two numbers, and so are its steps. Windows are read and stored
    number by number, whatever their steps are: few programs do that.

    The program of a request's first rows alone reads its history and stores the window after its last row. It reads
    before it stores: both may be the same memory.
    """
    request, first = tl.program_id(2), tl.program_id(1) * RT
    c = tl.program_id(0) * CT + tl.arange(0, CT)
    taps = ()  # of each channel of a word
    for channel in tl.static_range(NUMBERS):
        taps = taps + (tl.load(weight + NUMBERS * c + channel),)
    if EARLY:
        wait()
    # All that says where things are is loaded at once. 32 bits are enough, and make short products.
    unit, start = tl.load(read_units + request).to(tl.int32), tl.load(begin + request).to(tl.int32)
    rows, known = tl.load(count + request).to(tl.int32), tl.load(fresh + request) == 0
    at = NUMBERS * c[:, None] + tl.arange(0, NUMBERS)[None, :]
    pair = tl.arange(0, NUMBERS // 2)
    every = tl.num_programs(0) * CT * NUMBERS  # masks are bounds, as in `walk_words.py`
    if (unit >= 0) & (first < rows):
        # Behind the last row that one again, and before row 0 that one, which nobody uses.
        row = x + (start + first).to(tl.int64) * x_row + (c * (NUMBERS // 2))[:, None] + pair[None, :]
        back = tl.where(first > 0, x_row, 0)
        old, middle, newest = tl.load(row - 3 * back), tl.load(row - 2 * back), tl.load(row - back)
        new = ()
        for t in tl.static_range(RT):
            new = new + (apart(tl.load(row + tl.minimum(rows - 1 - first, t) * x_row)),)
        if first == 0:
            past = read + window_of(unit, read_unit, tl.load(read_columns + request), read_column)
            even = 2 * (c * (NUMBERS // 2))[:, None] + 2 * pair[None, :]
            there = even < tl.where(known, every, 0)  # a fresh request must not read its history
            old = entry(past, even, read_c, there)
            middle = entry(past + read_w, even, read_c, there)
            newest = entry(past + 2 * read_w, even, read_c, there)
            if store is not None:
                goal, column = tl.load(store_units + request).to(tl.int32), tl.load(store_columns + request)
                target = store + window_of(goal, store_unit, column, store_column)
                kept = even < tl.where(goal >= 0, every, 0)
                last = ()
                for w in tl.static_range(3):
                    behind = rows - 3 + w  # below 0 it is in the history
                    one = tl.load(row + tl.maximum(behind, 0) * x_row)
                    last = last + (tl.where(behind < 0, tl.where(behind == -2, middle, newest), one),)
                tl.debug_barrier()  # a thread may have read what another one stores
                for w in tl.static_range(3):
                    for at_pair in tl.static_range(2):
                        goes = target + (even + at_pair) * store_c + w * store_w
                        tl.store(goes, bits(last[w], at_pair).to(tl.uint16), mask=kept)
        inputs = (apart(old), apart(middle), apart(newest)) + new
        if mixed is not None:
            out = mixed + (start + first).to(tl.int64) * mixed_row + at
            for t in tl.static_range(RT):
                live = NUMBERS * c < tl.where(first + t < rows, every, 0)
                tl.store(out + t * mixed_row, convolved(inputs, t, taps, NUMBERS, FAST), mask=live[:, None])
        else:
            heads: tl.constexpr = CT // HT
            head = tl.program_id(0) * heads
            if head < 2 * H:
                for t in tl.static_range(RT):
                    bound = tl.where(first + t < rows, 1, 0)
                    norms(convolved(inputs, t, taps, NUMBERS, FAST).to(tl.float32), (start + first).to(tl.int64) + t, bound,
                          q, k, v, H, HV, scale, CT, HT)  # fmt: skip
            else:
                keys, width = 2 * H * HT * NUMBERS, HV * HT * NUMBERS
                out = v + (start + first).to(tl.int64) * width + (at - keys)
                for t in tl.static_range(RT):
                    live = NUMBERS * c < tl.where(first + t < rows, every, 0)
                    tl.store(out + t * width, convolved(inputs, t, taps, NUMBERS, FAST).to(tl.float32), mask=live[:, None])
            if head + heads > 2 * H:
                line, of = (tl.arange(0, RT) + first)[:, None], (head + tl.arange(0, heads))[None, :]
                gates(a, a_row, b, b_row, A_log, dt_bias, log_decay, beta, (start + line).to(tl.int64) + of * 0,
                      of - 2 * H + line * 0, HV, (of >= 2 * H) & (line < rows))  # fmt: skip

    # Rows of nobody: every program looks at its share of all rows, which its own request mostly covers.
    requests = tl.num_programs(2)
    begins = (request * tl.num_programs(1) + tl.program_id(1)) * share
    ends = tl.minimum(begins + share, look)
    if (begins < ends) & ((unit < 0) | (start > begins) | (start + rows < ends)):
        lane = tl.arange(0, LANES)
        if covered(begins, ends, lane, read_units, begin, count, requests) < ends - begins:
            for other in range(begins, ends):
                if covering(other, lane, read_units, begin, count, requests) == 0:
                    far, nothing = (start * 0 + other).to(tl.int64), tl.zeros((CT, NUMBERS), tl.float32)
                    if mixed is not None:
                        tl.store(mixed + far * mixed_row + at, nothing.to(tl.bfloat16))
                    else:  # of nobody's rows as well the gates are what a and b say
                        consume(nothing, far, a, a_row, b, b_row, A_log, dt_bias,
                                q, k, v, log_decay, beta, H, HV, scale, CT, HT)  # fmt: skip


@triton.jit
def window_of(unit, unit_step, column, column_step):
    """Where a window begins, in numbers"""
    return unit.to(tl.int64) * unit_step + column.to(tl.int64) * column_step


@triton.jit
def entry(window, channel, step, there):
    """One input of a window, of two channels each: as words"""
    return word((tl.load(window + channel * step, mask=there, other=0),
                 tl.load(window + (channel + 1) * step, mask=there, other=0)), tl.uint32, 2)  # fmt: skip


@triton.jit
def apart(pairs):
    """Words [CT, 2 or 4]  ->  as many times [CT]"""
    if pairs.shape[1] == 2:
        return tl.split(pairs)
    else:
        even, odd = tl.split(tl.reshape(pairs, (pairs.shape[0], 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def convolved(inputs, t: tl.constexpr, taps, NUMBERS: tl.constexpr, FAST: tl.constexpr):
    """Row t of the result [CT, NUMBERS] in bf16; inputs: from three before row 0 on"""
    sums = ()
    for channel in tl.static_range(NUMBERS):
        # A product of the first input and nothing: 0 if it is -0, as where it is added to 0.
        total = tl.fma(number(inputs[t][channel // 2], channel % 2), number(taps[channel], 0), 0.0)
        for tap in tl.static_range(1, 4):
            total += number(inputs[t + tap][channel // 2], channel % 2) * number(taps[channel], tap)
        sums = sums + (silu(total, FAST),)
    return side_by_side(sums, NUMBERS).to(tl.bfloat16)


_SILU: tl.constexpr = tl.constexpr("""{
    .reg .f32 e, r, x;
    .reg .pred p;
    mul.f32 e, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 e, e;
    add.f32 e, e, 0f3F800000;
    mov.f32 x, $1;
    setp.gt.f32 p, e, 0f7E800000;
    @p mul.f32 e, e, 0f3E800000;
    @p mul.f32 x, x, 0f3E800000;
    rcp.approx.ftz.f32 r, e;
    mul.f32 $0, r, x;
}""")


@triton.jit
def silu(total, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(_SILU, "=f,f", [total], tl.float32, True, 1)
    else:
        return total / (1.0 + tl.exp(-total))


@triton.jit
def side_by_side(numbers, NUMBERS: tl.constexpr):
    """NUMBERS numbers [CT], of one channel each  ->  [CT, NUMBERS], in the same threads"""
    if NUMBERS == 4:
        pairs = tl.join(tl.join(numbers[0], numbers[2]), tl.join(numbers[1], numbers[3]))
    else:
        even = tl.join(tl.join(numbers[0], numbers[4]), tl.join(numbers[2], numbers[6]))
        odd = tl.join(tl.join(numbers[1], numbers[5]), tl.join(numbers[3], numbers[7]))
        pairs = tl.join(even, odd)
    return tl.reshape(pairs, (numbers[0].shape[0], NUMBERS))
