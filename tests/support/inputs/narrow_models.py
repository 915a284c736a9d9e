"""Shapes of real models made narrow enough for a CPU: the layers and ratios stay.

Leaves out: weights (`instep.campaign.shapes.random_weights`).
"""

from dataclasses import replace
from typing import Any

from instep.campaign.shapes import shape
from instep_reference.contract.config import ModelConfig

WIDTHS = {
    "hidden": 32, "intermediate": 32, "key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 16, "heads": 2,
    "kv_heads": 1, "head_dim": 16, "rotary_dim": 4,
}


def narrow(name: str, layers: int = 4, vocab: int = 256, **widths: Any) -> ModelConfig:
    """The first layers of a shape."""
    return replace(shape(name, layers=layers, vocab=vocab), **{**WIDTHS, **widths})
