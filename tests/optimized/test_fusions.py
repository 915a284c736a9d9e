"""A fusion equals its parts, results and memory: bit for bit if it promises that; and when the parts run instead.

Leaves out: `prefill_gdn` (`test_fused_gdn.py`), whole runs (the relations `unseen` and `fused`), and real sizes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.kit.cases import CASES, Case, serve
from instep.kit.cases.case import BF16, FP32, Call, Draw, Inputs, at
from instep.kit.cases.guarded_pools import guarded
from instep.kit.cases.paged_kv import READINGS, Reading, attend_case
from instep.kit.cases.rows import linear_blocks, norm, row_case
from instep.run.run_variants import swapped
from instep_optimized.kernels.attention import dispatch as attend_file
from instep_optimized.kernels.runtime import launches_early
from instep_optimized.memory.tiled_units import Units
from instep_optimized.memory_addresses import Address
from instep_optimized.ops import fused
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.fused import FUSIONS, in_parts
from instep_optimized.ops.integer_op_protocols import Moved
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.op_shapes import misfits
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.place_names import unseen
from support.independent.op_agreement import agree
from support.kernels.planted import planted_kernels
from support.running.covering import few
from support.running.recorded_calls import launches

pytestmark = pytest.mark.usefixtures("garbage_in_fresh_memory")
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"]


def add_norm(draw: Draw, dtype: torch.dtype) -> Inputs:
    return norm(draw, dtype) | {name: draw.normal(7, 48, dtype=dtype)[1:6, 8:40] for name in ("x", "y")} | {
        "to": (at("residual"), at("post_normed"))}  # fmt: skip


def linears(draw: Draw, dtype: torch.dtype) -> Inputs:
    blocks = linear_blocks(draw, dtype)
    return {"x": blocks["x"], "weight": blocks["weight"], "shapes": ((2, 4), (5,), (3,)),
            "to": (at("z"), at("b"), at("a"))}  # fmt: skip


def conv_inputs(case: Case) -> Case:
    """A case of the conv with heads after it, as wide as a tile or not; a and b are columns of something wider."""

    def build(device: str) -> Call:
        call, draw = case.build(device), Draw(7, device)
        x = call.inputs["x"]
        heads, dim = (1, 16) if x.shape[1] == 48 else (x.shape[1] // 4 - 2, 4)
        sides = draw.normal(len(x), 2 * heads + 3, dtype=x.dtype, scale=3.0)
        rule = {"a": sides[:, :heads], "b": sides[:, heads : 2 * heads], "A_log": draw.normal(heads),
                "dt_bias": draw.normal(heads), "key_heads": 1, "key_dim": dim}  # fmt: skip
        places = tuple(map(at, ("mixed", *GdnInputs._fields)))
        return Call(call.inputs | rule | {"to": places}, call.pools)

    return replace(case, op="conv_inputs", build=build, exact=True)


def gated_attend(case: Case) -> Case:
    """A case of attention with gates next to the queries; the gate of an unowned row may be NaN."""

    def build(device: str) -> Call:
        call, draw = case.build(device), Draw(13, device)
        query, pages = call.inputs["query"], call.inputs["pages"]
        projected = draw.normal(len(query), query.shape[1], 2, query.shape[2], dtype=query.dtype, scale=3.0)
        owned = torch.zeros(len(query), dtype=torch.bool, device=device)
        for slot, begin, count in zip(*(x.tolist() for x in (pages.slots, pages.begin, pages.count)), strict=True):
            owned[begin : begin + count] = slot >= 0
        projected[~owned, 0] = torch.nan
        return Call(call.inputs | {"projected": projected, "to": (at("attended"), at("opened"))}, call.pools)

    return replace(case, op="gated_attend", build=build, exact=True)


def head_pick(draw: Draw, dtype: torch.dtype) -> Inputs:
    weight = draw.normal(70, 32, dtype=dtype)
    weight[40:] = weight[:30].clone()  # ties
    return {"x": draw.normal(5, 32, dtype=dtype), "weight": weight, "to": (at("logits"), at("pick"))}


def draft_inputs(draw: Draw, dtype: torch.dtype) -> Inputs:
    """A token pads the rows; hidden rows are some of the columns of something wider."""
    return {"tokens": draw.ints((3, -1, 8, 0, 3)), "table": draw.normal(9, 32, dtype=dtype),
            "hidden": draw.normal(7, 48, dtype=dtype)[1:6, 8:40], "eps": 1e-6,
            "weights": (draw.normal(32, dtype=dtype), draw.normal(32, dtype=dtype)),
            "to": tuple(map(at, ("embedding", "normed", "post_normed", "joined")))}  # fmt: skip


def kv_inputs(device: str) -> Call:
    """Rows that are views on one product, into pools of several pages; one row has no place, and positions are far."""
    draw, heads = Draw(11, device), (2, 16)
    pools = {name: guarded((5, 4), heads, BF16, device=device) for name in ("keys", "values")}
    whole = draw.normal(5, 14 * 16, dtype=BF16)
    for pool in pools.values():
        for place in (7, 18, 4, 19):
            pool.allow(place // 4, place % 4)
    projected, key, value = (part.view(5, *shape) for part, shape in zip(
        torch.split(whole, (160, 32, 32), dim=1), ((5, 2, 16), heads, heads), strict=True))  # fmt: skip
    given = {"projected": projected, "key_raw": key, "value": value, "eps": 1e-6, "rotary_dim": 8,
             "positions": draw.ints((7, 0, 100_000, 3, 250_000)), "q_norm": draw.normal(16, dtype=BF16),
             "k_norm": draw.normal(16, dtype=BF16), "theta": 1e7, "locations": draw.ints((7, -1, 18, 4, 19)),
             "pools": tuple(Units(pool.view) for pool in pools.values()), "to": (at("query"), at("key"))}  # fmt: skip
    return Call(given, pools)


def moves(layers: str) -> Callable[[str], Call]:
    """Columns of one pool into another, for three layers: of one allocation each, as pools are; or not alike."""

    def build(device: str) -> Call:
        draw = Draw(9, device)
        near = guarded((3, 4, 2), (6, 3), BF16, device=device)  # layers, units, columns
        far = guarded((3, 5), (6, 3), BF16, device=device)
        near.view.copy_(draw.normal(*near.view.shape).to(BF16))
        units, columns, slots = (draw.ints(numbers) for numbers in ((2, -1, 0), (1, 0, 0), (4, 1, 2)))
        other = slots if layers == "alike" else draw.ints((3, -1, 0))
        for layer in range(3):
            for slot in (3, 0) if other is not slots and layer == 1 else (4, 2):
                far.allow(layer, slot)
        order = (0, 1, 2) if layers == "alike" else (0, 2, 1)
        return Call({"pairs": tuple(
            Moved(Address(near.view[n], units, columns), Address(far.view[n], other if n == 1 else slots))
            for n in order)}, {"near": near, "far": far})  # fmt: skip

    return build


# A request with more rows than are read in parts, next to one with fewer.
LONG = Reading(((2, 5, 1, 8, 7), (3, 4, -1, -1, -1)), before=(2, 3), count=(18, 2))
EXACT = [
    Case("kv_inputs", "views", kv_inputs, exact=True),
    *(Case("moves", name, moves(name), exact=True) for name in ("alike", "apart")),
    *(row_case(op, "views", made, dtype, 700, exact=True) for op, made in (("add_norm", add_norm),
      ("draft_inputs", draft_inputs), ("head_pick", head_pick)) for dtype in (FP32, BF16)),
    *(conv_inputs(case) for case in CASES if case.op == "conv"),
    *(gated_attend(case) for case in CASES if case.op == "attend"),
    gated_attend(Case("attend", "long", attend_case(702, LONG, FP32))),
]
NEAR = [row_case("linears", "blocks", linears, dtype, 701) for dtype in (FP32, BF16)]


def composed(ops: Ops, op: str) -> Any:
    """The functions that the model calls, as an op set with this one op."""
    call: Callable[..., Any] = partial(getattr(fused, op), ops)

    def named(**given: Any) -> Any:
        found = call(**given)
        one = isinstance(found, torch.Tensor)
        return found if found is None or hasattr(found, "_fields") else Unnamed((found,) if one else found)

    return SimpleNamespace(**{op: named})


class Unnamed(tuple[torch.Tensor, ...]):
    """Results without names, as `serve` wants them."""

    @property
    def _fields(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self))))


@few(9)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*EXACT, *NEAR], ids=str)
def test_fusion_gives_the_results_of_its_parts(case: Case, device: str) -> None:
    apart = replace(in_parts(TRITON), linears=None)
    assert getattr(TRITON, case.op) is not None and FUSIONS[case.op].exact is case.exact
    parts, whole = (serve(composed(ops, case.op), case, device) for ops in (apart, TRITON))
    assert agree(case, parts, whole) == []


GATES = {
    "another head's gate": ("row * gate.per_row + head *", "row * gate.per_row + (head + 1) % heads *"),
    "the queries in place of the gate": ("gate.at + (row *", "gate.at - gate.per_head // 2 + (row *"),
    "a gate before the rows are rounded": ("found = (found.to(tl.float32) / opened_by)", "found = (mean / opened_by)"),
    "unowned rows without a gate": (
        "zero /= opening(gate.at + far * gate.per_row + some_head * gate.per_head + d, d < width)", "zero += 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_rows_joined_in_several_launches_are_gated_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for one tile of rows, and a request has more."""
    reading = Reading(((2, 5, 1), (3, 4, -1)), before=(2, 3), count=(8, 5), heads=16, kv_heads=1)
    case = gated_attend(Case("attend", "turns", attend_case(704, reading, BF16)))
    monkeypatch.setattr(attend_file, "SCRATCH", 1)
    launched = launches(monkeypatch, attend_file)
    parts, whole = (serve(composed(ops, case.op), case, device) for ops in (in_parts(TRITON), TRITON))
    assert agree(case, parts, whole) == [] and launched.count("join_parts") > 2


