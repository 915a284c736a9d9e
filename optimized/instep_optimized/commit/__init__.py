"""Commit strategies by name, states and conv windows apart: a line here and a file beside it.

Leaves out: their contents; see `base.py` for what a strategy is.
"""

from __future__ import annotations

from instep_reference.contract.config import ModelConfig

from ..memory import Memory
from ..memory.budget import Sizes
from ..memory.pool import Demand
from .base import StrategySpec
from .columns import COLUMNS
from .lazy_rerun import LAZY_RERUN
from .pair import CommitPair
from .rerun import RERUN
from .snapshot import SNAPSHOT
from .widened import WIDENED
from .windows import WINDOWS

STRATEGIES: dict[str, StrategySpec] = {
    "snapshot": SNAPSHOT, "columns": COLUMNS, "rerun": RERUN, "lazy_rerun": LAZY_RERUN,
}
CONV_FORMS: dict[str, StrategySpec] = {"windows": WINDOWS, "widened": WIDENED}


def demands(config: ModelConfig, sizes: Sizes, strategy: str, conv: str) -> tuple[Demand, ...]:
    """The pools of a pair: states, conv windows, and what it keeps beside them."""
    return CONV_FORMS[conv].demands(config, sizes) + STRATEGIES[strategy].demands(config, sizes)


def make(config: ModelConfig, sizes: Sizes, memory: Memory, width: int, strategy: str, conv: str) -> CommitPair:
    """A pair for windows of at most `width` tokens."""
    return CommitPair(*(
        spec.make(config, sizes, memory, width) for spec in (CONV_FORMS[conv], STRATEGIES[strategy])
    ))
