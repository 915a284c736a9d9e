"""The engine with controllers of all dialects: which results it counts, in which order, and when it reads them.

Leaves out: the rules of the dialects (`test_controllers.py`).
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from instep_optimized import OptimizedEngine
from instep_optimized.transfer.to_host import HostCopy
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import Path, Row
from instep_reference.contract.errors import BadInput, Unsupported
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import CAPACITY

# Each batch decides, by its own mean alone.
AT_ONCE = {"ema_alpha": 1, "warmup_batches": 0, "update_interval": 1}
SLOTS = {"1": {"candidate_steps": [0, 1]}, "2": {"candidate_steps": [1, 3]}, **AT_ONCE}


def engine(checkpoint: Checkpoint, num_steps: int, **given: Any) -> OptimizedEngine:
    """An engine that moves labels, with two requests after their prompts."""
    made = sides.engine(checkpoint, "ledger", num_steps=num_steps, **given)
    for name in "ab":
        made.admit(name, (1, 2, 3))
    made.forward(tuple(Row(name, "prefill", 3, root=4) for name in "ab"))
    return made


def verified(made: OptimizedEngine, requests: str, steps: int, accepted: int) -> None:
    """Draft, verify and commit a round in which every request accepts as many drafts."""
    names = tuple(requests)
    made.draft(names, picks=((5,) * steps,) * len(names))
    made.forward(tuple(Row(name, "verify") for name in names))
    made.commit(names, (Path(tuple(range(1, accepted + 1)), 6),) * len(names))


def decoded(made: OptimizedEngine, requests: str) -> None:
    made.forward(tuple(Row(name, "decode", root=7) for name in requests))


def test_wish_is_that_of_the_batch_that_comes(checkpoint: Checkpoint) -> None:
    made = engine(checkpoint, 1, controlled=Controlled("sglang-0.5.14", file=SLOTS))
    verified(made, "ab", 1, 1)
    assert (made.next_num_steps(1, 2), made.next_num_steps(2, 1)) == (1, 3)
    made.set_num_steps(3)
    verified(made, "a", 3, 0)
    assert (made.next_num_steps(1, 2), made.next_num_steps(2, 1)) == (0, 3)
    made.set_num_steps(0)
    decoded(made, "a")
    assert made.next_num_steps(1, 2) == 1, "a decode row at 0 counts, and a probe is due"
    with pytest.raises(BadInput, match="set_num_steps"):
        made.set_num_steps(2)


@pytest.mark.parametrize(("lag", "wish"), [(0, 3), (1, 1)])
def test_result_is_read_only_when_it_is_due(checkpoint: Checkpoint, lag: int, wish: int) -> None:
    """Rounds that overlap are not held up: the wish after round r needs the results up to round r - 1."""
    made = engine(checkpoint, 1, controlled=Controlled("sglang-0.5.14", file=SLOTS), lag=lag)
    verified(made, "ab", 1, 1)
    counts = made._unreported[-1]
    assert isinstance(counts, HostCopy) and counts._found is None
    assert made.next_num_steps(2, 2) == wish
    assert (counts._found is None) is (lag == 1)
    decoded(made, "a")
    assert made.next_num_steps(2, 2) == 3 and counts._found is not None


@pytest.mark.parametrize("looks", [True, False])
def test_wish_does_not_depend_on_when_it_is_read(checkpoint: Checkpoint, looks: bool) -> None:
    """A commit whose counts are on their way belongs to the forward before it, not to the next one."""
    made = engine(checkpoint, 1, controlled=Controlled("sglang-0.5.14", file=SLOTS), lag=1)
    verified(made, "ab", 1, 1)
    if looks:
        assert made.next_num_steps(2, 2) == 1
    decoded(made, "b")
    assert made.next_num_steps(2, 2) == 3


@pytest.mark.parametrize("controlled", [
    Controlled("sglang-0.5.12"), Controlled("sglang-0.5.13"), Controlled("sglang-0.5.14"),
    Controlled("vllm-table", table=((1, 9, 2),), num_speculative_tokens=2), Controlled("constant"),
], ids=lambda controlled: controlled.dialect)  # fmt: skip
def test_trees_are_refused_unless_the_count_is_constant(checkpoint: Checkpoint, controlled: Controlled) -> None:
    right = controlled.dialect == "constant"
    with nullcontext() if right else pytest.raises(Unsupported, match="trees with adaptive step counts"):
        made = sides.engine(checkpoint, room=replace(CAPACITY, num_draft_tokens=9), num_steps=1,
                                controlled=controlled, strategy="snapshot")  # fmt: skip
        assert right and made.next_num_steps(1, 1) == 1


def test_contradicting_controller_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(BadInput, match="num_steps: found 2"):
        engine(checkpoint, 2, controlled=Controlled("sglang-0.5.14"))
    with pytest.raises(BadInput, match="table"):
        engine(checkpoint, 2, controlled=Controlled("constant", table=((1, 2, 3),)))
