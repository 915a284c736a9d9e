"""The drafters by (model type, mode), and the fixed facts about each. Both sides and the harness read them here.

Leaves out: how each drafts (`draft/` of either side), and the proposer of given drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .config import ModelConfig


@dataclass(frozen=True)
class DrafterFacts:
    """Facts about one drafter.

    heads  whether MTP layers run in the engine. They have KV, take in the committed tokens, and propose. Without them a
           draft event brings its picks, `Drafted.own` is -1, and a request's draft side has no memory
    """

    heads: bool


EXTERNAL = "external"
MODES: Mapping[str, DrafterFacts] = {
    "eagle": DrafterFacts(heads=True), "vanilla": DrafterFacts(heads=True), EXTERNAL: DrafterFacts(heads=False),
}
MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # dense and MoE models draft alike
DRAFTERS: Mapping[tuple[str, str], DrafterFacts] = {(kind, mode): MODES[mode] for kind in MODEL_TYPES for mode in MODES}


def in_use(config: ModelConfig, mode: str) -> ModelConfig:
    """Return the model as its drafter uses it: with given drafts it has no MTP layers, whatever its file has."""
    facts = DRAFTERS.get((config.model_type, mode))
    return config if facts is None or facts.heads else replace(config, mtp_layers=0)


def heads_of(mode: str, mtp_layers: int) -> int:
    """Return the number of MTP layers in use."""
    return mtp_layers if mode not in MODES or MODES[mode].heads else 0
