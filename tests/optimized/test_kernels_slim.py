"""Products of few rows: right at every size, also where no tile fits, and each row by itself.

Leaves out: which sizes take them on a GPU (`instep bench`), and the library's products.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from instep.kit.cases.case import BF16, Draw, at
from instep.kit.cases.guarded_pools import same_bits
from instep.kit.cases.paged_kv import Reading, attend_case
from instep_optimized.kernels.attention import dispatch as attend_file
from instep_optimized.kernels.decisions.argmax_and_acceptance import pick
from instep_optimized.kernels.products import few_rows, linear
from instep_optimized.kernels.products.few_rows import fits, product
from instep_optimized.ops.triton import TRITON
from support.kernels.overlapped_launches import same_in_a_graph
from support.kernels.planted import on_device, planted_kernels
from support.running.covering import few
from support.running.recorded_calls import calls_of

HERE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = HERE == "cuda"
pytestmark = [pytest.mark.gpu if NATIVE else pytest.mark.interpreted]
SIZES = [(1, 16, 16), (4, 300, 520), (5, 24, 48), (16, 256, 512), (17, 33, 40), (32, 288, 24)]


def in_wider(draw: Draw, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A part of something wider, which is NaN."""
    every = torch.full((rows + 1, columns + 8), torch.nan, dtype=dtype, device=HERE)
    every[:rows, :columns] = draw.normal(rows, columns, scale=columns**-0.25).to(dtype)
    return every[:rows, :columns]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_product_of_few_rows_is_right(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, depth: int, dtype: torch.dtype, gated: bool
) -> None:
    """Rows and weights are parts of something wider, whose other numbers are NaN."""
    draw = Draw(rows, HERE)
    monkeypatch.setattr(few_rows, "staged", None)
    monkeypatch.setattr(few_rows, "shape_for", lambda *_: {"NT": 32, "KT": 64, "warps": 4, "stages": 3})
    monkeypatch.setattr(few_rows, "tile", lambda native, _: native)
    x, weight = (in_wider(draw, n, depth, dtype) for n in (rows, columns * (1 + gated)))
    found, wide = product(x, weight, gated), x.double() @ weight.double().T
    truth = silu(wide[:, :columns]) * wide[:, columns:] if gated else wide
    assert found.shape == (rows, columns) and found.dtype == dtype
    near = torch.finfo(dtype).eps  # one rounding is half of it
    # Sums of at most 520 terms: 23 (their root) roundings of 2 ** -25 of a partial sum are 2 ** -20.5; six times that.
    torch.testing.assert_close(found.double(), truth, rtol=near, atol=2.0**-18 * float(truth.abs().max()))
    x[: rows // 2] = torch.nan
    last = product(x, weight, gated)[rows // 2 :]
    assert torch.equal(last, found[rows // 2 :]), "a row is its own, whatever the others hold"


@few(1)
@pytest.mark.parametrize("rows", [2, 32])
def test_many_columns_of_few_rows_have_a_sum_of_each_half(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """And a result in fp32 has one sum, as it is declared."""
    monkeypatch.setattr(few_rows, "staged", None)
    monkeypatch.setattr(few_rows, "shape_for", lambda *_: {"NT": 32, "KT": 64, "warps": 4, "stages": 3})
    monkeypatch.setattr(few_rows, "tile", lambda native, _: native)
    halved = few_rows.halved(32, 4096, 700), few_rows.halved(1, 4096, 256), few_rows.halved(33, 4096, 700)
    assert halved == (512, 256, 700)
    draw = Draw(rows, HERE)
    x, weight = (draw.normal(n, 420, scale=420**-0.25).to(BF16) for n in (rows, 4100))
    halves = [product(x[:, at_k], weight[:, at_k], dtype=torch.float32) for at_k in (slice(256), slice(256, None))]
    found, whole = product(x, weight), product(x, weight, dtype=torch.float32)
    assert torch.equal(found, (halves[0] + halves[1]).to(BF16)) and not torch.equal(whole, halves[0] + halves[1])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("columns", [32, 300])
def test_a_pick_without_logits_is_the_pick_of_the_logits(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """The lowest column on a tie, also of two tiles; a NaN, and a row of nothing else, as in `pick`."""
    draw = Draw(columns, HERE)
    monkeypatch.setattr(few_rows, "staged", None)
    monkeypatch.setattr(few_rows, "shape_for", lambda *_: {"NT": 32, "KT": 64, "warps": 4, "stages": 3})
    monkeypatch.setattr(few_rows, "tile", lambda native, _: native)
    monkeypatch.setattr(linear, "fits", lambda *_, **__: True)
    # Whole numbers: their sums are exact, so equal columns have equal logits whatever a library does with columns.
    x, weight = ((4 * draw.normal(n, 72)).round().to(BF16) for n in (7, columns))
    weight[columns // 2 :] = weight[: columns - columns // 2].clone()  # every largest one occurs twice
    weight[5], x[3] = torch.nan, torch.nan
    found = linear.head_pick(x=x, weight=weight, to=(at("logits"), at("pick")))
    logits = product(x, weight, dtype=torch.float32)
    assert logits[0].isnan().any() and logits[3].isnan().all() and len(set(found.tolist())) > 3
    assert torch.equal(found, pick(logits=logits, to=at("pick"))) and bool((found < columns // 2).all())


def test_unsupported_shape_uses_the_library() -> None:
    weight = torch.zeros(2048, 16, dtype=BF16, device=HERE)
    for x in (weight[:0], weight.float()[:4], weight.T[:4], torch.zeros(4096, 16, dtype=BF16, device=HERE)):
        assert not fits(x, weight)
    assert fits(weight[:4], weight) is NATIVE and not fits(weight[:4], weight[:32])
    asked = ((512, False), (4096, False), (12352, False), (248320, False), (12288, True))
    sizes = [(rows, columns, gated) for rows in (1, 32, 33, 128) for columns, gated in asked]
    assert {size for size in sizes if few_rows.shape_for(*size) is None} == {
        *((rows, 512, False) for rows in (1, 32, 128)), *((rows, 4096, False) for rows in (32, 128)),
        *((33, columns, gated) for columns, gated in asked)}  # fmt: skip


# Rows, columns and K. Some have more steps than places, some fewer; some have more tiles than programs.
FEW = ((1, 4096, 1024), (8, 12352, 512), (8, 12353, 2048), (13, 4104, 264), (16, 20000, 1024), (32, 9000, 4096))
MANY = ((128, 12300, 520), (100, 12300, 200), (65, 12288, 1024), (128, 20000, 1040))


@pytest.mark.skipif(not NATIVE, reason="no CUDA device here")
@pytest.mark.parametrize(("sizes", "gated", "wide"), [
    (FEW, False, None), (FEW, True, None), (MANY, False, None), (MANY, True, None), (MANY, False, torch.float32),
], ids=["in pairs", "gated", "many", "many, gated", "many, logits"])  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_explicit_layouts_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sizes: tuple[tuple[int, int, int], ...], gated: bool,
    wide: torch.dtype | None,
) -> None:
    """This includes partial tiles, and rows and weights inside memory that is NaN otherwise; repeatedly.

    wide: fp32 results, of which `head_pick`, which stores none, must pick as `pick` does. Two columns are equal, one in
    the first tile and one in the last, and the largest of the first row.
    """
    taken, draw = calls_of(monkeypatch, few_rows.staged, "product", lambda x, *_: len(x)), Draw(5, HERE)
    for number, (rows, columns, depth) in enumerate(sizes):
        x, weight = (in_wider(draw, n, depth, dtype) for n in (rows, columns * (1 + gated)))
        weight[5] = weight[columns - 1] = 4 * x[0]
        found = [product(x, weight, gated, wide) for _ in range(4)]
        assert len(taken) == 4 * (number + 1), "explicit layouts serve"
        with monkeypatch.context() as patch:
            patch.setattr(few_rows, "staged", None)
            patch.setattr(few_rows, "shape_for", lambda *_: few_rows.LONG)
            twin = product(x, weight, gated, wide)
        if wide is not None:
            picked = linear.head_pick(x=x, weight=weight, to=(at("logits"), at("pick")))
            assert torch.equal(picked, pick(logits=found[0], to=at("pick"))) and int(picked[0]) == 5
        assert twin.isfinite().all() and all(torch.equal(one, twin) for one in found), (rows, columns, depth)


ROWS_FIRST = "    at = work[0], work[3]\n    if EARLY:\n        gdc_wait()\n"
QUERIES = "DT // 8], [W, 1], [1, 0])\n    if EARLY:\n        gdc_wait()\n"


def early(text: str) -> tuple[tuple[str, str]]:
    return ((text, text.partition("    if EARLY")[0]),)


EARLY_FAULTS = {  # in which file something is not waited for
    "nothing": None, "rows at once": ("products.few_rows_gluon", early(ROWS_FIRST)),
    "queries at once": ("attention.split_kv_gluon", early(QUERIES)),
}  # fmt: skip


@pytest.mark.parametrize(("before", "fault"), [
    ("norm", "nothing"), ("norm", "rows at once"), ("attention", "nothing"), ("attention", "rows at once"),
    ("attention", "queries at once"),
])  # fmt: skip
def test_a_product_that_begins_early_reads_the_rows_of_the_launch_before(
    before: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a graph, where launches overlap: products of several weights, and between them the kernels that make their
    rows.

    A product starts as soon as the kernel that joins parts of attention has. Attention reads rows of a product.
    """
    plant = EARLY_FAULTS[fault]
    on_device(*([] if plant is None else [plant]))
    draw = Draw(7, HERE)
    weights = [draw.normal(4096, 4096, dtype=BF16, scale=4096**-0.5) for _ in range(6)]
    starts, scale = [draw.normal(8, 4096, dtype=BF16) for _ in range(2)], draw.normal(4096, dtype=BF16)
    tables = (tuple(range(1, 18)), tuple(range(18, 35)))
    reading = Reading(tables, before=(1030, 700), count=(4, 4), page_size=64, heads=16, kv_heads=2, head_dim=256)
    pages = attend_case(706, reading, BF16)(HERE).inputs["pages"]
    start, projected = starts[0].clone(), draw.normal(8, 16, 2, 256, dtype=BF16)

    def rows_of(x: torch.Tensor) -> torch.Tensor:
        if before == "norm":
            return TRITON.norm(x=x, weight=scale, eps=1e-6, to=at("normed"))
        return TRITON.gated_attend(query=x.view(8, 16, 256), pages=pages, projected=projected,
                                   to=(at("attended"), at("opened"))).view(8, 4096)  # fmt: skip

    def chain() -> list[torch.Tensor]:
        made = [start]
        for weight in weights:
            made.append(rows_of(made[-1]))
            made.append(product(made[-1], weight))
        return made

    right = []
    for one in starts:
        start.copy_(one)
        right.append([x.clone() for x in chain()])
    if plant is not None:
        name, texts = plant
        other: Any = planted_kernels(name, texts, tmp_path, monkeypatch)
        if name.startswith("products"):
            monkeypatch.setattr(few_rows, "staged", other)
        else:
            monkeypatch.setattr(attend_file.windows, "read_parts_staged", other.read_parts_staged)
        chain()
    same = same_in_a_graph(chain, start, starts, right)
    assert all(same) is (fault == "nothing"), f"{same.count(False)} of {len(same)} are other rows"


WAITS, COMES = "    _wait(box + TAKEN, (message + 1) & 1)", "    _wait_a_while(box, message & 1)"
SENT = "[at, value, box + at * 0], gl.int32, False, FOUR)\n"
PARTED = "begin, end = gl.where(rank() > 0, cut, 0), gl.where(rank() > 0, steps, cut)"
FIRST = "            mbarrier.wait(come.index(place), 0)\n"
GIVEN = "    return found.to(gl.float32"
NEVER = ("b64 [$1], 1;", "b64 [$1], 9;")  # two messages before one was awaited would end the launch with an error
# Products of pairs of programs: the file, the old text and the fault; columns, and the number of the 32 steps of K that
# the first program sums. The program that has to wait has fewer steps than the other.
FAULTS = {
    "a message of one half only": ("pairs", (("(row // 16 * 8 + row % 8)", "(row % 8)"),), 4096, 16),
    "a first that stores the second's": ("few_rows_gluon", (("total += received", "total = received"),), 4096, 16),
    "a second that begins with the first": ("few_rows_gluon", ((PARTED, "begin, end = cut * 0, cut"),), 4096, 16),
    "no wait for the first weights": ("few_rows_gluon", ((FIRST, "            pass\n"),), 4096, 16),
    "a first that waits when it has read": ("pairs", ((COMES, "    "), (GIVEN, f"{COMES}\n{GIVEN}")), 4096, 1),
    "a second that waits when it has sent": ("pairs", (NEVER, (WAITS, "    "), (SENT, SENT + WAITS)), 8448, 31),
}
SOUND = {"nothing": ("pairs", (), 8448, 31), "no message is announced": ("pairs", (NEVER,), 8448, 31)}
GIVES_UP = """

_NO_LONGER = gl.constexpr(
    "{ .reg .pred p, q; .reg .u32 n; mov.u32 n, 0; again: mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; "
    "add.u32 n, n, 1; setp.lt.u32 q, n, 65536; @p bra done; @q bra again; done: mov.u32 $0, 0; }"
)


@gluon.jit
def _wait_a_while(address, phase):
    gl.inline_asm_elementwise(_NO_LONGER, "=r,r,r", [address, phase], gl.int32, False, 1)

"""


def second_launch(
    x: torch.Tensor, weight: torch.Tensor, gated: bool, shape: dict[str, int], tall: int, by: Any
) -> torch.Tensor:
    """Values that a launch leaves in shared memory must not be what the next one waits for."""
    out = torch.full((tall, len(weight) // (1 + gated)), torch.nan, dtype=BF16, device=HERE)
    for rows, weights in ((-x, 2 * weight), (x, weight)):
        by.product(rows, weights, gated, out[: len(x)], shape)
    return out


@pytest.mark.parametrize("fault", [*SOUND, *FAULTS])
def test_a_fault_of_a_pair_changes_bits(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first program that waits in vain continues after a while, or else a fault would hold the device forever."""
    place, texts, columns, cut = (SOUND | FAULTS)[fault]
    begin, uses = "HEAD = gl.constexpr(", (("from .cluster_pair_messages", "from .planted_cluster_pair_messages"),)
    bounded = ((begin, GIVES_UP + begin), (COMES.replace("_wait_a_while", "_wait"), COMES))
    its = {place: texts}
    pairs, rows = bounded + its.get("pairs", ()), uses + its.get("few_rows_gluon", ())
    on_device(("products.cluster_pair_messages", pairs), ("products.few_rows_gluon", rows))
    planted_kernels("products.cluster_pair_messages", pairs, tmp_path, monkeypatch)
    other = planted_kernels("products.few_rows_gluon", rows, tmp_path, monkeypatch)
    draw = Draw(11, HERE)
    x, weight = (draw.normal(n, 4096, dtype=BF16, scale=4096**-0.25) for n in (8, columns))
    shape = few_rows.STAGED[8, False][0][1] | {"MT": 8, "cut": cut}
    served = partial(second_launch, x, weight, False, shape, 8)
    right = served(few_rows.staged)
    torch.testing.assert_close(right.float(), x.float() @ weight.float().T, rtol=2**-7, atol=2**-7)
    assert all(torch.equal(served(other), right) is (fault in SOUND) for _ in range(3))


# Gated products, which have no pairs: the file, the old text and the fault. The product of 128 rows
# has another file. It gets 100 rows, in memory of 128.
PARTS_ASK, INSIDE = "step, steps, columns, P, KT, STEPS, ALONE)", "(m < rows) & (n < columns)"
FIRST_ROWS = "_ask_rows(x, given.index(step), full.index(step), at, work, KT)\n        at = _behind(at, work)\n"
GATED_FAULTS = {
    "nothing of 8 rows": ("few_rows_gluon", ()),
    "no wait for the first weights": ("few_rows_gluon", ((FIRST, "            pass\n"),)),
    "waits only for the first loads": ("few_rows_gluon", (("at + step < STEPS:", "at + step < AT_ONCE:"),)),
    "weights of a first step again": ("few_rows_gluon", (("for _ in gl.static_range(AT_ONCE)",
                                                       "for _ in gl.static_range(AT_ONCE - 1)"),)),
    "rows of the first step again": ("few_rows_gluon", ((FIRST_ROWS, FIRST_ROWS.splitlines(keepends=True)[0]),)),
    "nothing of 128 rows": ("gated_128_rows_gluon", ()),
    "no wait for the first weights of 128 rows": ("gated_128_rows_gluon", ((FIRST, "            pass\n"),)),
    "128 rows wait only for the first loads": ("gated_128_rows_gluon", (("if at < STEPS:", "if at < AT_ONCE:"),)),
    "weights of a first step of 128 rows again": ("gated_128_rows_gluon", ((PARTS_ASK, f"step - 1, {PARTS_ASK[6:]}"),)),
    "a gate in the place of up": ("gated_128_rows_gluon", (("[column + P + columns, k]", "[column + P, k]"),)),
    "rows after the last one": ("gated_128_rows_gluon", ((INSIDE, "n < columns"),)),
}  # fmt: skip


LOGITS_FAULTS = {  # old text and fault
    "nothing": (),
    "rows after the last one": ((INSIDE, "n < columns"),),
    "a column too far": ((INSIDE, "(m < rows) & (n <= columns)"),),
    "rounded to 16 bits": (("            found = total\n", "            found = total.to(gl.bfloat16).to(DTYPE)\n"),),
}


@pytest.mark.parametrize("fault", LOGITS_FAULTS)
def test_a_fault_of_logits_changes_bits(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(("products.few_rows_gluon", LOGITS_FAULTS[fault]))
    draw, columns, rows = Draw(13, HERE), 20001, 100
    x, weight = (draw.normal(n, 1024, dtype=BF16, scale=1024**-0.25) for n in (rows, columns))
    shape = few_rows.STAGED[128, False][0][1] | {"MT": 128, "cut": 0}
    other = planted_kernels("products.few_rows_gluon", LOGITS_FAULTS[fault], tmp_path, monkeypatch)

    def served(by: Any) -> torch.Tensor:
        out = torch.full((128, columns), torch.nan, device=HERE)
        by.product(x, weight, False, out[:rows], shape)
        return out.nan_to_num(7.0)

    right = served(few_rows.staged)
    # Each of 64 steps cuts what it adds below 2 ** -23 of a partial sum, which is below 2 ** 5: 2 ** -12. Torch's own
    # sum in fp32 is off by the root of 1024 terms times 2 ** -24 of such a sum: 2 ** -14. Three times both is 2 ** -10.
    torch.testing.assert_close(right[:rows], x.float() @ weight.float().T, rtol=2**-10, atol=2**-10)
    assert torch.equal(served(other), right) is (fault == "nothing")


@pytest.mark.parametrize("fault", GATED_FAULTS)
def test_a_fault_of_a_gated_product_changes_bits(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, texts = GATED_FAULTS[fault]
    on_device((f"products.{place}", texts))
    rows, tall, columns = (8, 8, 8448) if place == "few_rows_gluon" else (100, 128, 12288)
    draw = Draw(12, HERE)
    x, weight = (draw.normal(n, 1024, dtype=BF16, scale=1024**-0.25) for n in (rows, 2 * columns))
    shape = few_rows.STAGED[tall, True][0][1] | {"MT": tall, "cut": 0}
    served = partial(second_launch, x, weight, True, shape, 128)
    right, other = served(few_rows.staged), planted_kernels(f"products.{place}", texts, tmp_path, monkeypatch)
    if place == "gated_128_rows_gluon":
        monkeypatch.setattr(few_rows.staged, "_linear_parts", other._linear_parts)
        other = few_rows.staged
    wide = x.float() @ weight.float().T
    truth = silu(wide[:, :columns]) * wide[:, columns:]
    torch.testing.assert_close(right[:rows].float(), truth, rtol=2**-7, atol=2**-7)
    found = [served(other) for _ in range(3)]
    same = [same_bits(one, right) for one in found]
    assert all(same) if not texts else not any(same), same


def test_explicit_layouts_are_for_some_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon")
    weight = torch.zeros(4096, 512, dtype=BF16)
    monkeypatch.setattr(few_rows, "staged", _Hopper)
    assert few_rows._ahead(weight[:4], weight, False) is not None and few_rows._ahead(weight[:4], weight, True) is None
    assert few_rows._ahead(weight[:33], weight, False) is None and few_rows._ahead(weight[:0], weight, False) is None
    assert few_rows._ahead(weight[:4, :256], weight[:, :256], False) is None, "there is no second half"
    many = torch.zeros(20480, 512, dtype=BF16)
    served = {(rows, gated, wide): few_rows._ahead(many[:rows], many, gated, wide) is not None
              for rows in (4, 128) for gated in (False, True) for wide in (False, True)}  # fmt: skip
    assert [form for form, here in served.items() if not here] == [
        (4, False, True), (4, True, True), (128, True, True)], "fp32 results are of one sum that is not gated"


class _Hopper:
    """The answer of `few_rows_gluon.fits` where it can give one."""

    @staticmethod
    def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
        return True
