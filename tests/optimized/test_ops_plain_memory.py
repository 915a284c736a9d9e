"""What the plain ops leave in memory, which bits must not matter to them, and which they move.

Leaves out: their results, which are compared with the reference (`test_ops_plain.py`).
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from instep.kit.cases import CONV, MOVEMENT, RECURRENT, strays
from instep.kit.cases.case import BF16, FP32, Case, Draw, Outcome, at, serve
from instep.kit.cases.conv_and_gdn import HEADS, SHAPES, Heads, Shape, conv_case, gdn_case, make_part, make_pools
from instep.kit.cases.guarded_pools import guarded, runs, same_bits
from instep.kit.cases.paged_kv import MOVINGS, READINGS, attend_case, move_case
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.plain import PLAIN
from support.worlds.rings import delta_rows

Tensor = torch.Tensor
LAYOUTS = (False, True)


@pytest.mark.parametrize("case", [*CONV, *RECURRENT], ids=str)
def test_nothing_else_is_written_and_uncovered_rows_are_zero(case: Case) -> None:
    outcome = serve(PLAIN, case)
    assert not any(strays(outcome).values())
    covered = torch.zeros(len(outcome.results["result"]), dtype=torch.bool)
    for part in case.build("cpu").inputs["parts"]:
        for request in range(len(part.count)):
            if runs(part, request):
                covered[int(part.begin[request]) : int(part.begin[request] + part.count[request])] = True
    assert not outcome.results["result"][~covered].any()
    assert not covered.all()


@pytest.mark.parametrize("name", ["decode", "verify", "chunk", "mixed", "columns"])
def test_layouts_give_the_same_bits(name: str) -> None:
    served = [serve(PLAIN, Case("gdn", name, gdn_case(7, SHAPES[name], HEADS["r2"], FP32, s, FP32))) for s in LAYOUTS]
    assert_same(*served)
    served = [serve(PLAIN, Case("conv", name, conv_case(7, SHAPES[name], 48, 4, BF16, s))) for s in LAYOUTS]
    assert_same(*served)


def assert_same(one: Outcome, other: Outcome) -> None:
    assert same_bits(one.results["result"], other.results["result"])
    for name, pool in one.pools.items():
        assert same_bits(pool.view, other.pools[name].view)


def test_gdn_bits_do_not_depend_on_chunks_splits_or_batch() -> None:
    """One request's 6 tokens: as a chunk, as a window, split 1 + 5 through memory, and next to another request."""
    draw, (H, HV, K, V) = Draw(11, "cpu"), HEADS["r2"]
    whole = delta_rows(draw, Heads(H, HV, K, V), count=6)
    wanted, state = run_gdn(whole, [(0, 6)], "chunk")
    for form, cuts in (("window", [(0, 6)]), ("chunk", [(0, 1), (1, 5)]), ("window", [(0, 3), (3, 3)])):
        core, last = run_gdn(whole, cuts, form)
        assert same_bits(core, wanted)
        assert same_bits(last, state)
    core, last = run_gdn(whole, [(0, 6)], "chunk", company=True)
    assert same_bits(core, wanted)
    assert same_bits(last, state)


@pytest.mark.parametrize("channels", [1, 7, 44])
def test_conv_bits_do_not_depend_on_windows_or_batch(channels: int) -> None:
    """One request's 5 tokens: as one window, token by token, and after another request."""
    draw = Draw(12, "cpu")
    x, weight = draw.normal(9, channels), draw.normal(channels, 4)
    filled = draw.normal(4, channels, 3)

    def run(*launches: list[tuple[int, int, int]]) -> Tensor:
        pool, out = filled.clone(), torch.zeros_like(x)
        for launch in launches:
            begins, counts, units = (torch.tensor(column) for column in zip(*launch, strict=True))
            own = Address(pool, units)
            part = Part("window", begins, counts, int(counts.max()), own, torch.zeros(len(units)).bool(), store=own)
            out += PLAIN.conv(x=x, weight=weight, parts=(part,), to=at("mixed"))
        return torch.cat([out[4:].flatten(), pool[2].flatten()])

    wanted = run([(4, 5, 2)])
    assert same_bits(run(*([(row, 1, 2)] for row in range(4, 9))), wanted)
    assert same_bits(run([(0, 4, 1), (4, 5, 2)]), wanted)


