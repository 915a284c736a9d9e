"""What torch has itself for some kinds of work: scaled dot product attention, argmax.

Leaves out: everything that is paged.
"""

from __future__ import annotations

from typing import Any

import torch

from instep_reference.contract.errors import Unsupported

from ..base import Arm, At, Ground
from ..right import off, same


def attend(ground: Ground, at: At, name: str, **drawn: Any) -> Arm:
    """Rows of a prompt; keys and values side by side, which a paged pool has not."""
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
