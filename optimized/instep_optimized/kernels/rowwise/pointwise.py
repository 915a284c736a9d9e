"""Element by element: the residual sum, the output gate of attention, the activation of an MLP, a skip of values.

Leaves out: everything that reduces over a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from instep_reference.contract.place_names import Place

from ..device.programmatic_dependent_launch import wait, wait_before_product
from ..runtime import ceil_div, launch, tile

ELEMENTS = 1024  # per program on a GPU


def add(*, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor:
    """`Add` of the seam."""
    out = x.new_empty(x.shape)
    _launch(_add, out, x, x.stride(0), y, y.stride(0), x.shape[1])
    return out


def output_gate(*, attended: torch.Tensor, projected: torch.Tensor, to: Place) -> torch.Tensor:
    """`OutputGate` of the seam: attended times sigmoid of the gate half of `projected`, or of a head's last number."""
    out = attended.new_empty(attended.shape)
    of_heads = projected.dim() == 3
    gate = projected[:, :, -1:] if of_heads else projected[:, :, 1]
    heads, width = attended.shape[1:]
    _launch(_output_gate, out, attended, attended.stride(0), attended.stride(1), gate, gate.stride(0), gate.stride(1),
            heads, width, OF_HEADS=of_heads)  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """Compute [N, 2I], gate half first -> silu(gate) * up [N, I]. limit: of a clamped SwiGLU (`swiglu`)"""
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], width)
    _launch(_silu_mul, out, gate_up, gate_up.stride(0), width, LIMIT=limit)
    return out


def square(x: torch.Tensor) -> torch.Tensor:
    """Compute relu(x)^2 of [N, I]."""
    out = x.new_empty(x.shape)
    _launch(_square, out, x, x.stride(0), x.shape[1])
    return out


def add_skip(*, core: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
    """`AddSkip` of the seam: core + weight v, v in fp32, one cast at the end."""
    assert core.is_contiguous() and v.is_contiguous(), "read-outs and values are contiguous"
    out = core.new_empty(core.shape)
    _launch(_add_skip, out, core, v, weight, *core.shape[1:])
    return out


def _launch(kernel: object, out: torch.Tensor, *arguments: object, **constants: Any) -> None:
    """Launch over the elements of a contiguous result; rows of the arguments are contiguous."""
    block = tile(ELEMENTS, 1 << 14)
    launch(kernel, (ceil_div(out.numel(), block),), *arguments, out, out.numel(), BLOCK=block, **constants)


@triton.jit
def _add(x, x_row, y, y_row, width, out, elements, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, row, column = at < elements, at // width, at % width
    total = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(y + row * y_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def opening(gate, inside):
    """Return the divisor of the output gate."""
    return 1.0 + tl.exp(-tl.load(gate, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _output_gate(
    x, x_row, x_head, gate, gate_row, gate_head, heads, width, out, elements,
    OF_HEADS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """OF_HEADS: a head has one gate for all its channels."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # The result is contiguous and the gate is not: it is every second block of `projected`.
    inside, row, head, column = at < elements, at // (heads * width), at // width % heads, at % width
    here, there = x + row * x_row + head * x_head + column, gate + row * gate_row + head * gate_head
    if not OF_HEADS:
        there += column
    if EARLY:  # the wait comes after the divisions, which need no awaited data
        wait_before_product()
    value = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value / opening(there, inside)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu(gate, up, limit):
    """Return silu(gate) * up. limit: None, or a number: silu(gate) is at most it, and up within it on both sides."""
    opened = gate / (1.0 + tl.exp(-gate))
    if limit is not None:  # a NaN stays one
        opened = tl.minimum(opened, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), limit,
                        propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
    return opened * up


@triton.jit
def squared(x):
    """Return relu(x)^2; a NaN stays one."""
    opened = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return opened * opened


@triton.jit
def _square(x, x_row, width, out, elements, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at // width * x_row + at % width, mask=at < elements, other=0.0).to(tl.float32)
    tl.store(out + at, squared(value).to(out.dtype.element_ty), mask=at < elements)


@triton.jit
def _add_skip(core, v, weight, heads, width, out, elements, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, head = at < elements, at // width % heads
    value = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(core + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(weight + head, mask=inside, other=0.0).to(tl.float32) * value
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(
    gate_up, gate_up_row, width, out, elements, LIMIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, source = at < elements, gate_up + at // width * gate_up_row + at % width
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, swiglu(gate, up, LIMIT).to(out.dtype.element_ty), mask=inside)
