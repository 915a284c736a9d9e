"""The conv of prompts in bf16: a thread has four adjacent channels and walks some rows of one request.

It gives the bits of `causal_conv.py` and replaces it for chunks of more rows than `bf16_short_windows.py` takes.
Leaves out: trees, windows that are kept after every row, and channels that are no whole tiles (`fits`).
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, var-annotated"
# (device code: Triton's types are not Python's)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...memory_addresses import Part
from ..device.pool_address import Spans, Windows, constant, flat
from ..device.programmatic_dependent_launch import wait
from ..device.zero_uncovered_rows import LANES, covered, covering
from ..rowwise.gdn_inputs import RuleInputs, gates
from ..runtime import INTERPRETED, ceil_div, launch, tile
from .bf16_short_windows import bits, consume, normed, number, word
from .packed_16_bit_words import WIDTH, in_words, words
from .short_windows import ROWS as WALKED

OF_THREAD = 4  # channels of a thread
NUMBERS = tl.constexpr(OF_THREAD)


class Shape(NamedTuple):
    """Shape of a launch: rows that a program walks, and its warps. No bit depends on them."""

    rows: int
    warps: int = tile(2, 4)

    @property
    def channels(self) -> int:
        """Number of channels of a program."""
        return 32 * self.warps * OF_THREAD


# Keyed by whether the inputs of the delta rule are stored. Each entry: the minimum number of elements over all rows, in
# descending order, and the shape to use from there on (LOG.md). 2048 programs, about as many as a GPU runs at once,
# took
# longer than half or twice as many.
SHAPES: Mapping[bool, Sequence[tuple[int, Shape]]] = {
    False: ((1 << 23, Shape(8)), (1 << 22, Shape(4)), (1 << 21, Shape(8)), (0, Shape(4))),
    True: ((1 << 21, Shape(8)), (0, Shape(4))),
}
NARROW = tile(1, 4)  # warps, if channels or keys are not whole programs


def fits(
    x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, columns: int = 0, key_heads: int = 0,
) -> bool:  # fmt: skip
    """Return whether `walk_prompt` can run this part. columns: channels of a head, if no `mixed` is stored"""
    channels, width = weight.shape
    if part.parents is not None or part.per_row is not None or part.most <= WALKED or not len(part.begin):
        return False
    keys, rows = key_heads * columns if mixed is None else 0, [one for one in (x, mixed) if one is not None]
    shape = shape_for(part, channels, keys)
    if width != WIDTH or channels % shape.channels or any(one.dtype != torch.bfloat16 for one in (weight, *rows)):
        return False
    if mixed is None and (columns % OF_THREAD or shape.channels % columns or keys % shape.channels):
        return False
    held = all(one.pool.dtype == x.dtype for one in (part.read, part.store) if one is not None)
    taps = weight.is_contiguous() and in_words(weight, WIDTH)  # the taps of a channel are one word
    return held and taps and all(in_words(one, OF_THREAD) for one in rows)


def shape_for(part: Part, channels: int, keys: int = 0) -> Shape:
    """Choose the shape of a launch. keys: channels of all keys, if the inputs of the delta rule are stored"""
    numbers = len(part.begin) * part.most * channels
    shape = next(shape for least, shape in SHAPES[keys > 0] if numbers >= least)
    whole = channels % shape.channels == keys % shape.channels == 0
    return shape if whole else shape._replace(warps=NARROW)


def walk_prompt(
    x: torch.Tensor, weight: torch.Tensor, part: Part, mixed: torch.Tensor | None, look: int,
    rule: RuleInputs | None = None, columns: int = 0,
) -> None:  # fmt: skip
    """Run the conv of a part that `fits`. x, mixed [N, channels]

    look: number of rows to check; those that belong to no request become zero
    rule, columns: instead of `mixed`, the inputs of the delta rule to store, and the channels of a head
    """
    shape, requests = shape_for(part, len(weight), 0 if rule is None else rule.H * columns), len(part.begin)
    blocks = ceil_div(part.most, shape.rows)
    read, store = (one and Windows(words(one.pool, 1), *flat(one, 2, one)[1:]) for one in (part.read, part.store))
    out = (None, None) if mixed is None else (words(mixed, 2), mixed.stride(0) // 2)
    if rule is not None:
        rule = rule._replace(H=constant(rule.H), HV=constant(rule.HV))
    launch(
        conv_walk_prompt, (len(weight) // shape.channels, blocks, requests),
        words(x, 2), x.stride(0) // 2, *out, words(weight, WIDTH), Spans.of(part), read, store,
        look, ceil_div(look, blocks * requests), rule,
        RT=shape.rows, CT=shape.channels // OF_THREAD, HT=columns // OF_THREAD, NATIVE=not INTERPRETED,
        warps=shape.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["look", "share"])
def conv_walk_prompt(
    x, x_row: tl.constexpr, mixed, mixed_row: tl.constexpr, weight, spans, read, store, look, share, rule,
    RT: tl.constexpr, CT: tl.constexpr, HT: tl.constexpr, NATIVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Convolve RT rows of one request, at least 3; CT times NUMBERS channels, of which HT times NUMBERS make a head.

    Grid (channel tiles, row blocks, B). x is in words of two numbers, and so are its steps. Windows are read and stored
    number by number, whatever their steps are: few programs do that.

    Only the program of a request's first rows reads its history and stores the window after its last row. It reads
    before it stores, because both may be the same memory.
    """
    request, first = tl.program_id(2), tl.program_id(1) * RT
    c = tl.program_id(0) * CT + tl.arange(0, CT)
    taps = ()  # of each channel of a word
    for channel in tl.static_range(NUMBERS):
        taps = taps + (tl.load(weight + NUMBERS * c + channel),)
    if EARLY:
        wait()
    # All addresses and lengths are loaded at once. 32 bits are enough, and make short products.
    unit, start = tl.load(spans.units + request).to(tl.int32), tl.load(spans.begin + request).to(tl.int32)
    rows, known = tl.load(spans.rows + request).to(tl.int32), tl.load(spans.fresh + request) == 0
    at = NUMBERS * c[:, None] + tl.arange(0, NUMBERS)[None, :]
    at_word = NUMBERS // 2 * c[:, None] + tl.arange(0, NUMBERS // 2)[None, :]
    every = tl.num_programs(0) * CT * (NUMBERS // 2)  # words of a row: a bound of all
    if (unit >= 0) & (first < rows):
        row = x + (start + first).to(tl.int64) * x_row + at_word
        left, inner = rows - first, at_word * 0 < first
        old, middle = tl.load(row - 3 * x_row, mask=inner, other=0), tl.load(row - 2 * x_row, mask=inner, other=0)
        newest = tl.load(row - x_row, mask=inner, other=0)
        new = ()
        for t in tl.static_range(RT):
            new = new + (tl.split(tl.load(row + t * x_row, mask=at_word * 0 + t < left)),)
        if first == 0:
            past = window_of(read, unit, tl.load(read.columns + request))
            there = at_word < tl.where(known, every, 0)  # a fresh request must not read its history
            old = entry(past, 2 * at_word, read.per_channel, there)
            middle = entry(past + read.per_entry, 2 * at_word, read.per_channel, there)
            newest = entry(past + 2 * read.per_entry, 2 * at_word, read.per_channel, there)
            if store is not None:
                goal = tl.load(store.units + request).to(tl.int32)
                target = window_of(store, goal, tl.load(store.columns + request))
                kept = at_word < tl.where(goal >= 0, every, 0)
                last = ()
                for w in tl.static_range(3):
                    behind = rows - 3 + w  # below 0 it is in the history
                    one = tl.load(row + tl.maximum(behind, 0).to(tl.int64) * x_row)
                    last = last + (tl.where(behind < 0, tl.where(behind == -2, middle, newest), one),)
                tl.debug_barrier()  # a thread may have read what another one stores
                for w in tl.static_range(3):
                    for at_pair in tl.static_range(2):
                        goes = target + (2 * at_word + at_pair) * store.per_channel + w * store.per_entry
                        tl.store(goes, bits(last[w], at_pair).to(tl.uint16), mask=kept)
        inputs = (tl.split(old), tl.split(middle), tl.split(newest)) + new
        if mixed is not None:
            out = mixed + (start + first).to(tl.int64) * mixed_row + at_word
            for t in tl.static_range(RT):
                live = at_word * 0 + t < left
                pairs = convolved(inputs, t, taps, NATIVE)
                tl.store(out + t * mixed_row, tl.join(pairs[0], pairs[1]), mask=live)
        else:
            heads: tl.constexpr = CT // HT
            head, keys, width = tl.program_id(0) * heads, rule.H * HT * NUMBERS, rule.HV * HT * NUMBERS
            if head < 2 * rule.H:  # all heads are queries, or all are keys, which are not scaled
                query = head < rule.H
                factor, out = tl.where(query, rule.scale, 1.0), tl.where(query, rule.q, rule.k)
                out += (start + first).to(tl.int64) * keys + (at - tl.where(query, 0, keys))
                for t in tl.static_range(RT):
                    live = at * 0 + t < left
                    unit_of = normed(numbers_of(convolved(inputs, t, taps, NATIVE)), HT)
                    tl.store(out + t * keys, unit_of * factor, mask=live)
            else:
                out = rule.v + (start + first).to(tl.int64) * width + (at - 2 * keys)
                for t in tl.static_range(RT):
                    live = at * 0 + t < left
                    tl.store(out + t * width, numbers_of(convolved(inputs, t, taps, NATIVE)), mask=live)
                line, of = (tl.arange(0, RT) + first)[:, None], (head - 2 * rule.H + tl.arange(0, heads))[None, :]
                gates(rule, (start + line).to(tl.int64) + of * 0, of + line * 0, line + of * 0 < rows)

    # Rows without a request: every program checks its share of all rows, which its own request mostly covers.
    requests = tl.num_programs(2)
    begins = (request * tl.num_programs(1) + tl.program_id(1)) * share
    ends = tl.minimum(begins + share, look)
    if (begins < ends) & ((unit < 0) | (start > begins) | (start + rows < ends)):
        lane = tl.arange(0, LANES)
        if covered(begins, ends, lane, spans.units, spans.begin, spans.rows, requests) < ends - begins:
            for other in range(begins, ends):
                if covering(other, lane, spans.units, spans.begin, spans.rows, requests) == 0:
                    far = (start * 0 + other).to(tl.int64)
                    if mixed is not None:
                        tl.store(mixed + far * mixed_row + at_word, at_word * 0)
                    else:  # rows without a request still get the gates that a and b give
                        consume(tl.zeros((CT, NUMBERS), tl.float32), far, rule, CT, HT)


@triton.jit
def window_of(windows, unit, column):
    """Return the address at which a window begins."""
    return windows.pool + (unit.to(tl.int64) * windows.per_unit + column.to(tl.int64) * windows.per_column)


@triton.jit
def entry(window, channel, step, there):
    """Load one input of a window, for two channels each, as words."""
    return word((tl.load(window + channel * step, mask=there, other=0),
                 tl.load(window + (channel + 1) * step, mask=there, other=0)), tl.uint32, 2)  # fmt: skip


@triton.jit
def numbers_of(words):
    """Split two words [CT]  ->  their numbers [CT, 4] in fp32"""
    pairs = tl.join(words[0], words[1])
    return tl.reshape(tl.join(number(pairs, 0), number(pairs, 1)), (words[0].shape[0], NUMBERS))


@triton.jit
def convolved(inputs, t: tl.constexpr, taps, NATIVE: tl.constexpr):
    """Compute row t of the result, as two words [CT]; inputs: from three before row 0 on"""
    first = rounded(active(inputs, t, 0, taps, NATIVE), active(inputs, t, 1, taps, NATIVE), NATIVE)
    return first, rounded(active(inputs, t, 2, taps, NATIVE), active(inputs, t, 3, taps, NATIVE), NATIVE)


@triton.jit
def active(inputs, t: tl.constexpr, channel: tl.constexpr, taps, NATIVE: tl.constexpr):
    """Compute one channel of row t in fp32."""
    pair: tl.constexpr = channel // 2
    half: tl.constexpr = channel % 2
    # The first product is added to nothing, so that -0 becomes 0. One rounding is enough: the sum rounds nothing.
    total = tl.fma(number(inputs[t][pair], half), number(taps[channel], 0), 0.0)
    for tap in tl.static_range(1, 4):
        total += number(inputs[t + tap][pair], half) * number(taps[channel], tap)
    return silu(total, NATIVE)


_SILU = tl.constexpr("""{
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
def silu(total, NATIVE: tl.constexpr):
    """Return the bits of total / (1 + exp(-total)).

    The compiler's own code has nearly twice as many instructions. It also handles exponentials below 2^-126, which are
    negligible compared with 1, and divisors below 1, which do not occur. Its handling of a divisor above 2^126 is
    reproduced here.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(_SILU, "=f,f", [total], tl.float32, True, 1)
    else:
        return total / (1.0 + tl.exp(-total))


@triton.jit
def rounded(even, odd, NATIVE: tl.constexpr):
    """Round two numbers into a word. Rounding a single number runs at a quarter of the speed."""
    if NATIVE:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], tl.uint32, True, 1)
    else:
        even, odd = even.to(tl.bfloat16).to(tl.uint16, bitcast=True), odd.to(tl.bfloat16).to(tl.uint16, bitcast=True)
        return word((even, odd), tl.uint32, 2)
