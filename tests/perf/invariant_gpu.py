"""The invariant ops against the production ones at real sizes on a GPU: right, then row by row the same, then timed.

Leaves out: small shapes (`tests/optimized/test_invariant*.py`), and the ops that both sets share. Run it as a script.
Sizes: a 9B-shaped layer (D = 4096, MLP 12288, vocabulary 151936) and a 35B-A3B-shaped one (D = 2048, 128 experts of
768, 8 chosen), bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from instep_optimized.kernels import runtime
from instep_optimized.kernels.invariant import linear as linear_file
from instep_optimized.layout import Pages
from instep_optimized.ops.base import ExpertWeights, Ops
from instep_optimized.ops.invariant import INVARIANT
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_reference.contract.place import Place
from support.on_card import milliseconds, worst

D, MLP, VOCAB = 4096, 12288, 151_936
MOE_D, EXPERTS, INNER, TOP = 2048, 128, 768, 8
TO = Place("trunk", 0, "mixer")
BF16 = torch.bfloat16
ROWS = (1, 4, 32, 128, 2048)
PAST_L2 = 200e6  # bytes of weights that one replay walks through
Inputs = dict[str, Any]


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def ints(values: list[int] | range) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cuda")


def weight(*shape: int) -> torch.Tensor:
    return drawn(*shape, scale=shape[-1] ** -0.5)


def linear(columns: int, inner: int) -> Inputs:
    return {"weight": weight(columns, inner), "shape": (columns,), "to": TO}


def experts() -> Inputs:
    weights = ExpertWeights(
        weight(EXPERTS, MOE_D), weight(EXPERTS, 2 * INNER, MOE_D), weight(EXPERTS, MOE_D, INNER),
        weight(2 * INNER, MOE_D), weight(MOE_D, INNER), weight(1, MOE_D),
    )  # fmt: skip
    return {"weights": weights, "top_k": TOP, "norm_topk": True, "to": TO}


# op, inner width of its rows, bytes of one copy of its weights, how a copy is drawn
CASES: dict[str, tuple[str, int, float, Callable[[], Inputs]]] = {
    "linear 4096 -> 8192 (qkv)": ("linear", D, 2 * D * 8192, lambda: linear(8192, D)),
    "linear 4096 -> 4096 (out)": ("linear", D, 2 * D * D, lambda: linear(D, D)),
    "linear 4096 -> 32 (gates)": ("linear", D, 2 * D * 32, lambda: linear(32, D)),
    "mlp 12288": ("mlp", D, 6 * D * MLP, lambda: {"gate_up": weight(2 * MLP, D), "down": weight(D, MLP), "to": TO}),
    "lm_head 151936": ("lm_head", D, 2 * D * VOCAB, lambda: {"weight": weight(VOCAB, D), "to": TO}),
    "moe 8 of 128": ("moe", MOE_D, 6 * MOE_D * INNER * EXPERTS, experts),
}


def check(op: str, inner: int, rest: Inputs) -> str:
    """Against plain in fp32 on the same bf16 numbers, and each row alone against the same row in every batch."""
    x = drawn(200, inner)
    widened = {name: wide(value) for name, value in rest.items()}
    batch = getattr(INVARIANT, op)(x=x, **rest)
    error = worst(batch, getattr(PLAIN, op)(x=x.float(), **widened))
    apart = {name: 0 for name in ("invariant", "triton")}
    for ops in (INVARIANT, TRITON):
        whole = getattr(ops, op)(x=x, **rest)
        for rows in (1, 2, 3, 4, 5, 8, 16, 31, 64, 65, 130):
            some = getattr(ops, op)(x=x[200 - rows :].clone(), **rest)
            apart[ops.name] += int((some != whole[200 - rows :]).flatten(1).any(dim=1).sum())
    return f"error {error:.1e}; rows that differ, of 329: " + ", ".join(f"{n} {m}" for n, m in apart.items())


def wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float()
    if isinstance(value, ExpertWeights):
        return ExpertWeights(*(tensor.float() for tensor in vars(value).values()))
    return value


def time_op(op: str, inner: int, size: float, make: Callable[[], Inputs], rest: Inputs) -> None:
    copies = [rest, *(make() for _ in range(max(1, int(PAST_L2 / size)) - 1))]
    for rows in ROWS if op != "moe" else ROWS[:-1]:
        x = drawn(rows, inner)
        spent = [per_copy(ops, op, x, copies) for ops in (TRITON, INVARIANT)]
        rate = size / spent[1] / 1e6
        print(f"  {rows:5} rows: triton {spent[0]:9.1f} us, invariant {spent[1]:9.1f} us, "
              f"{spent[1] / spent[0]:5.2f} times; all weights once: {rate:.2f} TB/s", flush=True)  # fmt: skip


def per_copy(ops: Ops, op: str, x: torch.Tensor, copies: list[Inputs]) -> float:
    """Microseconds of one call, walking through copies of the weights so that none stays in the L2."""
    return 1e3 * milliseconds(lambda: [getattr(ops, op)(x=x, **rest) for rest in copies]) / len(copies)


def paged(requests: int, before: int, count: int, page: int = 64) -> Pages:
    """16 query heads on 2 KV heads of 256, pages in falling order."""
    each = -(-(before + count) // page)
    pools = (drawn(requests * each + 1, page, 2, 256) for _ in range(2))
    table = ints(range(requests * each, 0, -1)).view(requests, each)
    begin, counts = ints([i * count for i in range(requests)]), ints([count] * requests)
    return Pages(*pools, table, ints(range(requests)), begin, counts, ints([before] * requests), count)


def time_attend() -> None:
    for requests, before, count in ((1, 4096, 1), (1, 4096, 4), (32, 4096, 1), (32, 4096, 4), (1, 0, 2048)):
        pages, query = paged(requests, before, count), drawn(requests * count, 16, 256)
        spent = [1e3 * milliseconds(lambda: ops.attend(query=query, pages=pages, to=TO)) for ops in (TRITON, INVARIANT)]  # noqa: B023
        print(f"attend {requests}x{count} behind {before}: triton {spent[0]:.1f} us, invariant {spent[1]:.1f} us, "
              f"{spent[1] / spent[0]:.2f} times", flush=True)  # fmt: skip


def check_attend() -> None:
    """The last row of a window against the same row as a decode."""
    pages, query = paged(3, 1000, 5), drawn(15, 16, 256)
    last = replace(pages, begin=ints([0, 1, 2]), count=ints([1] * 3), before=ints([1004] * 3), most=1)
    for ops in (INVARIANT, TRITON):
        whole = ops.attend(query=query, pages=pages, to=TO)
        alone = ops.attend(query=query[4::5].contiguous(), pages=last, to=TO)
        print(f"attend {ops.name}: last rows of windows of 5 equal to decodes: {torch.equal(whole[4::5], alone)}")


def time_tiles() -> None:
    """Other tiles for narrow operands, at a decode of 4 rows and a prefill."""
    kept = linear_file.NARROW
    for tile in (*kept, *(linear_file.Tile(*sizes) for sizes in ((16, 32, 256), (64, 64, 128), (128, 128, 64)))):
        linear_file.NARROW = (tile, kept[-1])
        linear_file.PROGRAMS, programs = 1, linear_file.PROGRAMS
        rest = [linear(8192, D) for _ in range(4)]
        spent = [per_copy(INVARIANT, "linear", drawn(rows, D), rest) for rows in (4, 2048)]
        print(f"{tile}: 4 rows {spent[0]:.1f} us, 2048 rows {spent[1]:.1f} us", flush=True)
        linear_file.NARROW, linear_file.PROGRAMS = kept, programs


if __name__ == "__main__":
    print(runtime.versions())
    torch.manual_seed(1)
    for title, (op, inner, size, make) in CASES.items():
        rest = make()
        print(f"{title}: {check(op, inner, rest)}", flush=True)
        time_op(op, inner, size, make, rest)
    check_attend()
    time_attend()
    time_tiles()
