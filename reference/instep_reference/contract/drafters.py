"""The drafters by (model type, mode), and the fixed facts about each. Both sides and the harness read them here.

Leaves out: how each drafts (`draft/` of either side), and the proposer of given drafts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .config import ModelConfig


@dataclass(frozen=True)
class DrafterFacts:
    """Facts about one drafter.

    heads  whether MTP layers run in the engine. They have KV, take in the committed tokens, and propose
    block  whether a block drafter runs in the engine: a separate model. It has KV of rows of the target's layers for
           the committed tokens, and drafts in the draft event
    Without either a draft event brings its picks, `Drafted.own` is -1, and a request's draft side has no memory.
    """

    heads: bool
    block: bool = False

    @property
    def proposes(self) -> bool:
        """Whether the engine can draft by itself."""
        return self.heads or self.block


EXTERNAL, BLOCK = "external", "block"
MODES: Mapping[str, DrafterFacts] = {
    "eagle": DrafterFacts(heads=True), "vanilla": DrafterFacts(heads=True), EXTERNAL: DrafterFacts(heads=False),
    BLOCK: DrafterFacts(heads=False, block=True),
}
# Dense and MoE models draft alike.
MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "bailing_hybrid", "nemotron_h")
HEADLESS = ("kimi_linear", "olmo_hybrid", "lfm2", "minimax", "qwen4_exp")  # without MTP layers
DRAFTERS: Mapping[tuple[str, str], DrafterFacts] = {
    (kind, mode): facts for kind in (*MODEL_TYPES, *HEADLESS) for mode, facts in MODES.items()
    if kind not in HEADLESS or not facts.heads
}


def in_use(config: ModelConfig, mode: str) -> ModelConfig:
    """Return the model as its drafter uses it: without the MTP layers or the block drafter that are not in use."""
    facts = DRAFTERS.get((config.model_type, mode))
    if facts is None:
        return config
    used = replace(config, mtp_layers=config.mtp_layers if facts.heads else 0,
                   block=config.block if facts.block else None)  # fmt: skip
    return config if used == config else used


def heads_of(mode: str, mtp_layers: int) -> int:
    """Return the number of MTP layers in use."""
    return mtp_layers if mode not in MODES or MODES[mode].heads else 0
