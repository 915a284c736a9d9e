"""Lightning attention: a recurrence with a fixed decay per head, without a conv and without the delta rule.

Leaves out: blocks of a prompt, fusing, caches.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .contract.config import ModelConfig
from .contract.place_names import At
from .gdn import Conv, Rule, by_shown_updates, erase_and_write, recur, unread
from .norms import over_rms
from .weights import LightningWeights


@dataclass(frozen=True)
class LightningMemory:
    """The layer's memory of a request: state [HV, K, V], the decayed sum of k v^T."""

    state: torch.Tensor


def empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> LightningMemory:
    """Return the memory before the first token: zeros."""
    return LightningMemory(torch.zeros(config.lengths(config.recurrence.state), dtype=dtype, device=device))


def mix(
    config: ModelConfig, weights: LightningWeights, normed: torch.Tensor, memory: LightningMemory,
    positions: torch.Tensor, at: At, rule: Rule | None = None,
) -> tuple[torch.Tensor, LightningMemory]:
    """Run the layer between its input norm and its residual: T consecutive tokens of one request.

        S <- exp(log_decay) S + k v^T;   o <- S^T q;   out <- out_proj (sigmoid(z) norm(o)), the norm over all heads

    rule: the recurrence in another form than `recur`
    Shapes:  normed (T, D)  ->  (T, D), and the memory after the last of them. Positions play no part.
    Mirrors: Lightning Attention-2 (arXiv:2401.04658); transformers 5.24 `MiniMaxLightningAttention`. Queries have no
             scale. HF runs the first part of a prompt in blocks.
    """
    rows, z = _rows(config, weights, normed, at)
    done = (rule or recur)(**rows, state=memory.state[None])
    core = at("core", done.out[0])  # (T, HV, V)
    state = by_shown_updates(rows, done.update[0], done.state, memory.state[None], at)  # (1, HV, K, V)
    normed_core = over_rms(core.flatten(1), config.core_eps) * weights.norm  # (T, HV*V)
    gated = at("gated", torch.sigmoid(z.flatten(1)) * normed_core)  # (T, HV*V)
    return at("mixer", gated @ weights.out.T), LightningMemory(state[0])


def state_after(
    config: ModelConfig, weights: LightningWeights, normed: torch.Tensor, memory: LightningMemory, at: At,
    conv: Conv | None = None,
) -> torch.Tensor:
    """Return the state [HV, K, V] that `mix` leaves, bit for bit, without reading from it."""
    return unread(_rows(config, weights, normed, at)[0], memory.state, at)


def _rows(
    config: ModelConfig, weights: LightningWeights, normed: torch.Tensor, at: At
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs of the recurrence for T tokens, by the names of `recur`, and their gate z (T, HV, V)."""
    T, HV, K, V = normed.shape[0], config.value_heads, config.key_dim, config.value_dim
    qkv = at("qkv", (normed @ weights.qkv.T).reshape(T, HV, 2 * K + V))  # per head q, k, v
    z = at("z", (normed @ weights.z.T).reshape(T, HV, V))  # (T, HV, V)
    q, k, v = torch.split(F.silu(qkv), [K, K, V], dim=-1)  # (T, HV, K) twice, (T, HV, V)
    q, k, v = at("q", q), at("k", k), at("v", v)
    decay = at("log_decay", weights.log_decay.expand(T, HV))  # the same for every token
    gates = at("write", torch.ones_like(decay))  # (T, HV)
    erase, write = erase_and_write(config.recurrence, gates[None])  # (1, T, HV, 1)
    return {"q": q[None], "k": k[None], "v": v[None], "log_decay": decay[None, ..., None], "erase": erase,
            "write": write}, z  # fmt: skip
