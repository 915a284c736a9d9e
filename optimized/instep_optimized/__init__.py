"""The optimized side: pools, ops, commit strategies, and the engine that routes events to them.

Leaves out: the op sets themselves at import; `load` brings one by name (Triton only when it is asked for).
"""

from __future__ import annotations

from .engine import OptimizedEngine
from .ops import BY_NAME, load
from .options import Options

__all__ = ["BY_NAME", "OptimizedEngine", "Options", "load"]
