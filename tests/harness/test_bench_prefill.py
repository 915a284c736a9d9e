"""`instep bench --kind prefill` times what a model runs: rows in the bits in which they are handed over, and judged so.

Leaves out: what all kinds share (`test_bench.py`), and figures, which need a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep_optimized.ops import load
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.watch_op_calls import Op, around
from instep_reference.contract.place_names import unseen
from instep_speed.bench.bench_types import Ground
from instep_speed.bench.interleaved_timing import Rates
from instep_speed.bench.kinds import prefill

pytestmark = [pytest.mark.slow, pytest.mark.interpreted]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AT = {"sequences": 2, "tokens": 66, "heads": 4}


class Told:
    """Op sets with their `gdn` watched and, on request, changed.

    seen: the dtypes of its inputs, by set;  said: the finding of a set's arm
    """

    def __init__(self, dtype: torch.dtype, *names: str, strength: float = 1.0) -> None:
        self.strength, self.seen = strength, dict[str, tuple[torch.dtype, ...]]()
        sets = {name: around(load(name), unseen, self._watching(name)) for name in names}
        cell = prefill.make(Ground(torch.device("cpu"), dtype, sets, Rates(1e10, 2e10, 1e11), 0, False), AT)
        self.said = {arm.name: arm.judged().finding for arm in cell.arms}

    def _watching(self, ops: str) -> Any:
        def wrapper(name: str, op: Op) -> Op:
            def call(*, inputs: GdnInputs, **given: Any) -> Any:
                self.seen[ops] = tuple(x.dtype for x in inputs)
                return op(inputs=inputs._replace(beta=inputs.beta * self.strength), **given)

            return call if name == "gdn" else lambda **given: op(**given)

        return wrapper


@pytest.mark.parametrize(("dtype", "keys", "values"), [(BF16, BF16, BF16), (FP16, BF16, FP16), (FP32, FP32, FP32)])
def test_rows_are_as_a_model_hands_them_over(dtype: torch.dtype, keys: torch.dtype, values: torch.dtype) -> None:
    told = Told(dtype, "triton", "precise")
    assert told.seen == {"triton": (keys, keys, values, FP32, FP32), "precise": (FP32,) * 5}
    assert told.said == {"triton": "", "precise": ""}


def test_fault_is_found_in_rows_of_16_bits() -> None:
    told = Told(BF16, "triton", strength=0.9)
    assert told.seen["triton"][0] is BF16 and "is off by" in told.said["triton"]
