"""torch's own functions for some kinds of work: scaled dot product attention, argmax, products.

Experts are two grouped products over the rows in the order of their experts (`grouped_mm`), as in transformers.
Leaves out: everything that is paged.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, silu

from instep_optimized.ops.op_protocols import ExpertWeights
from instep_reference.contract.errors import Unsupported

from ..answer_check import off, same
from ..bench_types import Arm, At, Ground


def attend(ground: Ground, at: At, name: str, **drawn: Any) -> Arm:
    """Attend with the rows of a prompt; keys and values are contiguous, which a paged pool does not have."""
    if at["behind"] or "tree" in at or "kv" in at:
        raise Unsupported("torch's attention reads no pages, no scales and no trees")
    query, key, value = (drawn[one].view(at["batch"], at["rows"], *drawn[one].shape[1:]).transpose(1, 2)
                         for one in ("query", "key", "value"))  # fmt: skip

    def run() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def check() -> str:
        return off("attended", run().transpose(1, 2).reshape(drawn["truth"].shape), drawn["truth"], drawn["plain"], 1)

    return Arm(name, run, check, peer=f"torch {torch.__version__}")


def pick(ground: Ground, at: At, name: str, logits: list[torch.Tensor]) -> Arm:
    def check() -> str:
        return same("picks", logits[0].argmax(-1), logits[0].cpu().argmax(-1).to(logits[0].device))

    return Arm(name, lambda: [one.argmax(-1) for one in logits], check, len(logits), peer=f"torch {torch.__version__}")


def products(ground: Ground, at: At, name: str, op: str, arm: Callable[..., Arm]) -> Arm:
    """Judged like our first op set: sums on the same tensor cores."""
    if op == "moe" and not hasattr(torch.nn.functional, "grouped_mm"):
        raise Unsupported("torch has grouped products since 2.10")
    runs = {"linear": lambda x, weight, **_: linear(x, weight), "mlp": lambda x, to, **weights: _mlp(x, **weights),
            "lm_head": lambda x, weight, **_: _head(x, weight), "moe": lambda x, to, **given: _moe(x, **given)}
    return arm(name, runs[op], next(iter(ground.sets.values())), peer=f"torch {torch.__version__}")


def _mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return linear(_gated(linear(x, gate_up)), down)


def _gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up


def _head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute results in fp32, like our logits. On a CPU torch has no such product of 16-bit rows."""
    narrow = x.is_cuda and x.dtype.itemsize == 2
    return torch.mm(x, weight.T, out_dtype=torch.float32) if narrow else linear(x.float(), weight.float())


def _moe(x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool) -> torch.Tensor:
    # After rounding to 16 bits, other scores may be the largest.
    share, chosen = _head(x, weights.router).softmax(-1).topk(top_k)
    if norm_topk:
        share = share / share.sum(-1, keepdim=True)
    order = chosen.flatten().argsort()
    # `bincount` would make the host wait.
    counts = (chosen.flatten()[:, None] == torch.arange(len(weights.router), device=x.device)).sum(0)
    ends = counts.cumsum(0).int()
    both = torch.nn.functional.grouped_mm(x[order // top_k], weights.gate_up.mT, offs=ends)
    answers = torch.nn.functional.grouped_mm(_gated(both), weights.down.mT, offs=ends)
    placed = torch.empty_like(answers).index_copy_(0, order, answers).view(len(x), top_k, -1)
    out = (placed * share[..., None]).sum(1).to(x.dtype)
    if weights.shared_gate_up is None or weights.shared_down is None or weights.shared_gate is None:
        return out
    return out + linear(x, weights.shared_gate).sigmoid() * _mlp(x, weights.shared_gate_up, weights.shared_down)
