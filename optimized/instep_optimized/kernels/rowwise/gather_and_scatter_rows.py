"""Kernels that move rows by number: embedding, selection, joining, and storing into pages. Bits move as integers.

Leaves out: arithmetic.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from instep_reference.contract.place_names import Place

from ..device.programmatic_dependent_launch import wait
from ..device.scaled_tiles import store_packed
from ..runtime import ceil_div, launch, power_of_2, tile
from .copy_units import BITS

COLUMNS = 1024  # per program
AXES = 2  # maximum number of axes of a stored row: [kv_heads, head_dim]


def select(*, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`Select` of the seam: x [N, ...], index [M] -> [M, ...]; -1 gives zeros."""
    out = x.new_empty(index.shape[0], *x.shape[1:])
    if out.numel():
        source, target = _flat(x), _flat(out)
        _launch(_gather, index.shape[0], source.shape[1], source, source.stride(0), index, target, target.stride(0))
    return out


def embed(*, tokens: torch.Tensor, table: torch.Tensor, to: Place) -> torch.Tensor:
    """`Embed` of the seam: the table's rows; a token of -1 (padding) gives zeros."""
    return select(x=table, index=tokens)


def concat(*, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor:
    """`Concat` of the seam: [x | y]."""
    out = x.new_empty(x.shape[0], x.shape[1] + y.shape[1])
    _launch(_join, x.shape[0], out.shape[1], _flat(x), x.stride(0), x.shape[1], _flat(y), y.stride(0), _flat(out))
    return out


def store_rows(
    *, rows: torch.Tensor, pool: torch.Tensor, locations: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """`StoreRows` of the seam: rows [N, ...] into pool [pages, page_size, ...]; a row has at most AXES axes."""
    if scales is not None:
        store_packed(rows, pool, locations, scales)
        return
    assert rows.dtype == pool.dtype and rows.shape[1:] == pool.shape[2:], "equal dtypes, equal rows"
    bits = BITS[rows.element_size()]
    here, there = (x.view(bits)[(..., *[None] * (AXES - len(rows.shape[1:])))] for x in (rows, pool))
    _launch(
        _scatter, rows.shape[0], here.shape[1] * here.shape[2], here, *here.stride(), locations,
        there, *there.stride(), there.shape[1], here.shape[2],
    )  # fmt: skip


def _flat(x: torch.Tensor) -> torch.Tensor:
    """View [N] or [N, ...] as integers [N, width]."""
    return x.view(BITS[x.element_size()]).unsqueeze(-1).flatten(1)


def _launch(kernel: object, rows: int, width: int, *arguments: object) -> None:
    """Launch over row and column tiles."""
    tall, wide = tile(1, 16), min(power_of_2(width), COLUMNS)
    launch(kernel, (ceil_div(rows, tall), ceil_div(width, wide)), *arguments, rows, width, RT=tall, CT=wide)


@triton.jit
def _gather(x, x_row, index, out, out_row, rows, width, RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        wait()
    row = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    at = tl.program_id(1) * CT + tl.arange(0, CT)
    number = tl.load(index + row, mask=row < rows, other=-1)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    # A row of -1 loads nothing and stores the zeros.
    bits = tl.load(x + number[:, None] * x_row + at[None, :], mask=inside & (number >= 0)[:, None], other=0)
    tl.store(out + row[:, None] * out_row + at[None, :], bits, mask=inside)


@triton.jit
def _join(x, x_row, first, y, y_row, out, rows, width, RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr):
    """Take the first columns from x, the others from y."""
    if EARLY:
        wait()
    row = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    at = tl.program_id(1) * CT + tl.arange(0, CT)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    left = tl.load(x + row[:, None] * x_row + at[None, :], mask=inside & (at < first)[None, :], other=0)
    right = tl.load(y + row[:, None] * y_row + (at - first)[None, :], mask=inside & (at >= first)[None, :], other=0)
    tl.store(out + row[:, None] * width + at[None, :], tl.where((at < first)[None, :], left, right), mask=inside)


@triton.jit
def _scatter(
    x, x_row, x_head, x_inner, locations, pool, pool_page, pool_entry, pool_head, pool_inner,
    page_size, width_of_head, rows, width, RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait()
    row = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    at = tl.program_id(1) * CT + tl.arange(0, CT)
    head, inner = at // width_of_head, at % width_of_head
    place = tl.load(locations + row, mask=row < rows, other=-1)
    inside = (place >= 0)[:, None] & (at < width)[None, :]
    bits = tl.load(x + row[:, None] * x_row + (head * x_head + inner * x_inner)[None, :], mask=inside)
    # A location is page * page_size + offset, but a page's pitch in memory may be larger: pools have red zones.
    entry = (place // page_size) * pool_page + (place % page_size) * pool_entry
    tl.store(pool + entry[:, None] + (head * pool_head + inner * pool_inner)[None, :], bits, mask=inside)
