"""instep: check that a fast engine for gated-delta-net hybrids with speculation still computes the model.

This module resolves the public names lazily, so that importing it loads neither torch nor triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run.replay import Outcome, Replay
    from .trace.file import Trace, read
    from .verdict import Comparison, Exit, Tier, Verdict

__all__ = ["Comparison", "Exit", "Outcome", "Replay", "Tier", "Trace", "Verdict", "read"]

_HOMES = {
    "Comparison": "verdict", "Exit": "verdict", "Tier": "verdict", "Verdict": "verdict",
    "Outcome": "run.replay", "Replay": "run.replay", "Trace": "trace.file", "read": "trace.file",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'instep' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
