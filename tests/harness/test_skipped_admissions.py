"""A run may look at the first admission alone: of many large requests the others take longer than all that follows.

Leaves out: what is checked at events (`tests/harness/test_replay*.py`), and time.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from instep.bundled import model
from instep.checks.poison import _clean, _suspect
from instep.run import large_model
from instep.run.replay import Outcome
from instep.setting import Setting
from instep_optimized.engine import OptimizedEngine
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit
from instep_speed.bench.kinds import rounds
from support.running.covering import few
from support.running.recorded_calls import calls_of

pytestmark = pytest.mark.slow  # whole replays or commands

REQUESTS = 4
UNTIL = REQUESTS + 3 * rounds.CHECKED  # the prompts follow the admissions


@pytest.fixture
def served() -> Callable[..., Outcome]:
    checkpoint = Checkpoint.open(model())
    trace = rounds.laid(checkpoint, REQUESTS, rounds.CHECKED)
    setting = Setting.of(ops="plain", device="cpu", dtype="float32", graphs=False, overlap=True)
    assert sum(isinstance(event, Admit) for event in trace.events) == REQUESTS

    def run(**more: Any) -> Outcome:
        return large_model.outcome(trace, checkpoint, setting, until=UNTIL, layers=[0], **more)

    return run


def test_states_are_read_once_after_a_run_of_admissions(
    served: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = calls_of(monkeypatch, OptimizedEngine, "state")
    whole, all_of_them = served(), len(asked)
    asked.clear()
    found = served(admissions=False)
    looked = 1 + REQUESTS + REQUESTS * (UNTIL + 1 - REQUESTS)  # the first, then all of them once more than events
    assert len(asked) == looked < all_of_them
    assert found.verdict.exit == whole.verdict.exit == 0 and found.verdict.events == whole.verdict.events == UNTIL + 1
    assert 0 < found.verdict.elements < whole.verdict.elements


@few(1)
@pytest.mark.parametrize("admissions", [True, False])
def test_fault_after_admissions_is_found(admissions: bool, served: Callable[..., Outcome]) -> None:
    def gdn(*, inputs: Any, **given: Any) -> torch.Tensor:
        return PLAIN.gdn(inputs=inputs._replace(beta=inputs.beta * 0.5), **given)

    found = served(ops=replace(PLAIN, gdn=gdn), admissions=admissions)
    (first, *_) = found.verdict.findings
    assert found.verdict.exit == 1 and first.event == REQUESTS


def test_engine_that_raises_between_reads_is_a_finding(
    served: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = OptimizedEngine.admit

    def admit(self: OptimizedEngine, request: str, *given: Any, **more: Any) -> Any:
        if request == "r2":
            raise ValueError("planted")
        return real(self, request, *given, **more)

    monkeypatch.setattr(OptimizedEngine, "admit", admit)
    found = served(admissions=False)
    assert found.verdict.exit == 1 and "planted" in found.verdict.findings[0].diagnosis
    assert found.verdict.findings[0].event == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sum_of_poisoned_memory_shows_the_poison(dtype: torch.dtype) -> None:
    right = torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype)  # the sum is infinite
    one, mixed = right.clone(), right * torch.tensor([torch.inf, -torch.inf]).repeat(32).to(dtype)
    one[3, 5] = torch.nan
    assert _clean(right, float("nan")) and not _clean(one, float("nan"))
    assert not _clean(mixed, float("nan")) and not _suspect(mixed, float("nan")).any(), "looked at one by one"
    assert not _clean(right, 7.0) and not _clean(right.to(torch.float8_e4m3fn), float("nan"))
