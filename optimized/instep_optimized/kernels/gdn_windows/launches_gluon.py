"""The chain form of `token_by_token.py` with explicit layouts: states and token inputs come through shared memory.

It has the body of `token_by_token.py`, its contract, and the layout that the compiler chooses there. So it gives the
same bits, and a GPU runs it in place of `window` whenever it fits. States in 16 bits have the layout of states in fp32.
It may also compute norms and gates, with the bits of `gdn_inputs.py`, and the conv before them, with the bits of
`bf16_short_windows.py`.
Leaves out: the kernel (`token_by_token_gluon.py`); calls that do not fit (`fits`, `fits_conv`), and interpretation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...memory_addresses import Address, Part, Updates
from ...ops.fused import apart
from ...ops.op_protocols import GdnInputs
from ..convs.packed_16_bit_words import WIDTH as TAPS
from ..convs.packed_16_bit_words import WordWindows, in_words, windows, words
from ..device.gluon_helpers import NEWER
from ..device.pool_address import PackedRows, Spans, States, constant, flat
from ..runtime import launch, power_of_2
from .token_by_token import KEY_PIECE, Kept, ring_of, rows_of
from .token_by_token_gluon import staged_decode, staged_window

STORED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of states
# Each lane has at least 4 numbers of a key. For a narrower key the compiler gives a lane of `window` fewer numbers, and
# sums in another order; a wider key needs more registers than the shapes below have.
WIDTH = 128
TOKENS = 32  # maximum number of tokens in a ring or a window: a lane reads the gates of one token
SLIM = 88 if NEWER.value else 72  # registers for one row of V per thread: with 80 a newer Triton spills two
NARROW = 112 if NEWER.value else 96  # for two rows in 16 bits: with 96 it spills 26
KEEPS_FIRST = not NEWER.value  # for windows of many rows with their conv: with it a newer Triton spills four registers
# A window with its conv was timed only with the maximum number of rows that is accepted here, and with these numbers of
# rows of V over all heads and requests. With fewer the fused conv takes as long as its separate launch (LOG.md).
ROWS, VERIFIES = 4, range(8192, 131072 + 1)
AHEAD = 1024  # programs: some 4 MB of states
LEADS = 264  # half of the programs that an H200 runs at the same time
CHANNELS = 16  # more registers for a decay per key channel where a thread has `SLIM`: without them it spills
WRITTEN_OUT = 8  # maximum rows: with more the unrolled code is long and stalls on itself
Conv = tuple[torch.Tensor, Address, Address]  # weight; windows before the first row, and those after every row


class Rule(NamedTuple):
    """Constants of the gates [HV], and of norms: the factor of a query."""

    A_log: torch.Tensor
    dt_bias: torch.Tensor
    scale: float


class Shape(NamedTuple):
    """Shape of a launch: rows of V that a thread holds, warps, registers, and these options.

    ahead  prefetch distance: how many programs later the program runs whose state is prefetched (0: no prefetch).
           Windows with a rule do not prefetch. Only the first programs of a window guess then, twice as many as this
    lined  whether lanes swap pieces of a state before they store it, so that whole lines are written: a window's by
           shuffles, a decode's in shared memory
    ends   whether the state after the last row is skipped if it is not needed: less arithmetic, and a branch
    apart  whether the rows of a window are unrolled, without a branch, so that each is loaded while the previous one
           is computed: more registers, and a missing row takes its time, too
    guess  what is loaded while the previous launch runs, which may not have written its place yet. 0: nothing;
           1: the state, into the cache; 2: after the wait also the tokens' rows, and again if their place differs
    kept_first  whether rings keep keys and decays before rows are computed. ptxas then orders the computation
           differently, which is better for many states of fp32 and worse for 16 bits
    asked  `guess` prefetches the first 1 / asked of a program's state. Loads of the previous launch wait in the queue
           after it, so with many states it is not the whole state
    leads  how many programs copy their state before their tokens, and at once that of the guessed unit. They compute
           while the others still copy, which helps if all programs run at the same time, or nearly all
    """

    held: int
    warps: int
    registers: int
    ahead: int = 0
    lined: bool = False
    ends: bool = True
    apart: bool = False
    guess: int = 0
    kept_first: bool = False
    asked: int = 1
    leads: int = 0


# On a GPU (LOG.md), keyed by the form of a launch (`form`; a window with its conv: `verify`, and one with a decay per
# key channel: `channels`, or `window`) and the bytes of a state's number. Each entry: the minimum number of rows of V,
# over all heads and requests, and the shape to use from there on. The bits depend on none of them.
SHAPES: Mapping[str, Mapping[int, tuple[tuple[int, Shape], ...]]] = {
    "window": {
        4: ((32768, Shape(2, 4, 128, lined=True, guess=2, kept_first=True, asked=2)),
            (8192, Shape(2, 4, 128, guess=2, kept_first=True)), (0, Shape(1, 4, 168, apart=True, guess=2))),
        2: ((16384, Shape(2, 4, 128, lined=True, guess=2)), (8192, Shape(2, 4, 128, ends=False, guess=2)),
            (0, Shape(1, 4, 168, apart=True, guess=2))),
    },
    "channels": {
        4: ((65536, Shape(2, 4, 128, LEADS, lined=True, guess=2, kept_first=True, asked=2)),
            (32768, Shape(2, 4, 128, lined=True, guess=2, asked=2, leads=LEADS)),
            (8192, Shape(2, 4, 128, guess=2, kept_first=True)), (0, Shape(1, 4, 168, apart=True, guess=2))),
    },
    "verify": {
        4: ((65536, Shape(2, 4, 128, lined=True, guess=2, kept_first=KEEPS_FIRST, asked=2)),
            (32768, Shape(2, 4, 128, lined=True, guess=2, asked=2)), (0, Shape(2, 4, 128, guess=2, kept_first=True))),
    },
    "kept": {
        4: ((524288, Shape(2, 2, 112, guess=2)), (16384, Shape(2, 2, 112)), (0, Shape(2, 2, 112, guess=2))),
        2: ((524288, Shape(2, 2, 112)), (0, Shape(2, 2, 112, guess=2))),
    },
    "decode": {
        4: ((65536, Shape(1, 1, SLIM, AHEAD)), (12288, Shape(2, 2, 112)), (0, Shape(2, 2, 112, guess=1))),
        2: ((49152, Shape(2, 1, NARROW, AHEAD, lined=True)), (0, Shape(2, 2, 112, guess=1))),
    },
}  # fmt: skip
LARGEST = (2, 4)  # over all shapes
NOTHING, NO_RING = States._make(len(States._fields) * (None,)), Kept._make(len(Kept._fields) * (None,))


def fits(inputs: GdnInputs, part: Part, core: torch.Tensor, raw: bool = False, numbers: int = 1) -> bool:
    """Return whether `staged` can run this part. It neither rounds a state stochastically nor supports scales.

    raw: inputs are as a `rule` takes them, in any dtype;  numbers: in each element of their q, k and v, which may be
    words
    """
    addresses = [one for one in (part.read, part.store, part.settled, part.per_row) if one is not None]
    dtype = part.read.pool.dtype
    alike = dtype in STORED and all(one.pool.dtype == dtype and one.pool.stride(-2) == 1 for one in addresses)
    alike &= all(one.scales is None and one.chance is None for one in addresses) and _aligned(part.read.pool)
    wide, kept = raw or all(x.dtype == torch.float32 for x in inputs), 0
    if part.ring is not None:
        wide &= isinstance(part.ring.kept, Updates) and all(pool.dtype == torch.float32 for pool in part.ring.kept)
        kept = part.ring.size
    wide &= not raw or inputs.log_decay.dim() == 2  # gates per channel are not computed here
    keys, values = numbers * inputs.k.shape[2], core.shape[2]
    filled = keys == WIDTH and values % rows_of(*LARGEST, keys) == 0
    return alike and wide and filled and part.parents is None and max(kept, part.most) <= TOKENS


def fits_conv(x: torch.Tensor, weight: torch.Tensor, window: Part, part: Part, rows: int) -> bool:
    """Return whether `staged` can compute the conv of x, too, and is faster with it. Without its conv the part fits.

    rows: of V, over all heads and requests
    """
    kept = window.per_row
    if kept is None or kept.pool.dim() != 4 or not apart(window) or window.parents is not None:
        return False
    told = all(_same(*pair) for pair in zip(_rows(window), _rows(part), strict=True)) and window.most == part.most
    timed = part.read.pool.itemsize in SHAPES["verify"] and rows in VERIFIES and 1 < part.most <= ROWS
    if not (told and timed and part.ring is not None and part.per_row is None and weight.shape[1] == TAPS):
        return False
    held = (window.read.pool, kept.pool)
    whole = weight.is_contiguous() and len(weight) % TAPS == 0 and in_words(weight, TAPS)
    whole &= all(one.dtype == torch.bfloat16 for one in (x, weight, *held))
    whole &= all(pool.stride()[-2:] == (TAPS - 1, 1) and in_words(pool, TAPS, 2) for pool in held)
    return whole and x.stride(1) == 1 and in_words(x, TAPS)


def _rows(part: Part) -> tuple[torch.Tensor, ...]:
    return part.begin, part.count, part.fresh, part.read.units


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both are the same memory, and so hold the same values."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _aligned(pool: torch.Tensor) -> bool:
    """Return whether every row of a state can be copied in pieces of 16 bytes."""
    steps = (*pool.stride()[:-2], pool.stride(-1))
    return pool.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in steps)


def staged(
    inputs: GdnInputs, part: Part, core: torch.Tensor, shape: Shape | None = None, look: int = 0,
    rule: Rule | None = None, conv: Conv | None = None,
) -> None:
    """Run `window` on a part that fits. shape: None chooses from SHAPES; the bits do not depend on it.

    rule: if given, `inputs` are rows from the conv and the linear maps, with a and b in place of log decay and beta.
    Norms and gates are then computed here, with the bits of `gdn_inputs.py`.
    conv: if given, q, k and v of `inputs` are inputs of the conv, in words.
    """
    heads, values, keys = core.shape[1], core.shape[2], inputs.k.shape[2] * (TAPS if conv else 1)
    requests = part.begin.numel()
    kind = "verify" if conv else form(part)
    if kind == "window" and inputs.log_decay.dim() > 2:
        kind = "channels"
    one = Shape(*(shape or shape_for(kind, part.read.pool.itemsize, requests * heads * values)))
    ring, stripes = part.ring, values // rows_of(one.held, one.warps, keys)
    x, of_requests, of_conv = PackedRows.of(inputs, core), Spans.of(part), None
    group, grid, units = heads // inputs.k.shape[1], (stripes, heads, requests), len(part.read.pool)
    one = one._replace(ahead=one.ahead // stripes)  # the same rows of a later state
    more = CHANNELS if x.channels is not None and one.registers == SLIM else 0
    options: dict[str, Any] = {"KT": keys, "KI": KEY_PIECE, "warps": one.warps, "registers": one.registers + more}
    if kind == "decode":
        launch(
            staged_decode, grid, x, rule, of_requests, held_at(part.read), held_at(part.store), look, group, units,
            SHAPE=one, **options,
        )  # fmt: skip
        return
    if conv is not None:
        weight, before, after = conv
        of_conv = ConvWords(words(weight, TAPS), windows(before, TAPS), windows(after, TAPS))
    sizes = (1, 1) if ring is None else (ring.size, ring.own.shape[1])
    launch(
        staged_window, grid, x, rule, of_conv, of_requests,
        *map(held_at, (part.read, part.store, part.settled, part.per_row)), NO_RING if ring is None else ring_of(ring),
        *sizes, look, group, units, KEPT=power_of_2(sizes[0]), MOST=power_of_2(part.most),
        STEP=inputs.q.stride(0) if conv else None,
        SHAPE=one._replace(apart=one.apart and part.most <= WRITTEN_OUT), **options,
    )  # fmt: skip


def words_of(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, key_heads: int, key_dim: int) -> GdnInputs:
    """Pack rows [q | k | v] before the conv into words, with a and b."""
    every, width = words(x, TAPS), key_dim // TAPS
    q, k, v = torch.split(every, [key_heads * width, key_heads * width, every.shape[1] - 2 * key_heads * width], dim=1)
    heads = (len(x), key_heads, width)
    return GdnInputs(q.view(heads), k.view(heads), v.view(len(x), a.shape[1], -1), a, b)


class ConvWords(NamedTuple):
    """The conv of a launch in words: its taps, the windows before the first row, and those after every row."""

    taps: torch.Tensor
    past: WordWindows
    kept: WordWindows


def held_at(address: Address | None) -> States:
    """Return an address of states, in which the step of V is a constant. Absent parts are None in it.

    Triton 3.6 cannot compare a tuple in which something is None with None, so what is absent is a tuple, too.
    """
    if address is None:
        return NOTHING
    pool, units, _, *steps, per_v = flat(address, 3, address)
    return States._make((pool, units, address.column, *steps, constant(per_v), None, 0, 0))


def form(part: Part) -> str:
    """Name the form: `window`, `kept` (one row, and more than its final state is stored), or `decode`."""
    if part.most > 1:
        return "window"
    return "decode" if part.ring is None and part.per_row is None and part.settled is None else "kept"


def shape_for(form: str, size: int, rows: int) -> Shape:
    """Choose the shape of a launch over `rows` rows of V, whose states have numbers of `size` bytes."""
    return next(shape for least, shape in shapes(form, size) if rows >= least)


def shapes(form: str, size: int) -> tuple[tuple[int, Shape], ...]:
    """Look up a form of `SHAPES`."""
    return SHAPES["window" if form == "channels" and size not in SHAPES[form] else form][size]
