"""The optimized side: pools, ops, commit strategies, and the engine that routes events to them.

Leaves out: the op sets at import; `load` brings one by name (Triton is imported only with an op set that needs it).
"""

from .engine import OptimizedEngine
from .ops import BY_NAME, load
from .options import Options

__all__ = ["BY_NAME", "OptimizedEngine", "Options", "load"]