def run_gdn(inputs: GdnInputs, cuts: list[tuple[int, int]], form: Any, company: bool = False) -> tuple[Tensor, Tensor]:
    """Serve the cuts one call after the other on unit 2 of a pool; `company`: another request, shorter, in front."""
    HV, V, K = inputs.v.shape[1], inputs.v.shape[2], inputs.q.shape[2]
    pool = guarded((4,), (HV, K, V), FP32, swap=True)
    out = torch.zeros(inputs.v.shape)
    for begin, count in cuts:
        requests = [(0, 2, 1), (begin, count, 2)] if company else [(begin, count, 2)]
        begins, counts, units = (torch.tensor(column) for column in zip(*requests, strict=True))
        own = Address(pool.view, units)
        part = Part(form, begins, counts, int(counts.max()), own, torch.full((len(requests),), begin == 0), store=own)
        core = PLAIN.gdn(inputs=inputs, parts=(part,), dtype=FP32, to=at("core"))
        out[begin : begin + count] = core[begin : begin + count]
    return out, pool.view[2].clone()


def test_gdn_keeps_a_running_state_that_no_store_rounds() -> None:
    """In a bf16 pool the last of `per_row` is the fp32 run, rounded once: as `store` over the same rows has it."""
    shapes = (Shape("window", (5,), (1,), (1,), store=(1,), per_row=(0,)),)
    call = gdn_case(21, shapes, HEADS["r2"], BF16, True, FP32)("cpu")
    PLAIN.gdn(**call.inputs)
    wide = gdn_case(21, shapes, HEADS["r2"], FP32, True, FP32)("cpu")
    PLAIN.gdn(**wide.inputs)
    for token in range(5):
        rounded = wide.pools["snapshots"].view[0, token].bfloat16()
        assert same_bits(call.pools["snapshots"].view[0, token], rounded)
    assert same_bits(call.pools["memory"].view[1], call.pools["snapshots"].view[0, 4])


def test_a_verify_window_keeps_what_every_shorter_window_would_store() -> None:
    draw = Draw(31, "cpu")
    inputs = delta_rows(draw, HEADS["r3"], count=4)
    pool, snapshots = guarded((3,), (3, 32, 16), FP32), guarded((2, 4), (3, 32, 16), FP32)
    pool.view[1].copy_(draw.normal(3, 32, 16))
    own, one = Address(pool.view, torch.tensor([1])), torch.tensor([1])
    window = Part("window", torch.tensor([0]), 4 * one, 4, own, torch.tensor([False]),
                  per_row=Address(snapshots.view, torch.tensor([0])))
    PLAIN.gdn(inputs=inputs, parts=(window,), dtype=FP32, to=at("core"))
    for accepted in range(1, 5):
        aside = Address(guarded((3,), (3, 32, 16), FP32).view, torch.tensor([2]))
        part = replace(window, count=accepted * one, most=accepted, per_row=None, store=aside)
        PLAIN.gdn(inputs=inputs, parts=(part,), dtype=FP32, to=at("core"))
        assert same_bits(aside.pool[2], snapshots.view[0, accepted - 1])


def test_a_poisoned_fresh_unit_is_not_read() -> None:
    shapes = (Shape("chunk", (3, 2), (1, 2), (1, 1), store=(1, 2)),)
    pools = make_pools(shapes, (2, 16, 16), FP32, True, "cpu")
    draw = Draw(41, "cpu")
    part, rows = make_part(draw, shapes[0], 0, pools)
    assert bool(pools["memory"].raw.isnan().all())
    core = PLAIN.gdn(inputs=delta_rows(draw, HEADS["r1"], rows), parts=(part,), dtype=FP32, to=at("core"))
    assert bool(core.isfinite().all())
    assert bool(pools["memory"].view[1:3].isfinite().all())


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
