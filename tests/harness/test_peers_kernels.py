"""The adapters of kernels of peers, against fakes with the same arguments: right ones agree, a slip is found.

Leaves out: the real kernels (`make peers`; those that need a GPU: `tests/perf/peers_gpu.py`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.adapters.pooled import Launch
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.verdict import Exit, Tier, Verdict
from instep_reference.contract.errors import Unsupported
from support.inputs.few_channels import FIXTURES, few_channels
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed
from support.worlds.fake_kernels import FlashInfer, FlashQla, Kernels
from support.worlds.fake_recurrences import ADAPTERS
from support.worlds.installed_modules import forgotten, public, put_modules

OPS = "sglang.kernels.ops"
PLACES = [f"{OPS}.{name}" for name in (
    "attention.fla.fused_recurrent", "attention.linear.fused_sigmoid_gating_recurrent", "mamba.causal_conv1d_triton",
    "mamba.mamba_state_scatter_triton",
)]  # fmt: skip
pytestmark = pytest.mark.slow
OURS = ("instep.adapters.sglang", "instep.adapters.sglang_commit", "peers.kernels.vllm")
Put = Callable[[Any], None]
TOP = Path(__file__).resolve().parents[2]
FIXED = TOP / "fixtures" / "traces" / "faults"
THREE_WINDOWS = 12  # event of `wider`: a window of each width was verified and committed


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """`put(kernels)`: from now on SGLang's modules have them."""

    with forgotten(*OURS):
        yield lambda kernels: put_modules(monkeypatch, dict.fromkeys(PLACES, public(kernels)), *OURS)


@pytest.fixture(scope="module")
def wider() -> Trace:
    """Two requests in windows of 2, 4 and 2 tokens, in pools that are 4 wide: where a wrong stride shows."""
    return few_channels("wider", 2)


def verdict(trace: Trace, ops: str, strategy: str, until: int | None = None, dtype: str = "float32") -> Verdict:
    """With the drafts of the trace: the draft head has no GDN layer, and calls none of these kernels."""
    return Replay(trace, Setting(ops, strategy=strategy, dtype=dtype, drafter="external")).run(until=until).verdict


@few(2)
@pytest.mark.parametrize(("ops", "strategy"), [
    ("sglang:SIGMOID", "snapshot"), ("sglang:DECODE", "snapshot"), ("sglang_commit:CONV", "rerun"),
    ("sglang_commit:SCATTER", "snapshot"),
])  # fmt: skip
def test_right_kernels_of_sglang_agree(ops: str, strategy: str, put: Put, four_rounds: Trace) -> None:
    put(Kernels())
    agreed(verdict(four_rounds, f"instep.adapters.{ops}", strategy), events=len(four_rounds.events))


def test_a_wrong_kernel_of_sglang_is_found(put: Put, wider: Trace) -> None:
    put(Kernels(slip=True))
    came = verdict(wider, "instep.adapters.sglang:SIGMOID", "snapshot")
    assert came.exit is Exit.DIVERGED and "tails" in {one.check for one in came.findings}, came.findings[:1]


class Stray(Kernels):
    """Kernels that get copies: a verify's conv that writes to another slot, a scatter that writes to its snapshots."""

    def causal_conv1d_update(self, x: Any, conv_state: Any, *given: Any, **more: Any) -> torch.Tensor:
        if more["intermediate_conv_window"] is not None:
            conv_state[-1] = 1.0
        return super().causal_conv1d_update(x, conv_state, *given, **more)

    def fused_mamba_state_scatter_with_mask(self, dst: Any, src: Any, slots: Any, steps: Any) -> None:
        super().fused_mamba_state_scatter_with_mask(dst, src, slots, steps)
        src[:, 0] = 1.0


@pytest.mark.parametrize(("ops", "strategy", "kind"), [
    ("sglang_commit:CONV", "rerun", "forward"), ("sglang_commit:SCATTER", "snapshot", "commit"),
])  # fmt: skip
def test_write_to_a_copy_is_found(ops: str, strategy: str, kind: str, put: Put, four_rounds: Trace) -> None:
    put(Stray())
    found = verdict(four_rounds, f"instep.adapters.{ops}", strategy).findings[0]
    assert found.kind == kind and found.tier is Tier.BITWISE, found


