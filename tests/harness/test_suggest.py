"""`instep op --suggest-rounding`: the strictest declaration that agrees with a kernel, and none for a mistake.

Leaves out: what a declaration allows in a replay (`test_declared_rounding.py`, `test_declared_products.py`).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instep import kit
from instep.kit.strictest_rounding_declaration import declarations, suggested
from instep.verdict import Exit
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.declared_rounding import Product
from support.running.command import Runner
from support.running.covering import few
from support.wrong import narrow_products as narrow
from support.wrong.delta_rules import MISTAKES, RIGHT, UNKNOWN, dense_ops

pytestmark = pytest.mark.slow

CASES = ("snapshots-r2-VK-float32", "prefill-r2-VK-float32", "chunk-r2-VK-float32")  # the last one: bf16 activations


def of(ops: Ops, op: str = "gdn", *names: str) -> Any:
    return suggested(ops, [kit.op_cases(op, case=name)[0] for name in names or CASES])


def where_narrow() -> Ops:
    """Products of bf16 with bf16 activations, and of fp32 with others, as `triton` has them."""

    def gdn(**given: Any) -> Any:
        return (narrow.BF16 if given["dtype"].itemsize == 2 else narrow.SAME).gdn(**given)

    return replace(narrow.SAME, name="where narrow", gdn=gdn)


RIGHT_BUT = {
    "fp32": (narrow.SAME, {}), "fp32 by row": (RIGHT, {}),
    "tf32 cut off": (narrow.CUT, {"gdn.chunk": Product("tf32", block=64)}),
    "tf32 to nearest": (narrow.NEAREST, {"gdn.chunk": Product("tf32", block=64)}),
    "three tf32": (narrow.THREE, {"gdn.chunk": Product("3xtf32", block=64)}),
    "bf16": (narrow.BF16, {"gdn.chunk": Product("bf16", block=64)}),
    "bf16 where narrow": (where_narrow(), {"gdn.chunk": Product("bf16", block=64, narrow=True)}),
    "windows, too": (narrow.WINDOW_CUT, {"gdn.window": Product("tf32"), "gdn.chunk": Product("tf32", block=64)}),
}


@few(2)
@pytest.mark.parametrize(("ops", "due"), RIGHT_BUT.values(), ids=RIGHT_BUT)
def test_the_strictest_declaration_that_agrees_is_suggested(ops: Ops, due: dict[str, Product]) -> None:
    found = of(ops)
    without = {form: replace(one, residual=False) for form, one in found.products.items()}  # too few errors to tell
    assert (found.exit, without) == (Exit.AGREED, due)
    assert kit.served([kit.op_cases("gdn", case=name)[0] for name in CASES], replace(ops, products=due)).must_agree()
    for one in found.forms:
        assert one.chosen.failed == 0 < one.chosen.elements and one.chosen.worst <= one.chosen.allowed
        if one.chosen.product is not None:
            assert one.stricter.failed and one.stricter.worst > one.stricter.allowed and one.chosen.alike > 0.6


def slightly_loud(**given: Any) -> Any:
    """An error of the size of tf32's, and not a rounding."""
    return RIGHT.gdn(**given) * (1 + 2e-4)


WRONG = {
    "stale gate": (dense_ops(MISTAKES["gate before, or its own"][0]),
                   "this is a mistake, and no rounding: the gate of row t - 1 is used for row t"),
    "no entry": (dense_ops(UNKNOWN["root of beta"]), "no declaration allows these errors"),
    "small": (replace(RIGHT, gdn=slightly_loud),
              "allows errors of this size, but these are not the errors of its rounding"),
    "contract": (replace(RIGHT, gdn=lambda **given: RIGHT.gdn(**given)[:-1]), "no rounding: "),
}  # fmt: skip


@few(2)
@pytest.mark.parametrize(("ops", "why"), WRONG.values(), ids=WRONG)
def test_no_declaration_excuses_a_mistake(ops: Ops, why: str) -> None:
    found = of(ops)
    assert found.exit is Exit.DIVERGED and not found.products and not found.line
    assert any(why in one.why for one in found.forms), found.forms


def test_a_declaration_of_the_op_set_is_not_taken_for_granted() -> None:
    found = of(replace(RIGHT, products={"gdn.window": Product("bf16"), "attend": Product("tf32")}))
    assert found.exit is Exit.AGREED and found.products == {}


def test_other_ops_that_multiply_are_tried() -> None:
    cases = kit.op_cases("lm_head")
    assert suggested(narrow.LM_HEAD, cases).line == 'products={"lm_head": Product("tf32")}'


def test_declarations_go_from_the_strictest_on() -> None:
    import torch

    wide = [[str(one) for one in several] for several in declarations("linear", {torch.float32})]
    assert wide == [["ieee, sums as of hopper"], ["3xtf32"], ["tf32"], ["fp16"], ["bf16"]]
    both = [one for several in declarations("conv", {torch.float32, torch.bfloat16}) for one in several]
    assert [(one.format, one.narrow) for one in both[:4]] == [
        ("3xtf32", True), ("3xtf32", False), ("tf32", True), ("tf32", False)]


def test_the_command_prints_the_line_with_its_evidence(instep: Runner, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ("gdn", "--case", "prefill-r2-VK-float32", "--suggest-rounding", "--json", file)
    done = instep("op", "support.wrong.narrow_products:UNDECLARED", *words)
    line = 'products={"gdn.chunk": Product("tf32", block=64)}'
    assert done.code == 0 and f"Add to the op set: {line}" in done.out
    assert "DIVERGES" in done.out and 'Product("3xtf32", block=64)' in done.out
    found = json.loads(file.read_text())
    assert found["line"] == line and found["suggested"][0]["chosen"]["product"]["format"] == "tf32"
    assert "nothing has to be declared" in instep("op", "support.wrong.delta_rules:RIGHT", *words[:4]).out
    done = instep("op", "support.wrong.delta_rules:STALE_GATE", *words[:4])
    assert done.code == 1 and "gdn.chunk: nothing is suggested: this is a mistake" in done.out


def test_the_command_refuses_ops_without_products(instep: Runner, tmp_path: Path) -> None:
    refused = instep("op", "plain", "norm", "--suggest-rounding")
    assert refused.code == 2 and "expected ops that multiply: gdn" in refused.err
    refused = instep("op", "plain", "gdn", "--suggest-rounding", "--sarif", tmp_path / "a.sarif")
    assert refused.code == 2 and "--suggest-rounding" in refused.err
