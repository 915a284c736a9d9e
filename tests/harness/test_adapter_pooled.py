"""Kernels over pools through `pooled`: the file of the page, right and with one fault at a time.

Leaves out: the texts of the page (`test_adapter_fla.py`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.diagnose import diagnose
from instep.report.divergence_message import exercised
from instep.report.outcome_data import of
from instep.run.replay import Outcome, Replay
from instep.run.run_variants import AS_IS, Variant
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit
from instep_optimized.memory.budget import must_fill_pitch
from instep_optimized.memory.pool import Demand
from instep_reference.contract.errors import Unsupported
from support.inputs.few_channels import few_channels
from support.running.covering import WHOLE, few

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


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_pooled_kernel_is_found_and_named(fault: str, judged: Any) -> None:
    edits, setting, (kind, component, said) = FAULTS[fault]
    verdict = judged(*edits, **setting).verdict
    assert verdict.exit is Exit.DIVERGED
    found = verdict.findings[0]
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
    kernel, run = outcome.exercised["gdn.window"], of([outcome]).found["runs"][0]
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
