"""SGLang's kernels of the gated delta rule compute the model, event by event: install instep's wheel, then pytest
this file.

Each kernel serves recorded rounds of speculation, with fixed and with changing step counts; after every event every
state, every snapshot and every byte that it must not write is compared with a reference. Without a GPU they are
interpreted.
"""

import pytest

from instep import kit
from instep.adapters.sglang import DEVICE
from instep.adapters.sglang_commit import KERNELS

TRACES = {"adaptive": "steps", "fixed": "rounds"}  # 3, 0, 1 and 3 drafts a round; 3 in every round


@pytest.mark.parametrize("steps", TRACES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_computes_the_model(kernel: str, steps: str) -> None:
    trace = kit.fixtures() / "traces" / "faults" / f"{TRACES[steps]}.jsonl"
    kit.replayed(trace, f"instep.adapters.{kernel}", strategy=KERNELS[kernel], device=DEVICE).must_agree()
