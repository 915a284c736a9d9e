"""Results of the wrong kind are found at the kernel's own call, in the words of its contract.

Leaves out: wrong numbers (`test_adapter_gdn.py`, `test_adapter_conv.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from instep import kit
from instep.adapters.returned_tensors import WrongResult, rows_of
from instep_optimized.ops.op_protocols import Ops

PLAIN = kit.load("plain")
Change = Callable[[Any], Any]


def dense_gdn(change: Change) -> Ops:
    def mine(*, v: torch.Tensor, state: torch.Tensor, **_: Any) -> Any:
        return change((v, state))

    return replace(PLAIN, gdn=kit.dense(window=mine, chunk=mine), keeps="inputs", trees=False)


def pooled_gdn(change: Change) -> Ops:
    def mine(x: kit.Launch) -> Any:
        return change(x.v)

    return kit.pooled(PLAIN, name="pooled", window=mine)


def pooled_conv(change: Change) -> Ops:
    def mine(x: kit.ConvLaunch) -> Any:
        return change(x.x)

    return kit.pooled_conv(PLAIN, name="pooled conv", window=mine)


def dense_conv(change: Change) -> Ops:
    def mine(*, x: torch.Tensor, window: torch.Tensor, **_: Any) -> Any:
        return change((x, window))

    return kit.dense_conv(PLAIN, name="dense conv", window=mine, chunk=mine)


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
    (pooled_conv, lambda found: found.T, "expected ["),
    (pooled_conv, lambda found: found > 0, "mixed of bool, expected floating-point numbers"),
    (dense_conv, lambda found: found[::-1], "window ["),
    (dense_conv, lambda found: found[1], "a Tensor, expected (mixed ["),
])  # fmt: skip
def test_wrong_kind_of_result_is_found_at_the_call_of_the_kernel(
    make: Callable[[Change], Ops], change: Change, says: str
) -> None:
    op = "conv" if make.__name__.endswith("conv") else "gdn"
    case = {"gdn": "decode-r1-KV-float32", "conv": "decode-packed-float32"}[op]
    said = kit.served(kit.op_cases(op, case=case), make(change)).message
    assert "mine gave " in said and says in said, said
    assert "at tests/harness/test_adapter_results.py line " in said and "Traceback" not in said, said


def test_rows_with_further_leading_axes_are_accepted() -> None:
    x = torch.arange(24.0).view(6, 2, 2)
    for found in (x, x[None], x.view(2, 3, 2, 2)):
        assert torch.equal(rows_of(print, found, "core", (6, 2, 2)), x)
    for found in (x.view(2, 6, 2), x[:5], x.view(-1), x.view(2, 2, 6)):
        with pytest.raises(WrongResult, match=r"print gave core \[.*\], expected \[6, 2, 2\]"):
            rows_of(print, found, "core", (6, 2, 2))
