"""Mixture of experts: routing, then each chosen expert's products for each row, and the gated shared expert.

Leaves out: grouping rows by expert (`grouped_experts.py`), which `triton` uses for activations of 16 bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import triton
import triton.language as tl

from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place

from ...ops.family_op_protocols import SquaredMlp
from ...ops.op_protocols import ExpertWeights, Linear, LmHead
from ..rowwise.pointwise import add, squared, swiglu
from ..runtime import ceil_div, launch, power_of_2, tile
from . import linear
from .grouped_experts import best, grouped, router


class ClampedMlp(Protocol):
    """`Mlp`, and with a limit a clamped SwiGLU."""

    def __call__(
        self, *, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Place, limit: float | None
    ) -> torch.Tensor: ...


class Dense(Protocol):
    """Products for the shared expert and around latents. Modules `linear` and `invariant.linear` have this form."""

    @property
    def clamped_mlp(self) -> ClampedMlp: ...
    @property
    def squared_mlp(self) -> SquaredMlp: ...
    @property
    def linear(self) -> Linear: ...
    @property
    def lm_head(self) -> LmHead: ...


def moe(*, x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, to: Place) -> torch.Tensor:
    """`Moe` of the seam: rows of 16 bits grouped by expert (`grouped_experts.py`), wider ones singly; no host reads."""
    if x.dtype.itemsize == 2 and weights.to_latent is None:
        return grouped(x, weights, top_k, norm_topk)
    if x.dtype.itemsize == 2:
        return _around_latents(x, weights, linear, to, lambda alone, read: grouped(x, alone, top_k, norm_topk, read))
    return precise_moe(x=x, weights=weights, top_k=top_k, norm_topk=norm_topk, to=to)


def precise_moe(*, x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, to: Place) -> torch.Tensor:
    """`Moe` of the seam: router, softmax and products of the experts in fp32, one cast at the end."""
    return mix(x, weights, top_k, norm_topk, linear, to)


def mix(
    x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, dense: Dense, to: Place,
    read: torch.Tensor | None = None,
) -> torch.Tensor:
    """Route every row, run its experts, and add the shared expert, whose products are those of `dense`.

    read: rows that routed experts read, and whose width they have; None: x
    Every program here computes one row, in tiles whose size depends only on the weights. So a row's bits do not
    depend on other rows, unless they do in `dense`.
    """
    if weights.to_latent is not None:
        return _around_latents(
            x, weights, dense, to, lambda alone, read: mix(x, alone, top_k, norm_topk, dense, to, read))
    rows, width = x.shape
    experts, inner = weights.router.shape[0], weights.down.shape[2]
    chosen = x.new_empty(rows, top_k, dtype=torch.int64)
    share = x.new_empty(rows, top_k, dtype=torch.float32)
    launch(
        _route, (rows,), x, x.stride(0), weights.router, weights.router.stride(0), weights.router_bias, chosen, share,
        experts, width, TT=power_of_2(top_k), ET=power_of_2(experts), DT=min(power_of_2(width), tile(32, 512)),
        **router(weights, top_k, norm_topk),
    )  # fmt: skip
    read = x if read is None else read
    width = read.shape[1]
    middle = x.new_empty(rows, top_k, inner, dtype=torch.float32)
    tall, wide = min(power_of_2(inner), tile(16, 128)), min(power_of_2(width), tile(256, 512))
    launch(
        _up, (ceil_div(inner, tall), top_k, rows), read, read.stride(0), weights.gate_up, *weights.gate_up.stride(),
        chosen, middle, inner, width, GATED=weights.gated, LIMIT=weights.limit, IT=tall, DT=wide,
    )  # fmt: skip
    shared, opening = _shared(x, weights, dense, to)
    out = x.new_empty(rows, width)
    tall, wide = min(power_of_2(width), tile(16, 128)), min(power_of_2(inner), tile(256, 512))
    launch(
        _down, (ceil_div(width, tall), rows), middle, weights.down, *weights.down.stride(), chosen, share,
        shared, opening, out, inner, width, SHARED=shared is not None, TOP=top_k, DT=tall, IT=wide,
    )  # fmt: skip
    return out


def _around_latents(
    x: torch.Tensor, weights: ExpertWeights, dense: Dense, to: Place,
    routed: Callable[[ExpertWeights, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Project rows to latents for the routed experts, project their sum back, and add the shared expert of the rows.

    Latents, their sum and the shared expert's rows are rounded to x's dtype; what is projected back is fp32.
    routed: (weights of the routed experts alone, latents) -> their sum
    """
    to_latent, from_latent = weights.to_latent, weights.from_latent
    assert to_latent is not None and from_latent is not None, "latents have two projections"
    if weights.shared_gate is not None:
        raise Unsupported("a shared expert next to experts over latents has no gate here")
    alone = replace(weights, to_latent=None, from_latent=None, shared_gate_up=None, shared_down=None)
    total = routed(alone, dense.linear(x=x, weight=to_latent, shape=(len(to_latent),), to=to))
    back = dense.lm_head(x=total, weight=from_latent, to=to)
    shared, _ = _shared(x, weights, dense, to)
    return back.to(x.dtype) if shared is None else add(x=shared, y=back, to=to)


