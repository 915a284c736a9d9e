"""The `invariant` ops give a row the same correct bits alone and at any place in any batch.

Leaves out: whole engines (`test_invariant_engine.py`) and ops that only move rows. Every body runs interpreted on a CPU
at small sizes, native on a GPU at sizes where a kernel that follows the number of rows would differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from instep.kit.cases import CASES
from instep.kit.cases.case import BF16, FP32, Call, Case, Draw, Inputs, at, serve
from instep.kit.cases.conv_and_gdn import Heads
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.kernels.attention.dispatch import Shape, read
from instep_optimized.kernels.invariant.linear import multiply
from instep_optimized.memory_addresses import Address, Pages, Part
from instep_optimized.ops.attention_protocols import LatentInputs
from instep_optimized.ops.op_protocols import ExpertWeights, GdnInputs, Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.row_invariant_triton import INVARIANT
from instep_reference.contract.place_names import Place
from support.independent.op_agreement import agree
from support.running.covering import WHOLE, few
from support.worlds.rings import delta_rows

HERE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = HERE == "cuda"
pytestmark = [pytest.mark.gpu if NATIVE else pytest.mark.interpreted]
MOST_ROWS = 130 if NATIVE else 20  # past two tiles of rows
FEW_ROWS = MOST_ROWS if NATIVE else 3  # each row has separate programs, which are slow when interpreted
MOST_TOKENS = 40 if NATIVE else 18  # of a request; a chunk has two blocks of 16 then
SOME = settings(max_examples=40 if NATIVE else 4, deadline=None)
REPLACED = ("linear", "mlp", "squared_mlp", "moe", "lm_head", "attend", "attend_latents")
D, INNER, OUT = (1024, 528, 2064) if NATIVE else (80, 24, 40)
H, HV, K, V, W = (4, 8, 64, 128, 4) if NATIVE else (2, 4, 8, 16, 4)
HEADS, KV_HEADS, HEAD, LATENT = (8, 2, 128, 96) if NATIVE else (4, 2, 16, 20)
EXPERTS, PAGE_SIZES = (32, (1, 16, 64)) if NATIVE else (6, (1, 3, 8))


@dataclass(frozen=True)
class Subject:
    """An op, what it is given row by row, and what it is given once for all rows."""

    op: str
    rows: Callable[[Draw, int, torch.dtype], Inputs]
    rest: Callable[[Draw, torch.dtype], Inputs]
    most_rows: int = MOST_ROWS


def hidden(draw: Draw, count: int, dtype: torch.dtype) -> Inputs:
    return {"x": draw.normal(count, D, dtype=dtype)}


def experts(shared: bool) -> Callable[[Draw, torch.dtype], Inputs]:
    def rest(draw: Draw, dtype: torch.dtype) -> Inputs:
        def weight(*shape: int) -> torch.Tensor:
            return draw.normal(*shape, dtype=dtype, scale=shape[-1] ** -0.5)

        weights = ExpertWeights(
            weight(EXPERTS, D), weight(EXPERTS, 2 * INNER, D), weight(EXPERTS, D, INNER),
            *((weight(2 * INNER, D), weight(D, INNER), weight(1, D)) if shared else (None, None, None)),
        )  # fmt: skip
        return {"weights": weights, "top_k": 3, "norm_topk": shared, "to": at("mlp")}

    return rest


def sigmoid_experts(draw: Draw, dtype: torch.dtype) -> Inputs:
    """In three groups, with a shared expert that has no gate."""
    given = experts(shared=True)(draw, dtype)
    bias = draw.normal(EXPERTS // 3 * 3)
    weights = {name: getattr(given["weights"], name)[: len(bias)] for name in ("router", "gate_up", "down")}
    return {**given, "weights": replace(
        given["weights"], **weights, shared_gate=None, router_bias=bias, groups=3, groups_per_token=2)}


def latent_experts(draw: Draw, dtype: torch.dtype) -> Inputs:
    """Without gates, over latents, next to a shared expert that reads rows."""
    given = sigmoid_experts(draw, dtype)
    weights, latents = given["weights"], draw.normal(D // 2, D, dtype=dtype, scale=D**-0.5)
    return {**given, "weights": replace(
        weights, gate_up=weights.gate_up[:, :INNER, : D // 2].contiguous(), down=weights.down[:, : D // 2].contiguous(),
        shared_gate_up=weights.shared_gate_up[:INNER], gated=False, to_latent=latents,
        from_latent=latents.t().contiguous())}


def mixed(draw: Draw, count: int, dtype: torch.dtype) -> Inputs:
    gates = {name: draw.normal(count, HV, dtype=dtype) for name in ("a", "b")}
    return {"mixed": draw.normal(count, 2 * H * K + HV * V, dtype=dtype), **gates}


def raw_heads(draw: Draw, count: int, dtype: torch.dtype) -> Inputs:
    return {
        "projected": draw.normal(count, HEADS, 2, HEAD, dtype=dtype),
        "key_raw": draw.normal(count, KV_HEADS, HEAD, dtype=dtype),
        "positions": torch.randint(0, 100_000, (count,), generator=draw.source).to(draw.device),
    }


SUBJECTS: dict[str, Subject] = {
    "linear": Subject("linear", hidden, lambda draw, dtype: {
        "weight": draw.normal(OUT, D, dtype=dtype, scale=D**-0.5), "shape": (2, OUT // 2), "to": at("z")}),
    "linear, few columns": Subject("linear", hidden, lambda draw, dtype: {
        "weight": draw.normal(3, D, dtype=dtype, scale=D**-0.5), "shape": (3,), "to": at("b")}),
    "mlp": Subject("mlp", hidden, lambda draw, dtype: {
        "gate_up": draw.normal(2 * INNER, D, dtype=dtype, scale=D**-0.5),
        "down": draw.normal(D, INNER, dtype=dtype, scale=INNER**-0.5), "to": at("mlp")}),
    "moe": Subject("moe", hidden, experts(shared=True), FEW_ROWS),
    "moe without a shared expert": Subject("moe", hidden, experts(shared=False), FEW_ROWS),
    "moe with a sigmoid router": Subject("moe", hidden, sigmoid_experts, FEW_ROWS),
    "moe over latents": Subject("moe", hidden, latent_experts, FEW_ROWS),
    "lm_head": Subject("lm_head", hidden, lambda draw, dtype: {
        "weight": draw.normal(OUT + 1, D, dtype=dtype), "to": at("logits")}),
    "norm": Subject("norm", hidden, lambda draw, dtype: {
        "weight": draw.normal(D, dtype=dtype), "eps": 1e-6, "to": at("normed")}),
    "gated_norm": Subject(
        "gated_norm",
        lambda draw, count, dtype: {name: draw.normal(count, HV, V, dtype=dtype) for name in ("core", "z")},
        lambda draw, dtype: {"weight": draw.normal(V), "eps": 1e-6, "gate": "silu", "to": at("gated")}),
    "gdn_inputs": Subject("gdn_inputs", mixed, lambda draw, dtype: {
        "A_log": draw.normal(HV), "dt_bias": draw.normal(HV, dtype=dtype), "key_heads": H, "key_dim": K,
        "to": tuple(map(at, GdnInputs._fields))}),
    "attention_inputs": Subject("attention_inputs", raw_heads, lambda draw, dtype: {
        "q_norm": draw.normal(HEAD, dtype=dtype), "k_norm": draw.normal(HEAD, dtype=dtype), "eps": 1e-6,
        "rotary_dim": HEAD // 2, "theta": 1e7, "to": (at("query"), at("key"))}),
    "output_gate": Subject("output_gate", lambda draw, count, dtype: {
        "attended": draw.normal(count, HEADS, HEAD, dtype=dtype),
        "projected": draw.normal(count, HEADS, 2, HEAD, dtype=dtype)}, lambda draw, dtype: {"to": at("opened")}),
    "latent_inputs": Subject("latent_inputs", lambda draw, count, dtype: {
        "projected": draw.normal(count, HEADS, HEAD + 1, dtype=dtype),
        "key_raw": draw.normal(count, 1, LATENT + HEAD // 2, dtype=dtype),
        "positions": raw_heads(draw, count, dtype)["positions"]}, lambda draw, dtype: {
        "norm": draw.normal(LATENT, dtype=dtype), "eps": 1e-6, "rotary_dim": HEAD // 2, "theta": 6e6,
        "to": tuple(map(at, LatentInputs._fields))}),
    "pick": Subject("pick", lambda draw, count, dtype: {"logits": draw.normal(count, OUT, dtype=dtype)},
                    lambda draw, dtype: {"to": at("pick")}),
}  # fmt: skip


def answers(ops: Ops, op: str, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    result = getattr(ops, op)(**inputs)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def row_is_its_own(
    ops: Ops, subject: Subject, dtype: torch.dtype, count: int, place: int, scale: float, seed: int = 0
) -> bool:
    """Whether a row has the same bits alone and at `place` among `count` rows, the others drawn and times `scale`."""
    rest = subject.rest(Draw(seed, HERE), dtype)
    mine, others = subject.rows(Draw(seed + 1, HERE), 1, dtype), subject.rows(Draw(seed + 2, HERE), count, dtype)
    for name, rows in others.items():
        if rows.is_floating_point():
            rows *= scale
        rows[place] = mine[name][0]
    alone, among = (answers(ops, subject.op, {**rows, **rest}) for rows in (mine, others))
    return all(same_bits(x[:1], y[place : place + 1]) for x, y in zip(alone, among, strict=True))


@few(8)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
@SOME
@given(count=st.integers(1, MOST_ROWS), place=st.integers(0, MOST_ROWS), scale=st.sampled_from([1.0, 8.0, 0.0]))
@example(count=MOST_ROWS, place=MOST_ROWS - 1, scale=torch.nan)
@example(count=17, place=16, scale=1.0)
def test_a_row_has_the_same_bits_anywhere_in_any_batch(
    name: str, dtype: torch.dtype, count: int, place: int, scale: float
) -> None:
    subject = SUBJECTS[name]
    count = min(count, subject.most_rows)
    assert row_is_its_own(INVARIANT, subject, dtype, count, place % count, scale)


# Attention: a request's row at one position, read as a decode and as a row among others.


@dataclass(frozen=True)
class Text:
    """A request's queries [L, heads, head_dim] and KV [L, kv_heads, head_dim]; rows first .. first + count run now.

    latent: one head of KV, and latents as values
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    first: int
    count: int

    @classmethod
    def drawn(
        cls, seed: int, length: int, first: int, count: int, dtype: torch.dtype, latent: bool = False
    ) -> Text:
        draw = Draw(seed, HERE)
        shapes = ((1, HEAD // 4), (1, LATENT)) if latent else 2 * ((KV_HEADS, HEAD),)
        kv = (draw.normal(length, *shape, dtype=dtype) for shape in shapes)
        return cls(draw.normal(length, HEADS, HEAD, dtype=dtype), *kv, first, count)


def reading(texts: list[Text], page_size: int, wider: int) -> Inputs:
    """The rows of all texts in one launch; what is not written yet is NaN, the table `wider` than it must be."""
    ends = [text.first + text.count for text in texts]
    needs = [-(-end // page_size) for end in ends]
    table = torch.full((len(texts), max(needs) + wider), -1)
    pools = [torch.full((sum(needs) + 1, page_size, *kv.shape[1:]), torch.nan, dtype=kv.dtype, device=HERE)
             for kv in (texts[0].keys, texts[0].values)]  # fmt: skip
    page = sum(needs)
    for request, (text, end, need) in enumerate(zip(texts, ends, needs, strict=True)):
        table[request, :need] = torch.arange(page, page - need, -1)
        page -= need
        at_page = table[request, torch.arange(end) // page_size].to(HERE)
        entry = torch.arange(end, device=HERE) % page_size
        for pool, rows in zip(pools, (text.keys, text.values), strict=True):
            pool[at_page, entry] = rows[:end]
    counts, draw = [text.count for text in texts], Draw(0, HERE)
    begins = [sum(counts[:i]) for i in range(len(counts))]
    pages = Pages(
        *pools, table.to(HERE), draw.ints(range(len(texts))), draw.ints(begins), draw.ints(counts),
        draw.ints([text.first for text in texts]),
        most=max(counts),
    )  # fmt: skip
    query = torch.cat([text.queries[text.first : end] for text, end in zip(texts, ends, strict=True)])
    return {"query": query, "pages": pages, "to": at("attended")}


def reader_is_its_own(
    ops: Ops, dtype: torch.dtype, position: int, ahead: int, behind: int, neighbour: int, page_size: int = 8,
    latent: bool = False,
) -> bool:
    """Whether the row at `position` has the same bits alone and with `ahead` and `behind` rows of its request around,
    after a request of `neighbour` rows, in a wider table of other pages."""
    first, count = position - min(ahead, position), min(ahead, position) + 1 + behind
    mine = Text.drawn(1, position + behind + 1, first, count, dtype, latent)
    other = Text.drawn(2, position // 2 + neighbour, position // 2, neighbour, dtype, latent)
    attend: Any = ops.attend
    if latent:  # values are wider than keys
        up = Draw(3, HERE).normal(HEADS * (HEAD - HEAD // 4 + HEAD + 8), LATENT, dtype=dtype, scale=LATENT**-0.5)
        attend = partial(ops.attend_latents, up=up)  # type: ignore[arg-type]
    alone = attend(**reading([replace(mine, first=position, count=1)], PAGE_SIZES[1], wider=0))
    among = attend(**reading([other, mine], page_size, wider=3))
    return same_bits(alone[0], among[neighbour + position - first])


@pytest.mark.parametrize(("dtype", "latent"), [
    (FP32, False), (BF16, False), *(pytest.param(dtype, True, marks=WHOLE) for dtype in (FP32, BF16))], ids=str)
@settings(SOME, max_examples=60 if NATIVE else 8)
@given(
    position=st.integers(0, 700 if NATIVE else 40), ahead=st.integers(0, 20), behind=st.integers(0, 20),
    neighbour=st.integers(1, 9), page_size=st.sampled_from(PAGE_SIZES),
)  # fmt: skip
@example(position=15, ahead=0, behind=8, neighbour=1, page_size=8)
@example(position=16, ahead=3, behind=0, neighbour=4, page_size=1)
def test_attention_gives_a_row_the_same_bits_in_decode_verify_and_prefill(
    dtype: torch.dtype, latent: bool, position: int, ahead: int, behind: int, neighbour: int, page_size: int
) -> None:
    assert reader_is_its_own(INVARIANT, dtype, position, ahead, behind, neighbour, page_size, latent)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_later_steps_do_not_reach_a_row_with_any_contents(dtype: torch.dtype) -> None:
    last = 63  # of a step, whatever its length
    text = Text.drawn(4, last + 4, last, 4, dtype)
    alone = INVARIANT.attend(**reading([replace(text, count=1)], 8, wider=0))
    text.keys[last + 1 :], text.values[last + 1 :] = torch.nan, torch.nan
    assert same_bits(alone[0], INVARIANT.attend(**reading([text], 8, wider=0))[0])


# Ops with memory: a request alone and in a batch, with the same rows.


def run(op: str, form: str, counts: list[int], start: torch.Tensor, rows: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Request i in slot i + 1, all of them one after the other; -> answers and memory."""
    draw, pool = Draw(0, HERE), start.clone()
    slots = Address(pool, draw.ints(range(1, len(counts) + 1)))
    begins = draw.ints([sum(counts[:i]) for i in range(len(counts))])
    fresh = torch.zeros(len(counts), dtype=torch.bool, device=HERE)
    part = Part(form, begins, draw.ints(counts), max(counts), slots, fresh, store=slots)  # type: ignore[arg-type]
    (answer,) = answers(INVARIANT, op, {**rows, "parts": (part,), "to": at("core")})
    return answer, pool


def delta_inputs(draw: Draw, rows: int) -> Inputs:
    return {"inputs": delta_rows(draw, Heads(H, HV, K, V), rows), "dtype": FP32}


def conv_rows(draw: Draw, rows: int) -> Inputs:
    return {"x": draw.normal(rows, 2 * H * K), "weight": draw.normal(2 * H * K, W)}


def only(rows: Inputs, span: slice) -> Inputs:
    if "inputs" in rows:
        return {**rows, "inputs": GdnInputs(*(x[span].contiguous() for x in rows["inputs"]))}
    return {**rows, "x": rows["x"][span].contiguous()}


@pytest.mark.parametrize(("op", "form"), [("conv", "chunk"), ("conv", "window"), ("gdn", "chunk"), ("gdn", "window")])
@settings(SOME, max_examples=3)
@given(counts=st.lists(st.integers(1, MOST_TOKENS), min_size=2, max_size=4), chosen=st.integers(0, 3))
def test_a_request_has_the_same_bits_in_any_batch(op: str, form: str, counts: list[int], chosen: int) -> None:
    chosen %= len(counts)
    draw = Draw(9, HERE)
    rows = (delta_inputs if op == "gdn" else conv_rows)(draw, sum(counts))
    memory = draw.normal(6, *((HV, K, V) if op == "gdn" else (2 * H * K, W - 1)))
    span = slice(sum(counts[:chosen]), sum(counts[: chosen + 1]))
    together, pool = run(op, form, counts, memory, rows)
    own_memory = memory[[0, chosen + 1]]
    alone, own_pool = run(op, form, [counts[chosen]], own_memory, only(rows, span))
    assert same_bits(alone, together[span])
    assert same_bits(own_pool[1], pool[chosen + 1])


# They are right, and these tests can fail.


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=WHOLE if case.op == "attend_latents" and "verify" not in case.name else ())
    for case in CASES if case.op in REPLACED], ids=str)
def test_an_invariant_kernel_agrees_with_its_plain_twin(case: Case) -> None:
    assert agree(case, serve(PLAIN, case, HERE), serve(INVARIANT, case, HERE)) == []


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", [name for name, subject in SUBJECTS.items() if subject.op in REPLACED])
def test_invariant_kernel_agrees_across_tiles(name: str, dtype: torch.dtype) -> None:
    subject = SUBJECTS[name]

    def build(device: str) -> Call:
        draw = Draw(3, device)
        return Call({**subject.rows(draw, subject.most_rows, dtype), **subject.rest(draw, dtype)}, {})

    case = Case(subject.op, name, build)
    assert agree(case, serve(PLAIN, case, HERE), serve(INVARIANT, case, HERE)) == []


def split_when_few(*, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor:
    """A linear layer as libraries have it: few rows are split along the inner axis, to keep the machine busy."""
    half = x.shape[1] // 2
    if x.shape[0] > 4:
        return multiply(x, weight, x.dtype).view(-1, *shape)
    parts = (multiply(x[:, cut], weight[:, cut], FP32) for cut in (slice(0, half), slice(half, None)))
    return sum(parts, torch.zeros((), device=x.device)).to(x.dtype).view(-1, *shape)  # type: ignore[union-attr]


def tile_by_rows(*, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    """Attention that takes longer steps for decodes than for windows."""
    shape = Shape(16, 16 if pages.most > 1 else 64, 4, 1)
    return read(query, pages, shape, shape, 64, alone=True)


def test_a_product_split_by_the_number_of_rows_is_found() -> None:
    planted = replace(INVARIANT, linear=split_when_few)
    found = [row_is_its_own(planted, SUBJECTS["linear"], FP32, count, 0, 1.0) for count in (2, 5, 12)]
    assert found == [True, False, False]


def test_attention_tiled_by_the_number_of_rows_is_found() -> None:
    planted = replace(INVARIANT, attend=tile_by_rows)
    assert reader_is_its_own(planted, FP32, position=40, ahead=0, behind=0, neighbour=1)
    assert not reader_is_its_own(planted, FP32, position=40, ahead=2, behind=1, neighbour=1)
