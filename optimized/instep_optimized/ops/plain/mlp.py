"""SwiGLU, squared ReLU, and a mixture of such experts with a shared one.

One expert after the other, in at least fp32, with one cast at the end. Leaves out: fused or grouped expert products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import linear, relu, sigmoid, silu

from instep_reference.contract.place_names import Place

from ..op_protocols import ExpertWeights
from .compute_width import wide


def mlp(*, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor:
    """Compute down(silu(gate x) * up x).

    Shapes: x (N, D)  gate_up (2I, D), gate half first  down (D, I)  ->  (N, D)
    """
    return _swiglu(wide(x), gate_up, down).to(x.dtype)


def squared_mlp(*, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor:
    """Compute down(relu(up x)^2).

    Shapes: x (N, D)  up (I, D)  down (D, I)  ->  (N, D)
    """
    return _squared(wide(x), up, down).to(x.dtype)


def moe(*, x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, to: Place) -> torch.Tensor:
    """Sum the top-k experts by softmax over all of them, weighted, plus sigmoid(shared gate) * shared expert.

    Experts over latents read a projection of x, and another one maps their sum back. Router and shared expert read x.
    Shapes:  x (N, D)   router (E, D)   gate_up (E, 2I, D)   down (E, D, I)  ->  (N, D)
    Mirrors: Qwen3-Next's sparse block; `norm_topk` makes the chosen weights sum to 1. On a tie the expert with the
    lower
             number wins.
    """
    rows = wide(x)
    # A separate score for each expert: equal experts in one product may differ in the last bit.
    scores = [rows @ expert for expert in weights.router.to(rows.dtype)]
    table = torch.stack(scores, dim=1)
    chances = table.softmax(dim=-1)
    # A stable sort, and not `topk`, which promises nothing for equal values.
    ranked = chances.sort(dim=-1, descending=True, stable=True)
    share, chosen = ranked.values[:, :top_k], ranked.indices[:, :top_k]
    if weights.router_bias is not None:
        share, chosen = _by_sigmoid(table, weights, weights.router_bias, top_k)
    if norm_topk:
        share = share / share.sum(dim=-1, keepdim=True)
    share = share * weights.scale
    given = rows if weights.to_latent is None else linear(rows, weights.to_latent.to(rows.dtype))
    out = torch.zeros_like(given)
    for expert in range(weights.router.shape[0]):  # the order of experts fixes the order of each row's sum
        row, rank = torch.where(chosen == expert)
        answer = _expert(weights)(given[row], weights.gate_up[expert], weights.down[expert])
        out.index_add_(0, row, answer * share[row, rank, None])
    if weights.from_latent is not None:
        out = linear(out, weights.from_latent.to(rows.dtype))
    return (out + _shared(rows, weights)).to(x.dtype)


def _by_sigmoid(
    scores: torch.Tensor, weights: ExpertWeights, bias: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by sigmoid and bias in each row's best groups -> sigmoids and numbers of the chosen experts [N, top_k].

    A group is as good as its two best experts together.
    """
    shares = sigmoid(scores)
    ranks = shares + bias
    rows, experts = ranks.shape
    pairs = ranks.view(rows, weights.groups, -1).sort(dim=-1, descending=True).values[..., :2].sum(dim=-1)
    best = pairs.sort(dim=-1, descending=True, stable=True).indices[:, : weights.groups_per_token]
    group = torch.arange(experts, device=ranks.device) // (experts // weights.groups)
    inside = (group[None, :, None] == best[:, None, :]).any(dim=-1)
    chosen = ranks.masked_fill(~inside, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return shares.gather(1, chosen), chosen


def _shared(x: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Compute the shared expert, which every row uses, times its gate, if it has one; zeros if there is none."""
    weights = replace(weights, limit=weights.shared_limit)  # `_expert` reads the limit of routed ones
    if weights.shared_gate_up is None or weights.shared_down is None:
        return torch.zeros_like(x)
    opened = 1.0 if weights.shared_gate is None else sigmoid(linear(x, weights.shared_gate.to(x.dtype)))
    return opened * _expert(weights)(x, weights.shared_gate_up, weights.shared_down)


def _expert(weights: ExpertWeights) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    return partial(_swiglu, limit=weights.limit) if weights.gated else _squared


def _squared(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return linear(relu(linear(x, up.to(x.dtype))).square(), down.to(x.dtype))


def _swiglu(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, limit: float | None = None
) -> torch.Tensor:
    gate, up = linear(x, gate_up.to(x.dtype)).chunk(2, dim=-1)
    gate = silu(gate)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return linear(gate * up, down.to(x.dtype))
