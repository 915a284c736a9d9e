"""Inputs of a window's tokens for `token_by_token_gluon.py`: rows of the conv, or the conv itself; keys of length 1.

The conv has the bits of `bf16_short_windows.py`. A word is four channels of a row in bf16, the first one in its lowest
bits. A lane loads the four inputs of each of its words itself, so lanes exchange nothing. A window before or after a
row is three words in memory, in which channel c has the numbers 3 c, 3 c + 1 and 3 c + 2.
Leaves out: which launches include the conv (`launches_gluon.py`).
"""

# ruff: noqa: RUF005 (Triton knows no unpacking)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, misc, var-annotated"
# (device code: Triton's types are not Python's)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..convs import bf16_short_windows
from ..convs.packed_16_bit_words import WIDTH
from ..device.gluon_helpers import place
from ..rowwise.gdn_inputs import L2_EPS, STEPS

NUMBERS = gl.constexpr(WIDTH)  # numbers of a word, and taps of a channel

turned, number, put_window = (
    gluon.jit(one.fn) for one in (bf16_short_windows.turned, bf16_short_windows.number, bf16_short_windows.put_window)
)


@gluon.jit
def rows_at(x, k, q, v, log_decay, beta, first, rows, at_k, at_v, at, STEP: gl.constexpr):
    """Load the results of the conv and the linear maps from row `first` on  ->  k, q, v, a, b

    x: the packed rows; k, q, v, log_decay, beta: where those of this program begin
    at_k, at_v, at: the row indices for keys and queries, for values, and for a and b, among `rows`
    STEP: words from a row to the next, if k, q and v are inputs of the conv, four of which are loaded per row; else
    None
    """
    if STEP is not None:
        raw_k, raw_q = inputs_at(k + first * STEP, at_k, rows, STEP), inputs_at(q + first * STEP, at_k, rows, STEP)
        raw_v = inputs_at(v + first * STEP, at_v, rows, STEP)
    else:
        raw_k = gl.load(k + first * x.k.per_row, mask=at_k < rows, other=0.0)
        raw_q = gl.load(q + first * x.q.per_row, mask=at_k < rows, other=0.0)
        raw_v = gl.load(v + first * x.v.per_row, mask=at_v < rows, other=0.0)
    a_row, b_row = x.log_decay.per_row, x.beta.per_row
    forgets = gl.load(log_decay + first * a_row + at * a_row, mask=at < rows, other=0.0)
    strength = gl.load(beta + first * b_row + at * b_row, mask=at < rows, other=0.0)
    return raw_k, raw_q, raw_v, forgets, strength


@gluon.jit
def length_1(raw):
    """`unit` of `gdn_inputs.py`, with its order of the sum."""
    total = raw * raw
    for _ in gl.static_range(STEPS):
        if total.shape[1] > 1:
            total = gl.sum(gl.reshape(total, [raw.shape[0], total.shape[1] // 2, 2]), axis=2)
    return raw * gl.rsqrt(gl.convert_layout(total, raw.type.layout) + L2_EPS)


@gluon.jit
def taps_of(taps, word):
    """Pack the four taps of each channel of a word into a word."""
    found = ()
    for channel in gl.static_range(NUMBERS):
        found = found + (gl.load(taps + NUMBERS * word + channel),)
    return found


@gluon.jit
def window_at(windows, past, unit, request, row, known):
    """Load the window before the first row, as stored: three words, for the three rows that use its inputs."""
    past = place(past, unit, windows.columns, request, windows.per_unit, windows.per_column)
    there = (row < 3) & known
    one, two = gl.load(past, mask=there, other=0), gl.load(past + 1, mask=there, other=0)
    return one, two, gl.load(past + 2, mask=there, other=0)


@gluon.jit
def inputs_at(x, row, rows, STEP: gl.constexpr):
    """Load the conv's inputs of each row, except the window before the first one: four words, oldest first

    STEP: words from a row to the next
    """
    found = ()
    for tap in gl.static_range(NUMBERS):
        at = row + (tap - 3)
        found = found + (gl.load(x + (tap - 3) * STEP, mask=(at >= 0) & (at < rows), other=0),)
    return found


@gluon.jit
def conved(new, words, taps, row, LINES: gl.constexpr):
    """Convolve rows [tokens, words]  ->  [tokens, 4 words] in bf16, in LINES; the window after each row."""
    old = turned(words, NUMBERS)
    oldest = gl.where(row == 0, old[0], gl.where(row == 1, old[1], gl.where(row == 2, old[2], new[0])))
    older = gl.where(row == 0, old[1], gl.where(row == 1, old[2], new[1]))
    inputs = (oldest, older, gl.where(row == 0, old[2], new[2]), new[3])
    sums = ()
    for channel in gl.static_range(NUMBERS):
        total = gl.full(new[3].shape, 0.0, gl.float32, new[3].type.layout)
        for tap in gl.static_range(NUMBERS):
            total += number(inputs[tap], channel) * number(taps[channel], tap)
        sums = sums + (total / (1.0 + gl.exp(-total)),)
    pairs = gl.join(gl.join(sums[0], sums[2]), gl.join(sums[1], sums[3]))
    out = gl.reshape(pairs, [pairs.shape[0], NUMBERS * pairs.shape[1]]).to(gl.bfloat16)
    if LINES is not None:
        out = gl.convert_layout(out, LINES)
    return out, (inputs[1], inputs[2], inputs[3])


@gluon.jit
def put_windows(kept, word, window, there):
    """Store three inputs, each with all channels of a word, as the window of these channels."""
    put_window(kept + 3 * word, window[0], window[1], window[2], there, NUMBERS)
