"""instep: is a fast engine for hybrid gated-delta-net models with speculation still computing the model?

The public face, lazy: importing it loads neither torch nor triton. Leaves out everything but the names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .replay.replay import Outcome, Replay
    from .trace.file import Trace, read
    from .verdict import Comparison, Exit, Tier, Verdict

__all__ = ["Comparison", "Exit", "Outcome", "Replay", "Tier", "Trace", "Verdict", "read"]

_HOMES = {
    "Comparison": "verdict", "Exit": "verdict", "Tier": "verdict", "Verdict": "verdict",
    "Outcome": "replay.replay", "Replay": "replay.replay", "Trace": "trace.file", "read": "trace.file",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'instep' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
