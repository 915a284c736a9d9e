"""The plain ops on paged KV and those that move bits, against loops written out here.

Leaves out: the inputs of attention and its gate (`test_ops_plain.py`).
"""

import math
from typing import Any

import pytest
import torch

from instep.kit.cases import ATTEND, MOVEMENT, strays
from instep.kit.cases.case import FP32, Case, serve
from instep.kit.cases.guarded_pools import guarded, same_bits
from instep.kit.cases.paged_kv import MOVINGS, READINGS, attend_case, move_case
from instep_optimized.memory_addresses import Pages
from instep_optimized.ops.plain import PLAIN

Tensor = torch.Tensor
FP64 = torch.float64
FULL = [Case("attend", f"{name}-fp64", attend_case(800, READINGS[name], FP64)) for name in READINGS]


def attend_right(query: Tensor, pages: Pages, **_: Any) -> Tensor:
    """Every head of every row on its own."""
    out = torch.zeros(query.shape, dtype=FP64)
    size, group = pages.keys.shape[1], query.shape[1] // pages.keys.shape[2]
    for b, slot in enumerate(pages.slots.tolist()):
        for j in range(int(pages.count[b]) if slot >= 0 else 0):
            row = int(pages.begin[b]) + j
            line = [*pages.table[slot].tolist(), -1, -1]
            spots = [(line[p // size], p % size) for p in range(int(pages.before[b]) + j + 1)]
            spots = [spot for spot in spots if spot[0] >= 0]
            for head in range(query.shape[1] if spots else 0):
                keys, values = (torch.stack([pool[spot][head // group].double() for spot in spots])
                                for pool in (pages.keys, pages.values))
                scores = keys @ query[row, head].double() / math.sqrt(query.shape[2])
                out[row, head] = torch.softmax(scores, dim=0) @ values
    return out


@pytest.mark.parametrize("case", [*ATTEND, *FULL], ids=str)
def test_attend_is_the_softmax_over_what_a_row_sees(case: Case) -> None:
    outcome, truth = serve(PLAIN, case), attend_right(**case.build("cpu").inputs)
    out = outcome.results["result"]
    noise = 1e-13 if out.dtype == FP64 else 3e-6
    room = truth.abs() * torch.finfo(out.dtype).eps * 0.51 + noise * float(truth.abs().max())
    assert bool(((out.double() - truth).abs() <= room).all())
    assert not any(strays(outcome).values())


def test_attend_does_not_look_past_a_row() -> None:
    """Later rows' keys, and everything after the request's reach, may be anything."""
    case = attend_case(5, READINGS["verify"], FP32)
    one, other = case("cpu"), case("cpu")
    for name in ("keys", "values"):
        other.pools[name].view[6, 3] = 3e4  # position 7 of request 0: its row 2
    before, after = (PLAIN.attend(**call.inputs) for call in (one, other))
    rows = torch.tensor([3, 2, 6, 7, 8])  # rows 0 and 1 of request 0; request 2
    assert torch.equal(before[rows], after[rows])
    assert not torch.equal(before[4], after[4])


@pytest.mark.parametrize("case", MOVEMENT, ids=str)
def test_moved_rows_keep_their_bits_and_change_nothing_else(case: Case) -> None:
    outcome = serve(PLAIN, case)
    assert not any(strays(outcome).values())
    if case.op == "store_rows":
        inputs = case.build("cpu").inputs
        pool = outcome.pools["pool"].view
        for row, location in zip(inputs["rows"], inputs["locations"].tolist(), strict=True):
            if location >= 0:
                assert same_bits(pool[location // 4, location % 4], row)


@pytest.mark.parametrize("name", MOVINGS)
@pytest.mark.parametrize("swaps", [(False, False), (True, True), (False, True)])
def test_move_copies_unit_by_unit(name: str, swaps: tuple[bool, bool]) -> None:
    moving = MOVINGS[name]
    call = move_case(6, moving, (2, 16, 32), FP32, swaps)("cpu")
    call.pools["source"].view[..., 0, 0, 0] = math.nan  # payloads move as well
    PLAIN.move(**call.inputs)
    source, target = call.pools["source"].view, call.pools["target"].view
    for b, (here, there) in enumerate(zip(moving.source, moving.target, strict=True)):
        if here >= 0 and there >= 0:
            came = source[here] if moving.source_column is None else source[here, moving.source_column[b]]
            went = target[there] if moving.target_column is None else target[there, moving.target_column[b]]
            assert same_bits(came, went)


def test_rows_are_stored_through_a_strided_pool_of_another_width() -> None:
    pool = guarded((3, 4), (1, 16), torch.float16)
    rows = torch.arange(32.0).view(2, 1, 16)
    PLAIN.store_rows(rows=rows, pool=pool.view, locations=torch.tensor([9, 6]))
    assert torch.equal(pool.view[2, 1], rows[0].half())
    assert torch.equal(pool.view[1, 2], rows[1].half())
    assert int((~pool.raw.isnan()).sum()) == 32
