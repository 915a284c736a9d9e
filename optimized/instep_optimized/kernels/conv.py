"""Causal depthwise conv over prefill chunks and verify windows, with its history in memory: one kernel for both.

Leaves out: the projections around it, and the choice of addresses (the commit strategy makes it).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from instep_reference.contract.place import Place

from ..layout import Part
from ..ops.base import GdnInputs
from ..ops.fused import fuses
from .address import flat, given
from .cover import clear, result
from .inputs import clear_inputs, consume, gdn_inputs, results
from .runtime import ceil_div, launch, power_of_2, tile

ROWS = 16  # rows per block on a GPU, fewer in a shorter window; no bit depends on it: every result is its own sum
CHANNELS = 128  # channels per program on a GPU: 256 bytes of bf16
COLUMN_ROWS = 4  # windows that one step stores, where a window is kept per row
TREE_ELEMENTS = 8192  # of a tree all windows are stored in one step: this many elements per program


def conv(*, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place) -> torch.Tensor:
    """`Conv` of the seam: fp32 inside, result in x's dtype. Windows in memory keep the bits of x."""
    mixed, look = result(parts, x, *x.shape, dtype=x.dtype)
    _over(x, weight, parts, look, mixed)
    return mixed


@fuses(conv=conv, gdn_inputs=gdn_inputs)
def conv_inputs(
    *, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, to: tuple[Place, ...],
) -> GdnInputs:  # fmt: skip
    """`ConvInputs` of the seam: a program of the conv has the channels of one head, so it norms them at once.

    Where heads do not fit into a tile, and where there are several parts of a batch, conv and inputs serve.
    """
    found = results(x, key_heads, key_dim, len(A_log))
    fits = len(parts) == 1 and key_dim <= _tiles(parts[0], *weight.shape)[2]
    if not fits or not found.v.shape[2] == key_dim == power_of_2(key_dim):
        mixed = conv(x=x, weight=weight, parts=parts, to=to[0])
        return gdn_inputs(mixed=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, key_heads=key_heads, key_dim=key_dim,
                          to=to[1:])  # fmt: skip
    assert a.stride(1) == b.stride(1) == 1, "rows are contiguous"
    gates = a, a.stride(0), b, b.stride(0), A_log, dt_bias
    _over(x, weight, parts, len(x), None, (*gates, *found, key_heads, len(A_log), key_dim**-0.5), key_dim)
    return found


def _over(
    x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], look: int, mixed: torch.Tensor | None,
    rule: tuple[object, ...] = (None,) * 14, columns: int = 0,
) -> None:
    """The kernel over all parts, with its rows into `mixed`, or with what the delta rule consumes of them."""
    assert x.stride(1) == 1 and weight.stride(1) == 1, "channels of x and taps of weight are contiguous"
    channels, width = weight.shape
    assert width - 1 <= COLUMN_ROWS, "the history reaches further than one step of kept windows"
    for part in parts:
        rows, step, wide = _tiles(part, channels, width)
        each, each_units, _, *each_steps = flat(part.per_row, 2, part.read)  # row t is its column
        launch(
            _conv,
            (max(ceil_div(part.most, rows), 1), ceil_div(channels, columns or wide), part.begin.numel() + bool(look)),
            x, x.stride(0), mixed, 0 if mixed is None else mixed.stride(0), weight, weight.stride(0),
            part.begin, part.count, part.fresh, *flat(part.read, 2, part.read), *flat(part.store, 2, part.read),
            given(part.store),
            each, each_units, *each_steps, given(part.per_row), part.parents, channels, part.begin.numel(), look,
            *rule, W=width, WT=power_of_2(width), RT=rows, ST=step, CT=columns or wide,
        )  # fmt: skip


