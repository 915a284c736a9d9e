"""The MLP of a layer: SwiGLU, or a mixture of SwiGLU experts with a shared one.

Every expert that some row has chosen runs on all rows; the rows that did not choose it get weight 0. Leaves out:
sorting tokens by expert.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .contract.config import ModelConfig
from .weights import MlpWeights, MoeWeights


def mlp(config: ModelConfig, weights: MlpWeights | MoeWeights, x: torch.Tensor) -> torch.Tensor:
    """Map x (T, D) -> (T, D), dense or with experts, as the weights are."""
    return swiglu(weights, x) if isinstance(weights, MlpWeights) else mixture(config, weights, x)


def swiglu(weights: MlpWeights, x: torch.Tensor) -> torch.Tensor:
    """Compute down(silu(gate x) * up x)."""
    return (F.silu(x @ weights.gate.T) * (x @ weights.up.T)) @ weights.down.T


def mixture(config: ModelConfig, weights: MoeWeights, x: torch.Tensor) -> torch.Tensor:
    """Sum share * expert(x) over the chosen experts, plus sigmoid(shared_gate x) * shared(x).

    Mirrors: transformers `Qwen3NextSparseMoeBlock`, `Qwen3_5MoeSparseMoeBlock`; HF's router softmax is fp32.
    """
    # One by one, so that equal experts have equal scores to the last bit. The columns of one product may differ.
    shares = route(config, torch.stack([x @ weights.router[number] for number in range(len(weights.router))], dim=-1))
    out = torch.sigmoid(x @ weights.shared_gate.T) * swiglu(weights.shared, x)
    for expert in shares.any(0).nonzero().flatten().tolist():
        out = out + shares[:, expert, None] * swiglu(weights.experts[expert], x)
    return out


def route(config: ModelConfig, scores: torch.Tensor) -> torch.Tensor:
    """Softmax over all experts, with the top k of each row kept, and renormalised if the configuration has it.

    On a tie the expert with the lower number wins. (HF's `topk` promises nothing for ties.)
    Shapes:  scores (T, E)  ->  shares (T, E), zero for experts that were not chosen.
    """
    probabilities = scores.softmax(-1)
    ranked = probabilities.sort(dim=-1, descending=True, stable=True)
    top, chosen = (part[..., : config.experts_per_token] for part in (ranked.values, ranked.indices))
    if config.norm_topk:
        top = top / top.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, chosen, top)
