"""The commit strategies by name: one table for the recurrent states, one for the conv windows.

A new strategy is one line here and one file beside this one. Leaves out: what a strategy is (`base.py`).
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
    """The pools that a pair of strategies needs: states, conv windows, and marks, rings or snapshots beside them."""
    return CONV_FORMS[conv].demands(config, sizes) + STRATEGIES[strategy].demands(config, sizes)


def make(config: ModelConfig, sizes: Sizes, memory: Memory, width: int, strategy: str, conv: str) -> CommitPair:
    """A pair of strategies for windows of at most `width` tokens."""
    return CommitPair(*(
        spec.make(config, sizes, memory, width) for spec in (CONV_FORMS[conv], STRATEGIES[strategy])
    ))
