"""Kernels of other packages as the `gdn` op, dense and over pools: the pages' own ones, right and with one fault each.

FLA runs too if it is installed. Leaves out: native kernels at real sizes (`tests/perf/fla_gpu.py`, run here with a few
channels).
"""

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from instep import kit
from instep.adapters import find
from instep.adapters.dense import dense
from instep.adapters.pooled import pooled
from instep.diagnose import diagnose
from instep.kit.cases import RECURRENT, Case, serve
from instep.report.divergence_message import exercised
from instep.report.outcome_data import of
from instep.run.replay import Outcome, Replay
from instep.run.run_variants import AS_IS, Variant
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit
from instep_optimized import Options, load
from instep_optimized.commit import STRATEGIES
from instep_optimized.memory.budget import must_fill_pitch
from instep_optimized.memory.pool import Demand
from instep_optimized.memory_addresses import StateLayout
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.place_names import Place
from support.independent.op_agreement import agree
from support.inputs.few_channels import few_channels
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed, first_finding

CASES = [case for case in RECURRENT if case.op == "gdn"]
TOP = Path(__file__).resolve().parents[2]
DENSE, POOLED = (
    re.findall(r"```python\n(.*?)```", (TOP / "docs" / page).read_text(), re.DOTALL)[0]
    for page in ("adapters.md", "pooled.md")
)
KEPT = ("buffer[call.rows[i] * steps + t - begin] = S", "call.snapshots[call.rows[i], t - begin] = S")
OWN = ("raw=True)", "raw=True, strided=True)")
PACKED = ("raw=True)", "raw=True, packed=True)")
# The same kernel, where norms and gates come from the ops before it.
GATED = (
    ("q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (call.q.float(), call.k.float()))",
     "q, k = call.q, call.k"), ("(q * width**-0.5, k)", "(q, k)"),
    ("(-call.A_log.exp() * softplus(call.a.float() + call.dt_bias)).exp(), call.b.float().sigmoid()",
     "call.log_decay.exp(), call.beta"), (", raw=True", ""),
)  # fmt: skip
PREFILL_OF_PLAIN = ("chunk=kernel, ", "")


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four_rounds: Trace) -> Any:
    """`judged(*edits, strategy=..)`: replay a whole trace with these edits of the page's file.

    The drafts of the trace are handed in: the draft head has no GDN layer, and calls no kernel of the file.
    """
    monkeypatch.syspath_prepend(tmp_path)

    def run(
        *edits: tuple[str, str], text: str = POOLED, trace: Trace | str = four_rounds, until: int | None = None,
        variant: Variant = AS_IS, **setting: Any,
    ) -> Outcome:
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        name = f"pooled_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        setting = {"strategy": "snapshot", "drafter": "external", **setting}
        opened = few_channels(trace, 2) if isinstance(trace, str) else trace
        return diagnose(Replay(opened, Setting(f"{name}:OPS", **setting)), until=until, variant=variant)

    return run


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("edits", "setting"), [
    pytest.param((), {}, marks=WHOLE), ((), {"layout": "KV", "strategy": "columns"}), (GATED, {}),
    ((PREFILL_OF_PLAIN,), {}), ((OWN, KEPT), {}), ((PACKED,), {"strategy": "columns"}),
    (('packed', 'KV'), {"layout": "KV"}),
], ids=["raw", "columns", "gated", "prefill of plain", "strided", "packed", "order"])  # fmt: skip
def test_right_pooled_kernel_agrees(edits: Any, setting: dict[str, Any], judged: Any, four_rounds: Trace) -> None:
    if edits == ("packed", "KV"):  # the same states in the other order, in the engine's own memory
        edits = (("raw=True)", 'raw=True, packed=True, order="KV")'), ("[unit].clone()", "[unit].mT.clone()"),
                 ("call.pool[unit] = S", "call.pool[unit] = S.mT"), (KEPT[0], KEPT[0] + ".mT"))
    outcome = judged(*edits, **setting)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings
    assert outcome.verdict.events == len(four_rounds.events)
    kernel = outcome.exercised["gdn.window"]
    assert kernel.widest == kernel.asked == 4 and kernel.rows > kernel.calls > 0
    assert ("gdn.chunk" in outcome.exercised) is (PREFILL_OF_PLAIN not in edits)
    assert outcome.packed == (PACKED in edits or "packed=True" in str(edits))


