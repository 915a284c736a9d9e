"""Products of few rows: right at every size, also where no tile fits, and each row by itself.

Leaves out: which sizes take them on a GPU (`instep bench`), and the library's products.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from instep.kit.cases.case import BF16, Draw, at
from instep_optimized.kernels import products, slim
from instep_optimized.kernels.pick import pick
from instep_optimized.kernels.slim import fits, product

HERE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = HERE == "cuda"
pytestmark = [pytest.mark.gpu if NATIVE else pytest.mark.interpreted]
SIZES = [(1, 16, 16), (4, 300, 520), (5, 24, 48), (16, 256, 512), (17, 33, 40), (32, 288, 24)]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_product_of_few_rows_is_right(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, depth: int, dtype: torch.dtype, gated: bool
) -> None:
    """Rows and weights are parts of something wider, whose other numbers are NaN."""
    draw = Draw(rows, HERE)
    monkeypatch.setattr(slim, "shape_for", lambda *_: {"NT": 32, "KT": 64, "warps": 4, "stages": 3})
    monkeypatch.setattr(slim, "tile", lambda native, _: native)

    def view(*shape: int) -> torch.Tensor:
        every = torch.full((shape[0] + 1, shape[1] + 8), torch.nan, dtype=dtype, device=HERE)
        every[: shape[0], : shape[1]] = draw.normal(*shape, scale=shape[1] ** -0.25).to(dtype)
        return every[: shape[0], : shape[1]]

    x, weight = view(rows, depth), view(columns * (1 + gated), depth)
    found, wide = product(x, weight, gated), x.double() @ weight.double().T
    truth = silu(wide[:, :columns]) * wide[:, columns:] if gated else wide
    assert found.shape == (rows, columns) and found.dtype == dtype
    near = torch.finfo(dtype).eps  # one rounding is half of it
    # Sums of at most 520 terms: 23 (their root) roundings of 2 ** -25 of a partial sum are 2 ** -20.5; six times that.
    torch.testing.assert_close(found.double(), truth, rtol=near, atol=2.0**-18 * float(truth.abs().max()))
    x[: rows // 2] = torch.nan
    last = product(x, weight, gated)[rows // 2 :]
    assert torch.equal(last, found[rows // 2 :]), "a row is its own, whatever the others hold"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("columns", [32, 300])
def test_a_pick_without_logits_is_the_pick_of_the_logits(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """The lowest column on a tie, also of two tiles; a NaN, and a row of nothing else, as in `pick`."""
    draw = Draw(columns, HERE)
    monkeypatch.setattr(slim, "shape_for", lambda *_: {"NT": 32, "KT": 64, "warps": 4, "stages": 3})
    monkeypatch.setattr(slim, "tile", lambda native, _: native)
    monkeypatch.setattr(products, "fits", lambda *_: True)
    x, weight = (draw.normal(n, 72, dtype=BF16) for n in (7, columns))
    weight[columns // 2 :] = weight[: columns - columns // 2].clone()  # every largest one stands twice
    weight[5], x[3] = torch.nan, torch.nan
    found = products.head_pick(x=x, weight=weight, to=(at("logits"), at("pick")))
    logits = product(x, weight, dtype=torch.float32)
    assert logits[0].isnan().any() and logits[3].isnan().all() and len(set(found.tolist())) > 3
    assert torch.equal(found, pick(logits=logits, to=at("pick"))) and bool((found < columns // 2).all())


def test_what_it_is_not_meant_for_is_the_librarys() -> None:
    weight = torch.zeros(2048, 16, dtype=BF16, device=HERE)
    for x in (weight[:0], weight.float()[:4], weight.T[:4], torch.zeros(4096, 16, dtype=BF16, device=HERE)):
        assert not fits(x, weight)
    assert fits(weight[:4], weight) is NATIVE and not fits(weight[:4], weight[:32])
    asked = ((512, False), (4096, False), (12352, False), (248320, False), (12288, True))
    sizes = [(rows, columns, gated) for rows in (1, 32, 33, 128) for columns, gated in asked]
    assert {size for size in sizes if slim.shape_for(*size) is None} == {
        *((rows, 512, False) for rows in (1, 32, 128)), *((rows, 4096, False) for rows in (32, 128)),
        *((33, columns, gated) for columns, gated in asked)}  # fmt: skip
