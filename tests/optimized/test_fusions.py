"""A fusion is its parts: bit for bit where it says so, results and memory; and where the parts serve in its place.

Leaves out: whole runs (the relations `unseen` and `fused`), and real sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep_optimized.ops import fused
from instep_optimized.ops.base import GdnInputs, Ops
from instep_optimized.ops.fused import FUSIONS, in_parts
from instep_optimized.ops.triton import TRITON
from support.ops_case import BF16, FP32, Call, Case, Draw, Inputs, agree, at, serve
from support.ops_cases import CASES
from support.ops_row_cases import linear_blocks, norm, row_case

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"]


def add_norm(draw: Draw, dtype: torch.dtype) -> Inputs:
    return norm(draw, dtype) | {name: draw.normal(7, 48, dtype=dtype)[1:6, 8:40] for name in ("x", "y")} | {
        "to": (at("residual"), at("post_normed"))}  # fmt: skip


def linears(draw: Draw, dtype: torch.dtype) -> Inputs:
    blocks = linear_blocks(draw, dtype)
    return {"x": blocks["x"], "weight": blocks["weight"], "shapes": ((2, 4), (5,), (3,)),
            "to": (at("z"), at("b"), at("a"))}  # fmt: skip


def conv_inputs(case: Case) -> Case:
    """A case of the conv with heads behind it, as wide as a tile or not; a and b are columns of something wider."""

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


EXACT = [
    *(row_case("add_norm", "views", add_norm, dtype, 700, exact=True) for dtype in (FP32, BF16)),
    *(conv_inputs(case) for case in CASES if case.op == "conv"),
]
NEAR = [row_case("linears", "blocks", linears, dtype, 701) for dtype in (FP32, BF16)]


@pytest.fixture(autouse=True)
def garbage_in_fresh_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def composed(ops: Ops, op: str) -> Any:
    """What the model calls, as an op set of this one op."""
    call: Callable[..., Any] = partial(getattr(fused, op), ops)

    def named(**given: Any) -> Any:
        found = call(**given)
        return found if hasattr(found, "_fields") else SimpleNamespaceTuple(found)

    return SimpleNamespace(**{op: named})


class SimpleNamespaceTuple(tuple[torch.Tensor, ...]):
    """Results without names, as `serve` wants them."""

    @property
    def _fields(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*EXACT, *NEAR], ids=str)
def test_a_fusion_is_its_parts(case: Case, device: str) -> None:
    apart = replace(in_parts(TRITON), linears=None)
    assert getattr(TRITON, case.op) is not None and FUSIONS[case.op].exact is case.exact
    assert agree(case, serve(composed(apart, case.op), case, device), serve(composed(TRITON, case.op), case, device)) == []
