"""The drafters by (model type, mode), and what is plainly so about each. Both sides and the harness read it here.

Leaves out: how each drafts (`draft/` of either side), and who proposes where drafts are handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .config import ModelConfig


@dataclass(frozen=True)
class DrafterFacts:
    """heads  whether MTP layers run in the engine. They have KV, take in what is committed, and propose. Without them a
           draft event brings its picks, `Drafted.own` is -1, and nothing is remembered of a request's draft side
    """

    heads: bool


EXTERNAL = "external"
MODES: Mapping[str, DrafterFacts] = {
    "eagle": DrafterFacts(heads=True), "vanilla": DrafterFacts(heads=True), EXTERNAL: DrafterFacts(heads=False),
}
MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # dense and MoE models draft alike
DRAFTERS: Mapping[tuple[str, str], DrafterFacts] = {(kind, mode): MODES[mode] for kind in MODEL_TYPES for mode in MODES}


def in_use(config: ModelConfig, mode: str) -> ModelConfig:
    """The model as its drafter uses it: where drafts are handed in, it has no MTP layers, whatever its file has."""
    facts = DRAFTERS.get((config.model_type, mode))
    return config if facts is None or facts.heads else replace(config, mtp_layers=0)


def heads_of(mode: str, mtp_layers: int) -> int:
    """How many MTP layers are in use."""
    return mtp_layers if mode not in MODES or MODES[mode].heads else 0
