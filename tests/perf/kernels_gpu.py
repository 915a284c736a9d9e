"""The kernels at real sizes on a GPU: right against fp64 first, then timed; a table to paste into kernels/LOG.md.

Leaves out: small shapes (`tests/optimized/test_kernels*.py`) and the gate. Run it as a script; `--tiles` varies tiles.
Sizes: H = 16 key heads, K = V = 128, bf16 activations, fp32 state in `VK` layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from instep_optimized.kernels import attend as attend_file
from instep_optimized.kernels import chunk as chunk_file
from instep_optimized.kernels import runtime
from instep_optimized.kernels import staged as staged_file
from instep_optimized.layout import Address, Pages, Part
from instep_optimized.ops.base import GdnInputs
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_reference.contract.place import Place
from support.on_card import bytes_per_second, milliseconds, worst

H, K, V, W = 16, 128, 128, 4
TO = Place("trunk", 0, "core")
BF16, FP32 = torch.bfloat16, torch.float32
PAST_L2 = 400e6  # bytes of state that one replay walks through: several times the cache


def ints(values: list[int] | range) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cuda")


def drawn(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=FP32).to(dtype)


def gdn_rows(rows: int, heads: int) -> GdnInputs:
    q, k = (torch.nn.functional.normalize(drawn(rows, H, K), dim=-1) for _ in range(2))
    log_decay = -torch.rand(rows, heads, device="cuda").pow(4) * 2
    return GdnInputs(q * K**-0.5, k, drawn(rows, heads, V), log_decay, torch.rand(rows, heads, device="cuda"))


def part(form: str, slots: list[int], count: int, pool: torch.Tensor, kept: torch.Tensor | None = None) -> Part:
    """Equal requests one after the other; with `kept`, columns instead of the slot."""
    requests = len(slots)
    here = Address(pool, ints(slots))
    each = None if kept is None else Address(kept, ints(range(requests)))
    fresh = torch.zeros(requests, dtype=torch.bool, device="cuda")
    begin, counts = ints([i * count for i in range(requests)]), ints([count] * requests)
    return Part(form, begin, counts, count, here, fresh, here if kept is None else None, each)  # type: ignore[arg-type]


def check_recurrent(heads: int) -> None:
    for form, count, requests in (("window", 4, 8), ("chunk", 257, 2)):
        inputs, pool = gdn_rows(count * requests, heads), drawn(requests + 3, heads, V, K).transpose(2, 3)
        truth, twin = pool.double(), pool.clone()
        slots = list(range(requests, 0, -1))
        wide = GdnInputs(*(x.double() for x in inputs))
        core = TRITON.gdn(inputs=inputs, parts=(part(form, slots, count, pool),), dtype=BF16, to=TO)
        wanted = PLAIN.gdn(inputs=wide, parts=(part(form, slots, count, truth),), dtype=torch.float64, to=TO)
        PLAIN.gdn(inputs=inputs, parts=(part(form, slots, count, twin),), dtype=BF16, to=TO)
        print(f"gdn {form:6} HV={heads} {requests}x{count}: state {worst(pool, truth):.1e} "
              f"(plain fp32 {worst(twin, truth):.1e}), core bf16 {worst(core, wanted):.1e}")  # fmt: skip


def check_exact(heads: int) -> None:
    inputs, pool = gdn_rows(32, heads), drawn(12, heads, V, K).transpose(2, 3)
    kept = drawn(8, 5, heads, V, K).transpose(3, 4)
    alone, start = pool.clone(), pool.clone()
    slots = [9, 1, 8, 2, 7, 3, 6, 4]
    TRITON.gdn(inputs=inputs, parts=(part("window", slots, 4, pool, kept),), dtype=BF16, to=TO)
    same = torch.equal(pool, start)
    for t in range(4):
        one = GdnInputs(*(x[t::4].contiguous() for x in inputs))
        TRITON.gdn(inputs=one, parts=(part("window", slots, 1, alone),), dtype=BF16, to=TO)
        same = same and torch.equal(alone[slots], kept[:, t])
    print(f"verify columns HV={heads} bit-identical to one-token decodes: {same}")


def check_conv_and_attend() -> None:
    C = 2 * H * K + 32 * V
    x, weight, memory = drawn(2 * 300, C, dtype=BF16), drawn(C, W, dtype=BF16), drawn(5, C, W - 1, dtype=BF16)
    twin = memory.clone()
    mixed, wanted = (
        ops.conv(x=x, weight=weight, parts=(part("chunk", [3, 1], 300, pool),), to=TO)
        for ops, pool in ((TRITON, memory), (PLAIN, twin))
    )
    print(f"conv 2x300: {worst(mixed, wanted):.1e} of plain, windows equal: {torch.equal(memory, twin)}")
    for dtype in (BF16, FP32):
        for before, count in ((2000, 4), (100, 300)):
            pages = paged(2, before, count, dtype)
            query = drawn(2 * count, 16, 256, dtype=dtype)
            wide = Pages(pages.keys.double(), pages.values.double(), *list(vars(pages).values())[2:])
            served = TRITON.attend(query=query, pages=pages, to=TO)
            wanted = PLAIN.attend(query=query.double(), pages=wide, to=TO)
            print(f"attend {dtype} before={before} rows={count}: {worst(served, wanted):.1e}")


def paged(requests: int, before: int, count: int, dtype: torch.dtype, page: int = 64) -> Pages:
    """16 query heads on 2 KV heads of 256, pages in falling order."""
    each = -(-(before + count) // page)
    pools = (drawn(requests * each + 1, page, 2, 256, dtype=dtype) for _ in range(2))
    table = ints(range(requests * each, 0, -1)).view(requests, each)
    begin, counts = ints([i * count for i in range(requests)]), ints([count] * requests)
    return Pages(*pools, table, ints(range(requests)), begin, counts, ints([before] * requests), count)


def time_window(heads: int, requests: int) -> str:
    """Microseconds per layer: decode in place; verify of 4 with columns; the move that commits; the floors."""
    size = heads * K * V * 4
    layers = max(2, int(PAST_L2 / (requests * size)))
    pool = drawn(layers, requests + 1, heads, V, K).transpose(3, 4)
    kept = torch.empty(max(2, layers // 4), requests, 4, heads, V, K, device="cuda").transpose(4, 5)
    slots = list(range(requests, 0, -1))
    one, four = gdn_rows(requests, heads), gdn_rows(4 * requests, heads)
    decode = [part("window", slots, 1, pool[i]) for i in range(layers)]
    verify = [part("window", slots, 4, pool[i], kept[i % len(kept)]) for i in range(layers)]
    columns, units = ints([2] * requests), ints(range(requests))
    moves = [(Address(kept[i % len(kept)], units, columns), decode[i].read) for i in range(layers)]

    def gdn(inputs: GdnInputs, parts: list[Part]) -> Callable[[], object]:
        return lambda: [TRITON.gdn(inputs=inputs, parts=(p,), dtype=BF16, to=TO) for p in parts]

    per = [1e3 * milliseconds(work) / layers for work in (
        gdn(one, decode), gdn(four, verify), lambda: [TRITON.move(source=s, target=t) for s, t in moves],
    )]  # fmt: skip
    floor = requests * size / COPY
    return (f"{heads:3} {requests:3} | decode {per[0]:7.1f} (2S {2e6 * floor:6.1f}) | verify 4 {per[1]:7.1f} "
            f"(5S {5e6 * floor:6.1f}) | move {per[2]:6.1f} (2S {2e6 * floor:6.1f})")  # fmt: skip


def time_prefill(heads: int, tokens: int) -> str:
    inputs, pool = gdn_rows(tokens, heads), drawn(3, heads, V, K).transpose(2, 3)
    whole = part("chunk", [2], tokens, pool)
    spent = milliseconds(lambda: TRITON.gdn(inputs=inputs, parts=(whole,), dtype=BF16, to=TO))
    return f"gdn chunk HV={heads} 1x{tokens}: {spent:.3f} ms"


def time_conv() -> None:
    C = 2 * H * K + 32 * V
    for tokens, requests in ((2048, 1), (4, 32)):
        x, weight = drawn(tokens * requests, C, dtype=BF16), drawn(C, W, dtype=BF16)
        rows = part("window", list(range(1, requests + 1)), tokens, drawn(requests + 1, C, W - 1, dtype=BF16))
        spent = milliseconds(lambda: TRITON.conv(x=x, weight=weight, parts=(rows,), to=TO))  # noqa: B023
        print(f"conv {requests}x{tokens}: {1e3 * spent:.1f} us (floor {4e6 * x.numel() / COPY:.1f})")


def time_attend() -> None:
    for requests, before, count in ((1, 0, 2048), (32, 4096, 4), (1, 4096, 4)):
        pages, query = paged(requests, before, count, BF16), drawn(requests * count, 16, 256, dtype=BF16)
        spent = milliseconds(lambda: TRITON.attend(query=query, pages=pages, to=TO))  # noqa: B023
        print(f"attend {requests}x{count} behind {before}: {1e3 * spent:.1f} us")


def time_tiles() -> None:
    for shape in ((1, 1, 96), (1, 4, 96), (2, 1, 128), (2, 4, 128)):
        staged_file.SHAPES = ((*shape, 0),)
        for requests in (1, 8, 32):
            print(f"window rows, warps, registers={shape}: {time_window(32, requests)}", flush=True)
    for tokens, columns, solve, carry, precision in (
        (16, 16, 2, 4, "ieee"), (16, 32, 2, 8, "ieee"), (32, 32, 4, 4, "ieee"), (64, 32, 4, 4, "tf32x3"),
    ):  # fmt: skip
        chunk_file.TOKENS, chunk_file.VALUE_COLUMNS, chunk_file.PRECISION = tokens, columns, precision
        chunk_file.WARPS = {"solve": solve, "carry": carry}
        print(f"chunk tokens={tokens} columns={columns} warps={solve},{carry} {precision}: {time_prefill(32, 2048)}")
        check_recurrent(32)
    for queries, positions, warps, stages in ((64, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 3), (128, 128, 8, 1)):
        attend_file.QUERIES[2], attend_file.POSITIONS[2] = queries, positions
        attend_file.WARPS, attend_file.STAGES = warps, stages
        print(f"attend queries={queries} positions={positions} warps={warps} stages={stages}:")
        time_attend()


if __name__ == "__main__":
    print(runtime.versions())
    torch.manual_seed(1)
    for value_heads in (32, 48):
        check_recurrent(value_heads)
        check_exact(value_heads)
    check_conv_and_attend()
    COPY = bytes_per_second()
    print(f"copy {COPY / 1e12:.2f} TB/s; microseconds per layer: HV, B | ...")
    for value_heads, batch in ((32, 1), (32, 8), (32, 32), (48, 8), (48, 32)):
        print(time_window(value_heads, batch), flush=True)
    for length in (2048, 8192):
        print(time_prefill(32, length), flush=True)
    time_conv()
    time_attend()
    if "--tiles" in sys.argv:
        time_tiles()
