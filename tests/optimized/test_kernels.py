"""The Triton kernels against the plain ops on every shared case: interpreted on a CPU, native on a GPU.

Leaves out: what is exact between kernels (`test_kernels_exact.py`) and real sizes (`instep bench`).
"""

from __future__ import annotations

import pytest
import torch

from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from support.ops_cases import CASES, Case, agree, serve

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are native here")),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_agrees_with_its_plain_twin_and_writes_nothing_else(case: Case, device: str) -> None:
    assert agree(case, serve(PLAIN, case, device), serve(TRITON, case, device)) == []
