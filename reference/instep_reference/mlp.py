"""The MLP of a layer: SwiGLU, squared ReLU, or a mixture of such experts with a shared one.

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
    return dense(weights, x) if isinstance(weights, MlpWeights) else mixture(config, weights, x)


def dense(weights: MlpWeights, x: torch.Tensor) -> torch.Tensor:
    """Compute down(silu(gate x) * up x), or down(relu(up x)^2) without a gate.

    With a limit, silu(gate x) is at most the limit, and up x lies between -limit and limit.
    Mirrors: `BailingMLP` of `bailing_moe_v3.py` in SGLang, `SwigluStepAndMul` of vLLM.
    """
    up, limit = x @ weights.up.T, weights.limit
    if weights.gate is None:
        return torch.relu(up).square() @ weights.down.T
    opened = F.silu(x @ weights.gate.T)
    if limit is not None:
        opened, up = opened.clamp(max=limit), up.clamp(-limit, limit)
    return (opened * up) @ weights.down.T


def mixture(config: ModelConfig, weights: MoeWeights, x: torch.Tensor) -> torch.Tensor:
    """Sum share * expert(x) over the chosen experts, plus sigmoid(shared_gate x) * shared(x), or plus shared(x).

    Experts over latents read z = to_latent x, and from_latent maps their sum back. Router and shared expert read x.
    Mirrors: transformers `Qwen3NextSparseMoeBlock`, `Qwen3_5MoeSparseMoeBlock`, and `KimiLinearMoE` and
             `NemotronHMoE`, whose shared expert has no gate; HF's router is fp32.
    """
    # One by one, so that equal experts have equal scores to the last bit. The columns of one product may differ.
    scores = torch.stack([x @ weights.router[number] for number in range(len(weights.router))], dim=-1)
    shares = route(config, scores) if weights.bias is None else route_by_sigmoid(config, scores, weights.bias)
    out = dense(weights.shared, x)
    if weights.shared_gate is not None:
        out = torch.sigmoid(x @ weights.shared_gate.T) * out
    z = x if weights.to_latent is None else x @ weights.to_latent.T
    total = out if weights.from_latent is None else torch.zeros_like(z)
    for expert in shares.any(0).nonzero().flatten().tolist():
        total = total + shares[:, expert, None] * dense(weights.experts[expert], z)
    return total if weights.from_latent is None else out + total @ weights.from_latent.T


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


def route_by_sigmoid(config: ModelConfig, scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Choose the top k of sigmoid(scores) + bias in the best groups. The bias chooses, and is no part of a share.

    A group of consecutive experts is as good as the sum of its two best. Shares are sigmoid(scores), renormalised if
    the configuration has it, times `routed_scale`. On a tie the lower number wins, of groups and of experts.
    Shapes:  scores (T, E)   bias (E,)  ->  shares (T, E), zero for experts that were not chosen.
    Mirrors: transformers 5.24 `KimiLinearTopkRouter` (DeepSeek-V3's). HF adds 1e-20 to the sum of shares.
    """
    ranked = in_best_groups(config, torch.sigmoid(scores) + bias).sort(dim=-1, descending=True, stable=True)
    chosen = ranked.indices[..., : config.experts_per_token]
    top = torch.sigmoid(scores).gather(-1, chosen)
    if config.norm_topk:
        top = top / top.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, chosen, top * config.routed_scale)


def in_best_groups(config: ModelConfig, ranks: torch.Tensor) -> torch.Tensor:
    """Put the experts outside of each row's best groups last: ranks (T, E) -> (T, E), there -inf."""
    # (T, groups, experts of a group)
    groups = ranks.reshape(*ranks.shape[:-1], config.expert_groups, config.experts // config.expert_groups)
    pairs = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)  # (T, groups)
    best = pairs.sort(dim=-1, descending=True, stable=True).indices[..., : config.groups_per_token]
    allowed = torch.zeros_like(pairs, dtype=torch.bool).scatter(-1, best, True)
    return ranks.masked_fill(~allowed[..., None].expand_as(groups).flatten(-2), float("-inf"))
