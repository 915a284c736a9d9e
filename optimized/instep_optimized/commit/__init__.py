"""The commit strategies by name: one table for the recurrent states, one for the conv windows.

A new strategy is one line here and one file in this folder; an op set may bring more (`Ops.keepers`). Leaves out: the
definition of a strategy (`base.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from instep_reference.contract.config import ModelConfig

from ..memory import Memory
from ..memory.budget import Component, Sizes, conv_window, state_block, with_scales
from ..memory.pool import Demand
from ..ops.op_protocols import Ops
from .base import StrategySpec
from .columns import COLUMNS
from .conv_form_widened import WIDENED
from .conv_form_windows import WINDOWS
from .external_strategies import checked, demanded, made
from .lazy_rerun import LAZY_RERUN
from .rerun import RERUN
from .snapshot import SNAPSHOT
from .strategy_pair import CommitPair, PeekShapes

STRATEGIES: dict[str, StrategySpec] = {
    "snapshot": SNAPSHOT, "columns": COLUMNS, "rerun": RERUN, "lazy_rerun": LAZY_RERUN,
}
CONV_FORMS: dict[str, StrategySpec] = {"windows": WINDOWS, "widened": WIDENED}
OURS: Mapping[Component, dict[str, StrategySpec]] = {"state": STRATEGIES, "conv": CONV_FORMS}


def known(component: Component, ops: Ops | None = None) -> dict[str, StrategySpec]:
    """Return the strategies of a component by name: the built-in ones, and those that the op set brings."""
    brought = {} if ops is None else checked(ops, [*STRATEGIES, *CONV_FORMS])
    return OURS[component] | {name: spec for name, spec in brought.items() if spec.component == component}


def demands(
    config: ModelConfig, sizes: Sizes, strategy: str, conv: str, ops: Ops | None = None
) -> tuple[Demand, ...]:
    """The pools that a pair of strategies needs: states, conv windows, and also marks, rings or snapshots."""
    return with_scales(
        demand for name, spec in _chosen(strategy, conv, ops)
        for demand in demanded(name, spec, spec.demands(config, sizes))
    )


def make(
    config: ModelConfig, sizes: Sizes, memory: Memory, width: int, strategy: str, conv: str,
    ops: Ops | None = None,
) -> CommitPair:
    """Make a pair of strategies for windows of at most `width` tokens."""
    of_conv, of_state = (
        made(name, spec, spec.make(config, sizes, memory, width), spec.demands(config, sizes))
        for name, spec in _chosen(strategy, conv, ops)
    )
    brought = ops is not None and not {strategy, conv}.isdisjoint(ops.keepers)
    asked = PeekShapes(config.recurrent, conv_window(config), state_block(config)) if brought else None
    return CommitPair(of_conv, of_state, asked, trees=sizes.capacity.trees)


def _chosen(strategy: str, conv: str, ops: Ops | None) -> tuple[tuple[str, StrategySpec], ...]:
    """Return the conv form, and the strategy of the states."""
    return (conv, known("conv", ops)[conv]), (strategy, known("state", ops)[strategy])
