"""Find the fixtures that instep ships, in a checkout or a wheel: a trained model, traces, an example suite.

This file does not import torch, because the plugin uses it before anything is loaded. Leaves out: copying the fixtures
(`cli/fixtures.py`).
"""

from pathlib import Path

# The part of the folder `fixtures` that a wheel contains. A test compares it with `pyproject.toml`.
CARRIED = ("tiny/config.json", "tiny/model.safetensors", "tiny/prompts.json", "tiny/README.md",
           "tiny/block/config.json", "tiny/block/model.safetensors",
           "experts/config.json", "experts/model.safetensors", "kimi/config.json",
           "kimi/model.safetensors", "ling/config.json", "ling/model.safetensors", "olmo/config.json",
           "olmo/model.safetensors", "lfm2/config.json", "lfm2/model.safetensors", "minimax/config.json",
           "minimax/model.safetensors", "nemotron/config.json", "nemotron/model.safetensors",
           "nemotron-mtp/config.json", "nemotron-mtp/model.safetensors",
           "ling-clamped/config.json", "ling-clamped/model.safetensors",
           "next/config.json", "next/model.safetensors",
           "qwen4/config.json", "qwen4/model.safetensors", "traces", "example")  # fmt: skip


def fixtures() -> Path:
    """The folder that contains `tiny`, `traces` and `example`: in the installed package, or in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "fixtures"
    return installed if installed.is_dir() else package.parents[1] / "fixtures"


def model() -> Path:
    """The trained model, which commands use by default."""
    return fixtures() / "tiny"


def trace() -> Path:
    """The main trace, which `instep replay` uses by default."""
    return fixtures() / "traces" / "adaptive.jsonl"