def test_a_kernel_that_no_release_has_is_named(put: Put) -> None:
    put(Kernels())
    take = import_module("instep.adapters.sglang").take
    with pytest.raises(ModuleNotFoundError, match=r"gone: none of sglang\.nowhere"):
        take("gone", "sglang.nowhere", "sglang.kernels.nothing")


@pytest.mark.parametrize("ops", ["RECURRENT", "SIGMOID"])
def test_vllms_columns_agree_and_other_strategies_are_refused(
    ops: str, four_rounds: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "vllm" / "third_party" / "flash_linear_attention" / "ops"
    place.mkdir(parents=True)
    for name in ("fused_recurrent", "fused_sigmoid_gating"):
        (place / f"{name}.py").write_text(
            "from support.worlds.fake_kernels import VLLM\nglobals().update(vars(VLLM))\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for module in [name for name in sys.modules if name.partition(".")[0] == "vllm" or name in OURS]:
        monkeypatch.delitem(sys.modules, module)
    assert verdict(four_rounds, f"peers.kernels.vllm:{ops}", "columns").exit is Exit.AGREED
    with pytest.raises(Unsupported, match="--strategy columns"):
        verdict(four_rounds, f"peers.kernels.vllm:{ops}", "snapshot")


@WHOLE
@pytest.mark.parametrize("slips", [pytest.param(False, marks=WHOLE), True])  # the right one agrees above, too
def test_kit_for_another_tree_lists_the_failing_step_counts(
    slips: bool, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(Kernels(slip=slips))
    spec = spec_from_file_location("kit", TOP / "docs" / "kit" / "test_gdn_kernels.py")
    kit: Any = module_from_spec(spec)
    spec.loader.exec_module(kit)
    assert len(kit.KERNELS) == 4 and all(few_channels(trace, 2) for trace in kit.TRACES.values())
    monkeypatch.setattr(kit.kit, "fixtures", lambda: FIXTURES.with_name("2"))
    if slips:  # and so it is with a right kernel
        kit.test_a_kernel_computes_the_model("sglang:SIGMOID", "fixed")
    with pytest.raises(pytest.fail.Exception, match="this event writes only") if slips else nullcontext():
        kit.test_a_kernel_computes_the_model("sglang:SIGMOID", "adaptive")


# ---- FlashInfer and FlashQLA


@contextmanager
def installed(kernels: Any) -> Iterator[None]:
    """Put fake kernels into the packages, and import the adapters again."""
    places, adapters = ("flashinfer.gdn_decode", "flashinfer.gdn_prefill", "flash_qla"), ("flashinfer", "flashqla")
    ours = [f"instep.adapters.{name}" for name in adapters]
    with pytest.MonkeyPatch.context() as patch, forgotten(*ours):
        put_modules(patch, dict.fromkeys(places, public(kernels)), *ours)
        yield


def verdict_of(
    trace: Trace, kernels: Any, ops: str, strategy: str, dtype: str = "bfloat16", until: int | None = None,
) -> Verdict:
    with installed(kernels):
        return verdict(trace, f"instep.adapters.{ops}", strategy, until, dtype)


@few(2)
@pytest.mark.parametrize(("kernels", "ops", "name"), [
    (FlashInfer(), "flashinfer:VERIFY", "four_rounds_bf16"), (FlashInfer(slip=True), "flashinfer:EXACT", "wider"),
    (FlashInfer(), "flashinfer:STRIDED", "four_rounds_bf16"),
    (FlashInfer(), "flashinfer:VERIFY --strategy columns", "four_rounds_bf16"),
    (FlashInfer(), "flashinfer:PREFILL", "four_rounds_bf16"), (FlashQla(), "flashqla:OPS", "four_rounds_bf16"),
])  # fmt: skip
def test_right_kernels_agree(kernels: Any, ops: str, name: str, request: pytest.FixtureRequest) -> None:
    ops, _, strategy = ops.partition(" --strategy ")
    trace: Trace = request.getfixturevalue(name)
    last = THREE_WINDOWS if name == "wider" else len(trace.events) - 1
    agreed(verdict_of(trace, kernels, ops, strategy or "snapshot", until=last), events=last + 1)


@pytest.mark.parametrize(("kernels", "ops", "kind", "tier"), [
    (FlashInfer(slip=True), "flashinfer:VERIFY", "forward", Tier.BITWISE),
    (FlashInfer(forgets=True), "flashinfer:PREFILL", "forward", Tier.DIRECTED),
    (FlashQla(forgets=True), "flashqla:OPS", "forward", Tier.DIRECTED),
], ids=["stride", "prefill", "flashqla"])  # fmt: skip
def test_a_wrong_kernel_is_found(kernels: Any, ops: str, kind: str, tier: Tier, wider: Trace) -> None:
    found = verdict_of(wider, kernels, ops, "snapshot").findings[0]
    assert (found.kind, found.tier) == (kind, tier), found


def test_a_decode_that_stores_nothing_is_found(four_rounds_bf16: Trace) -> None:
    found = verdict_of(four_rounds_bf16, FlashInfer(forgets=True), "flashinfer:VERIFY", "snapshot").findings[0]
    assert found.tier is Tier.DIRECTED and "before the step" in found.diagnosis, found


def test_rows_that_the_kernels_would_round_are_refused(wider: Trace) -> None:
    with pytest.raises(Unsupported, match="read rows in bfloat16"):
        verdict_of(wider, FlashInfer(), "flashinfer:VERIFY", "snapshot", dtype="float32")


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

    with installed(FlashInfer()):
        core, kept = served(slice(0, 4))
        alone = [served(slice(i, i + 1)) for i in range(4)]
    assert torch.equal(core, torch.cat([one for one, _ in alone]))
    assert torch.equal(kept, sum(one for _, one in alone))
    assert kept.flatten(2).any(-1).sum(1).tolist() == [1, 2, 0, 3, 2]


# ---- KDA and Mamba2


def judged(adapter: str, ops: str, strategy: str, *faults: str) -> Verdict:
    """The op set of `tests/peers/kernels` over fakes with these faults."""
    functions, modules = ADAPTERS[adapter]
    readers = (f"peers.kernels.{adapter}", "instep.adapters.sglang", "instep.adapters.sglang_ring")
    with pytest.MonkeyPatch.context() as patch, forgotten(*readers):
        for package in ("sglang", "vllm"):
            patch.setattr(f"instep.adapters.stubbed_imports.{package}", lambda: None)
        of_gdn = ("fused_recurrent_gated_delta_rule_packed_decode", "fused_sigmoid_gating_delta_rule_update")
        put_modules(patch, dict.fromkeys(modules, dict.fromkeys(of_gdn) | functions(*faults)), *readers)
        trace = read(FIXED / ("kimi.jsonl" if "kda" in adapter else "nemotron.jsonl"))
        return verdict(trace, f"peers.kernels.{adapter}:{ops}", strategy)


@WHOLE
@pytest.mark.parametrize(("adapter", "ops", "strategy"), [
    ("sglang_kda", "DECODE", "snapshot"), ("sglang_kda", "RING", "kda_ring"), ("vllm_kda", "RECURRENT", "columns"),
    ("sglang_mamba2", "UPDATE", "snapshot"), ("vllm_mamba2", "UPDATE", "columns"),
])  # fmt: skip
def test_right_kernels_of_other_recurrences_agree(adapter: str, ops: str, strategy: str) -> None:
    agreed(judged(adapter, ops, strategy), events=25)


ONE_LESS = "holds the state after 2 tokens; 3 tokens were accepted"


@few(1)
@pytest.mark.parametrize(("adapter", "ops", "strategy", "fault", "kind", "said"), [
    ("sglang_kda", "VERIFY", "snapshot", "step", "commit", ONE_LESS),
    ("sglang_kda", "VERIFY", "snapshot", "pads", "forward", "counts the last token twice"),
    ("sglang_kda", "RING", "kda_ring", "count", "commit", ONE_LESS),
    ("vllm_kda", "RECURRENT", "columns", "step", "commit", ONE_LESS),
    ("fla_kda", "CHUNKED", "snapshot", "forgets", "forward", "is all zero"),
    ("fla_kda", "RECURRENT", "snapshot", "bias", "forward", "relative error"),
    ("sglang_mamba2", "UPDATE", "snapshot", "stride", "forward", "this event writes only"),
    ("sglang_mamba2", "UPDATE", "snapshot", "group", "forward", "relative error"),
    ("vllm_mamba2", "UPDATE", "columns", "step", "forward", "elements are poison"),
])  # fmt: skip
def test_fault_of_a_kernel_of_another_recurrence_is_found(
    adapter: str, ops: str, strategy: str, fault: str, kind: str, said: str
) -> None:
    found = judged(adapter, ops, strategy, fault).findings[0]
    assert found.kind == kind and said in found.diagnosis, found