@pytest.mark.slow
@pytest.mark.parametrize(("trace", "until", "dtype"), [("ragged", None, "float32"), ("wider", 12, "bfloat16")])
def test_right_pooled_kernel_agrees_in_windows_of_many_widths(
    trace: str, until: int | None, dtype: str, judged: Any
) -> None:
    outcome = judged(trace=trace, until=until, dtype=dtype)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    assert until is not None or outcome.verdict.events == outcome.of


STRAY = "    return core\n"
FAULTS = {
    "row stride from the window in force": (
        [("call.snapshots.shape[1]", "call.window")], {"trace": "wider"},
        ("forward", "state", "snapshot_state row 0 changed at positions 2 to 3")),
    "a stray write into a free slot": (
        [(STRAY, f"    call.pool[2, 0, 0, 0] = 1\n{STRAY}")], {}, ("forward", "state", "state slot 2")),
    "a verify that writes the live state": (
        [("if call.stores:", "if True:")], {}, ("forward", "state", "changed in state slot")),
    "a state that goes into a copy": (
        [OWN, KEPT, ("            call.pool[unit] = S\n", "            call.pool.contiguous()[unit] = S\n")], {},
        ("forward", "state", "holds the state from before the step")),
    "a column too far": (
        [("t - begin]] = S", "min(t + 1, end - 1) - begin]] = S")], {"strategy": "columns"},
        ("commit", "state", "holds the state from before the step")),
    "a column after the window": (
        [("t - begin]] = S", "t + 1 - begin]] = S if t + 2 - begin <= call.blocks.shape[1] else S")],
        {"strategy": "columns"}, ("forward", "state", "")),
    "keys without their norm": ([("q * width**-0.5, k)", "q * width**-0.5, 2 * k)")], {}, ("forward", "core", "")),
    "a write after the pool": (
        [(STRAY, f"    p = call.pool\n    p.as_strided((1,), (1,), p.storage_offset() + p.numel()).zero_()\n{STRAY}")],
        {}, ("forward", "core", "wrote after the last of the 4 units")),
    "a NaN before the pool": (
        [(STRAY, f"    p = call.pool\n    p.as_strided((1,), (1,), p.storage_offset() - 1).fill_(torch.nan)\n{STRAY}")],
        {}, ("forward", "core", "wrote before the first of the 4 units")),
    "rows that are gated in place": (
        [(STRAY, f"    call.v.mul_(2), call.index.zero_()\n{STRAY}")], {},
        ("forward", "core", "the kernel changed v, index, which it may only read")),
}  # fmt: skip


@few(4)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_pooled_kernel_is_found_and_named(fault: str, judged: Any) -> None:
    edits, setting, (kind, component, said) = FAULTS[fault]
    found = first_finding(judged(*edits, **setting))
    assert (found.kind, found.place.component) == (kind, component) and said in found.diagnosis, found


@pytest.mark.slow
def test_raw_kernel_is_compared_from_its_inputs(judged: Any) -> None:
    """With two ops of `plain` instead, the same op set shows q, k, v and the gates."""
    slip = ("repeat_interleave(heads, dim=1)", "repeat_interleave(heads, dim=1).half().float()")
    found, mended = judged(slip).verdict, judged(slip, variant=Variant(swap={"fused_gdn": "plain"})).verdict
    assert found.exit is Exit.DIVERGED and found.findings[0].place.component == "core", found.findings[:1]
    assert mended.exit is Exit.AGREED
    shown = [{one.place.component for one in verdict.compared} for verdict in (found, mended)]
    assert not {"q", "k", "v", "log_decay", "beta"} & shown[0] and {"q", "k", "v", "log_decay", "beta"} <= shown[1]


