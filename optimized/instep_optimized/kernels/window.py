"""The gated delta rule token by token: decode and verify, one kernel, snapshots per position where asked.

Leaves out: prefill chunks (`chunk.py`) and the choice of addresses (the commit strategy's).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..layout import Part
from ..ops.base import GdnInputs
from .address import flat, given
from .body import step
from .runtime import ceil_div, launch, power_of_2, tile

VALUE_ROWS = 8  # rows of V per program on a GPU (LOG.md): the occupancy knob, pinned because bits depend on it
WARPS = 2


def window(inputs: GdnInputs, part: Part, core: torch.Tensor) -> None:
    """Run one part's rows through their states; write `core` [N, HV, V] and the memory that the part names.

    Every part runs the same compiled code: absent addresses and counts are run-time values, so a window of T
    tokens gives the bits of T one-token decodes (fp32 state; a narrower one is rounded where it is stored).
    """
    heads, values, keys = core.shape[1], core.shape[2], inputs.k.shape[2]
    rows = min(power_of_2(values), tile(VALUE_ROWS, 64))
    launch(
        _window,
        (ceil_div(values, rows), heads, part.begin.numel()),
        *_rows(inputs, core),
        part.begin, part.count, part.fresh,
        *flat(part.read, 3, part.read),
        *flat(part.store, 3, part.read), given(part.store),
        *flat(part.each, 3, part.read), given(part.each),
        values, keys, heads // inputs.k.shape[1],
        VT=rows, KT=power_of_2(keys), warps=WARPS,
    )  # fmt: skip


def _rows(inputs: GdnInputs, core: torch.Tensor) -> tuple[Any, ...]:
    """The packed rows as (tensor, row step, head step); their last axis is contiguous."""
    flattened: list[Any] = []
    for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, core):
        assert x.dim() == 2 or x.stride(2) == 1, "rows have a contiguous last axis"
        flattened += [x, x.stride(0), x.stride(1)]
    return tuple(flattened)


@triton.jit(do_not_specialize=["has_store", "has_each"])
def _window(
    q, q_row, q_head, k, k_row, k_head, v, v_row, v_head,
    log_decay, log_decay_row, log_decay_head, beta, beta_row, beta_head, core, core_row, core_head,
    begin, count, fresh,
    read, read_units, read_columns, read_unit, read_column, read_h, read_k, read_v,
    store, store_units, store_columns, store_unit, store_column, store_h, store_k, store_v, has_store,
    each, each_units, each_columns, each_unit, each_column, each_h, each_k, each_v, has_each,
    V, K, group,
    VT: tl.constexpr, KT: tl.constexpr,
):  # fmt: skip
    """One program: one request, one value head, VT rows of V. Grid (V tiles, HV, B)."""
    request, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    unit, rows = tl.load(read_units + request), tl.load(count + request)
    if (unit < 0) | (rows <= 0):
        return  # core is zero there already
    at_v = tl.program_id(0) * VT + tl.arange(0, VT)
    at_k = tl.arange(0, KT)
    in_v, in_k = at_v < V, at_k < K

    # A condition on the whole tile is a bound of 0 on its rows: nothing is below it.
    remembers = (at_v < tl.where(tl.load(fresh + request) == 0, V, 0))[:, None] & in_k[None, :]
    source = read + unit * read_unit + tl.load(read_columns + request) * read_column + head * read_h
    state = tl.load(source + at_v[:, None] * read_v + at_k[None, :] * read_k, mask=remembers, other=0.0).to(tl.float32)
    tl.debug_barrier()  # whatever is stored below may be what another warp reads here

    kept_unit = tl.load(each_units + request)
    keeps = (at_v < tl.where((has_each != 0) & (kept_unit >= 0), V, 0))[:, None] & in_k[None, :]
    kept = each + kept_unit * each_unit + head * each_h + at_v[:, None] * each_v + at_k[None, :] * each_k

    row = tl.load(begin + request)
    key_head = head // group
    for t in range(rows):
        state, out = step(
            state,
            tl.load(q + row * q_row + key_head * q_head + at_k, mask=in_k, other=0.0),
            tl.load(k + row * k_row + key_head * k_head + at_k, mask=in_k, other=0.0),
            tl.load(v + row * v_row + head * v_head + at_v, mask=in_v, other=0.0),
            tl.exp(tl.load(log_decay + row * log_decay_row + head * log_decay_head)),
            tl.load(beta + row * beta_row + head * beta_head),
        )
        tl.store(core + row * core_row + head * core_head + at_v, out.to(core.dtype.element_ty), mask=in_v)
        tl.store(kept + t * each_column, state.to(each.dtype.element_ty), mask=keeps)
        row += 1

    goal = tl.load(store_units + request)
    target = store + goal * store_unit + tl.load(store_columns + request) * store_column + head * store_h
    stays = (at_v < tl.where((has_store != 0) & (goal >= 0), V, 0))[:, None] & in_k[None, :]
    tl.store(target + at_v[:, None] * store_v + at_k[None, :] * store_k, state.to(store.dtype.element_ty), mask=stays)
