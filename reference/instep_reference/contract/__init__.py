"""The contract between both sides: events, answers, places, configuration, checkpoint. Nothing here computes.

These are the public names; start reading at `engine.py`. They are imported on first use, so that errors and
configurations can be used without torch. Leaves out: types that are only unions or aliases (import those from their
files).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .adaptive_controller_file import AdaptiveFile, Bracket
    from .answers import Committed, Drafted, Forwarded, RequestState
    from .capacity import Capacity
    from .checkpoint import Checkpoint
    from .config import ModelConfig
    from .controllers import Controlled
    from .engine import (
        Abort,
        Admit,
        Commit,
        Draft,
        Engine,
        Event,
        Evict,
        Fetch,
        Finish,
        Forward,
        Idle,
        Inspectable,
        Load,
        Offload,
        Path,
        Preempt,
        Refused,
        Region,
        Resume,
        Row,
        Save,
        SetNumSteps,
        ShowsBudget,
        Watched,
    )
    from .errors import BadInput, InstepError, OutOfCapacity, Unsupported
    from .kept_copies import ShowsCopies, Tracks
    from .place_names import Place, unseen
    from .pool_meaning import Meaning, Positions
    from .sampling import Sampling

__all__ = [
    "Abort", "AdaptiveFile", "Admit", "BadInput", "Bracket", "Capacity", "Checkpoint", "Commit", "Committed",
    "Controlled", "Draft", "Drafted", "Engine", "Event", "Evict", "Fetch", "Finish", "Forward", "Forwarded", "Idle",
    "Inspectable", "InstepError", "Load", "Meaning", "ModelConfig", "Offload", "OutOfCapacity", "Path", "Place",
    "Positions", "Preempt", "Refused", "Region", "RequestState", "Resume", "Row", "Sampling", "Save", "SetNumSteps",
    "ShowsBudget", "ShowsCopies", "Tracks", "Unsupported", "Watched", "unseen",
]

# Those without torch first.
_HOMES = (
    "errors", "config", "adaptive_controller_file", "controllers", "sampling", "pool_meaning", "place_names",
    "capacity", "answers", "engine", "kept_copies", "checkpoint",
)


def __getattr__(name: str) -> object:
    for home in _HOMES if name in __all__ else ():
        found: object = getattr(import_module(f".{home}", __name__), name, None)
        if getattr(found, "__module__", None) == f"{__name__}.{home}":
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
