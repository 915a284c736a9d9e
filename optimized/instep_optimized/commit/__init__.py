"""The commit strategies by name: one table for the recurrent states, one for the conv windows.

Every other component of a layer with a recurrence is kept by snapshots, and has no option.

A new strategy is one line here and one file in this folder; an op set may bring more (`Ops.keepers`). Leaves out: the
definition of a strategy (`base.py`).
"""

from collections.abc import Mapping

from instep_reference.contract.answers import MEMORY_FACTS
from instep_reference.contract.config import ModelConfig

from ..memory import Memory
from ..memory.budget import Component, Sizes, with_scales
from ..memory.pool import Demand
from ..ops.op_protocols import Ops
from .base import StrategySpec
from .columns import COLUMNS
from .conv_form_widened import WIDENED
from .conv_form_windows import WINDOWS
from .external_strategies import checked, demanded, made
from .lazy_rerun import LAZY_RERUN
from .rerun import RERUN
from .snapshot import SNAPSHOT, snapshots_of
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
        demand for name, spec in _chosen(config, strategy, conv, ops).values()
        for demand in demanded(name, spec, spec.demands(config, sizes))
    )


def make(
    config: ModelConfig, sizes: Sizes, memory: Memory, width: int, strategy: str, conv: str,
    ops: Ops | None = None,
) -> CommitPair:
    """Make a pair of strategies for windows of at most `width` tokens."""
    chosen = _chosen(config, strategy, conv, ops)
    found = {component: made(name, spec, spec.make(config, sizes, memory, width), spec.demands(config, sizes))
             for component, (name, spec) in chosen.items()}  # fmt: skip
    brought = ops is not None and not {strategy, conv}.isdisjoint(ops.keepers)
    asked = {name: (config.keeping(name), config.lengths(MEMORY_FACTS[name].axes)) for name in found}
    return CommitPair(found, PeekShapes(asked) if brought else None, trees=sizes.capacity.trees)


def _chosen(
    config: ModelConfig, strategy: str, conv: str, ops: Ops | None
) -> dict[str, tuple[str, StrategySpec]]:
    """Return component -> the name of its strategy, and its definition. Without an option it is kept by snapshots."""
    named = {"conv": conv, "state": strategy}
    return {name: (named[name], known(name, ops)[named[name]]) if name in named else ("snapshot", snapshots_of(name))
            for name, facts in MEMORY_FACTS.items()
            if facts.form == "block" and (name in named or config.keeping(name))}  # fmt: skip
