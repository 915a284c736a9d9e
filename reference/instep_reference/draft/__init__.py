"""The drafters by mode, and the function that makes one; `contract/drafters.py` lists the model types of each.

Leaves out: how each drafts.
"""

from collections.abc import Callable

from ..contract.config import ModelConfig
from ..contract.drafters import BLOCK, DRAFTERS
from ..contract.errors import Unsupported
from .block import BlockHead
from .drafter_protocol import Asked, Drafter, Proposed
from .eagle import Eagle
from .external import Block, External
from .vanilla import Vanilla

MODES: dict[str, Callable[[], Drafter]] = {
    "eagle": Eagle, "vanilla": Vanilla, "external": External, BLOCK: BlockHead,
}


def drafter(config: ModelConfig, mode: str) -> Drafter:
    """Make the drafter of a model. A model without MTP layers gets `External`, which needs given drafts."""
    if mode == BLOCK and config.block is None:
        raise Unsupported("block drafting needs a block drafter, and this checkpoint was opened without one")
    if config.mtp_layers == 0 and mode != BLOCK:
        return External()
    if mode == "eagle" and config.mtp_layers > 1:
        raise Unsupported(f"eagle re-runs one MTP layer; this model has {config.mtp_layers} (mode vanilla serves them)")
    if (config.model_type, mode) not in DRAFTERS:
        raise Unsupported(f"no drafter for model type {config.model_type} in mode {mode}")
    return MODES[mode]()


__all__ = ["MODES", "Asked", "Block", "BlockHead", "Drafter", "Eagle", "External", "Proposed", "Vanilla", "drafter"]