def _tiles(part: Part, channels: int, width: int) -> tuple[int, int, int]:
    """Rows per block, kept windows per step, channels per program.

    Any row of a tree may reach the history, and a window may be kept over it. So one program has all rows of a tree and
    stores their windows in one step: whatever it reads, it reads before that.
    """
    columns = min(power_of_2(channels), tile(CHANNELS, 512))
    if part.parents is None:
        return min(power_of_2(part.most), tile(ROWS, 64)), COLUMN_ROWS, columns
    assert part.parents.is_contiguous(), "the parents of packed rows are contiguous"
    rows = power_of_2(part.most)
    return rows, rows, min(columns, tile(max(TREE_ELEMENTS // (rows * power_of_2(width)), 16), 512))


@triton.jit(do_not_specialize=["has_store", "has_each", "requests", "look"])
def _conv(
    x, x_row, mixed, mixed_row, weight, weight_row, begin, count, fresh,
    read, read_units, read_columns, read_unit, read_column, read_c, read_w,
    store, store_units, store_columns, store_unit, store_column, store_c, store_w, has_store,
    each, each_units, each_unit, each_column, each_c, each_w, has_each,
    parents, channels, requests, look,
    a, a_row, b, b_row, A_log, dt_bias, q, k, v, log_decay, beta, H, HV, scale,
    W: tl.constexpr, WT: tl.constexpr, RT: tl.constexpr, ST: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """RT rows of one request, CT channels. Grid (row blocks, channel tiles, B; one more: `clear`).

    Row t takes the inputs t - (W-1) .. t. The window after row t is the last W-1 of them. With `parents` (of packed
    rows, for trees) a row takes its own input, its parent's, and so on. Where `parents` is None, Triton leaves it out.

    Only the program of the first row block reads the history, and only it writes windows, after it has read. So no
    program can read a window too late, when another one has overwritten it.
    """
    request, first = tl.program_id(2), tl.program_id(0).to(tl.int64) * RT
    c = tl.program_id(1).to(tl.int64) * CT + tl.arange(0, CT)
    in_c = c < channels
    if request == requests:
        if mixed is not None:
            clear(mixed, mixed_row, c, in_c, read_units, begin, count, requests, look, RT)
        else:
            clear_inputs(c, in_c, read_units, begin, count, requests, look, a, a_row, b, b_row, A_log, dt_bias, q,
                         k, v, log_decay, beta, H, HV, RT, CT)
        return
    unit, rows = tl.load(read_units + request), tl.load(count + request)
    if (unit < 0) | (first >= rows):
        return
    row, start = first + tl.arange(0, RT), tl.load(begin + request)
    # A fresh request must not read its history. Then the bound is 0; no channel index is below 0, so nothing is loaded.
    remembered = c < tl.where(tl.load(fresh + request) == 0, channels, 0)
    history = read + unit * read_unit + tl.load(read_columns + request) * read_column + c * read_c

    # An input before row 0 (back < 0) is entry back + W-1 of the history.
    total = tl.zeros((RT, CT), tl.float32)  # [RT, CT]
    for tap in tl.static_range(W):
        back = climb(row, row * 0 + tap - (W - 1), parents, start, rows, W)
        new = tl.load(
            x + ((start + back) * x_row)[:, None] + c[None, :],
            mask=((back >= 0) & (row < rows))[:, None] & in_c[None, :], other=0.0,
        )  # fmt: skip
        old = tl.load(
            history[None, :] + ((back + W - 1) * read_w)[:, None],
            mask=((back < 0) & (row < rows))[:, None] & remembered[None, :], other=0.0,
        )  # fmt: skip
        value = tl.where((back >= 0)[:, None], new.to(tl.float32), old.to(tl.float32))
        total += value * tl.load(weight + c * weight_row + tap, mask=in_c, other=0.0).to(tl.float32)[None, :]
    out = total / (1.0 + tl.exp(-total))
    if mixed is not None:
        tl.store(
            mixed + ((start + row) * mixed_row)[:, None] + c[None, :], out.to(mixed.dtype.element_ty),
            mask=(row < rows)[:, None] & in_c[None, :],
        )  # fmt: skip
    else:
        consume(out.to(x.dtype.element_ty).to(tl.float32), start + row, row < rows, a, a_row, b, b_row, A_log,
                dt_bias, q, k, v, log_decay, beta, H, HV, scale, CT)
    if first > 0:
        return

    # The window after the last row: its inputs are read here, and stored at the end.
    w = tl.arange(0, WT)  # [WT], entry of a window; entries from W-1 on are padding
    behind = rows - (W - 1) + w  # [WT], the row of each entry; negative: it is in the history
    last_new = tl.load(
        x + ((start + behind) * x_row)[:, None] + c[None, :],
        mask=((w < W - 1) & (behind >= 0))[:, None] & in_c[None, :], other=0.0,
    )  # fmt: skip
    last_old = tl.load(
        history[None, :] + ((behind + W - 1) * read_w)[:, None],
        mask=((w < W - 1) & (behind < 0))[:, None] & remembered[None, :], other=0.0,
    )  # fmt: skip

    kept_unit = tl.load(each_units + request)
    kept = each + kept_unit * each_unit + c[None, None, :] * each_c + (w * each_w)[None, :, None]
    # The window after every row, ST of them in a step. Without such an address the loop has no steps.
    for t in range(0, tl.where((has_each != 0) & (kept_unit >= 0), rows, 0), ST):
        token = t + tl.arange(0, ST)
        # [ST, WT], the row of each entry; negative: history
        reach = climb(token[:, None], (w - (W - 2))[None, :], parents, start, rows, W)
        live = (token < rows)[:, None] & (w < W - 1)[None, :]
        later = tl.load(
            x + ((start + reach) * x_row)[:, :, None] + c[None, None, :],
            mask=(live & (reach >= 0))[:, :, None] & in_c[None, None, :], other=0.0,
        )  # fmt: skip
        earlier = tl.load(
            history[None, None, :] + ((reach + W - 1) * read_w)[:, :, None],
            mask=(live & (reach < 0))[:, :, None] & remembered[None, None, :], other=0.0,
        )  # fmt: skip
        tl.debug_barrier()  # all of the history is read (W-1 <= ST, or a tree) before a column is written over it
        columns = tl.where((reach >= 0)[:, :, None], later.to(each.dtype.element_ty), earlier.to(each.dtype.element_ty))
        tl.store(
            kept + (token * each_column)[:, None, None], columns, mask=live[:, :, None] & in_c[None, None, :]
        )

    tl.debug_barrier()  # `store` may be the same memory as a window that was read or stored above
    goal = tl.load(store_units + request)
    target = store + goal * store_unit + tl.load(store_columns + request) * store_column + c * store_c
    window = tl.where((behind >= 0)[:, None], last_new.to(store.dtype.element_ty), last_old.to(store.dtype.element_ty))
    stays = (w < tl.where((has_store != 0) & (goal >= 0), W - 1, 0))[:, None] & in_c[None, :]
    tl.store(target[None, :] + (w * store_w)[:, None], window, mask=stays)


@triton.jit
def climb(row, by, parents, start, rows, W: tl.constexpr):
    """The row whose input lies -`by` inputs before that of `row` (0 to W-1); -1 is the last input of the history, -2
    the one before it. Rows from `rows` on are nobody's."""
    if parents is None:
        return row + by
    else:
        at = row + by * 0
        for step in tl.static_range(W - 1):
            parent = tl.load(parents + start + at, mask=(at >= 0) & (at < rows), other=-1)
            at = tl.where(step < -by, tl.where(at < 0, at - 1, parent), at)
        return at
