"""The drafters by model type and mode, and the function that makes one.

Dense and MoE models draft alike, because only the model knows the kind of MLP. Leaves out: how each drafts.
"""

from __future__ import annotations

from collections.abc import Callable

from ..contract.config import ModelConfig
from ..contract.errors import Unsupported
from .base import Asked, Drafter, Proposed
from .eagle import Eagle
from .external import Block, External
from .vanilla import Vanilla

DRAFTERS: dict[tuple[str, str], Callable[[], Drafter]] = {
    ("qwen3_next", "eagle"): Eagle,
    ("qwen3_5", "eagle"): Eagle,
    ("qwen3_5_moe", "eagle"): Eagle,
    ("qwen3_next", "vanilla"): Vanilla,
    ("qwen3_5", "vanilla"): Vanilla,
    ("qwen3_5_moe", "vanilla"): Vanilla,
    ("qwen3_next", "external"): External,
    ("qwen3_5", "external"): External,
    ("qwen3_5_moe", "external"): External,
}


def drafter(config: ModelConfig, mode: str) -> Drafter:
    """The drafter of a model. A model without MTP layers gets `External`, which must be given every draft."""
    if config.mtp_layers == 0:
        return External()
    if mode == "eagle" and config.mtp_layers > 1:
        raise Unsupported(f"eagle re-runs one MTP layer; this model has {config.mtp_layers} (mode vanilla serves them)")
    make = DRAFTERS.get((config.model_type.removesuffix("_text"), mode))
    if make is None:
        raise Unsupported(f"no drafter for model type {config.model_type} in mode {mode}")
    return make()


__all__ = ["DRAFTERS", "Asked", "Block", "Drafter", "Eagle", "External", "Proposed", "Vanilla", "drafter"]
