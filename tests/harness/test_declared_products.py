"""Declared products and sums: which op is rounded how, which declarations are valid, and that none is a free pass.

Leaves out: whole runs (`test_declared_rounding.py`), and what a card does (`test_sums_native.py`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from instep.kit.cases import CASES
from instep.kit.compare_with_reference import judged
from instep.oracle.declared_product_rounding import MULTIPLY, Operands, added, in_chunks, launched, to_bits
from instep.oracle.reordered_arithmetic import Reordered
from instep.run.run_variants import swapped
from instep.subject.declared_rounding import NOTHING, Declared, declared
from instep.subject.engines.verbs import product_of
from instep.subject.guarded_calls import SubjectFailed
from instep_optimized import load
from instep_reference import gdn, trunk
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import FORMATS, FORMS, SUMS, Product, Sums, checked
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import RECURRENCES
from instep_reference.engine import ReferenceEngine
from instep_reference.mlp import mixture
from instep_reference.weights import GdnWeights, MlpWeights, MoeWeights, Weights
from instep_speed.bench.answer_check import off
from instep_speed.bench.kinds.products import _drawn
from support.inputs import check_contexts as m
from support.inputs.checkpoints import write
from support.running.covering import few
from support.wrong.narrow_products import BF16, BLOCK, cut

TF32, TOKENS = Product("tf32"), 3
CHUNKS = {row.forms[1] for row in RECURRENCES.values() if row.update == "delta"}


class Counting(TorchFunctionMode):
    """Counts every product under the form that `Operands` takes it for."""

    def __init__(self, operands: Operands) -> None:
        super().__init__()
        self.operands, self.found = operands, Counter[str | None]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        form, name = self.operands.form, func.__name__
        if name in ("matmul", "einsum") or name in MULTIPLY.get(form or "", ()):
            self.found[form] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=["dense", "moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = write(tmp_path_factory.mktemp(request.param) / "model", request.param, 3)
    return Weights.of(Checkpoint.open(folder), torch.float32)


def test_every_product_of_a_layer_belongs_to_a_form(model: Weights) -> None:
    """As many as the model has: projections, taps, three a token in the delta rule, two in attention, the MLP's."""
    config = model.config
    for index, kind in enumerate(config.mixers):
        operands = Operands({}, model)
        memory = trunk.empty_memory(config, kind, torch.float32)
        hidden = torch.randn(TOKENS, config.hidden, generator=torch.Generator().manual_seed(0))

        def see(place: Place, tensor: torch.Tensor, operands: Operands = operands) -> torch.Tensor:
            operands.seen(place)
            return tensor

        with Counting(operands) as counting:
            trunk.layer(config, model.layers[index], index, "trunk", hidden, memory, torch.arange(TOKENS), see)
        found = counting.found
        if isinstance(model.layers[index].mlp, MoeWeights):
            assert found.pop("moe") >= 5, "router, shared gate, three of the shared expert, and of each that was chosen"
        else:
            assert found.pop("mlp") == 3
        gdn = {"linear": 5, "conv": config.conv_width, "gdn.window": 3 * TOKENS}
        assert found == (gdn if kind == "gdn" else {"linear": 4, "attend": 2})


@pytest.mark.slow
def test_every_product_of_a_run_belongs_to_a_form(tmp_path: Any) -> None:
    opened = m.checkpoint(tmp_path)
    engine = ReferenceEngine(Weights.of(opened, torch.float32), num_steps=m.POLICY.num_steps)
    operands = Operands({}, Weights.of(opened, torch.float32))

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        operands.seen(place)
        return tensor

    engine.watch(see)
    with Counting(operands) as counting:
        for event in m.events_of(opened)[:12]:
            event.on(engine)
    others = {form for row in RECURRENCES.values() for form in row.forms} - {"gdn.window"}
    assert set(counting.found) == set(FORMS) - {"moe"} - others


def test_routers_stay_wide(tmp_path: Any) -> None:
    weights = Weights.of(Checkpoint.open(write(tmp_path / "model", "moe", 3)), torch.float32)
    operands = Operands({"moe": TF32}, weights)
    operands.form = "moe"
    mlp = next(layer.mlp for layer in weights.layers if isinstance(layer.mlp, MoeWeights))
    x = torch.randn(2, weights.config.hidden, generator=torch.Generator().manual_seed(0))
    for weight, stays in ((mlp.router, True), (mlp.shared_gate, True), (mlp.shared.gate, False)):
        out = operands.multiply(torch.matmul, "matmul", (x, weight.T), {})
        assert torch.equal(out, x @ weight.T) is stays
    for expert in mlp.router:  # one after the other, as the reference asks
        assert torch.equal(operands.multiply(torch.matmul, "matmul", (x, expert), {}), x @ expert)