def _shared(
    x: torch.Tensor, weights: ExpertWeights, dense: Dense, to: Place
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the shared expert's rows and the logit of its gate, as far as it has them."""
    gate_up, down, gate = weights.shared_gate_up, weights.shared_down, weights.shared_gate
    rows = None
    if gate_up is not None and down is not None:
        rows = (dense.clamped_mlp(x=x, gate_up=gate_up, down=down, to=to, limit=weights.shared_limit) if weights.gated
                else dense.squared_mlp(x=x, up=gate_up, down=down, to=to))  # fmt: skip
    return rows, None if gate is None else dense.lm_head(x=x, weight=gate, to=to)


@triton.jit
def _route(
    x, x_row, router, router_row, bias, chosen, share, experts, width, scale, group_size,
    NORM: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, BEST_GROUPS: tl.constexpr, GT: tl.constexpr,
    TT: tl.constexpr, ET: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Route one row: its logits, and the experts that they choose. Grid (N)."""
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, ET)
    logit = tl.zeros((ET,), tl.float32)
    for start in range(0, width, DT):
        d = start + tl.arange(0, DT)
        value = tl.load(x + row * x_row + d, mask=d < width, other=0.0).to(tl.float32)
        weight = tl.load(
            router + e[:, None] * router_row + d[None, :], mask=(e < experts)[:, None] & (d < width)[None, :], other=0.0
        )
        logit += tl.sum(weight.to(tl.float32) * value[None, :], axis=1)
    logit = tl.where(e < experts, logit, float("-inf"))
    rank = tl.arange(0, TT)
    which, part = best(
        logit, experts, rank, bias, scale, group_size, NORM, TOP, GROUPS, BEST_GROUPS, GT)
    tl.store(chosen + row * TOP + rank, which.to(tl.int64), mask=rank < TOP)
    tl.store(share + row * TOP + rank, part, mask=rank < TOP)


@triton.jit
def _up(
    x, x_row, gate_up, expert_step, row_step, column_step, chosen, middle, inner, width,
    GATED: tl.constexpr, LIMIT: tl.constexpr, IT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate) * up of one chosen expert for one row, IT inner channels. Grid (tiles of I, TOP, N).

    Without GATED an expert has no up half, and the result is relu(gate)^2.
    """
    row, pair = tl.program_id(2).to(tl.int64), tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    i = tl.program_id(0) * IT + tl.arange(0, IT)
    expert = gate_up + tl.load(chosen + pair) * expert_step
    gate, up = tl.zeros((IT,), tl.float32), tl.zeros((IT,), tl.float32)
    for start in range(0, width, DT):
        d = start + tl.arange(0, DT)
        inside = (i < inner)[:, None] & (d < width)[None, :]
        value = tl.load(x + row * x_row + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
        at = i[:, None] * row_step + d[None, :] * column_step
        gate += tl.sum(tl.load(expert + at, mask=inside, other=0.0).to(tl.float32) * value, axis=1)
        if GATED:
            lower = expert + inner * row_step  # the up half follows the gate half
            up += tl.sum(tl.load(lower + at, mask=inside, other=0.0).to(tl.float32) * value, axis=1)
    tl.store(middle + pair * inner + i, swiglu(gate, up, LIMIT) if GATED else squared(gate), mask=i < inner)


@triton.jit
def _down(
    middle, down, expert_step, row_step, column_step, chosen, share, shared, opening, out, inner, width,
    SHARED: tl.constexpr, TOP: tl.constexpr, DT: tl.constexpr, IT: tl.constexpr,
):  # fmt: skip
    """Sum one row's experts by weight, in the order of choice, DT channels. Grid (tiles of D, N)."""
    row, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * DT + tl.arange(0, DT)
    total = tl.zeros((DT,), tl.float32)
    for n in tl.static_range(TOP):
        expert = down + tl.load(chosen + row * TOP + n) * expert_step
        answer = tl.zeros((DT,), tl.float32)
        for start in range(0, inner, IT):
            i = start + tl.arange(0, IT)
            inside = (d < width)[:, None] & (i < inner)[None, :]
            value = tl.load(middle + (row * TOP + n) * inner + i, mask=i < inner, other=0.0)
            weight = tl.load(expert + d[:, None] * row_step + i[None, :] * column_step, mask=inside, other=0.0)
            answer += tl.sum(weight.to(tl.float32) * value[None, :], axis=1)
        total += tl.load(share + row * TOP + n) * answer
    if SHARED:
        answer = tl.load(shared + row * width + d, mask=d < width, other=0.0).to(tl.float32)
        if opening is not None:
            answer = 1.0 / (1.0 + tl.exp(-tl.load(opening + row).to(tl.float32))) * answer
        total += answer
    tl.store(out + row * width + d, total.to(out.dtype.element_ty), mask=d < width)
