"""The plain conv and gdn, against loops written out here in fp64; what they leave in memory, and what must not matter.

Leaves out: the inputs of gdn and the gated norm (`test_ops_plain.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from instep.kit.cases import CONV, GDN, strays
from instep.kit.cases.case import BF16, FP32, Case, Draw, Outcome, at, serve
from instep.kit.cases.conv_and_gdn import HEADS, SHAPES, Heads, Shape, conv_case, gdn_case, make_part, make_pools
from instep.kit.cases.guarded_pools import guarded, place, runs, same_bits
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.plain import PLAIN
from support.worlds.rings import delta_rows

Tensor = torch.Tensor
FP64 = torch.float64
LAYOUTS = (False, True)


class Right(NamedTuple):
    """The results of a correct op: every result row, and the blocks that it writes."""

    rows: Tensor
    writes: list[tuple[Tensor, Tensor]]  # the unit in the pool, and what it must hold


def walk(parts: tuple[Part, ...]) -> Iterator[tuple[Part, int, int, int, Tensor]]:
    """Every request that runs: its part and number, first row, count, and memory before, in fp64."""
    for part in parts:
        for request in range(len(part.count)):
            if runs(part, request):
                before = part.read.pool[place(part.read, request)].double()
                memory = torch.zeros_like(before) if part.fresh[request] else before
                yield part, request, int(part.begin[request]), int(part.count[request]), memory


def targets(part: Part, request: int, memories: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The right place of the memory after each row."""
    if part.store is not None and part.store.units[request] >= 0:
        yield part.store.pool[place(part.store, request)], memories[-1]
    if part.per_row is not None and part.per_row.units[request] >= 0:
        for token, memory in enumerate(memories):
            yield part.per_row.pool[int(part.per_row.units[request]), token], memory


def conv_right(x: Tensor, weight: Tensor, parts: tuple[Part, ...], **_: Any) -> Right:
    rows, writes = torch.zeros(x.shape, dtype=FP64), []
    for part, request, begin, count, window in walk(parts):
        memories = []
        for row in range(begin, begin + count):
            line = torch.cat([window, x[row].double()[:, None]], dim=1)
            total = (line * weight.double()).sum(1)
            rows[row], window = total / (1 + torch.exp(-total)), line[:, 1:]
            memories.append(window)
        writes += targets(part, request, memories)
    return Right(rows, writes)


def gdn_right(inputs: GdnInputs, parts: tuple[Part, ...], **_: Any) -> Right:
    q, k, v, log_decay, beta = (x.double() for x in inputs)
    rows, writes, group = torch.zeros_like(v), [], v.shape[1] // q.shape[1]
    for part, request, begin, count, state in walk(parts):
        memories = []
        for row in range(begin, begin + count):
            after = []
            for head, S in enumerate(state):
                key = k[row, head // group]
                S = S * torch.exp(log_decay[row, head])
                S = S + torch.outer(key, beta[row, head] * (v[row, head] - S.T @ key))
                rows[row, head] = S.T @ q[row, head // group]
                after.append(S)
            state = torch.stack(after)
            memories.append(state)
        writes += targets(part, request, memories)
    return Right(rows, writes)


RIGHT: dict[str, Callable[..., Right]] = {"conv": conv_right, "gdn": gdn_right}
FULL = [
    *(Case("conv", f"{name}-fp64", conv_case(700, SHAPES[name], 48, 4, FP64, True)) for name in SHAPES),
    *(Case("gdn", f"{name}-fp64", gdn_case(701, SHAPES[name], HEADS["r3"], FP64, True, FP64)) for name in SHAPES),
]


@pytest.mark.parametrize("case", [*CONV, *GDN, *FULL], ids=str)
def test_rows_and_memory_are_those_of_the_loop(case: Case) -> None:
    inputs = case.build("cpu").inputs
    right = RIGHT[case.op](**inputs)
    assert near(getattr(PLAIN, case.op)(**inputs), right.rows)
    for unit, block in right.writes:
        assert near(unit, block)


def near(x: Tensor, truth: Tensor) -> bool:
    """Within one rounding of x's dtype, plus fp32 sums unless x is fp64."""
    noise = 1e-12 if x.dtype == FP64 else 3e-6
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    room = truth.abs() * torch.finfo(x.dtype).eps * 0.51 + noise * largest
    return bool(((x.double() - truth).abs() <= room).all())


@pytest.mark.parametrize("case", [*CONV, *GDN], ids=str)
def test_nothing_else_is_written_and_uncovered_rows_are_zero(case: Case) -> None:
    outcome = serve(PLAIN, case)
    assert not any(strays(outcome).values())
    covered = torch.zeros(len(outcome.results["result"]), dtype=torch.bool)
    for _, _, begin, count, _ in walk(case.build("cpu").inputs["parts"]):
        covered[begin : begin + count] = True
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
