"""Conv kernels of other packages through `pooled_conv` and `dense_conv`, and results of the wrong kind of any kernel.

The latter are found at the kernel's own call, in the words of its contract. Leaves out: the pages' files
(`test_adapter_gdn.py`), and SGLang's adapter (`test_peers_kernels.py`).
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from instep import kit
from instep.adapters.conv import ConvLaunch, dense_conv, pooled_conv
from instep.adapters.returned_tensors import WrongResult, rows_of
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

pytestmark = pytest.mark.slow  # whole replays or commands

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


@few(4)
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


KIT_PLAIN = kit.load("plain")
Change = Callable[[Any], Any]


def dense_gdn(change: Change) -> Ops:
    def mine(*, v: torch.Tensor, state: torch.Tensor, **_: Any) -> Any:
        return change((v, state))

    return replace(KIT_PLAIN, gdn=kit.dense(window=mine, chunk=mine), keeps="inputs", trees=False)


def pooled_gdn(change: Change) -> Ops:
    def mine(x: kit.Launch) -> Any:
        return change(x.v)

    return kit.pooled(KIT_PLAIN, name="pooled", window=mine)


def of_pooled_conv(change: Change) -> Ops:
    def mine(x: kit.ConvLaunch) -> Any:
        return change(x.x)

    return kit.pooled_conv(KIT_PLAIN, name="pooled conv", window=mine)


def of_dense_conv(change: Change) -> Ops:
    def mine(*, x: torch.Tensor, window: torch.Tensor, **_: Any) -> Any:
        return change((x, window))

    return kit.dense_conv(KIT_PLAIN, name="dense conv", window=mine, chunk=mine)


@pytest.mark.parametrize(("make", "change", "says"), [
    (dense_gdn, lambda found: (found[0].transpose(0, 1), found[1]), "core [2, 3, 16], expected [3, 2, 16]"),
    (dense_gdn, lambda found: (found[0], found[1].mT[..., :4]), "state"),
    (dense_gdn, lambda found: (found[0], None), "None for state, expected a tensor"),
    (dense_gdn, lambda found: (found[0].long(), found[1]), "core of int64, expected floating-point numbers"),
    (dense_gdn, lambda found: None, "None, expected (core ["),
    (dense_gdn, lambda found: found[0], "a Tensor, expected (core ["),
    (dense_gdn, lambda found: (*found, 1), "a tuple of 3, expected (core ["),
    (pooled_gdn, lambda found: found.transpose(0, 1), "expected ["),
    (pooled_gdn, lambda found: None, "None for core, expected a tensor ["),
    (of_pooled_conv, lambda found: found.T, "expected ["),
    (of_pooled_conv, lambda found: found > 0, "mixed of bool, expected floating-point numbers"),
    (of_dense_conv, lambda found: found[::-1], "window ["),
    (of_dense_conv, lambda found: found[1], "a Tensor, expected (mixed ["),
])  # fmt: skip
def test_wrong_kind_of_result_is_found_at_the_call_of_the_kernel(
    make: Callable[[Change], Ops], change: Change, says: str
) -> None:
    op = "conv" if make.__name__.endswith("conv") else "gdn"
    case = {"gdn": "decode-r1-KV-float32", "conv": "decode-packed-float32"}[op]
    said = kit.served(kit.op_cases(op, case=case), make(change)).message
    assert "mine gave " in said and says in said, said
    assert "at tests/harness/test_adapter_conv.py line " in said and "Traceback" not in said, said


def test_rows_with_further_leading_axes_are_accepted() -> None:
    x = torch.arange(24.0).view(6, 2, 2)
    for found in (x, x[None], x.view(2, 3, 2, 2)):
        assert torch.equal(rows_of(print, found, "core", (6, 2, 2)), x)
    for found in (x.view(2, 6, 2), x[:5], x.view(-1), x.view(2, 2, 6)):
        with pytest.raises(WrongResult, match=r"print gave core \[.*\], expected \[6, 2, 2\]"):
            rows_of(print, found, "core", (6, 2, 2))
