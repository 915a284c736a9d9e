"""The fixtures that come with instep: a trained model, traces, an example suite; in a checkout and in a wheel alike.

Leaves out: writing them somewhere (`cli/fixtures.py`), and torch: the plugin asks for them before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path

# What a wheel carries of the folder `fixtures` (`pyproject.toml` says it to the build); a test compares the two.
CARRIED = ("tiny/config.json", "tiny/model.safetensors", "tiny/prompts.json", "tiny/README.md", "experts/config.json",
           "experts/model.safetensors", "traces", "example")  # fmt: skip


def fixtures() -> Path:
    """The folder with `tiny`, `traces` and `example` in it: inside an installed package, else in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "fixtures"
    return installed if installed.is_dir() else package.parents[1] / "fixtures"


def model() -> Path:
    """The trained model: what a command runs when none is named."""
    return fixtures() / "tiny"


def trace() -> Path:
    """The main trace: what `instep replay` replays when none is named."""
    return fixtures() / "traces" / "adaptive.jsonl"
