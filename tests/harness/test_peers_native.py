"""The adapters of FlashInfer's and FlashQLA's kernels, against fakes with the same arguments: right ones agree, wrong
ones are found.

Leaves out: the real kernels, which need a GPU (`tests/perf/peers_gpu.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from instep.adapters.pooled import Launch
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier, Verdict
from instep_reference.contract.errors import Unsupported
from support.covering import few
from support.fake_kernels import FlashInfer, FlashQla
from support.few_channels import few_channels
from support.traces import first, recorded

pytestmark = pytest.mark.slow
THREE_WINDOWS = 12  # event of `wider`: a window of each width was verified and committed


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Three requests, rounds of every kind, a preemption and a reload, through a model of a few channels."""
    return recorded(tmp_path_factory.mktemp("small"), first(4), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def wider() -> Trace:
    """Two requests in windows of 2, 4 and 2 tokens, in pools that are 4 wide: where a wrong stride shows."""
    return few_channels("wider", 2)


@contextmanager
def put(kernels: Any) -> Iterator[None]:
    """Put fake kernels into the packages, and import the adapters again."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("flashinfer", "flashinfer.gdn_decode", "flashinfer.gdn_prefill", "flash_qla"):
            patch.setitem(sys.modules, name, ModuleType(name))
            for kernel in (each for each in dir(kernels) if not each.startswith("_")):
                patch.setattr(sys.modules[name], kernel, getattr(kernels, kernel), raising=False)
        for adapter in ("flashinfer", "flashqla"):
            patch.delitem(sys.modules, f"instep.adapters.{adapter}", raising=False)
        yield


def verdict(
    trace: Trace, kernels: Any, ops: str, strategy: str, dtype: str = "bfloat16", until: int | None = None,
) -> Verdict:
    """With the drafts of the trace handed in: the draft head has no GDN layer, and calls none of these kernels."""
    with put(kernels):
        setting = Setting(f"instep.adapters.{ops}", strategy=strategy, dtype=dtype, drafter="external")
        return Replay(trace, setting).run(until=until).verdict


@few(2)
@pytest.mark.parametrize(("kernels", "ops", "name"), [
    (FlashInfer(), "flashinfer:VERIFY", "small"), (FlashInfer(slip=True), "flashinfer:EXACT", "wider"),
    (FlashInfer(), "flashinfer:STRIDED", "small"), (FlashInfer(), "flashinfer:VERIFY --strategy columns", "small"),
    (FlashInfer(), "flashinfer:PREFILL", "small"), (FlashQla(), "flashqla:OPS", "small"),
])  # fmt: skip
def test_right_kernels_agree(kernels: Any, ops: str, name: str, request: pytest.FixtureRequest) -> None:
    ops, _, strategy = ops.partition(" --strategy ")
    trace: Trace = request.getfixturevalue(name)
    last = THREE_WINDOWS if name == "wider" else len(trace.events) - 1
    came = verdict(trace, kernels, ops, strategy or "snapshot", until=last)
    assert came.exit is Exit.AGREED and came.events == last + 1, came.findings[:1]


@pytest.mark.parametrize(("kernels", "ops", "kind", "tier"), [
    (FlashInfer(slip=True), "flashinfer:VERIFY", "forward", Tier.BITWISE),
    (FlashInfer(forgets=True), "flashinfer:PREFILL", "forward", Tier.DIRECTED),
    (FlashQla(forgets=True), "flashqla:OPS", "forward", Tier.DIRECTED),
], ids=["stride", "prefill", "flashqla"])  # fmt: skip
def test_a_wrong_kernel_is_found(kernels: Any, ops: str, kind: str, tier: Tier, wider: Trace) -> None:
    found = verdict(wider, kernels, ops, "snapshot").findings[0]
    assert (found.kind, found.tier) == (kind, tier), found


def test_a_decode_that_stores_nothing_is_found(small: Trace) -> None:
    found = verdict(small, FlashInfer(forgets=True), "flashinfer:VERIFY", "snapshot").findings[0]
    assert found.tier is Tier.DIRECTED and "before the step" in found.diagnosis, found


def test_rows_that_the_kernels_would_round_are_refused(wider: Trace) -> None:
    with pytest.raises(Unsupported, match="read rows in bfloat16"):
        verdict(wider, FlashInfer(), "flashinfer:VERIFY", "snapshot", dtype="float32")


@pytest.mark.parametrize("exact", [False, True])
def test_windows_of_several_lengths_are_served_apart(exact: bool) -> None:
    """In one launch and one by one they give the same, each in its own row of the snapshots."""
    lengths, own = (2, 1, 2, 3), torch.tensor([4, 0, 1, 3])
    ends, draw = torch.tensor([0, *lengths]).cumsum(0), torch.Generator().manual_seed(0)

    def rows(*size: int) -> torch.Tensor:
        return torch.randn(8, *size, generator=draw).bfloat16()

    pool, gates = torch.randn(5, 2, 4, 4, generator=draw), {"A_log": torch.zeros(2), "dt_bias": torch.ones(2)}
    given = {"q": rows(1, 4), "k": rows(1, 4), "v": rows(2, 4), "a": rows(2), "b": rows(2)}

    def served(which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some, kept = own[which], torch.zeros(5, 4, 2, 4, 4)
        bounds = ends[which.start : which.stop + 1]
        packed = {name: x[bounds[0] : bounds[-1]] for name, x in given.items()}
        launch = Launch(**packed, **gates, log_decay=None, beta=None, cu_seqlens=bounds - bounds[0], pool=pool,
                        index=some, stores=False, window=3, snapshots=kept, rows=some)  # fmt: skip
        core = import_module("instep.adapters.flashinfer").verify(launch, exact)
        return torch.as_tensor(core), kept

    with put(FlashInfer()):
        core, kept = served(slice(0, 4))
        alone = [served(slice(i, i + 1)) for i in range(4)]
    assert torch.equal(core, torch.cat([one for one, _ in alone]))
    assert torch.equal(kept, sum(one for _, one in alone))
    assert kept.flatten(2).any(-1).sum(1).tolist() == [1, 2, 0, 3, 2]
