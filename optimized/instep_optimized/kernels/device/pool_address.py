"""Kernel arguments of addresses and packed rows: tensors with every stride, read from the tensor.

Triton specializes every number in a tuple. So a number that changes between launches is an argument of its kernel.
Leaves out: the op that reads or writes them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...memory_addresses import Address, Part
from ...ops.op_protocols import GdnInputs

constant = cache(tl.constexpr)  # Triton looks a kernel up sooner by the same object


class Rows(NamedTuple):
    """Packed rows [N, heads, width]; the last axis is contiguous."""

    at: torch.Tensor
    per_row: int
    per_head: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Rows:
        assert x.dim() == 2 or x.stride(2) == 1, "rows have a contiguous last axis"
        return cls(x, *x.stride()[:2])


class Pool(NamedTuple):
    """Keys or values [pages, page_size, heads, width], and their scales, if there are any."""

    at: torch.Tensor
    per_page: int
    per_entry: int
    per_head: int
    scales: torch.Tensor | None
    scales_per_page: int | None

    @classmethod
    def of(cls, pool: torch.Tensor, scales: torch.Tensor | None = None) -> Pool:
        assert scales is None or scales[0].is_contiguous(), "the scales of a page lie side by side"
        return cls._make((pool, *pool.stride()[:3], scales, None if scales is None else scales.stride()[0]))


class Spans(NamedTuple):
    """The rows of each request of a part: the first one, and their number; its unit; whether it has no tokens yet."""

    begin: torch.Tensor
    rows: torch.Tensor
    units: torch.Tensor
    fresh: torch.Tensor

    @classmethod
    def of(cls, part: Part) -> Spans:
        return cls(part.begin, part.count, part.read.units, part.fresh)


class PackedRows(NamedTuple):
    """The inputs of the delta rule, and its read-outs.

    channels: a constant if log decays are [N, HV, K], one per key channel; None if they are [N, HV]
    """

    q: Rows
    k: Rows
    v: Rows
    log_decay: Rows
    beta: Rows
    core: Rows
    channels: Any = None

    @classmethod
    def of(cls, inputs: GdnInputs, core: torch.Tensor) -> PackedRows:
        channels = constant(True) if inputs.log_decay.dim() == 3 else None
        return cls._make((*map(Rows.of, (*inputs, core)), channels))


class States(NamedTuple):
    """Units of a pool of states [HV, K, V]: `flat`, and the scales of a pool in tiles."""

    pool: torch.Tensor
    units: torch.Tensor
    columns: torch.Tensor | None
    per_unit: int
    per_column: int
    per_head: int
    per_k: int
    per_v: Any
    scales: torch.Tensor | None
    scales_per_unit: int
    scales_per_column: int

    @classmethod
    def of(cls, address: Address | None, otherwise: Address) -> States:
        """An absent address is as in `flat`. Without scales the pool is passed in their place, and not touched."""
        scales, steps = (address or otherwise).scales, (0, 0)
        if scales is not None:
            assert scales[0].is_contiguous(), "the scales of a unit lie side by side"
            steps = scales.stride(0), scales.stride(1) if scales.dim() == 5 else 0
        return cls._make((*flat(address, 3, otherwise), otherwise.pool if scales is None else scales, *steps))


class Windows(NamedTuple):
    """Units of a pool of conv windows [channels, width - 1]: `flat`."""

    pool: torch.Tensor
    units: torch.Tensor
    columns: torch.Tensor
    per_unit: int
    per_column: int
    per_channel: int
    per_entry: int

    @classmethod
    def of(cls, address: Address) -> Windows:
        return cls(*flat(address, 2, address))


@triton.jit
def row_of(rows, row, head):
    """Return the address of a row of a head."""
    return rows.at + row * rows.per_row + head * rows.per_head


@triton.jit
def state_of(states, unit, column, head):
    """Return the address of the state of a head."""
    return states.pool + unit * states.per_unit + column * states.per_column + head * states.per_head


@triton.jit
def window_of(windows, unit, column):
    """Return the address at which a window begins."""
    return windows.pool + unit * windows.per_unit + column * windows.per_column


def flat(address: Address | None, inner: int, otherwise: Address) -> tuple[Any, ...]:
    """Expand to (pool, units, column, unit step, column step, one step per inner axis) for a kernel.

    If the address is absent, `otherwise` is passed in its place, so that the kernel compiles to the same code. A
    separate flag (`given`) then keeps the kernel from touching it. If the column is absent, the units are passed in its
    place with a column step of 0.
    """
    address = address or otherwise
    pool, steps = address.pool, address.pool.stride()
    positions = pool.dim() - inner == 2  # [units, positions, ...] and not [units, ...]
    column = address.units if address.column is None else address.column
    return pool, address.units, column, steps[0], steps[1] if positions else 0, *steps[pool.dim() - inner :]


def given(address: Address | None) -> int:
    """Return 1 if there is an address, else 0. It is a run-time argument, so both cases run the same compiled code."""
    return int(address is not None)
