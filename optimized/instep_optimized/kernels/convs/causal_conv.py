"""Causal depthwise conv over prefill chunks and verify windows, with its history in memory: one kernel for both.

Short windows, and prompts in bf16, have separate kernels (`short_windows.py`, `bf16_short_windows.py`,
`bf16_prompts.py`).
Leaves out: the projections around it, and the choice of addresses (the commit strategy makes it).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from instep_reference.contract.place_names import Place

from ...memory_addresses import Part
from ...ops.fused import fuses
from ...ops.op_protocols import GdnInputs
from ..device.pool_address import Spans, Windows, window_of
from ..device.zero_uncovered_rows import ROWS as CLEARED
from ..device.zero_uncovered_rows import beyond, clear, result, rows_of
from ..rowwise.gdn_inputs import RuleInputs, clear_inputs, consume, gdn_inputs, made, results
from ..runtime import ceil_div, launch, power_of_2, tile
from .bf16_prompts import fits as prompt_fits
from .bf16_prompts import walk_prompt
from .bf16_short_windows import fits as words_fit
from .bf16_short_windows import walk_words
from .short_windows import MANY, WARPS, conv_walk
from .short_windows import ROWS as WALKED

ROWS = tile(16, 64)  # per block, fewer in a shorter window; no bit depends on it: every result is its own sum
CHANNELS = 128  # channels per program on a GPU: 256 bytes of bf16
COLUMN_ROWS = 2  # windows that one step stores, where a window is kept per row, on a GPU
TREE_ELEMENTS = 8192  # elements per program for a tree, whose windows are all stored in one step


def conv(*, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place) -> torch.Tensor:
    """`Conv` of the seam: fp32 inside, result in x's dtype. Windows in memory keep the bits of x."""
    mixed, look = result(parts, x, *x.shape, dtype=x.dtype)
    _over(x, weight, parts, look, mixed)
    return mixed


def biased_conv(
    *, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, parts: tuple[Part, ...], to: Place
) -> torch.Tensor:
    """`BiasedConv` of the seam, by the general kernel for every number of rows."""
    mixed, look = result(parts, x, *x.shape, dtype=x.dtype)
    _over(x, weight, parts, look, mixed, bias=bias)
    return mixed


@fuses(conv=conv, gdn_inputs=gdn_inputs)
def conv_inputs(
    *, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, to: tuple[Place, ...],
) -> GdnInputs:  # fmt: skip
    """`ConvInputs` of the seam."""
    found = results(x, key_heads, key_dim, len(A_log), channels=a.dim() == 3)
    consumed(found, x, weight, parts, (a, b, A_log, dt_bias), to[0])
    return found


def consumed(
    found: GdnInputs, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...],
    rule: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], to: Place,
) -> None:  # fmt: skip
    """Write `found`, each tensor in its dtype, from one kernel that also normalizes.

    A program of the conv has the channels of one head, so it can normalize them. If heads do not fit into a tile, or a
    batch has several parts, or each key channel has its own decay, the separate conv and inputs kernels run instead.
    rule: a, b, A_log and dt_bias;  to: the place of mixed
    """
    key_dim = found.q.shape[2]
    fits = len(parts) == 1 and len(parts[0].begin) and key_dim <= _tiles(parts[0], *weight.shape)[2]
    if found.log_decay.dim() == 3 or not fits or not found.v.shape[2] == key_dim == power_of_2(key_dim):
        made(found, conv(x=x, weight=weight, parts=parts, to=to), *rule)
        return
    _over(x, weight, parts, len(x), None, RuleInputs.of(found, *rule), key_dim)


