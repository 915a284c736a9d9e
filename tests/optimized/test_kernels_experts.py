"""Experts whose rows are grouped: every pair of a row and its expert in one block, rows right, one order of sums.

Leaves out: the shared cases of `moe` (`test_kernels.py`), real sizes (`instep bench`), whole engines.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from instep.kit.cases.case import BF16, Draw
from instep_optimized.kernels.products import grouped_experts
from instep_optimized.kernels.products.grouped_experts import _moe_mix, _moe_sort, grouped
from instep_optimized.kernels.runtime import ceil_div, launch
from instep_optimized.ops import load
from instep_optimized.ops.op_protocols import ExpertWeights
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.place_names import Place
from support.running.covering import few

HERE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = HERE == "cuda"
pytestmark = [pytest.mark.gpu if NATIVE else pytest.mark.interpreted]
D, INNER, SHARED, E, TOP = (512, 256, 128, 40, 6) if NATIVE else (48, 16, 24, 5, 2)
FEW, TALL = grouped_experts.FEW, 32  # rows of a block


def drawn(rows: int, top: int = TOP, shared: bool = True, seed: int = 0) -> tuple[torch.Tensor, ExpertWeights, int]:
    draw = Draw(seed, HERE)

    def weight(*shape: int) -> torch.Tensor:
        return draw.normal(*shape, dtype=BF16, scale=shape[-1] ** -0.5)

    beside = (weight(2 * SHARED, D), weight(D, SHARED), weight(1, D)) if shared else (None, None, None)
    weights = ExpertWeights(weight(E, D) * 4, weight(E, 2 * INNER, D), weight(E, D, INNER), *beside)
    return draw.normal(rows, D, dtype=BF16), weights, top


def idle(rows: int) -> tuple[torch.Tensor, ExpertWeights, int]:
    """Rows whose first number is 1: expert 1 is never chosen."""
    x, weights, top = drawn(rows)
    x[:, 0], weights.router[1] = 1.0, 0.0
    weights.router[1, 0] = -100.0
    return x, weights, top


def crowded(rows: int) -> tuple[torch.Tensor, ExpertWeights, int]:
    """Every row chooses expert 3 alone."""
    x, weights, _ = idle(rows)
    weights.router[3] = -weights.router[1]
    return x, weights, 1


def tied(rows: int) -> tuple[torch.Tensor, ExpertWeights, int]:
    """The lower numbers win a tie of experts."""
    x, weights, top = drawn(rows)
    weights.router.zero_()
    return x, weights, top


CALLS: dict[str, Callable[[], tuple[torch.Tensor, ExpertWeights, int]]] = {
    "one row": lambda: drawn(1), "a wider shared expert": lambda: drawn(3), "no rows": lambda: drawn(0),
    "no shared expert": lambda: drawn(5, shared=False), "every expert": lambda: drawn(3, top=E),
    "ties": lambda: tied(4), "an idle expert": lambda: idle(7), "all rows to one": lambda: crowded(2 * FEW + 1),
    "blocks of many rows": lambda: drawn(2 * TALL), "steps of a row and of a weight": lambda: steps(5),
    "more rows than at a time": lambda: drawn(4 * TALL),
}  # fmt: skip


def steps(rows: int) -> tuple[torch.Tensor, ExpertWeights, int]:
    """Rows and weights that are views on something wider."""
    x, weights, top = drawn(rows)

    def view(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., : tensor.shape[-1]]

    tensors = {name: one for name, one in vars(weights).items() if isinstance(one, torch.Tensor)}
    return view(x), replace(weights, **{name: view(one) for name, one in tensors.items()}), top


@pytest.fixture(autouse=True)
def few_rows_make_tall_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "MANY_FROM", 2 * TALL)
    monkeypatch.setattr(grouped_experts, "MANY", TALL)
    monkeypatch.setattr(grouped_experts, "MOST", 3 * TALL)


@few(4)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_grouped_experts_agree_with_experts_one_by_one(name: str, norm_topk: bool) -> None:
    x, weights, top = CALLS[name]()
    wide = replace(weights, **{at: w.double() for at, w in vars(weights).items() if isinstance(w, torch.Tensor)})
    truth = PLAIN.moe(x=x.double(), weights=wide, top_k=top, norm_topk=norm_topk, to=Place("trunk", 0, "mlp"))
    found = grouped(x, weights, top, norm_topk)
    assert found.dtype == BF16 and found.shape == x.shape
    # The answer is rounded once to 2^-9 of itself, and each middle row before it.
    near = 2.0**-8 * float(truth.abs().max()) if len(x) else 0.0
    torch.testing.assert_close(found.double(), truth, rtol=2.0**-8, atol=near)


@few(2)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("ops", "dtype"), [
    ("triton", BF16), ("invariant", torch.float32), ("precise", BF16), ("invariant", BF16)], ids=str)
@pytest.mark.parametrize(("groups", "best"), [(4, 2), (10, 1), (3, 2), (5, 5)])
def test_a_sigmoid_router_chooses_as_plain_does(ops: str, dtype: torch.dtype, groups: int, best: int) -> None:
    """In groups that are no powers of two, with ties of experts and groups, and a row of NaN next to them."""
    x, weights, _ = drawn(9)
    each = {10: 2, 5: 4}.get(groups, 3)
    count, draw = groups * each, Draw(3, HERE)
    router, bias = draw.normal(count, D, dtype=dtype), draw.normal(count, scale=0.5)
    router[each : 2 * each], bias[each : 2 * each] = router[:each], bias[:each]  # equal groups: the first one wins
    router[1], bias[1] = router[0], bias[0]
    experts = {name: draw.normal(count, *shape, dtype=dtype, scale=shape[-1] ** -0.5)
               for name, shape in (("gate_up", (2 * INNER, D)), ("down", (D, INNER)))}  # fmt: skip
    shared = {f"shared_{name}": getattr(weights, f"shared_{name}").to(dtype) for name in ("gate_up", "down")}
    weights = ExpertWeights(router=router, **experts, **shared, shared_gate=None, router_bias=bias, groups=groups,
                            groups_per_token=best, scale=2.446)  # fmt: skip
    x = x.to(dtype)
    wide = replace(weights, **{at: w.double() for at, w in vars(weights).items() if isinstance(w, torch.Tensor)})
    given = {"top_k": 2, "norm_topk": True, "to": Place("trunk", 0, "mlp")}
    truth = PLAIN.moe(x=x.double(), weights=wide, **given)
    x[4] = torch.nan
    found = load(ops).moe(x=x, weights=weights, **given)
    assert found[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    error = 2.0**-8 if dtype is BF16 else 1e-5
    torch.testing.assert_close(found[others].double(), truth[others], rtol=error, atol=error * float(truth.abs().max()))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_of_padding_reach_no_other_row() -> None:
    """Not even a row of NaN, which takes the place of an expert's rows."""
    x, weights, top = drawn(6)
    alone = grouped(x, weights, top, True)
    x[2], x[4] = torch.nan, 0.0
    found, others = grouped(x, weights, top, True), [0, 1, 3, 5]
    assert found[2].isnan().all() and not found[4].any()
    # Interpreted, sums of other tiles differ by fp32's rounding, which may turn one rounding to bf16: one ulp.
    close = torch.equal if NATIVE else partial(torch.allclose, rtol=2.0**-7)
    assert close(found[others], alone[others])