def test_gate_that_does_not_fit_is_named() -> None:
    given = gated_attend(Case("attend", "verify", attend_case(705, READINGS["verify"], FP32))).build("cpu").inputs
    assert list(misfits("gated_attend", given)) == []
    (told,) = misfits("gated_attend", given | {"projected": given["projected"][:, :-1]})
    assert "projected" in told


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", GATES)
def test_wrong_gate_is_detected(fault: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = replace(READINGS["verify"], heads=4, kv_heads=2)
    case = gated_attend(Case("attend", "verify", attend_case(703, reading, BF16)))
    parts = serve(composed(in_parts(TRITON), case.op), case, device)
    assert agree(case, parts, serve(composed(TRITON, case.op), case, device)) == []
    other = planted_kernels("attention.split_kv", (GATES[fault],), tmp_path, monkeypatch)
    monkeypatch.setattr(attend_file, "join_parts", other.join_parts)
    assert agree(case, parts, serve(composed(TRITON, case.op), case, device))


@pytest.mark.gpu
def test_angles_use_positions_of_the_previous_launch() -> None:
    """In a graph, where the launch of angles starts early and finds the values of the previous replay."""
    given, _ = kv_inputs("cuda")
    if not launches_early(given["positions"].device):
        pytest.skip("no launch begins early here")
    apart = [torch.randint(0, 300_000, (300_000,), device="cuda") for _ in range(2)]
    source, none = apart[0].clone(), torch.full_like(apart[0], -1)

    def chain() -> list[torch.Tensor]:
        chosen = (TRITON.choose(own=source, forced=none)[-5:] for _ in range(8))
        return [fused.kv_inputs(TRITON, **given | {"positions": positions}) for positions in chosen]

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for turn in range(20):
        source.copy_(apart[turn % 2])
        graph.replay()
        right = fused.kv_inputs(in_parts(PLAIN), **given | {"positions": source[-5:]})
        same = fused.kv_inputs(TRITON, **given | {"positions": source[-5:].clone()})
        torch.testing.assert_close(same, right, rtol=2**-6, atol=2**-6)
        assert all(torch.equal(one, same) for one in found)


def test_the_table_has_every_fusion_and_its_parts() -> None:
    """Each is an op that a set may lack, with a composition for that case; our fusions list their parts."""
    for name, fusion in FUSIONS.items():
        op = getattr(TRITON, name)
        assert getattr(PLAIN, name) is None and all(callable(getattr(PLAIN, part)) for part in fusion.parts)
        assert name == "fused_gdn" or (callable(getattr(fused, name)) and tuple(op.fuses[1]) == fusion.parts)


@pytest.mark.parametrize("part", sorted({part for fusion in FUSIONS.values() for part in fusion.parts}))
def test_a_set_with_another_part_has_no_fusion_of_it(part: str) -> None:
    """However the part came there: by `replace`, or by `--swap`, which is given a set that is wrapped."""
    counted = around(TRITON, unseen, lambda name, op: wraps(op)(lambda **given: op(**given)))
    assert fusions(counted) == fusions(TRITON)
    for other in (replace(TRITON, **{part: getattr(PLAIN, part)}), swapped(counted, {part: "plain"})):
        assert fusions(other) == {name for name in fusions(TRITON) if part not in FUSIONS[name].parts}


def fusions(ops: Ops) -> set[str]:
    return {name for name in FUSIONS if getattr(ops, name) is not None}


def test_observed_exact_fusions_run_as_their_parts() -> None:
    """A tensor that replaces a value inside a fusion is used."""
    told = around(TRITON, lambda place, x: x * 2 if place.component == "residual" else x)
    assert told.add_norm is None and told.conv_inputs is None and told.linears is not None
    given = add_norm(Draw(1, "cpu"), FP32)
    total, normed = fused.add_norm(told, **given)
    assert torch.equal(total, 2 * (given["x"] + given["y"]))
    assert torch.equal(normed, TRITON.norm(x=total, weight=given["weight"], eps=given["eps"], to=given["to"][1]))


def test_results_of_one_product_are_shown_separately() -> None:
    """And they may share memory, which no other op's results may."""
    seen, broken = dict[str, torch.Tensor](), list[str]()
    told = around(TRITON, lambda place, x: seen.setdefault(place.component, x + 1), contracts(broken.append))
    given = linears(Draw(2, "cpu"), FP32)
    found, right = fused.linears(told, **given), fused.linears(replace(TRITON, linears=None), **given)
    assert broken == [] and list(seen) == ["z", "b", "a"]
    for mine, theirs in zip(found, right, strict=True):
        assert mine.shape == theirs.shape and torch.allclose(mine, theirs + 1)
