"""Sums as a matrix instruction takes them: what is declared, how it is evaluated, and that it is no free pass.

Leaves out: formats of operands (`test_declared_products.py`), and what a card does (`test_sums_native.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.kit.cases import CASES
from instep.kit.compare_with_reference import judged
from instep.oracle.declared_product_rounding import added
from instep.subject.declared_rounding import declared
from instep.subject.engines.verbs import product_of
from instep_optimized import load
from instep_reference.contract.declared_rounding import SUMS, Product, Sums, checked
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place
from instep_speed.bench.answer_check import off
from instep_speed.bench.kinds.products import _drawn
from support.narrow_products import BF16, BLOCK

HOPPER = SUMS["hopper"]
assert HOPPER is not None
SAID, WIDTH = Product("ieee", narrow=True, sums="hopper"), 4096
CUT = replace(load("plain"), name="cut", products={"lm_head": SAID})


def exactly(x: list[float], y: list[float], sums: Sums) -> float:
    """The model in whole numbers of arbitrary size: no float is added."""
    total = Fraction(0)

    def lead(number: Fraction) -> int:
        """The exponent of the leading bit."""
        up, down = abs(number).as_integer_ratio()
        guess = up.bit_length() - down.bit_length()
        return guess if abs(number) >= Fraction(2) ** guess else guess - 1

    def cut(number: Fraction, behind: int) -> Fraction:
        return int(number / Fraction(2) ** behind) * Fraction(2) ** behind  # `int` cuts off

    for begin in range(0, len(x), sums.terms):
        some = list(zip(x, y, strict=True))[begin : begin + sums.terms]
        factors = [(Fraction(a), Fraction(b)) for a, b in some if a and b]
        tops = [lead(a) + lead(b) for a, b in factors] + [lead(total)] * (total != 0)
        if tops:
            behind = max(tops) - sums.bits
            total = sum((cut(a * b, behind) for a, b in factors), cut(total, behind))
            total = cut(total, lead(total) - 23) if total else total
    return float(total)


@pytest.mark.parametrize("sums", [HOPPER, Sums(8, 24), Sums(4, 23)], ids=str)
def test_sums_are_evaluated_as_they_are_written_down(sums: Sums) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, by, other = torch.randn(4, 40, 30, generator=generator)
    x, y = (x * (4 * by).exp2()).bfloat16().float(), (y * (4 * other).exp2()).bfloat16().float()
    x[0], x[1, 5:20], y[2] = 0.0, 0.0, y[2].abs()
    right = [[exactly(a.tolist(), b.tolist(), sums) for b in y[:3]] for a in x[:6]]
    assert torch.equal(added(x[:6], y[:3].T, sums), torch.tensor(right))
    each = torch.func.vmap(lambda row: added(row[None], y.T, sums)[0])(x)
    assert torch.equal(each, added(x, y.T, sums))


def head(x: torch.Tensor, weight: torch.Tensor, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    """The benchmark's verdict on a head with this product. Like the kit and T2 it requires e_x <= 3 e_r + 4 ulp."""
    ground: Any = SimpleNamespace(device=x.device, dtype=x.dtype)
    plain = _drawn("lm_head", x, {"weight": weight}, ground, CUT)
    return off("lm_head", how(x.float(), weight.float()), x.double() @ weight.double().T, plain)