@pytest.mark.parametrize("draws", [[0, 1, 2, 3], [5, 6, 7, 8]])
def test_four_draws_in_turn_are_of_all_kinds(draws: list[int], model: Weights) -> None:
    """Each cuts or not, and inverts by substitution or not; drawn together as well as one by one."""
    lower, seen = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).tril(-1) / 8, set()

    def drawn(number: torch.Tensor | int) -> torch.Tensor:
        operands = Operands({"gdn.chunk": TF32}, model)
        operands.begin_draw(number)
        if isinstance(number, int):
            seen.add((bool(operands.cut), bool(operands.by_substitution)))
        return operands.inverse(lower[None, None])

    together = torch.func.vmap(drawn)(torch.tensor(draws))
    assert all(torch.equal(one, drawn(number)) for one, number in zip(together, draws, strict=True)) and len(seen) == 4


def test_a_form_that_is_not_declared_is_left_alone(model: Weights) -> None:
    operands = Operands({"gdn.chunk": Product("tf32", block=64), "mlp": TF32}, model)
    x, y = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
    for form in (None, *FORMS):
        operands.form = form
        out = operands.multiply(torch.matmul, "matmul", (x, y), {})
        assert torch.equal(out, x @ y) is (form not in ("gdn.chunk", "mlp")), form


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "error"), [("3xtf32", 2.0**-19), ("tf32", 2.0**-9), ("fp16", 2.0**-10), ("bf16", 2.0**-7)]
)
def test_operands_have_the_width_of_the_format(format: str, error: float, model: Weights) -> None:
    operands = Operands({"mlp": Product(format)}, model)
    operands.form = "mlp"
    x, y = torch.rand(2, 1, 1000, generator=torch.Generator().manual_seed(0)) + 0.5
    for is_cut in (False, True):
        operands.cut = is_cut
        found = operands.multiply(torch.matmul, "matmul", (x.T, y), {})
        off = ((found.double() - x.T.double() * y.double()) / (x.T.double() * y.double())).abs().max()
        assert error / 16 < off <= error, (format, is_cut)


