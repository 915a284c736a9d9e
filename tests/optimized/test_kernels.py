"""The Triton kernels against the plain ops on every shared case: interpreted on a CPU, native on a GPU.

Leaves out: what is exact between kernels (`test_kernels_exact.py`) and real sizes (`instep bench`).
"""

import pytest
import torch

from instep.kit.cases import CASES, Case, serve
from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from support.independent.op_agreement import agree
from support.running.covering import few

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are native here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]

pytestmark = [
    pytest.mark.usefixtures("garbage_in_fresh_memory"),
    pytest.mark.filterwarnings("ignore:.*determinis"),  # on a GPU some ops of the plain twin have no such form
]


WITHOUT_KERNELS = {"lightning", "lightning_inputs", "scaled_add", "short_conv", "multiply"}  # MiniMax, LFM2
SERVED = [case for case in CASES if case.op not in WITHOUT_KERNELS]


def test_two_families_have_no_kernels() -> None:
    assert {case.op for case in CASES if getattr(TRITON, case.op) is None} == WITHOUT_KERNELS


@few(38)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_a_kernel_agrees_with_its_plain_twin_and_writes_nothing_else(case: Case, device: str) -> None:
    assert agree(case, serve(PLAIN, case, device), serve(TRITON, case, device)) == []


@pytest.mark.parametrize("device", DEVICES)
def test_pick_never_takes_a_nan_unless_the_row_has_only_nan(device: str) -> None:
    logits = torch.full((3, 33_000), torch.nan, device=device)
    logits[0, 20_000], logits[1, 17], logits[1, 32_900] = 1.0, -torch.inf, -1e30
    picked = TRITON.pick(logits=logits, to=Place("trunk", AFTER_LAYERS, "pick"))
    assert picked.tolist() == [20_000, 32_900, 0] and picked.dtype is torch.int64