def _over(
    x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], look: int, mixed: torch.Tensor | None,
    rule: RuleInputs | None = None, columns: int = 0, bias: torch.Tensor | None = None,
) -> None:
    """Run the kernel over all parts. It stores its rows in `mixed`, or else the inputs of the delta rule.

    bias: only the general kernel adds one
    """
    assert x.stride(1) == 1 and weight.stride(1) == 1, "channels of x and taps of weight are contiguous"
    channels, width = weight.shape
    rows = x, x.stride(0), mixed, None if mixed is None else mixed.stride(0), weight, weight.stride(0)
    for part in parts:
        if bias is None and words_fit(x, weight, part, mixed, columns):
            walk_words(x, weight, part, mixed, look, rule, columns)
            continue
        if bias is None and prompt_fits(x, weight, part, mixed, columns, 0 if rule is None else rule.H):
            walk_prompt(x, weight, part, mixed, look, rule, columns)
            continue
        ahead, step, wide = _tiles(part, channels, width)
        # An absent argument compiles to no code. No bit depends on that: every result is a separate sum.
        memory = Spans.of(part), *(one and Windows.of(one) for one in (part.read, part.store, part.per_row))
        wide, entries = columns or wide, max(width - 1, 1)  # a conv of width 1 has windows without entries
        if bias is None and part.parents is None and part.most <= WALKED and len(part.begin):
            launch(
                conv_walk, (1, ceil_div(channels, wide), part.begin.numel()),
                *rows, *memory, channels, look, ceil_div(look, len(part.begin)), rule,
                W=width, RT=power_of_2(part.most), CT=wide, WHOLE=channels % wide == 0,
                warps=1 if mixed is None and part.per_row is None and len(part.begin) >= MANY else WARPS,
            )  # fmt: skip
            continue
        for head, tall, blocks in ((True, ahead, 1), (False, ROWS, ceil_div(part.most - ahead, ROWS))):
            more = beyond(look, blocks) if head is (part.most <= ahead) else 0  # one launch clears
            launch(
                _conv, (max(blocks, 0), ceil_div(channels, wide), part.begin.numel() + more),
                *rows, *memory, part.parents, channels, part.begin.numel(), look, 0 if head else ahead, rule, bias,
                HEAD=head, W=width, RT=tall, ST=step, CT=wide, ET=entries, JT=power_of_2(wide * entries), QT=CLEARED,
            )  # fmt: skip


