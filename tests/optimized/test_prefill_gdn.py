"""`prefill_gdn` is conv, norms and delta rule of prompts: the same bits from 16-bit rows, and where its parts serve.

Leaves out: what all fusions share (`test_fusions.py`), and whole runs (the relation `fused`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.kit.cases import serve
from instep.kit.cases.case import BF16, FP32, Call, Case, Draw, at
from instep.kit.cases.conv_and_gdn import SHAPES, Heads, Shape, conv_case, gdn_case
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.kernels import prefill_gdn
from instep_optimized.ops import fused
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.fused import in_parts
from instep_optimized.ops.fused.prefill_gdn import stored
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.row_invariant_triton import INVARIANT
from instep_optimized.ops.triton import TRITON
from instep_optimized.ops.triton_with_fp32_prefill import PRECISE
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.place_names import unseen
from support.covering import each_value, few
from support.ops_agree import agree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else [pytest.mark.interpreted]
FP16 = torch.float16
INSIDE = ("mixed", *GdnInputs._fields)
Shapes = tuple[Shape, ...]
PROMPTS: dict[str, Shapes] = {
    # Several blocks, a request without rows, one without a unit, one that is not stored; before and after them unowned
    # rows. Short ones take another kernel of the conv.
    "long": (Shape("chunk", (70, 2, 0, 133, 3), (3, 1, 2, 6, -1), (0, 0, 0, 1, 0), (3, -1, 2, 6, -1), skip=3),),
    "short": SHAPES["prefill"],
    "apart": (*SHAPES["prefill"], Shape("chunk", (3, 66), (9, 7), (0, 1), store=(9, 7), skip=1)),
}
OTHERS: dict[str, tuple[Shapes, torch.dtype]] = {
    "beside a window": (SHAPES["mixed"], BF16), "a window": (SHAPES["decode"], BF16), "nothing": ((), BF16),
    "32 bits": (SHAPES["prefill"], FP32),
}  # fmt: skip
DENSE, GROUPED, NO_TILE = Heads(2, 2, 16, 16), Heads(2, 4, 16, 16), Heads(2, 4, 16, 32)
REAL = Heads(1, 2, 128, 128)  # as wide as kernels with explicit layouts take them on a GPU


def case(shapes: Shapes, heads: Heads, dtype: torch.dtype) -> Case:
    """a and b are columns of something wider."""

    def build(device: str) -> Call:
        (H, HV, K, V), draw = heads, Draw(7, device)
        conv = conv_case(1, shapes, 2 * H * K + HV * V, 4, dtype, True)(device)
        rule = gdn_case(2, shapes, heads, FP32, True, dtype)(device)
        x, weight, windows, _ = conv.inputs.values()
        sides = draw.normal(len(x), 2 * HV + 3, dtype=dtype, scale=3.0)
        given = {"x": x, "weight": weight, "windows": windows, "a": sides[:, :HV], "b": sides[:, HV : 2 * HV],
                 "A_log": draw.normal(HV), "dt_bias": draw.normal(HV), "key_heads": H, "key_dim": K,
                 "parts": rule.inputs["parts"], "dtype": dtype, "to": tuple(map(at, (*INSIDE, "core")))}  # fmt: skip
        return Call(given, {"windows": conv.pools["memory"], "states": rule.pools["memory"]} | {
            f"kept {name}": call.pools["snapshots"] for name, call in (("windows", conv), ("states", rule))
            if "snapshots" in call.pools})  # fmt: skip

    return Case("prefill_gdn", "drawn", build, exact=True)


def composed(ops: Ops) -> Any:
    """The functions that the model calls, as an op set with this one op."""
    return SimpleNamespace(prefill_gdn=partial(fused.prefill_gdn, ops))


def trap(**given: Any) -> torch.Tensor:
    raise AssertionError("the parts are to serve")


@few(2)
@pytest.mark.parametrize(
    ("heads", "shape", "dtype"), each_value((DENSE, GROUPED, NO_TILE, REAL), PROMPTS, (BF16, FP16)), ids=str)
def test_rows_of_16_bits_give_the_bits_of_the_parts(
    heads: Heads, shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, seen = case(PROMPTS[shape], heads, dtype), list[tuple[torch.dtype, ...]]()
    parts = serve(composed(in_parts(TRITON)), one, DEVICE)

    def told(*, inputs: GdnInputs, **given: Any) -> torch.Tensor:
        seen.append(tuple(x.dtype for x in inputs))
        return TRITON.gdn(inputs=inputs, **given)

    monkeypatch.setattr(prefill_gdn, "gdn", told)
    whole = serve(composed(TRITON), one, DEVICE)
    assert agree(one, parts, whole) == [] and bool(parts.results["result"].any())
    assert seen == [(BF16, BF16, dtype, FP32, FP32)] == [stored(dtype)]


def rounded(**formats: torch.dtype) -> Callable[..., torch.Tensor]:
    """The fusion, with some of its rows rounded to another format on their way."""

    def planted(*, windows: Any, parts: Any, dtype: torch.dtype, to: Any, **given: Any) -> torch.Tensor:
        right = fused.conv_inputs(TRITON, parts=windows, to=to[:-1], **given)
        wrong = {name: getattr(right, name).to(narrow) for name, narrow in formats.items()}
        narrow = GdnInputs(*(x.to(how) for x, how in zip(right._replace(**wrong), stored(dtype), strict=True)))
        return TRITON.gdn(inputs=narrow, parts=parts, dtype=dtype, to=to[-1])

    return planted


@cache
def short_in_parts(dtype: torch.dtype) -> tuple[Case, Any]:
    one = case(PROMPTS["short"], GROUPED, dtype)
    return one, serve(composed(in_parts(TRITON)), one, DEVICE)


@pytest.mark.parametrize(("formats", "dtype"), [
    ({"k": FP16}, BF16), ({"q": FP16}, BF16), ({"v": BF16}, FP16), ({}, FP16),
], ids=["k rounded twice", "q rounded twice", "v in bf16 next to fp16", "nothing"])  # fmt: skip
def test_differently_rounded_row_is_detected(formats: dict[str, torch.dtype], dtype: torch.dtype) -> None:
    one, right = short_in_parts(dtype)
    found = serve(composed(replace(TRITON, prefill_gdn=rounded(**formats))), one, DEVICE)
    assert bool(agree(one, right, found)) is bool(formats)


@pytest.mark.parametrize("name", OTHERS)
def test_parts_run_next_to_windows_and_with_32_bits(name: str) -> None:
    one = case(OTHERS[name][0], GROUPED, OTHERS[name][1])
    parts, found = (serve(composed(ops), one, DEVICE) for ops in (
        in_parts(TRITON), replace(TRITON, prefill_gdn=trap)))  # fmt: skip
    assert agree(one, parts, found) == []


def test_parts_run_when_every_row_is_kept() -> None:
    kept = Shape("chunk", (3, 2), (1, 2), (0, 1), store=(1, 2), per_row=(0, 1))
    for which in ("windows", "parts"):
        given = case((kept,), GROUPED, BF16).build(DEVICE).inputs
        other = next(name for name in ("windows", "parts") if name != which)
        given[other] = tuple(replace(part, per_row=None) for part in given[other])
        watched = replace(TRITON, prefill_gdn=trap, gdn=lambda *, inputs, **rest: inputs.v)
        assert fused.prefill_gdn(watched, **given).dtype is FP32


def test_op_set_with_other_chunk_rounding_does_not_use_it() -> None:
    """`precise` has another `gdn`. `invariant` has ours, and what it declares of it."""
    assert PRECISE.prefill_gdn is None and INVARIANT.prefill_gdn is TRITON.prefill_gdn
    one = case(SHAPES["prefill"], GROUPED, BF16)
    for products in ({}, {"gdn.chunk": replace(TRITON.products["gdn.chunk"], format="fp16")}):
        found = serve(composed(replace(TRITON, prefill_gdn=trap, products=products)), one, DEVICE)
        assert agree(one, serve(composed(in_parts(TRITON)), one, DEVICE), found) == []


def test_observed_row_inside_is_shown_and_its_replacement_is_used() -> None:
    one, shown = case(SHAPES["prefill"], GROUPED, BF16), dict[str, torch.Tensor]()

    def see(place: Any, x: torch.Tensor) -> torch.Tensor:
        shown[place.component] = x
        return x * 2 if place.component == "q" else x

    told = around(TRITON, see)
    assert told.prefill_gdn is None
    watched, plain = (serve(composed(ops), one, DEVICE) for ops in (told, TRITON))
    assert tuple(shown) == (*INSIDE, "core") and shown["q"].dtype is FP32
    # A power of two changes no rounding: the read-out is twice as large, and the memory is what it was.
    assert same_bits(watched.results["result"], 2 * plain.results["result"]) and bool(shown["core"].any())
    assert all(same_bits(pool.raw, plain.pools[name].raw) for name, pool in watched.pools.items())


def test_call_is_checked_by_the_contracts_of_its_parts() -> None:
    broken = list[str]()
    told = around(TRITON, unseen, contracts(broken.append))
    given = case(PROMPTS["short"], GROUPED, BF16).build(DEVICE).inputs
    assert fused.prefill_gdn(told, **given).shape == (len(given["x"]), 4, 16) and broken == []
    for which in ("windows", "parts"):
        (part,) = given[which]
        units = part.store.units.clone()
        units[0] = 0
        wrong = {**given, which: (replace(part, store=replace(part.store, units=units)),)}
        broken.clear()
        fused.prefill_gdn(told, **wrong)
        assert any("reserved" in one for one in broken), (which, broken)