@pytest.mark.slow
def test_dense_kernel_without_a_window_is_reported_as_not_judged(judged: Any, longer: Trace) -> None:
    outcome = judged(text=DENSE, trace=longer, until=12)
    kernel, run = outcome.exercised["gdn.window"], of([outcome]).data()["runs"][0]
    assert kernel.widest == 1 and kernel.asked == 4 and kernel.calls == kernel.rows
    assert run["exercised"]["gdn.window"]["widest"] == 1 and not run["packed"]
    assert any("never with more than one row of a sequence; windows have up to 4" in x for x in exercised(outcome))
    assert judged(text=DENSE, trace=longer, until=12, strategy="rerun").exercised["gdn.window"].widest == 4


def test_unused_form_is_reported_as_never_called(judged: Any) -> None:
    outcome = judged(text=DENSE, until=2)
    assert outcome.exercised["gdn.window"].calls == 0 and "gdn.window: never called" in exercised(outcome)


def test_dense_kernel_that_changes_its_rows_is_found(judged: Any) -> None:
    found = judged(("    return ", "    beta.zero_()\n    return "), text=DENSE, until=4).verdict.findings[0]
    assert "the kernel changed beta, which it may only read" in found.diagnosis


def test_calls_of_own_ops_are_not_counted(four_rounds: Trace) -> None:
    assert Replay(four_rounds, Setting("plain")).run(until=3).exercised == {}


@pytest.mark.parametrize(("edits", "setting", "why"), [
    ((), {"strategy": "rerun"}, "pooled kernels cannot rerun kept tokens"),
    ((OWN, KEPT), {"strategy": "columns"}, "packed=True"),
    ((OWN, KEPT), {"layout": "KV"}, "--layout VK"),
], ids=["rerun", "strided columns", "the other order"])  # fmt: skip
def test_unsupported_setting_of_a_pooled_kernel_is_refused(
    edits: Any, setting: dict[str, Any], why: str, judged: Any
) -> None:
    with pytest.raises(Unsupported, match=re.escape(why)):
        judged(*edits, **setting)


def test_padded_pools_cannot_be_packed() -> None:
    state = Demand("state", "slot", (0,), 2, (4, 8), torch.float32)
    mark = replace(state, name="mark", shape=(1,), dtype=torch.int64)
    must_fill_pitch((state, mark))
    with pytest.raises(Unsupported, match="20 elements, a unit of state, are padded"):
        must_fill_pitch((replace(state, shape=(4, 5)), mark))


ADAPTIVE = TOP / "fixtures" / "traces" / "adaptive.jsonl"
PLAIN = load("plain")
HERE = importlib.util.find_spec("fla") is not None and importlib.util.find_spec("einops") is not None
needs_fla = pytest.mark.skipif(not HERE, reason="fla-core or einops is not installed")

PAGES = {way: (TOP / "docs" / f"{page}.md").read_text() for way, page in
         (("dense", "adapters"), ("pooled", "pooled"), ("conv", "conv"))}  # fmt: skip
FILES = {way: re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0] for way, page in PAGES.items()}
RUNS = {way: re.findall(r"^instep (replay .*)$", page, re.MULTILINE)[0] for way, page in PAGES.items()}
# The faults of each page: (old, new, parts of the message).
BROKEN = {
    way: [re.findall(r"`([^`]+)`", line) for line in page.splitlines() if re.match(r"\| `.+` \| `.+` \| `", line)]
    for way, page in PAGES.items()
}


def run_of(way: str) -> list[str | Path]:
    """The command of the page, with its trace on a model of few channels."""
    command, trace, *words = RUNS[way].split()
    return [command, few_channels((TOP / trace).resolve(strict=True).stem, 2).path, *words]


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("way", "lines"), [("dense", 30), ("pooled", 40), ("conv", 45)])
def test_files_of_the_pages_agree_and_are_short(
    way: str, lines: int, mine: Callable[..., None], instep: Runner
) -> None:
    mine(FILES[way])
    assert len(FILES[way].splitlines()) < lines
    ran = instep(*run_of(way))
    op = "conv" if way == "conv" else "gdn"
    assert ran.code == 0 and "mine:OPS agrees" in ran.out and f"mine:OPS: {op}.window: " in ran.out, ran