def stepwise(dtype: torch.dtype, terms: int = 16) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A sum that is kept in a narrower dtype between instructions."""

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(len(x), len(weight))
        for begin in range(0, x.shape[1], terms):
            total = (total + x[:, begin : begin + terms] @ weight[:, begin : begin + terms].T).to(dtype).float()
        return total

    return multiply


def without(*lost: slice) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for one in lost:
            x[:, one] = 0
        return x @ weight.T

    return multiply


SHUFFLED = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
RIGHT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rounded to nearest": lambda x, w: x @ w.T,
    "one after the other": stepwise(torch.float32, 1),
    "as a Hopper card": lambda x, w: added(x, w.T, HOPPER),
    "in another order": lambda x, w: added(x[:, SHUFFLED], w[:, SHUFFLED].T, HOPPER),
    "split in two": lambda x, w: sum((added(a, b.T, HOPPER) for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)),
                                     torch.zeros(())),
    "instructions of 8": lambda x, w: added(x, w.T, Sums(8, 24)),
}  # fmt: skip
WRONG = {
    "summed in bf16": stepwise(torch.bfloat16), "summed in fp16": stepwise(torch.float16),
    "rounded to bf16 at the end": lambda x, w: (x @ w.T).bfloat16().float(),
    "sums of 14 bits, as with fp8": lambda x, w: added(x, w.T, Sums(32, 13)),
    "sums of 20 bits": lambda x, w: added(x, w.T, Sums(16, 19)),
    "a lost block": without(slice(64, 80)), "a lost product": without(slice(77, 78)),
    "the last block twice": lambda x, w: x @ w.T + x[:, -16:] @ w[:, -16:].T,
}


@pytest.mark.slow
@pytest.mark.parametrize("one_sign", [False, True])
def test_head_may_sum_as_declared_and_no_worse(one_sign: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, WIDTH, generator=generator), torch.randn(100, WIDTH, generator=generator) * WIDTH**-0.5
    x, weight = (y.abs().bfloat16() if one_sign else y.bfloat16() for y in (x, weight))
    assert {name: head(x, weight, how) for name, how in RIGHT.items()} == dict.fromkeys(RIGHT, "")
    assert [name for name, how in WRONG.items() if not head(x, weight, how)] == []


@pytest.mark.parametrize(
    ("how", "right"), [("as a Hopper card", True), ("rounded to nearest", True), ("summed in bf16", False),
                       ("summed in fp16", False), ("sums of 14 bits, as with fp8", False)],
)  # fmt: skip
def test_the_kit_judges_a_head_as_it_is_declared(how: str, right: bool) -> None:
    def lm_head(*, x: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
        return ({**RIGHT, **WRONG})[how](x.float(), weight.float())

    cases = [one for one in CASES if one.op == "lm_head" and one.build("cpu").inputs["x"].dtype == torch.bfloat16]
    assert cases and bool(judged(replace(CUT, lm_head=lm_head), cases).findings) is not right


@pytest.mark.parametrize(
    ("products", "says"),
    [
        ({"gdn.chunk": Product("bf16", block=64, sums="hopper")}, "expected fp32: others are of linear, mlp, lm_head"),
        ({"attend": SAID}, "expected fp32"),
    ],
)
def test_sums_are_declared_only_where_they_are_evaluated(products: dict[str, Product], says: str) -> None:
    with pytest.raises(BadInput) as refused:
        checked(products)
    assert says in str(refused.value)


def test_unmeasured_summation_order_is_refused() -> None:
    with pytest.raises(BadInput, match=r"Product.sums: found 'mine', expected one of fp32, hopper"):
        Product("bf16", sums="mine")


def test_the_head_of_triton_adds_as_declared_where_activations_are_narrow() -> None:
    """And it is spelled as it is read."""
    for activation, said in ((torch.float32, None), (torch.bfloat16, SAID), (torch.float16, SAID)):
        assert declared(load("triton"), activation, torch.float32).products.get("lm_head") == said
    assert str(SAID) == "ieee, sums as of hopper" and replace(product_of(str(SAID)), narrow=True) == SAID  # type: ignore[type-var]
    both = Product("bf16", block=64, residual=True)
    assert product_of(str(both)) == both and SAID in checked({"lm_head": SAID, "linear": SAID}).values()


def test_kit_grants_wide_activations_no_narrow_declaration() -> None:
    """A chunk kernel whose operands are bf16 is wrong where rows are fp32."""
    narrow = replace(BF16, products={"gdn.chunk": Product("bf16", block=BLOCK, narrow=True)})
    chunks = (one for one in CASES if str(one).startswith("gdn-chunk"))
    case = next(one for one in chunks if one.build("cpu").inputs["dtype"] == torch.float32)
    assert [len(judged(ops, [case]).findings) > 0 for ops in (BF16, narrow)] == [False, True]
