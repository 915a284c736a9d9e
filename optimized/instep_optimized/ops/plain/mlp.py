"""SwiGLU, and a mixture of such experts with a shared one.

One expert after the other, in at least fp32, with one cast at the end. Leaves out: fused or grouped expert products.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, sigmoid, silu

from instep_reference.contract.place_names import Place

from ..op_protocols import ExpertWeights
from .compute_width import wide


def mlp(*, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor:
    """Compute down(silu(gate x) * up x).

    Shapes: x (N, D)  gate_up (2I, D), gate half first  down (D, I)  ->  (N, D)
    """
    return _swiglu(wide(x), gate_up, down).to(x.dtype)


def moe(*, x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, to: Place) -> torch.Tensor:
    """Sum the top-k experts by softmax over all of them, weighted, plus sigmoid(shared gate) * shared expert.

    Shapes:  x (N, D)   router (E, D)   gate_up (E, 2I, D)   down (E, D, I)  ->  (N, D)
    Mirrors: Qwen3-Next's sparse block; `norm_topk` makes the chosen weights sum to 1. On a tie the expert with the
    lower
             number wins.
    """
    rows = wide(x)
    # A separate score for each expert: equal experts in one product may differ in the last bit.
    scores = [rows @ expert for expert in weights.router.to(rows.dtype)]
    chances = torch.stack(scores, dim=1).softmax(dim=-1)
    # A stable sort, and not `topk`, which promises nothing for equal values.
    ranked = chances.sort(dim=-1, descending=True, stable=True)
    share, chosen = ranked.values[:, :top_k], ranked.indices[:, :top_k]
    if norm_topk:
        share = share / share.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(rows)
    for expert in range(weights.router.shape[0]):  # the order of experts fixes the order of each row's sum
        row, rank = torch.where(chosen == expert)
        answer = _swiglu(rows[row], weights.gate_up[expert], weights.down[expert])
        out.index_add_(0, row, answer * share[row, rank, None])
    return (out + _shared(rows, weights)).to(x.dtype)


def _shared(x: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Compute the shared expert, which every row uses, times its gate; zeros if there is none."""
    if weights.shared_gate_up is None or weights.shared_down is None or weights.shared_gate is None:
        return torch.zeros_like(x)
    opened = sigmoid(linear(x, weights.shared_gate.to(x.dtype)))
    return opened * _swiglu(x, weights.shared_gate_up, weights.shared_down)


def _swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = linear(x, gate_up.to(x.dtype)).chunk(2, dim=-1)
    return linear(silu(gate) * up, down.to(x.dtype))