@few(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "old", "new", "says"), [(way, *edit[:2], edit[2:]) for way, edits in BROKEN.items() for edit in edits]
)
def test_faults_of_the_pages_are_found_as_printed(
    way: str, old: str, new: str, says: list[str], mine: Callable[..., None], instep: Runner
) -> None:
    mine(FILES[way], old, new)
    ran = instep(*run_of(way), "--no-ladder", "--drafter", "external")
    assert ran.code == 1 and all(part in ran.out for part in says), ran.out


def test_each_page_has_three_faults() -> None:
    assert [len(edits) for edits in BROKEN.values()] == [3, 3, 3]
    assert any("2 tokens were accepted" in part for part in BROKEN["dense"][-1])


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "layout"), [
    pytest.param(*one, marks=WHOLE if one[0] == Options().strategy else ())  # which the page's command runs
    for one in zip(STRATEGIES, cycle(("VK", "KV")), strict=False)
])
def test_dense_states_agree_under_every_strategy(
    strategy: str, layout: StateLayout, mine: Callable[..., None], trace: Trace
) -> None:
    """Use the drafts of the trace, because the draft head has no GDN layer. The commands above use the head."""
    mine(FILES["dense"])
    setting = Setting("mine:OPS", strategy=strategy, layout=layout, drafter="external")
    verdict = Replay(trace, setting).run().verdict
    assert verdict.exit is Exit.AGREED and verdict.events == len(trace.events), verdict.findings[:1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense_obeys_the_contract(case: Case, mine: Callable[..., None]) -> None:
    """Idle and padded requests, fresh ones, columns, skipped stores, red zones: the cases of every op set."""
    mine(FILES["dense"])
    ours = find("mine:OPS")
    assert isinstance(ours, Ops)
    served = serve(ours, case)
    assert agree(case, serve(PLAIN, case), served) == []


# The same kernels with a decay per channel, and with the first channel's decay for all.
CHANNELS = {
    "dense": (("log_decay[row].exp()[:, None, None]", "log_decay[row].exp()[..., None]"),
              ("gdn=dense(window=kernel, chunk=kernel)", 'kda=dense(window=kernel, chunk=kernel, op="kda")')),
    "pooled": (*GATED, ("decay[t][:, None, None]", "decay[t][:, None, :]"),
               ("chunk=kernel)", 'chunk=kernel, op="kda")')),
}  # fmt: skip
FIRST = {"dense": ("exp()[..., None]", "exp()[..., :1, None]"),
         "pooled": ("decay[t][:, None, :]", "decay[t][:, None, :1]")}  # fmt: skip


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("form", CHANNELS)
def test_kernels_with_a_decay_per_channel_are_adapted(form: str, right: bool, mine: Callable[..., None]) -> None:
    text = {"dense": DENSE, "pooled": POOLED}[form]
    for old, new in (*CHANNELS[form], *(() if right else (FIRST[form],))):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    mine(text)
    cases = [case for case in kit.op_cases("kda", dtype="float32") if form == "dense" or "VK" in case.name]
    found = kit.served(cases, "mine:OPS")
    assert found.exit is (Exit.AGREED if right else Exit.DIVERGED), found.message


def test_raw_kernel_needs_the_arguments_of_the_op_before_it() -> None:
    """The fusion of `gdn` has them itself; that of another recurrence has not."""
    ops = pooled(load("plain"), name="mine", window=lambda _: torch.zeros(1), raw=True, op="kda")
    assert ops.kda is not None
    with pytest.raises(Unsupported, match="own op before kda, which a replay has"):
        ops.kda(inputs=GdnInputs(*torch.zeros(5, 1, 1, 1)), parts=(), dtype=torch.float32, to=Place("trunk", 0, "core"))
    with pytest.raises(BadInput, match="one of gdn, kda, mamba2"):
        pooled(load("plain"), name="mine", raw=True, op="lightning")


@pytest.mark.slow
def test_dense_without_keeps_inputs_is_refused(mine: Callable[..., None], trace: Trace) -> None:
    mine(FILES["dense"], ', keeps="inputs"', "")
    agreed(Replay(trace, Setting("mine:OPS", strategy="snapshot")).run(until=4))
    with pytest.raises(Unsupported, match='declare keeps="inputs" in its op set'):
        Replay(trace, Setting("mine:OPS", strategy="rerun")).run()


def test_kernel_that_ignores_rerun_tokens_is_found(mine: Callable[..., None], trace: Trace) -> None:
    """`dense` passes kept tokens as separate sequences, with their keys as queries."""
    first = "    q, k = (x.repeat_interleave"
    mine(FILES["dense"], first, f"    if q is k:\n        return v, state\n{first}")
    found = first_finding(Replay(trace, Setting("mine:OPS", strategy="rerun", drafter="external")).run())
    assert (found.kind, found.place.component) == ("commit", "state") and "accepted" in found.diagnosis, found


@pytest.mark.slow
def test_gpu_benchmark_of_fla_runs(tmp_path: Path) -> None:
    file = tmp_path / "fla.json"
    names = ("plain", "fla") if HERE else ("plain", "plain")
    words = [word for name in names for word in ("--ops", name)]
    common = ["--narrow", "--device", "cpu", "--shape", "qwen3.5-27b", "--strategy", "rerun", "--rounds", "1"]
    assert _script().main([*common, *words, "--out", str(file), "--commit", "abc"]) == 0
    result = json.loads(file.read_text())
    assert {run["ops"] for run in result["runs"]} == set(names) and result["commit"] == "abc"
    assert {tier["tier"] for tier in result["runs"][-1]["tiers"]} == {"T0", "T1", "T2d"}
    (apart,) = result["apart"]
    assert apart["states"] > 0 and apart["worst"] < 1e-5
    assert set(result["peers"]) >= {"fla-core", "einops"} and (result["peers"]["fla-core"] is not None) == HERE


@pytest.mark.skipif(HERE, reason="fla-core is installed")
def test_fla_without_its_package_names_the_package(instep: Runner) -> None:
    said = complaint(instep("replay", ADAPTIVE, "--ops", "fla"))
    assert "'fla', whose package is not installed, expected fla-core and einops" in said
    assert said.endswith("pip install fla-core einops")


@needs_fla
@pytest.mark.parametrize("case", CASES, ids=str)
def test_recurrent_kernel_of_fla_obeys_the_contract(case: Case) -> None:
    served = serve(find("fla"), case)
    assert agree(case, serve(PLAIN, case), served) == []


@needs_fla
@pytest.mark.parametrize("case", [case for case in CASES if "chunk" in case.name or "mixed" in case.name], ids=str)
def test_chunked_kernels_of_fla_obey_the_contract(case: Case, patched: ModuleType) -> None:
    ops = replace(PLAIN, gdn=dense(window=patched.RECURRENT, chunk=patched.CHUNKED), keeps="inputs")
    served = serve(ops, case)
    assert agree(case, serve(PLAIN, case), served) == []


@needs_fla
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fla_computes_the_model_under_every_strategy(strategy: str, trace: Trace) -> None:
    verdict = Replay(trace, Setting("fla", strategy=strategy)).run().verdict
    assert verdict.exit is Exit.AGREED and verdict.events == len(trace.events), verdict.findings[:1]


@needs_fla
def test_fla_refuses_float64() -> None:
    ops = find("fla")
    assert isinstance(ops, Ops) and not ops.captures
    with pytest.raises(Unsupported, match="float64"):
        ops.types(torch.float64, torch.float64)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The adapter, with FLA's chunked kernels fixed for the interpreter: no tuning, indices with methods."""
    from triton.runtime.autotuner import Autotuner

    adapter = importlib.import_module("instep.adapters.fla")
    for name, module in list(sys.modules.items()):
        for kernel in vars(module).values() if name.startswith("fla.ops") else ():
            kernel = getattr(kernel, "fn", kernel)
            if isinstance(kernel, Autotuner):
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
    monkeypatch.setitem(vars(sys.modules["fla.ops.common.chunk_delta_h"]), "range", _indices)
    return adapter


def _indices(count: Any) -> Iterator[Any]:
    """`range` as in a compiled kernel: its values are Triton scalars."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    for index in range(int(count.handle.data.item())):
        yield tl.core.tensor(TensorHandle(np.array([index], dtype=np.int32), tl.int32), tl.int32)


def _script() -> ModuleType:
    """The benchmark, which is a script."""
    spec = importlib.util.spec_from_file_location("fla_gpu", TOP / "tests" / "perf" / "fla_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
