"""Cases of ops on a GPU: the same bits as on the CPU, no mix of devices in the judge, a GPU that fails.

Without a GPU a tensor type imitates one: it refuses to combine with CPU tensors. Leaves out: the findings of the judge
(`test_kit.py`), and the kernels (`tests/optimized`).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from instep import kit
from instep.kit import compare_with_reference
from instep.kit.cases import CASES
from instep.kit.cases.case import Call, moved, packed
from instep.watch import batched_host_copies
from instep.watch.batched_host_copies import with_others
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.watch_op_calls import memory_of
from support.running.command import Runner, complaint
from support.wrong.kit_ops import FORGETFUL


class OnCard(torch.Tensor):
    """A tensor that combines with no CPU tensor except a single number, as on a GPU; `.cpu()` gives a CPU tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in [*args, *(kwargs or {}).values()] for x in (x if isinstance(x, list | tuple) else [x])]
        beside = [x for x in given if isinstance(x, torch.Tensor) and not isinstance(x, OnCard) and x.dim()]
        assert not beside, f"{function} of tensors of two devices"
        out = super().__torch_function__(function, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if getattr(function, "__name__", "") == "cpu" else out


def put(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(OnCard)


def taken(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(torch.Tensor)


def on_card(call: Call, device: str) -> Call:
    return Call(with_others(call.inputs, put), with_others(call.pools, put))


def launched(op: Any) -> Any:
    """The op as a kernel: it reads the card's memory, and its results are there."""
    return lambda **given: with_others(op(**with_others(given, taken)), put)


def test_judge_mixes_no_tensors_of_cpu_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_with_reference, "moved", on_card)
    ops = sorted({case.op for case in CASES})
    card = replace(PLAIN, name="card", **{op: launched(getattr(PLAIN, op)) for op in ops})
    found = kit.served([case for op in ops for case in kit.op_cases(op, trees=True)[:4]], card)
    assert found.must_agree() and len(found.cases) > 60
    wrong = replace(card, gdn=launched(FORGETFUL.gdn))
    assert "holds what was there" in kit.served(kit.op_cases("gdn")[0], wrong).message


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_moved_case_keeps_its_layout_and_bits(device: str) -> None:
    for case in CASES:
        for built in (case.build("cpu"), packed(case.build("cpu"))):
            there = moved(built, device)
            mine, theirs = ([x for value in (*call.inputs.values(), *call.pools.values()) for x in every(value)]
                            for call in (built, there))  # fmt: skip
            assert [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in mine] == [
                (x.shape, x.stride(), x.storage_offset(), x.dtype) for x in theirs]
            assert {x.device.type for x in theirs} <= {device}
            if device == "cuda":
                here, away = ([memory_of(x) for x in tensors if x.numel()] for tensors in (mine, theirs))
                assert [here.index(x) for x in here] == [away.index(x) for x in away]
                bits = compare_with_reference._bytes
                assert all(bits(x).equal(bits(y)) for x, y in zip(mine, theirs, strict=True))
            for name, pool in there.pools.items():  # the op writes into an input that is a pool
                assert pool.view._base is pool.raw._base, name


def every(value: Any) -> list[torch.Tensor]:
    """All tensors of the call, including those of addresses."""
    found: list[torch.Tensor] = []
    with_others(value, lambda x: found.append(x) or x)
    return found


def test_result_on_a_wrong_device_and_a_failed_gpu_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # all of it stays on the CPU
        patch.setattr(compare_with_reference, "moved", lambda call, device: call)
        patch.setattr(compare_with_reference, "settle", lambda device: None)
        first, *_ = compare_with_reference.judged(PLAIN, kit.op_cases("gdn")[:1], "cuda").findings
    assert first.check == "contract" and first.diagnosis == "a result lies on cpu"
    launches: list[int] = []

    def settled(device: str) -> None:
        launches.append(1)
        if len(launches) > 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for module in (compare_with_reference, batched_host_copies):  # which asks whether the card still works
        monkeypatch.setattr(module, "settle", settled)
    fell = kit.served(kit.op_cases("gdn")[:6], PLAIN)
    assert fell.exit is kit.Exit.DIVERGED and "raised RuntimeError (CUDA error: an illegal" in fell.message
    assert [skip.event for skip in fell.verdict.skipped] == [3, 4, 5]
    assert {skip.reason for skip in fell.verdict.skipped} == {f"cpu takes no launch any more, after {fell.cases[2]}"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_missing_gpu_is_refused_in_one_line(instep: Runner) -> None:
    ran = instep("op", "plain", "gdn", "--device", "cuda")
    assert "found cuda, expected cpu; no CUDA device is here" in complaint(ran)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "triton", "precise", "invariant"])
def test_op_sets_agree_on_a_gpu(name: str) -> None:
    """All cases and some drawn, in fp32 and native bf16, with trees and narrow states; once at real sizes."""
    cases = [case for state in ("float32", "bfloat16") for case in kit.op_cases(trees=True, state_dtype=state)]
    cases += [*kit.op_cases(drawn=6)[-18:], *(kit.op_cases(real=True) if name == "triton" else [])]
    found = kit.served(cases, name, device="cuda")
    assert found.must_agree() and found.device == "cuda"


@pytest.mark.gpu
def test_command_for_a_gpu_case_names_the_device(instep: Runner) -> None:
    assert instep("op", "plain", "gdn", "--device", "cuda", "--drawn", 2).code == 0
    wrong = instep("op", "support.wrong.kit_ops:FORGETFUL", "gdn", "--device", "cuda", "--drawn", 0)
    line = "instep op support.wrong.kit_ops:FORGETFUL gdn --case decode-r1-KV-float32 --device cuda"
    assert wrong.code == 1 and line in wrong.out, wrong
