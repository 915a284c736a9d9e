"""SGLang's kernels of the gated delta rule compute the model, event by event: install instep's wheel, then pytest
this file.

Each kernel serves recorded rounds of speculation, with fixed and with changing step counts; after every event every
state, every snapshot and every byte that it must not write is compared with a reference. Without a GPU they are
interpreted.
"""

import pytest

from instep.adapters.sglang import DEVICE
from instep.adapters.sglang_commit import KERNELS
from instep.carried import fixtures
from instep.replay.replay import Replay
from instep.replay.setting import Setting
from instep.report.words import divergence
from instep.trace.file import read

TRACES = {"adaptive": "steps", "fixed": "rounds"}  # 3, 0, 1 and 3 drafts a round; 3 in every round


@pytest.mark.parametrize("steps", TRACES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_computes_the_model(kernel: str, steps: str) -> None:
    trace = read(fixtures() / "traces" / "faults" / f"{TRACES[steps]}.jsonl")
    setting = Setting(f"instep.adapters.{kernel}", strategy=KERNELS[kernel], device=DEVICE)
    outcome = Replay(trace, setting).run()
    if outcome.verdict.exit != 0:
        pytest.fail(divergence(outcome), pytrace=False)
