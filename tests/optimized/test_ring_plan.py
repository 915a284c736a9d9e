"""The op that plans a ring: what is run again, where rows are kept, whatever the marks hold; plain and kernel alike.

Leaves out: running it (`test_exact*.py`), and who asks for it (`test_strategies.py`).
"""

from typing import NamedTuple

import pytest
import torch

from instep_optimized import load
from instep_optimized.ops.op_protocols import Ops

SIZE = 16
POISON = [0x7FF8000000000000, -(1 << 63), -1, 1 << 40]  # NaN as labels hold it, and other garbage


class One(NamedTuple):
    """One request: the call, and its right result with spare None, 0 and 8."""

    slot: int
    before: int
    count: int
    mark: int
    begin: int
    pending: int
    absorbed: int
    after: tuple[int, int]
    settle: tuple[int, int]


ONES = (
    One(5, 9, 4, 9, 9, 0, 13, (9, 9), (-1, -1)),  # nothing is pending
    One(1, 21, 4, 18, 2, 3, 25, (21, 18), (1, -1)),
    One(3, 33, 4, 21, 5, 12, 37, (33, 33), (3, 3)),
    One(-1, 7, 0, 0, 0, 0, 0, (0, 0), (-1, -1)),  # idle
    One(7, 0, 1, 0, 0, 0, 1, (0, 0), (-1, -1)),
)


@pytest.fixture(params=["plain", "ledger", "triton"], scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return load(request.param)


def asked(ones: tuple[One, ...], marks: list[int] | None = None) -> dict[str, torch.Tensor]:
    settled = torch.full((9, 3), 1 << 50)[:, 1]  # a column of a pool: its stride is not 1
    for number, one in enumerate(ones):
        if one.slot >= 0:
            settled[one.slot] = one.mark if marks is None else marks[number]
    slots, before, count = (torch.tensor([one[at] for one in ones]) for at in range(3))
    return {"slots": slots, "before": before, "count": count, "settled": settled}


def test_plan_of_a_verify_keeps_its_rows(ops: Ops) -> None:
    for number, spare in enumerate((0, 8)):
        told = ops.plan_ring(**asked(ONES), size=SIZE, most=4, spare=spare)
        assert told.begin.tolist() == [one.begin for one in ONES]
        assert told.pending.tolist() == [one.pending for one in ONES]
        assert told.keep.tolist() == [one.before % SIZE if one.slot >= 0 else -1 for one in ONES]
        assert told.settle.tolist() == [one.settle[number] for one in ONES]
        assert told.after.tolist() == [one.after[number] for one in ONES]
        assert {x.dtype for x in told} == {torch.int64}


def test_plan_without_spare_absorbs_rows_into_the_state(ops: Ops) -> None:
    told = ops.plan_ring(**asked(ONES), size=SIZE, most=4, spare=None)
    assert told.pending.tolist() == [one.pending for one in ONES]
    assert set(told.keep.tolist()) == set(told.settle.tolist()) == {-1}
    assert told.after.tolist() == [one.absorbed for one in ONES]


@pytest.mark.parametrize("spare", [None, 0, 8])
def test_a_mark_may_hold_anything_and_no_entry_leaves_the_ring(ops: Ops, spare: int | None) -> None:
    ones = tuple(One(slot, 40 * slot, 4, 0, 0, 0, 0, (0, 0), (0, 0)) for slot in (1, 2, 3, 4))
    told = ops.plan_ring(**asked(ones, POISON), size=SIZE, most=4, spare=spare)
    assert all(0 <= pending <= SIZE - 4 for pending in told.pending.tolist())
    assert all(0 <= begin < SIZE for begin in told.begin.tolist())
    assert all(-1 <= keep < SIZE for keep in told.keep.tolist())


def test_an_empty_batch_returns_at_once(ops: Ops) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    settled = torch.zeros(4, dtype=torch.int64)
    told = ops.plan_ring(slots=none, before=none, count=none, settled=settled, size=SIZE, most=0, spare=0)
    assert all(x.shape == (0,) for x in told)
