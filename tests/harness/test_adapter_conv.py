"""Conv kernels of other packages through `pooled_conv` and `dense_conv`: right ones agree, wrong ones are found.

Leaves out: the page's file (`test_adapter_gdn.py`), and SGLang's adapter (`test_peers_kernels.py`).
"""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from instep.adapters.conv import ConvLaunch, dense_conv, pooled_conv
from instep.diagnose import diagnose
from instep.kit.cases import CONV, Case, serve
from instep.report.divergence_message import exercised
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier
from instep_optimized import load
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.errors import Unsupported
from support.independent.op_agreement import agree
from support.running.covering import few
from support.worlds.fake_kernels import Kernels

pytestmark = pytest.mark.slow  # replays through an external conv

PLAIN, FAKE = load("plain"), Kernels()
OF_WINDOWS = frozenset(Tier) - {Tier.DIRECTED}  # T2d compares states, not conv windows


def update(call: ConvLaunch) -> torch.Tensor:
    """A live window that a verify must not change. The fake kernel, like SGLang's, shifts it."""
    return FAKE.causal_conv1d_update(
        call.even, call.pool, call.weight, None, "silu", conv_state_indices=call.index,
        intermediate_conv_window=call.snapshots, intermediate_state_indices=call.rows,
    ).mT.flatten(0, 1)  # fmt: skip


def prefill(call: ConvLaunch) -> torch.Tensor:
    return FAKE.causal_conv1d_fn(
        call.x.T, call.weight, None, conv_states=call.pool, query_start_loc=call.cu_seqlens,
        seq_lens_cpu=call.cu_seqlens.diff().tolist(), cache_indices=call.index, has_initial_state=~call.fresh,
        activation="silu",
    ).T  # fmt: skip


def pooled(window: Any = update, chunk: Any = prefill, **said: bool) -> Ops:
    return pooled_conv(PLAIN, name="fake", window=window, chunk=chunk, even=True, **{"shifts": True, **said})


def carried(x: Any, weight: Any, lengths: Any, window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One window per sequence, in and out."""
    out, left, begin = torch.empty_like(x), window.clone(), 0
    for n, length in enumerate(lengths.tolist()):
        rows = x[begin : begin + length].T[None]
        out[begin : begin + length] = FAKE.causal_conv1d_update(
            rows, left, weight, None, "silu", conv_state_indices=torch.tensor([n]), intermediate_conv_window=None,
            intermediate_state_indices=None,
        )[0].T  # fmt: skip
        begin += length
    return out, left


def dense(window: Any = carried) -> Ops:
    return dense_conv(PLAIN, name="fake", window=window, chunk=carried)


@pytest.fixture
def judged(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(ops: Ops, tiers: Collection[Tier] = frozenset(Tier), **setting: Any) -> Outcome:
        monkeypatch.setattr("support.worlds.fake_kernels.OPS", ops, raising=False)
        given = {"drafter": "external", **setting}  # the draft head has no conv
        return diagnose(Replay(trace, Setting("support.worlds.fake_kernels:OPS", **given)), tiers=tiers)

    return run


@few(2)
@pytest.mark.parametrize(("ops", "widest", "strategy", "chunks"), [
    (pooled(), 4, "rerun", True), (pooled(strided=True), 4, "snapshot", True),
    (pooled(packed=True), 4, "rerun", True),
    (pooled(chunk=None), 4, "rerun", False), (dense(), 1, "columns", True),
], ids=["mirrors", "strided", "packed", "prefill of plain", "dense"])  # fmt: skip
def test_right_kernel_agrees_and_its_calls_are_counted(
    ops: Ops, widest: int, strategy: str, chunks: bool, judged: Callable[..., Any], trace: Trace
) -> None:
    all_of_them = not ops.packed and chunks and widest == 4 and strategy == "rerun"
    outcome = judged(ops, frozenset(Tier) if all_of_them else OF_WINDOWS, strategy=strategy)
    assert outcome.verdict.exit is Exit.AGREED and outcome.verdict.events == len(trace.events), outcome.verdict.findings
    kernel = outcome.exercised["conv.window"]
    assert (kernel.widest, kernel.asked) == (widest, 4) and kernel.calls > 0
    assert ("conv.chunk" in outcome.exercised, outcome.packed) == (chunks, ops.packed)


def _then(change: Any) -> Any:
    """The kernel, and one more change to the launch."""
    def run(call: ConvLaunch) -> torch.Tensor:
        found = update(call)
        change(call)
        return found

    return run


def _late(call: ConvLaunch) -> torch.Tensor:
    """Keeps each window one row too early."""
    found = update(call)
    if call.snapshots is not None and call.window > 1:
        call.snapshots[call.rows, 1:call.window] = call.snapshots[call.rows, :call.window - 1].clone()
    return found


def _unshared(call: ConvLaunch) -> None:
    """Writes a number after the end of the pool."""
    call.pool.as_strided((1,), (1,), call.pool.storage_offset() + call.pool.numel()).zero_()


@pytest.mark.parametrize(("ops", "kind", "component", "says"), [
    (pooled(_then(lambda call: call.pool[2].fill_(1))), "forward", "conv", "changed in conv slot 2"),
    (pooled(_then(_unshared)), "forward", "mixed", "wrote after the last of the"),
    (pooled(_then(lambda call: (call.x.mul_(2), call.index.zero_()))), "forward", "mixed",
     "the kernel changed x, index, which it may only read"),
    (pooled(shifts=False), "forward", "conv", "which this event may not write"),
    (pooled(_late), "commit", "conv", "holds the window after"),
    (dense(lambda **given: (carried(**given)[0], given["window"])), "forward", "mixed", "relative error"),
    (dense(lambda **given: carried(**given | {"x": given["x"].mul_(1.5)})), "forward", "mixed",
     "the kernel changed x, which it may only read"),
], ids=["stray", "behind", "inputs", "live window", "late", "kept", "dense inputs"])  # fmt: skip
def test_wrong_kernel_is_found_and_named(ops: Ops, kind: str, component: str, says: str, judged: Any) -> None:
    found = judged(ops, OF_WINDOWS, strategy="rerun").verdict.findings[0]
    assert (found.kind, found.place.component) == (kind, component) and says in found.diagnosis, found


def test_kernel_without_a_window_is_reported_as_not_judged(judged: Callable[..., Any]) -> None:
    said = [line for line in exercised(judged(dense(), {Tier.IDENTITY})) if line.startswith("conv.window")]
    assert len(said) == 1 and "never with more than one row of a sequence; windows have up to 4" in said[0]


@pytest.mark.parametrize("case", CONV, ids=str)
def test_dense_conv_obeys_the_contract(case: Case) -> None:
    assert agree(case, serve(PLAIN, case), serve(dense(), case)) == []


def test_widened_windows_are_refused(judged: Callable[..., Any]) -> None:
    with pytest.raises(Unsupported, match="--conv windows"):
        judged(pooled(), conv="widened")
