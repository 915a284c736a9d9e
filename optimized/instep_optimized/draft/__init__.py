"""The drafters by (model type, mode). A new drafter is one line here and one file beside this one.

Leaves out: what a drafter is (`base.py`).
"""

from __future__ import annotations

from .base import Make
from .eagle import Eagle
from .vanilla import Vanilla

MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
MODES: dict[str, Make] = {"eagle": Eagle.of, "vanilla": Vanilla.of}

DRAFTERS: dict[tuple[str, str], Make] = {
    (model_type, mode): make for model_type in MODEL_TYPES for mode, make in MODES.items()
}
