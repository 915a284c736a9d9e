"""Products in a declared format: which op is rounded to which format, and which declarations are valid.

Leaves out: whole runs (`test_declared_rounding.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from instep.oracle.declared_product_rounding import MULTIPLY, Operands, in_chunks, launched, to_bits
from instep.oracle.reordered_arithmetic import Reordered
from instep.run.run_variants import swapped
from instep.subject.declared_rounding import NOTHING, Declared, declared
from instep.subject.engines.verbs import product_of
from instep.subject.guarded_calls import SubjectFailed
from instep_optimized import load
from instep_reference import gdn, trunk
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import FORMATS, FORMS, Product, checked
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place
from instep_reference.engine import ReferenceEngine
from instep_reference.weights import GdnWeights, MoeWeights, Weights
from support import contexts as m
from support.checkpoints import write
from support.narrow_products import cut

TF32, TOKENS = Product("tf32"), 3


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
    for index, kind in enumerate(config.layer_kinds):
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
    assert set(counting.found) == set(FORMS) - {"gdn.chunk", "moe"}


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
    right = launched(None, [x.double() for x in rows], base.double())
    operands = Operands({"gdn.chunk": Product(format, block=64, residual=residual)}, model, chunk=True)
    operands.form = "gdn.chunk"

    class Rounding(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return operands.multiply(func, func.__name__, args, kwargs or {})

    with Rounding():
        core, state = in_chunks(operands, rows, base)
    assert torch.equal(launched(operands, rows, base), in_chunks(operands, rows, base)[1])
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


@pytest.mark.parametrize(
    ("products", "says"),
    [
        ({"gdn": TF32}, "found 'gdn', expected forms of ops: linear"),
        ({"gdn.chunk": TF32}, "expected the block of the kernel"),
        ({"linear": Product("tf32", block=16)}, "expected no block"),
        ({"linear": Product("tf32", residual=True)}, "only gdn.chunk has residuals"),
        ({"linear": Product("bf16", results=True)}, "only conv in fp16 or bf16 rounds its results"),
        ({"conv": Product("tf32", results=True)}, "only conv in fp16 or bf16 rounds its results"),
        ({"linear": "tf32"}, "expected a Product"),
    ],
)
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


@pytest.mark.parametrize(
    "said", [{"rounds": 3}, {"products": 3}, {"rounds": lambda *_: {"v": "fp16"}}]
)
def test_a_declaration_that_cannot_be_read_is_its_authors_mistake(said: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        declared(SimpleNamespace(**said), torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("activation", "left"), [(torch.float32, set()), (torch.bfloat16, {"gdn.chunk", "lm_head"})],
    ids=["float32", "bfloat16"],
)
def test_narrow_declaration_grants_nothing_to_wide_activations(
    activation: torch.dtype, left: set[str]
) -> None:
    """The op set `triton`, and `precise`, whose prefill is fp32."""
    assert {*declared(load("triton"), activation, torch.float32).products} == left
    assert {*declared(load("precise"), activation, torch.float32).products} == left - {"gdn.chunk"}


def test_exception_in_a_declaration_is_the_subjects_finding() -> None:
    with pytest.raises(SubjectFailed, match="nobody knows"):
        declared(SimpleNamespace(rounds=_falls_over), torch.float32, torch.float32)


def test_a_swapped_op_brings_its_products() -> None:
    mine = {"gdn.chunk": Product("tf32", block=64), "gdn.window": TF32, "linear": TF32}
    ops = replace(load("plain"), products=mine)
    assert swapped(ops, {"gdn": "plain"}).products == {"linear": TF32}
    assert swapped(ops, {"conv": "plain"}).products == mine
    assert swapped(load("plain"), {"gdn": "support.narrow_products:CUT"}).products == {
        "gdn.chunk": Product("tf32", block=64)}  # fmt: skip
