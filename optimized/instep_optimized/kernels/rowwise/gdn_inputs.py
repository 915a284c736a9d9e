"""Inputs of recurrences: queries and keys, normalized for the delta rule, values, log decay, write gate; in fp32.

Leaves out: the conv before it (`causal_conv.py`) and the rule itself (`token_by_token.py`, `chunk16_fp32.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from instep_reference.contract.place_names import Place

from ...ops.op_protocols import GdnInputs
from ..device.programmatic_dependent_launch import wait
from ..device.zero_uncovered_rows import clear
from ..runtime import ceil_div, launch, power_of_2, tile

L2_EPS = tl.constexpr(1e-6)  # added to the sum of squares, inside the root
WIDE = (torch.float32,) * 5  # dtypes of q, k, v, log_decay and beta at the seam
STEPS = tl.constexpr(12)  # steps of a pairwise sum: as many as the widest head may need


class RuleInputs(NamedTuple):
    """What the delta rule's inputs are made of, without rows, and where they go: an argument of kernels."""

    a: torch.Tensor
    a_row: int
    b: torch.Tensor
    b_row: int
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    H: Any  # key heads; a kernel may take it as a constant
    HV: Any
    scale: float

    @classmethod
    def of(
        cls, found: GdnInputs, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> RuleInputs:
        """`found` receives the results."""
        assert a.stride(1) == b.stride(1) == 1, "rows are contiguous"
        key_heads, key_dim = found.q.shape[1:]
        return cls(a, a.stride(0), b, b.stride(0), A_log, dt_bias, *found, key_heads, len(A_log), key_dim**-0.5)


def gdn_inputs(
    *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, to: tuple[Place, ...], beta_bound: float = 1.0, decay_bound: float | None = None,
) -> GdnInputs:  # fmt: skip
    """`MakeGdnInputs` of the seam. Computed once per token here, so that no program of the rule has to do it again."""
    found = results(mixed, key_heads, key_dim, len(A_log), channels=a.dim() == 3)
    made(found, mixed, a, b, A_log, dt_bias, beta_bound, decay_bound)
    return found


def selective_inputs(
    *, mixed: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int,
    to: tuple[Place, ...],
) -> GdnInputs:
    """`MakeSelectiveInputs` of the seam: x, B and C of the conv's output in fp32; decay and write gate of one step."""
    assert mixed.stride(1) == a.stride(1) == 1, "rows are contiguous"
    found = results(mixed, key_heads, key_dim, len(A_log))
    rows, heads, width = found.v.shape
    tall = tile(8, 64)
    launch(
        _selective_inputs, (ceil_div(rows * heads, tall), 3), mixed, mixed.stride(0), a, a.stride(0), A_log, dt_bias,
        *found, rows, key_heads, heads, key_dim, width, RT=tall, CT=power_of_2(max(key_dim, width)),
    )  # fmt: skip
    return found


def results(
    mixed: torch.Tensor, key_heads: int, key_dim: int, heads: int, dtypes: tuple[torch.dtype, ...] = WIDE,
    channels: bool = False,
) -> GdnInputs:  # fmt: skip
    """Allocate the results for rows [q | k | v]. channels: each key channel has its own decay"""
    rows, width = mixed.shape
    keys, values = (key_heads, key_dim), (heads, (width - 2 * key_heads * key_dim) // heads)
    gate: tuple[int, ...] = (heads, key_dim) if channels else (heads,)
    shapes = keys, keys, values, gate, (heads,)
    return GdnInputs(*(
        mixed.new_empty(rows, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    ))  # fmt: skip


def made(
    found: GdnInputs, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    beta_bound: float = 1.0, decay_bound: float | None = None,
) -> None:
    """Write `found`, each tensor in its dtype: a store rounds to nearest."""
    assert decay_bound is None or a.dim() == 3, "a safe gate has a decay per channel"
    assert mixed.stride(1) == 1, "rows are contiguous"
    (rows, heads), key_dim, width, tall = b.shape, found.q.shape[2], found.v.shape[2], tile(8, 64)
    if a.dim() == 3:
        assert a.stride(2) == 1 and a.stride(1) == key_dim and dt_bias.is_contiguous(), "channels are contiguous"
        launch(
            _channel_decays, (ceil_div(rows * heads, tall),), a, a.stride(0), A_log, dt_bias, found.log_decay,
            rows, heads, key_dim, decay_bound, RT=tall, CT=power_of_2(key_dim),
        )  # fmt: skip
        # The kernel below computes a decay per head: it gets b for it, and the result is unused.
        found, a, dt_bias = found._replace(log_decay=torch.empty_like(found.beta)), b, A_log
    launch(
        _gdn_inputs, (ceil_div(rows * heads, tall), 3),
        mixed, mixed.stride(0), RuleInputs.of(found, a, b, A_log, dt_bias), rows, key_dim, width,
        None if beta_bound == 1.0 else beta_bound,
        RT=tall, CT=power_of_2(max(key_dim, width)),
    )  # fmt: skip


@triton.jit
def _gdn_inputs(
    mixed, mixed_row, rule, rows, K, V, bound, RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr
):
    """Compute RT (row, head) pairs of q (kind 0), of k (1), or of v with the gates (2). Grid (pair tiles, 3).

    bound: of beta; where it is None, Triton leaves it out.
    """
    if EARLY:
        wait()
    kind = tl.program_id(1)
    pair = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    at = tl.arange(0, CT)
    if kind == 2:
        row, head, live = pair // rule.HV, pair % rule.HV, pair < rows * rule.HV
        inside = live[:, None] & (at < V)[None, :]
        source = mixed + (row * mixed_row + 2 * rule.H * K + head * V)[:, None] + at[None, :]
        value = tl.load(source, mask=inside, other=0.0)
        tl.store(rule.v + pair[:, None] * V + at[None, :], value.to(tl.float32), mask=inside)
        gates(rule, row, head, live, bound)
    else:
        row, head, live = pair // rule.H, pair % rule.H, pair < rows * rule.H
        inside = live[:, None] & (at < K)[None, :]
        source = mixed + (row * mixed_row + kind * rule.H * K + head * K)[:, None] + at[None, :]
        raw = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if kind == 0:
            tl.store(rule.q + pair[:, None] * K + at[None, :], unit(raw) * rule.scale, mask=inside)
        else:
            tl.store(rule.k + pair[:, None] * K + at[None, :], unit(raw), mask=inside)


@triton.jit
def _selective_inputs(
    mixed, mixed_row, a, a_row, A_log, dt_bias, q, k, v, log_decay, write, rows, H, HV, K, V,
    RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Copy RT (row, head) pairs of C (kind 0), of B (1), or of x with the gates (2). Rows are [x | B | C].

    dt = softplus(a + dt_bias) is the write gate, and log_decay = -exp(A_log) dt. Grid (pair tiles, 3)
    """
    if EARLY:
        wait()
    kind, at = tl.program_id(1), tl.arange(0, CT)
    pair = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT)
    if kind == 2:
        row, head, live = pair // HV, pair % HV, pair < rows * HV
        inside = live[:, None] & (at < V)[None, :]
        source = mixed + (row * mixed_row + head * V)[:, None] + at[None, :]
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        tl.store(v + pair[:, None] * V + at[None, :], value, mask=inside)
        drive = tl.load(a + row * a_row + head, mask=live, other=0.0).to(tl.float32)
        dt = softplus(drive + tl.load(dt_bias + head, mask=live, other=0.0).to(tl.float32))
        rate = tl.exp(tl.load(A_log + head, mask=live, other=0.0).to(tl.float32))
        tl.store(log_decay + pair, -rate * dt, mask=live)
        tl.store(write + pair, dt, mask=live)
    else:
        row, head, live = pair // H, pair % H, pair < rows * H
        inside = live[:, None] & (at < K)[None, :]
        source = mixed + (row * mixed_row + HV * V + (1 - kind) * H * K + head * K)[:, None] + at[None, :]
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if kind == 0:
            tl.store(q + pair[:, None] * K + at[None, :], value, mask=inside)
        else:
            tl.store(k + pair[:, None] * K + at[None, :], value, mask=inside)


@triton.jit
def _channel_decays(
    a, a_row, A_log, dt_bias, log_decay, rows, HV, K, bound, RT: tl.constexpr, CT: tl.constexpr, EARLY: tl.constexpr
):
    """Compute log_decay = -exp(A_log) softplus(a + dt_bias) of RT (row, head) pairs, for every key channel.

    bound: of a safe gate, bound sigmoid(exp(A_log) (a + dt_bias)); where it is None, Triton leaves it out.
    """
    if EARLY:
        wait()
    pair, at = tl.program_id(0).to(tl.int64) * RT + tl.arange(0, RT), tl.arange(0, CT)
    row, head, live = pair // HV, pair % HV, pair < rows * HV
    inside, channel = live[:, None] & (at < K)[None, :], (head * K)[:, None] + at[None, :]
    drive = tl.load(a + (row * a_row)[:, None] + channel, mask=inside, other=0.0).to(tl.float32)
    drive += tl.load(dt_bias + channel, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head, mask=live, other=0.0).to(tl.float32))
    goal = log_decay + pair[:, None] * K + at[None, :]
    if bound is None:
        tl.store(goal, -rate[:, None] * softplus(drive), mask=inside)
    else:
        tl.store(goal, bound / (1.0 + tl.exp(-rate[:, None] * drive)), mask=inside)


@triton.jit
def gates(rule, row, head, live, bound=None):
    """Store log_decay = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), times bound, of (row, head) pairs."""
    drive = tl.load(rule.a + row * rule.a_row + head, mask=live, other=0.0).to(tl.float32)
    drive += tl.load(rule.dt_bias + head, mask=live, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(rule.A_log + head, mask=live, other=0.0).to(tl.float32))
    tl.store(rule.log_decay + row * rule.HV + head, -rate * softplus(drive), mask=live)
    strength = tl.load(rule.b + row * rule.b_row + head, mask=live, other=0.0).to(tl.float32)
    beta = 1.0 / (1.0 + tl.exp(-strength))
    if bound is not None:
        beta = bound * beta
    tl.store(rule.beta + row * rule.HV + head, beta, mask=live)


@triton.jit
def consume(mixed, row, live, rule, CT: tl.constexpr):
    """Store rows [RT, CT] of one head, the second axis of the grid, as `gdn_inputs` computes them from memory."""
    head, at = tl.program_id(1), tl.arange(0, CT)
    if head < rule.H:
        goal = rule.q + ((row * rule.H + head) * CT)[:, None] + at[None, :]
        tl.store(goal, unit(mixed) * rule.scale, mask=live[:, None])
    elif head < 2 * rule.H:
        tl.store(rule.k + ((row * rule.H + head - rule.H) * CT)[:, None] + at[None, :], unit(mixed), mask=live[:, None])
    else:
        tl.store(rule.v + ((row * rule.HV + head - 2 * rule.H) * CT)[:, None] + at[None, :], mixed, mask=live[:, None])


@triton.jit
def consume_all(mixed, row, live, rule, CT: tl.constexpr):
    """Do `consume`; for a value head also store its gates."""
    consume(mixed, row, live, rule, CT)
    head = tl.program_id(1) - 2 * rule.H
    if head >= 0:
        gates(rule, row, row * 0 + head, live)


@triton.jit
def clear_inputs(c, in_c, row, spans, requests, rows, rule, CT: tl.constexpr):
    """Clear rows without a request: zeros of one head; gates of all rows, because they depend only on a and b."""
    keys = rule.H * CT
    if tl.program_id(1) < rule.H:
        clear(rule.q, keys, c, in_c, row, spans.units, spans.begin, spans.rows, requests, rows)
    elif tl.program_id(1) < 2 * rule.H:
        clear(rule.k, keys, c - keys, in_c, row, spans.units, spans.begin, spans.rows, requests, rows)
    else:
        clear(rule.v, rule.HV * CT, c - 2 * keys, in_c, row, spans.units, spans.begin, spans.rows, requests, rows)
        gates(rule, row.to(tl.int64), row * 0 + tl.program_id(1) - 2 * rule.H, row < rows)


@triton.jit
def unit(raw):
    """Normalize rows [R, C] to length 1.

    Neighbours are added, then pairs of neighbours, and so on. So the order of the sum, and its bits, do not depend on a
    kernel's tile or on how the compiler spreads it over threads.
    """
    total = raw * raw
    for _ in tl.static_range(STEPS):
        if total.shape[1] > 1:
            total = tl.sum(tl.reshape(total, (raw.shape[0], total.shape[1] // 2, 2)), axis=2)
    return raw * tl.rsqrt(total + L2_EPS)


@triton.jit
def softplus(x):
    """log(1 + e^x), without overflow, and to full relative precision where e^x is tiny.

    A head that remembers hundreds of tokens has e^x of 1e-4 and less. There 1 + y rounds most digits of y away. Kahan's
    formula log(u) * y / (u - 1), with u = 1 + y as rounded, cancels this rounding.
    """
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    lost = u - 1.0
    log1p = tl.where(lost == 0.0, y, tl.log(u) * (y / tl.where(lost == 0.0, 1.0, lost)))
    return tl.maximum(x, 0.0) + log1p