def test_a_cut_is_what_a_tensor_core_reads_and_nearest_is_to_even() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (50000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    x = x[x.isfinite() & (x.abs() > 1e-30)]
    assert torch.equal(to_bits(x, 11, torch.trunc), cut(x))
    assert torch.equal(to_bits(x, 8, torch.round), x.bfloat16().float())
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(to_bits(odd, 11, torch.round), odd) and to_bits(torch.tensor(torch.nan), 11, torch.round).isnan()


def test_stochastic_operand_rounding_is_unbiased(model: Weights) -> None:
    operands = Operands({"mlp": TF32}, model, chance=torch.Generator().manual_seed(0))
    operands.form = "mlp"
    x = torch.full((1, 20000), 1 + 2.0**-12)
    found = operands.multiply(torch.matmul, "matmul", (x.T, torch.ones(1, 1)), {})
    assert set(found.flatten().tolist()) == {1.0, 1 + 2.0**-10}
    assert abs(float(found.mean()) - float(x[0, 0])) < 2e-5


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_the_block_form_errs_as_its_format_does(format: str, residual: bool, model: Weights) -> None:
    """And its narrow intermediates: in bf16 it errs more than its inputs' rounding alone."""
    generator = torch.Generator().manual_seed(0)
    config, count = model.config, 150
    heads, shape = config.value_heads, (config.value_heads, config.key_dim, config.value_dim)
    k = torch.nn.functional.normalize(torch.randn(count, heads, config.key_dim, generator=generator) + 0.5, dim=-1)
    decay, beta = torch.rand(2, count, heads, generator=generator)
    rows = [k.roll(1, 0), k, torch.randn(count, heads, config.value_dim, generator=generator), -decay / 8, beta]
    base = torch.randn(*shape, generator=generator)
    right = launched(None, config.recurrence, [x.double() for x in rows], base.double())
    operands = Operands({"gdn.chunk": Product(format, block=64, residual=residual)}, model, chunk=True)
    operands.form = "gdn.chunk"

    class Rounding(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return operands.multiply(func, func.__name__, args, kwargs or {})

    with Rounding():
        core, state = in_chunks(operands, rows, base)
    assert torch.equal(launched(operands, config.recurrence, rows, base), in_chunks(operands, rows, base)[1])
    off = float((state - right).norm() / right.norm())
    ten_bits = (5e-5, 5e-3)
    limits = {"ieee": (1e-8, 3e-6), "3xtf32": (1e-8, 6e-6), "tf32": ten_bits, "fp16": ten_bits, "bf16": (5e-4, 4e-2)}
    least, most = limits[format]
    assert least < off < most and core.shape == rows[2].shape, off


def _in_16_bits(x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_conv` as SGLang's Triton kernels do it: 16-bit tensors are multiplied, and added in fp32."""
    history, width = torch.cat([window.T, x]).bfloat16(), weight.shape[1]
    taps = [weight[:, j].bfloat16() * history[j : j + len(x)] for j in range(width)]
    return torch.stack([tap.float() for tap in taps]).sum(0), history.float()[len(x):].T


def test_a_conv_that_multiplies_16_bit_tensors_is_declared_by_its_results(tmp_path: Any) -> None:
    """The operands are exact there, so a declaration of operands alone allows nothing of the error."""
    weights = Weights.of(Checkpoint.open(write(tmp_path / "model", "dense", 3)), torch.float32)
    layer, config = weights.layers[0].mixer, weights.config
    assert isinstance(layer, GdnWeights)
    layer = replace(layer, **{name: getattr(layer, name).bfloat16().float() for name in ("qkv", "conv")})
    normed = torch.randn(24, config.hidden, generator=torch.Generator().manual_seed(0)).bfloat16().float()

    def run(product: Product | None, conv: Any = gdn.causal_conv) -> torch.Tensor:
        operands = Operands({} if product is None else {"conv": product}, weights)
        operands.begin()

        def at(name: str, tensor: torch.Tensor) -> torch.Tensor:
            operands.seen(Place("trunk", 0, name))
            return tensor.bfloat16().float() if name in ("qkv", "mixed") else tensor

        with Reordered(torch.Generator().manual_seed(1), operands):
            return gdn.state_after(config, layer, normed, gdn.empty(config, torch.float32, "cpu"), at, conv)

    found, right = run(None, _in_16_bits), run(None)

    def off(product: Product) -> float:
        return float((run(product) - found).norm() / right.norm())

    assert off(Product("bf16", results=True)) < 2e-4 < 1.5e-3 < off(Product("bf16"))
    assert product_of(str(Product("bf16", results=True))) == Product("bf16", results=True)
    assert Declared({}, {"conv": Product("bf16", results=True)}).said(torch.float32) == (
        "multiplies conv as bf16, results too")


@pytest.mark.parametrize(("products", "says"), [
    ({"gdn": TF32}, "found 'gdn', expected forms of ops: linear"),
    ({"gdn.chunk": TF32}, "expected the block of the kernel"),
    ({"linear": Product("tf32", block=16)}, "expected no block"),
    ({"linear": Product("tf32", residual=True)}, "only gdn.chunk and kda.chunk have residuals"),
    ({"linear": Product("bf16", results=True)}, "only conv in fp16 or bf16 rounds its results"),
    ({"conv": Product("tf32", results=True)}, "only conv in fp16 or bf16 rounds its results"),
    ({"linear": "tf32"}, "expected a Product"),
])  # fmt: skip
def test_unknown_declaration_is_refused(products: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as refused:
        checked(products)
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("format", "block"), [("fp8", None), ("TF32", None), ("tf32", 0), ("tf32", "64")])
def test_invalid_format_or_block_is_refused(format: str, block: Any) -> None:
    with pytest.raises(BadInput):
        Product(format, block)


def test_op_set_without_a_declaration_declares_nothing() -> None:
    assert declared(SimpleNamespace(), torch.bfloat16, torch.float32) == NOTHING
    assert declared(None, torch.bfloat16, torch.float32) == NOTHING


def _falls_over(activation: torch.dtype, state: torch.dtype) -> dict[str, torch.dtype]:
    raise ZeroDivisionError("nobody knows")


@pytest.mark.parametrize("said", [{"rounds": 3}, {"products": 3}, {"rounds": lambda *_: {"v": "fp16"}}])
def test_a_declaration_that_cannot_be_read_is_its_authors_mistake(said: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        declared(SimpleNamespace(**said), torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("activation", "left"), [(torch.float32, set()), (torch.bfloat16, {*CHUNKS, "lm_head"})],
    ids=["float32", "bfloat16"],
)
def test_narrow_declaration_grants_nothing_to_wide_activations(activation: torch.dtype, left: set[str]) -> None:
    """The op set `triton`, and `precise`, whose prefill is fp32."""
    assert {*declared(load("triton"), activation, torch.float32).products} == left
    assert {*declared(load("precise"), activation, torch.float32).products} == left - CHUNKS


def test_exception_in_a_declaration_is_the_subjects_finding() -> None:
    with pytest.raises(SubjectFailed, match="nobody knows"):
        declared(SimpleNamespace(rounds=_falls_over), torch.float32, torch.float32)


def test_a_swapped_op_brings_its_products() -> None:
    mine = {"gdn.chunk": Product("tf32", block=64), "gdn.window": TF32, "linear": TF32}
    ops = replace(load("plain"), products=mine)
    assert swapped(ops, {"gdn": "plain"}).products == {"linear": TF32}
    assert swapped(ops, {"conv": "plain"}).products == mine
    assert swapped(load("plain"), {"gdn": "support.wrong.narrow_products:CUT"}).products == {
        "gdn.chunk": Product("tf32", block=64)}  # fmt: skip


# ---- sums, as a matrix instruction takes them

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


@few(1)
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


@pytest.mark.parametrize(("products", "says"), [
    ({"gdn.chunk": Product("bf16", block=64, sums="hopper")}, "expected fp32: others are of linear, mlp, lm_head"),
    ({"attend": SAID}, "expected fp32"),
])  # fmt: skip
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


def test_partial_sums_of_ranks_are_rounded_before_they_are_added(model: Weights) -> None:
    """Only the product that makes a mixer's result is split, in the order of the ranks; others of the form are not."""
    operands = Operands({"linear": Product("ieee", parts=2, stored="bf16")}, model)
    layer, generator = model.layers[0].mixer, torch.Generator().manual_seed(0)
    operands.form = "linear"
    rows = torch.randn(3, layer.out.shape[1], generator=generator)
    half = layer.out.shape[1] // 2
    rows[:, half:] = -rows[:, :half] @ layer.out[:, :half].T @ torch.linalg.pinv(layer.out[:, half:].T)  # they cancel
    parts = [(rows[:, part] @ layer.out[:, part].T).bfloat16().float() for part in (slice(half), slice(half, None))]
    found = operands.multiply(torch.matmul, "matmul", (rows, layer.out.T), {})
    right = rows @ layer.out.T
    assert torch.equal(found, parts[0] + parts[1])
    assert (found - right).norm() > 10 * (right.bfloat16().float() - right).norm()  # no rounding of the total covers it
    x = torch.randn(3, model.config.hidden, generator=generator)
    assert torch.equal(operands.multiply(torch.matmul, "matmul", (x, layer.qkv.T), {}), x @ layer.qkv.T)  # type: ignore[union-attr]


class Multiplies(TorchFunctionMode):
    """Rounds products as declared, without the errors of other orders of sums."""

    def __init__(self, operands: Operands) -> None:
        super().__init__()
        self.operands = operands

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.operands.multiply(func, func.__name__, args, kwargs or {})


@pytest.mark.parametrize("whole", [False, True])
def test_each_rank_rounds_its_sum_of_experts_once(model: Weights, whole: bool) -> None:
    """Half of the columns of each expert, or half of the experts, and half of the columns of the shared one."""
    experts = model.layers[0].mlp
    if not isinstance(experts, MoeWeights):
        return
    def half(one: MlpWeights, rank: int) -> MlpWeights:
        return MlpWeights(one.gate.chunk(2)[rank], one.up.chunk(2)[rank], one.down.chunk(2, dim=1)[rank])

    def on(rank: int, number: int, one: MlpWeights) -> MlpWeights:
        if not whole:
            return half(one, rank)
        return one if number // 2 == rank else MlpWeights(*(torch.zeros_like(x) for x in (one.gate, one.up, one.down)))

    x = torch.randn(5, model.config.hidden, generator=torch.Generator().manual_seed(0))
    parts = [mixture(model.config, replace(experts, shared=half(experts.shared, rank), experts=tuple(
        on(rank, number, one) for number, one in enumerate(experts.experts))), x) for rank in range(2)]  # fmt: skip
    operands = Operands({"moe": Product("ieee", parts=2, stored="bf16", whole=whole)}, model)
    operands.seen(Place("trunk", 0, "post_normed"))
    with Multiplies(operands):
        found = mixture(model.config, experts, x)
    found, right = operands.added_up(Place("trunk", 0, "mlp"), found), sum(part.bfloat16().float() for part in parts)
    assert (found != sum(parts)).float().mean() > 0.9 and (found == right).float().mean() > 0.9  # sums may tie
    assert torch.allclose(found, right, atol=float(2**-8 * right.abs().max()))


@pytest.mark.parametrize(("form", "product", "says"), [
    ("conv", Product("ieee", parts=2), "expected 1: only linear, mlp, moe end in a sum over ranks"),
    ("moe", Product("ieee", whole=True), "expected False: only moe in parts has experts"),
    ("mlp", Product("ieee", parts=2, whole=True), "expected False: only moe in parts has experts"),
])  # fmt: skip
def test_partial_sums_are_declared_only_where_there_are_any(form: str, product: Product, says: str) -> None:
    with pytest.raises(BadInput) as raised:
        checked({form: product})
    assert says in str(raised.value) and str(Product("tf32", parts=4, stored="bf16")) == "tf32, 4 partial sums in bf16"
