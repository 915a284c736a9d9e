"""A conv of width 1 has no history: instep serves and compares it, and does not count its empty window.

Leaves out: that `transformers` computes the same (`tests/reference/test_oracle.py`).
"""

from dataclasses import replace

import pytest
import torch

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit
from instep.watch.pool_addresses import Pools
from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import RequestState
from support.inputs.traces import brief, recorded
from support.running.covering import each_value, few


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("width one"), brief(), linear_conv_kernel_dim=1)


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "conv"), each_value(STRATEGIES, CONV_FORMS))
def test_every_strategy_agrees_and_the_empty_window_is_not_counted(trace: Trace, strategy: str, conv: str) -> None:
    """To a commit of two; labels tell where every row is up to the end. Drafts are given: their head has no conv."""
    how = Setting("plain", strategy=strategy, conv=conv, graphs=strategy == "rerun", drafter="external")
    ran = Replay(trace, how).run(until=16).verdict
    assert ran.exit is Exit.AGREED and ran.events == 17, ran.findings[:2]
    compared = [found for found in ran.compared if found.place.component == "conv"]
    assert all(found.elements > 0 for found in compared)
    assert "a conv of width 1 keeps no inputs" in " ".join(skipped.reason for skipped in ran.skipped)


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("ops", "conv", "until"), [
    ("ledger", "windows", None), ("ledger", "widened", None), ("triton", "widened", 16),  # kernels: to a commit of two
])  # fmt: skip
def test_labels_and_kernels_agree(trace: Trace, ops: str, conv: str, until: int | None) -> None:
    drafter = "external" if ops == "triton" else None
    ran = Replay(trace, Setting(ops, conv=conv, drafter=drafter)).run(until=until).verdict
    assert ran.exit is Exit.AGREED and ran.events == len(trace.events[:until]) + bool(until), ran.findings[:2]


@pytest.mark.slow
def test_engine_that_still_keeps_inputs_is_found(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(self: OptimizedEngine, request: str) -> RequestState:
        told = right(self, request)
        return replace(told, conv={layer: torch.zeros(len(window), 1) for layer, window in told.conv.items()})

    right = OptimizedEngine.state
    monkeypatch.setattr(OptimizedEngine, "state", state)
    found = Replay(trace, Setting("plain")).run().verdict.findings[0]
    assert (found.check, found.place.component, found.kind) == ("bytes", "conv", "forward")


def test_empty_packed_pools_have_no_address(trace: Trace) -> None:
    checkpoint = Checkpoint.open(trace.path.parent / trace.header.checkpoint.near)
    served = OptimizedEngine(
        checkpoint, load("plain"), Options(guarded=False), trace.header.room(), num_steps=trace.header.num_steps
    )
    for event in trace.events[:3]:
        event.on(served)
    empty = [region.units for region in served.regions() if region.name == "conv"]
    pools = Pools(served.regions())
    assert empty and all(not units.numel() and not pools.clauses("read", units, 0) for units in empty)
