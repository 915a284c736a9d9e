"""instep.kit: the public Python API, for tests in other people's repositories (promises: docs/stable.md).

    @pytest.mark.parametrize("case", kit.op_cases("gdn"), ids=str)
    def test_one_launch(case): kit.served(case, OPS).must_agree()

    def test_whole_runs(): kit.replayed(kit.small(), OPS, strategy="snapshot").must_agree()

Names are imported lazily, as those of `instep` are. On a machine without a GPU, importing this module switches Triton's
interpreter on. Leaves out: everything else. Names that are not listed here may change in any version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from instep_optimized.ops.interpreter import wanted_without_gpu

if TYPE_CHECKING:
    from instep_optimized import load

    from ..adapters.conv import ConvLaunch, dense_conv, pooled_conv
    from ..adapters.dense import dense
    from ..adapters.pooled import Launch, pooled
    from ..bundled import fixtures
    from ..verdict import Exit
    from .barrier_overlaps import over_barriers
    from .cases import Case
    from .hypothesis_strategies import configurations, prompts, traces
    from .listed_cases import Served, op_cases, served
    from .model_and_trace import Workload, small
    from .replayed_trace import Divergence, Replayed, replayed
    from .sharded_layers import Segment, Shard, over_ranks

__all__ = [
    "Case", "ConvLaunch", "Divergence", "Exit", "Launch", "Replayed", "Segment", "Served", "Shard", "Workload",
    "configurations", "dense", "dense_conv", "fixtures", "load", "op_cases", "over_barriers", "over_ranks", "pooled",
    "pooled_conv", "prompts", "replayed", "served", "small", "traces",
]

_HOMES = {
    "instep_optimized": ("load",), "instep.bundled": ("fixtures",), "instep.verdict": ("Exit",),
    "instep.adapters.conv": ("ConvLaunch", "dense_conv", "pooled_conv"), "instep.adapters.dense": ("dense",),
    "instep.adapters.pooled": ("Launch", "pooled"),
    "instep.kit.barrier_overlaps": ("over_barriers",), "instep.kit.cases": ("Case",),
    "instep.kit.replayed_trace": ("Divergence", "Replayed", "replayed"),
    "instep.kit.listed_cases": ("Served", "op_cases", "served"),
    "instep.kit.hypothesis_strategies": ("configurations", "prompts", "traces"),
    "instep.kit.model_and_trace": ("Workload", "small"),
    "instep.kit.sharded_layers": ("Segment", "Shard", "over_ranks"),
}

wanted_without_gpu()  # now, because the next line of a test may import Triton


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'instep.kit' has no attribute {name!r}")
    home = next(home for home, names in _HOMES.items() if name in names)
    return getattr(import_module(home), name)