@pytest.mark.skipif(not NATIVE, reason="the interpreter's products sum the rows of one tile in several orders")
@pytest.mark.parametrize("call", [drawn, idle, crowded, tied])
def test_a_row_has_the_same_bits_alone(call: Callable[[int], tuple[torch.Tensor, ExpertWeights, int]]) -> None:
    x, weights, top = call(2 * TALL - 1)
    together = grouped(x, weights, top, True)
    for row in (0, 17, 2 * TALL - 2):
        assert torch.equal(grouped(x[row : row + 1], weights, top, True)[0], together[row])


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("draw", ["any", "one", "last", "few"])
def test_every_pair_is_in_one_block_of_its_expert(draw: str, compact: bool) -> None:
    """In the order of rows, in the fewest blocks; an unowned block has no rows."""
    pairs, tall, count = 90, 4, 7
    chosen = torch.randint(0, count, (pairs,), generator=torch.Generator().manual_seed(1))
    chosen = {"any": chosen, "one": chosen * 0, "last": chosen * 0 + count - 1, "few": chosen // 3 * 3}[draw]
    room = pairs if compact else ceil_div(pairs, tall) + count
    order, blocks = torch.full((pairs,), -7), torch.zeros(3, room, dtype=torch.int64)
    mine, order, blocks = (x.to(HERE, torch.int32) for x in (chosen, order, blocks))
    launch(_moe_sort, (3,), mine, order, blocks, room, pairs, COMPACT=compact, RT=tall, PT=32, QT=64)
    found: dict[int, list[int]] = {}
    lines = blocks.T.tolist()
    for rows, first, expert in lines:
        assert 0 <= rows <= tall
        found.setdefault(expert, []).extend(order[first : first + rows].tolist()) if rows else None
    assert found == {int(e): torch.where(chosen == e)[0].tolist() for e in chosen.unique()}
    assert sum(rows > 0 for rows, *_ in lines) == sum(ceil_div(len(one), tall) for one in found.values())


def test_a_row_adds_its_experts_in_the_order_of_choice() -> None:
    """Bit by bit, whatever the other rows: a sum in another order has other bits here."""
    rows, each, width = 3, 5, 40
    draw = Draw(4, HERE)
    answer, share = draw.normal(rows * each, width) * 10.0 ** draw.normal(rows * each, 1), draw.normal(rows, each).abs()
    out = torch.empty(rows, width, device=HERE)
    launch(_moe_mix, (1, rows), answer, share, out, width, EACH=each, DT=64)
    terms = share[:, :, None] * answer.view(rows, each, width)
    ordered = torch.zeros(rows, width, device=HERE)
    for n in range(each):
        ordered = ordered + terms[:, n]
    backwards = ((terms[:, 4] + terms[:, 3]) + terms[:, 2]) + terms[:, 1] + terms[:, 0]
    assert torch.equal(out, ordered) and not torch.equal(ordered, backwards)
