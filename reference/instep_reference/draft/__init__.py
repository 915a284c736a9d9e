"""The drafters by mode, and the function that makes one; `contract/drafters.py` lists the model types of each.

Leaves out: how each drafts.
"""

from __future__ import annotations

from collections.abc import Callable

from ..contract.config import ModelConfig
from ..contract.drafters import DRAFTERS
from ..contract.errors import Unsupported
from .drafter_protocol import Asked, Drafter, Proposed
from .eagle import Eagle
from .external import Block, External
from .vanilla import Vanilla

MODES: dict[str, Callable[[], Drafter]] = {"eagle": Eagle, "vanilla": Vanilla, "external": External}


def drafter(config: ModelConfig, mode: str) -> Drafter:
    """Make the drafter of a model. A model without MTP layers gets `External`, which needs given drafts."""
    if config.mtp_layers == 0:
        return External()
    if mode == "eagle" and config.mtp_layers > 1:
        raise Unsupported(f"eagle re-runs one MTP layer; this model has {config.mtp_layers} (mode vanilla serves them)")
    if (config.model_type, mode) not in DRAFTERS:
        raise Unsupported(f"no drafter for model type {config.model_type} in mode {mode}")
    return MODES[mode]()


__all__ = ["MODES", "Asked", "Block", "Drafter", "Eagle", "External", "Proposed", "Vanilla", "drafter"]