def _tiles(part: Part, channels: int, width: int) -> tuple[int, int, int]:
    """Return rows per request of the launch with windows, kept windows per step, channels per program.

    Any row of a tree may reach the history, and a window may be kept over it. So one program has all rows of a tree and
    stores their windows in one step, after all its reads.
    """
    columns = min(power_of_2(channels), tile(CHANNELS, 512))
    if part.parents is None:
        # The history reaches into the windows of the first W-2 rows. They are stored in one step.
        rows = power_of_2(part.most if part.most <= ROWS else width - 1)
        return rows, max(tile(COLUMN_ROWS, 16), power_of_2(width - 2)), columns
    assert part.parents.is_contiguous(), "the parents of packed rows are contiguous"
    rows = power_of_2(part.most)
    return rows, rows, min(columns, tile(max(TREE_ELEMENTS // (rows * power_of_2(width)), 16), 512))


@triton.jit(do_not_specialize=["requests", "look", "ahead"])
def _conv(
    x, x_row, mixed, mixed_row, weight, weight_row, spans, read, store, each, parents,
    channels, requests, look, ahead, rule, bias,
    HEAD: tl.constexpr, W: tl.constexpr, RT: tl.constexpr, ST: tl.constexpr, CT: tl.constexpr, ET: tl.constexpr,
    JT: tl.constexpr, QT: tl.constexpr,
):  # fmt: skip
    """Convolve RT rows of one request, CT channels. Grid (row blocks, channel tiles, B and the blocks of `clear`).

    Row t takes the inputs t - (W-1) .. t. The window after row t is the last W-1 of them. With `parents` (one per
    packed row, for trees) a row takes its own input, its parent's, and so on. If `parents` or `bias` is None, Triton
    compiles no code for it.

    HEAD: the first RT rows of every request, and its windows. Only this launch reads the history, and a program writes
    windows after it has read. So no program can read a window after another program has overwritten it. The second
    launch has the remaining rows. It needs neither history nor windows, so more of its programs run at once.
    """
    request, first = tl.program_id(2), ahead + tl.program_id(0).to(tl.int64) * RT
    c = tl.program_id(1).to(tl.int64) * CT + tl.arange(0, CT)
    in_c = c < channels
    if request >= requests:
        free = rows_of(request - requests, QT)
        if mixed is not None:
            clear(mixed, mixed_row, c, in_c, free, spans.units, spans.begin, spans.rows, requests, look)
        else:
            clear_inputs(c, in_c, free, spans, requests, look, rule, CT)
        return
    unit, rows = tl.load(spans.units + request), tl.load(spans.rows + request)
    if (unit < 0) | (first >= rows):
        return
    row, start = first + tl.arange(0, RT), tl.load(spans.begin + request)
    # A fresh request must not read its history. Then the bound is 0; no channel index is below 0, so nothing is loaded.
    remembered = tl.where(tl.load(spans.fresh + request) == 0, channels, 0)
    history = window_of(read, unit, tl.load(read.columns + request))

    # An input before row 0 (back < 0) is entry back + W-1 of the history.
    total = tl.zeros((RT, CT), tl.float32)  # [RT, CT]
    for tap in tl.static_range(W):
        back = climb(row, row * 0 + tap - (W - 1), parents, start, rows, W)
        value = tl.load(
            x + ((start + back) * x_row)[:, None] + c[None, :],
            mask=((back >= 0) & (row < rows))[:, None] & in_c[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if HEAD:
            old = tl.load(
                history + (c * read.per_channel)[None, :] + ((back + W - 1) * read.per_entry)[:, None],
                mask=((back < 0) & (row < rows))[:, None] & (c < remembered)[None, :], other=0.0,
            )  # fmt: skip
            value = tl.where((back >= 0)[:, None], value, old.to(tl.float32))
        total += value * tl.load(weight + c * weight_row + tap, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    out = total / (1.0 + tl.exp(-total))
    if mixed is not None:
        tl.store(
            mixed + ((start + row) * mixed_row)[:, None] + c[None, :], out.to(mixed.dtype.element_ty),
            mask=(row < rows)[:, None] & in_c[None, :],
        )  # fmt: skip
    else:
        consume(out.to(x.dtype.element_ty).to(tl.float32), start + row, row < rows, rule, CT)
    if not HEAD:
        return

    # A window is contiguous, channel by channel. Its elements are numbered in that order and spread over the threads.
    element = tl.arange(0, JT)  # [JT], entry w of channel d
    d, w = tl.program_id(1) * CT + element // ET, element % ET
    there = (element < CT * (W - 1)) & (d < channels)
    history += d * read.per_channel
    if store is not None:  # the window after the last row: its inputs are read here, and stored at the end
        behind = rows.to(tl.int32) - (W - 1) + w  # the row of each entry; negative: it is in the history
        last = x + (start + rows - (W - 1)) * x_row + w * x_row + d
        last_new = tl.load(last, mask=there & (behind >= 0), other=0.0)
        old = history + (behind + W - 1) * read.per_entry
        last_old = tl.load(old, mask=there & (behind < 0) & (d < remembered), other=0.0)

    if each is not None:  # the window after every row, ST of them in a step
        kept_unit = tl.load(each.units + request)
        kept = each.pool + kept_unit * each.per_unit + d * each.per_channel + w * each.per_entry
        own = x + start * x_row + d
        for t in range(0, tl.where(kept_unit >= 0, rows.to(tl.int32), 0), ST):
            token = t + tl.arange(0, ST)
            reach = climb(token[:, None], (w - (W - 2))[None, :], parents, start, rows, W).to(tl.int32)  # [ST, JT]
            live = (token < rows)[:, None] & there[None, :]
            later = tl.load(own[None, :] + reach * x_row, mask=live & (reach >= 0), other=0.0)
            at_earlier = history[None, :] + (reach + W - 1) * read.per_entry
            earlier = tl.load(at_earlier, mask=live & (reach < 0) & (d < remembered)[None, :], other=0.0)
            tl.debug_barrier()  # all of the history is read (W-2 <= ST, or a tree) before a column is written over it
            KEPT: tl.constexpr = each.pool.dtype.element_ty
            columns = tl.where(reach >= 0, later.to(KEPT), earlier.to(KEPT))
            tl.store(kept[None, :] + (token * each.per_column)[:, None], columns, mask=live)

    if store is not None:
        tl.debug_barrier()  # it may be the same memory as a window that was read or stored above
        goal = tl.load(store.units + request)
        target = window_of(store, goal, tl.load(store.columns + request)) + d * store.per_channel + w * store.per_entry
        STORED: tl.constexpr = store.pool.dtype.element_ty
        window = tl.where(behind >= 0, last_new.to(STORED), last_old.to(STORED))
        tl.store(target, window, mask=there & (d < tl.where(goal >= 0, channels, 0)))


@triton.jit
def climb(row, by, parents, start, rows, W: tl.constexpr):
    """Return the row whose input lies -`by` inputs before that of `row` (0 to W-1).

    -1 is the last input of the history, -2 the one before it. Rows from `rows` on belong to no request.
    """
    if parents is None:
        return row + by
    else:
        at = row + by * 0
        for step in tl.static_range(W - 1):
            parent = tl.load(parents + start + at, mask=(at >= 0) & (at < rows), other=-1)
            at = tl.where(step < -by, tl.where(at < 0, at - 1, parent), at)
        return at
