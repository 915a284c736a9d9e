"""Attention in parts: correct at every edge of a part, and a row's bits depend only on the entries that it sees.

Leaves out: further promises of `invariant` (`test_invariant.py`), trees next to chains (`test_kernels_trees.py`), and
requests that share pages. Every body runs interpreted on a CPU, native on a GPU at real sizes.
"""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.kit.cases import Case, serve
from instep.kit.cases.case import BF16, FP32, Call, Draw, at
from instep.kit.cases.guarded_pools import same_bits
from instep.kit.cases.paged_kv import Reading, attend_case
from instep.kit.cases.trees import seen
from instep.run.stress import Neighbour
from instep_optimized.kernels.attention import dispatch as attend_file
from instep_optimized.kernels.attention.dispatch import GROUP, PART, WINDOW
from instep_optimized.memory_addresses import Pages
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.row_invariant_triton import INVARIANT
from instep_optimized.ops.triton import TRITON
from support.independent.op_agreement import agree
from support.running.recorded_calls import launches

HERE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = HERE == "cuda"
pytestmark = [pytest.mark.gpu if NATIVE else pytest.mark.interpreted]
SIZES: dict[str, Any] = {"page_size": 64, "heads": 16, "kv_heads": 2, "head_dim": 256} if NATIVE else {"page_size": 16}
LENGTHS = (*(PART * parts + more for parts in (1, GROUP) for more in (-1, 0, 1)), PART * (GROUP + 1) + 1)
FP8 = torch.float8_e4m3fn
TREE = (-1, 0, 0, 1, 2)
OPS = pytest.mark.parametrize("ops", [TRITON, INVARIANT], ids=lambda ops: ops.name)


def reading(ends: tuple[int, ...], counts: tuple[int, ...]) -> Reading:
    """Requests that end after these numbers of positions, with separate pages in falling order."""
    tables, page = [], sum(-(-end // SIZES["page_size"]) for end in ends)
    for end in ends:
        need = -(-end // SIZES["page_size"])
        tables.append(tuple(range(page, page - need, -1)))
        page -= need
    widest = max(map(len, tables))
    before = tuple(end - count for end, count in zip(ends, counts, strict=True))
    return Reading(tuple((*table, *(widest - len(table)) * [-1]) for table in tables), before, counts, **SIZES)


def windows(count: int, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, times: int = 1) -> Case:
    """times: of the queries; then some score is far above those before it."""
    build = attend_case(40 + count, reading(lengths, len(lengths) * (count,)), dtype)

    def built(device: str) -> Call:
        inputs, pools = build(device)
        return Call(inputs | {"query": times * inputs["query"]}, pools)

    return Case("attend", f"{count}", built)


@OPS
@pytest.mark.parametrize(
    ("count", "dtype", "times"), [(1, FP32, 1), (3, BF16, 1), (3, FP32, 20), (WINDOW + 1, FP32, 20)], ids=str
)
def test_attention_is_right_at_every_edge_of_a_part(ops: Ops, count: int, dtype: torch.dtype, times: int) -> None:
    """A window ends on, before and after an edge; and its rows are on both sides of one."""
    case = windows(count, dtype, times=times)
    assert agree(case, serve(PLAIN, case, HERE), serve(ops, case, HERE)) == []


@OPS
@pytest.mark.parametrize("drafted", [None, (3, 3, 3, 4, 1)], ids=["whole", "drafted"])
def test_trees_are_right_at_every_edge_of_a_part(ops: Ops, drafted: tuple[int, ...] | None) -> None:
    """The window begins before, at and after an edge. drafted: the node of each request that is its only row."""
    ends = tuple(PART + begin + len(TREE) for begin in (-5, -2, -1, 0, 1))
    case = Case("attend", "trees", seen(windows(len(TREE), FP32, ends).build, len(ends) * (TREE,), drafted=drafted))
    assert agree(case, serve(PLAIN, case, HERE), serve(ops, case, HERE)) == []


def cut(pages: Pages, query: torch.Tensor, request: int, row: int) -> dict[str, Any]:
    """One row of one request as a decode."""
    one, place = slice(request, request + 1), int(pages.begin[request]) + row
    alone = replace(
        pages, slots=pages.slots[one], begin=0 * pages.begin[one], count=0 * pages.count[one] + 1,
        before=pages.before[one] + row, most=1,
    )  # fmt: skip
    return {"query": query[place : place + 1].contiguous(), "pages": alone, "to": at("attended")}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_row_of_a_window_has_the_bits_of_a_decode_alone(dtype: torch.dtype) -> None:
    """Next to requests with fewer and more parts, also with the production kernel, and next to a prefill chunk."""
    inputs = windows(3, dtype, (*LENGTHS, WINDOW + 2)).build(HERE).inputs
    pages, query = inputs["pages"], inputs["query"]
    attended = TRITON.attend(**inputs)
    last = int(pages.begin[-1])
    more = Draw(5, HERE).normal(WINDOW, *query.shape[1:], dtype=dtype)
    beside = replace(
        pages, count=pages.count + (pages.begin == last) * (WINDOW - 2), before=pages.before * (pages.begin < last),
        most=WINDOW + 1,
    )  # fmt: skip
    beside = TRITON.attend(query=torch.cat([query[: last + 1], more]), pages=beside, to=at("attended"))
    assert same_bits(attended[:last], beside[:last])
    for request in range(len(LENGTHS)):
        for row in (0, 2):
            assert same_bits(TRITON.attend(**cut(pages, query, request, row))[0], attended[3 * request + row])


@pytest.mark.slow
def test_bits_do_not_depend_on_how_the_work_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over other numbers of programs; a tile of rows after the other, as if no more of them fit; in parts or groups."""
    tree, ends = (-1, 0, 0, 1, 2, 2, 3, 4, 6), LENGTHS[-2:]
    build = seen(windows(len(tree), FP32, ends).build, len(ends) * (tree,), chains=(1,))
    wanted = TRITON.attend(**build(HERE).inputs)
    for name, value in (("RESIDENT", 7), ("SCRATCH", 1), ("FEW", 0), ("FEW", 999)):
        with monkeypatch.context() as patch:
            patch.setattr(attend_file, name, value)
            assert same_bits(TRITON.attend(**build(HERE).inputs), wanted)


def test_small_trees_next_to_a_wide_one_use_only_their_own_parts() -> None:
    """33 trees fill all pages: 32 roots that end a page before a part does, and one of nine nodes, the widest."""
    size, (small, wide) = 4, (32, 9)
    counts, before = [1] * small + [wide], [2 * PART - 5] * small + [3]
    needed = [-(-(known + count) // size) for known, count in zip(before, counts, strict=True)]
    table, page = torch.full((small + 1, 3 * PART // size), -1), 0
    for request, count in enumerate(needed):
        table[request, :count] = torch.arange(page, page + count)
        page += count
    draw, begin = Draw(8, HERE), [sum(counts[:i]) for i in range(len(counts))]
    ancestors = [1] * small + [(2 << node) - 1 for node in range(wide)]
    pages = Pages(draw.normal(page, size, 1, 16), draw.normal(page, size, 1, 16), table.to(HERE),
                  draw.ints(range(small + 1)), draw.ints(begin), draw.ints(counts), draw.ints(before), wide,
                  draw.ints(ancestors), wide)  # fmt: skip
    given = {"query": draw.normal(sum(counts), 2, 16), "pages": pages, "to": at("attended")}
    found, right = TRITON.attend(**given), PLAIN.attend(**given)
    assert bool(found.isfinite().all()) and bool(((found - right).abs() <= 2e-5 * right.abs().max()).all())


def test_requests_that_share_pages_beyond_the_room_are_not_read_silently() -> None:
    """The room for units is that of all pages, and a broken one of each request: here for 3."""
    inputs = windows(1, FP32, 2 * ((2 * GROUP + 1) * PART,)).build(HERE).inputs
    pages, few = inputs["pages"], PART // SIZES["page_size"]
    pools = (Draw(6, HERE).normal(few, *pages.keys.shape[1:]) for _ in range(2))
    shared = replace(pages, **dict(zip(("keys", "values"), pools, strict=True)), table=pages.table % few)
    assert TRITON.attend(**inputs | {"pages": shared}).isnan().flatten(1).all(dim=1)[:2].tolist() == [False, True]


@pytest.mark.parametrize(
    ("requests", "mapped", "pooled", "sides"),
    [(1, 4160, 4224, 1), (2, 16448, 32960, 1), (4, 16448, 65856, 2), (8, 32768, 4224, 1), (128, 576, 73792, 2)],
)
def test_tiles_share_copies_when_not_all_run_at_a_time(requests: int, mapped: int, pooled: int, sides: int) -> None:
    """Windows of 4 on 2 KV heads: a longer line of the table than the pool has pages for does not count."""
    assert attend_file.sides_of(requests, mapped, pooled, 4, 1024, 132) == sides


def mixed(size: int, between: int, dtype: torch.dtype, heads: int = 2) -> tuple[torch.Tensor, Pages]:
    """Prompts, windows and decodes in one launch; an idle request, holes in the table, NaN in entries that are not
    read.

    between: numbers between the pages of a pool, like red zones
    dtype: of keys and values; with scales if it has 8 bits
    heads: of keys and values
    """
    counts = (300, 1, 4, 0, 17, 16, 130, 7, 4, 9, 1)
    before = (77, 1300, 4093, 5, 0, 1020, 640, 3000, 2046, 1147, 1151)  # the end of a unit, and a part after it
    ends = [known + count for known, count in zip(before, counts, strict=True)]
    needed = [-(-end // size) for end in ends]
    draw, table = Draw(3, HERE), torch.full((len(counts), max(needed) + 1), -1)
    span = size * heads * 256
    raw = [draw.normal(sum(needed), span + between, dtype=dtype, scale=60 if dtype is FP8 else 1) for _ in range(2)]
    for memory in raw:
        memory[:, span:] = float("nan")
    keys, values = (memory[:, :span].unflatten(1, (size, heads, 256)) for memory in raw)
    scales = [draw.uniform(*keys.shape[:3], 1, low=0.005, high=0.015) for _ in raw] if dtype is FP8 else []
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(4))
    for line, (pages, end) in enumerate(zip(order.split(needed), ends, strict=True)):
        table[line, : len(pages)] = pages
        for pool in (keys, values, *scales):
            pool[int(pages[-1]), end - size * (len(pages) - 1) :] = float("nan")
    table[6, 1] = table[7, 2] = -1
    begin = [3 + sum(counts[:i]) + 2 * i for i in range(len(counts))]
    slots = draw.ints([-1 if i == 4 else i for i in range(len(counts))])
    given = Pages(keys, values, table.to(HERE), slots, *map(draw.ints, (begin, counts, before)), max(counts),
                  **dict(zip(("key_scales", "value_scales"), scales, strict=False)))  # fmt: skip
    return draw.normal(begin[-1] + 9, 16, 256, dtype=BF16), given


@pytest.mark.skipif(not NATIVE, reason="no CUDA device here")
@pytest.mark.parametrize("ops", [TRITON, INVARIANT], ids=lambda ops: ops.name)
@pytest.mark.parametrize(
    ("size", "between", "heads", "dtype"),
    [(8, 0, 2, BF16), (16, 16, 2, BF16), (24, 0, 2, BF16), (64, 0, 2, BF16), (64, 4, 2, BF16), (64, 32, 2, BF16),
     (128, 8, 2, BF16), (64, 0, 1, BF16), (16, 16, 4, BF16),
     (8, 0, 2, FP8), (16, 16, 2, FP8), (24, 0, 2, FP8), (64, 8, 2, FP8), (64, 32, 2, FP8), (128, 0, 2, FP8),
     (64, 32, 1, FP8), (128, 0, 1, FP8), (16, 16, 4, FP8), (64, 0, 4, FP8)],
    ids=lambda value: str(value).removeprefix("torch."),
)  # fmt: skip
def test_explicit_layouts_give_the_bits_of_the_others(
    monkeypatch: pytest.MonkeyPatch, ops: Ops, size: int, between: int, heads: int, dtype: torch.dtype
) -> None:
    query, given = mixed(size, between, dtype, heads)
    launched = list[str]()
    real = attend_file.launch
    sides = set[tuple[str, int]]()

    def told(kernel: Any, *rest: Any, **more: Any) -> None:
        launched.append(kernel.__name__)
        sides.update({(kernel.__name__, more["SIDES"])} if "SIDES" in more else ())
        real(kernel, *rest, **more)

    monkeypatch.setattr(attend_file, "launch", told)
    found = ops.attend(query=query, pages=given, to=at("attended"))
    # A step is not a whole number of pages of 24. With 8 bytes between pages, pages are not aligned to 16 bytes. The
    # scales of a page of 8 are 64 bytes.
    staged = "" if size == 24 or between * dtype.itemsize == 8 or (size, dtype) == (8, FP8) else "_staged"
    assert launched[-2:] == [f"read_parts{staged}", "join_parts"] and found.isfinite().all()
    assert launched[0] == ("read_chunk" if ops is INVARIANT or dtype is FP8 else f"read_chunk{staged}")
    as_is = attend_file.FEW
    for places in (2, 9999):  # programs; in items of two tiles, and of one
        monkeypatch.setattr(attend_file, "multiprocessors", lambda _, places=places: places)
        for few in (0, 9999, as_is):  # in groups, in parts, and as is
            monkeypatch.setattr(attend_file, "FEW", few)
            assert same_bits(ops.attend(query=query, pages=given, to=at("attended")), found)
    whole = ["read_chunk_staged"] * (ops is not INVARIANT and dtype is not FP8)
    kernels = ["read_parts_staged", *whole] if staged else []
    assert launched[-2:] == [f"read_parts{staged}", "join_parts"] and sides == {*product(kernels, (1, 2))}
    monkeypatch.setattr(attend_file, "staged", None)
    assert same_bits(ops.attend(query=query, pages=given, to=at("attended")), found)
    assert not any("staged" in name for name in launched[-3:])


@pytest.mark.skipif(not NATIVE, reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bfloat16", "float8"])
def test_bits_are_the_same_next_to_another_process(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device saves programs that run, and brings them back: `reused_barriers.py` shows what it may write then."""
    query, given = mixed(64, 0, dtype)
    wanted = TRITON.attend(query=query, pages=given, to=at("attended"))
    monkeypatch.setattr(attend_file, "multiprocessors", lambda _: 2)  # programs, which take a millisecond then
    with (other := Neighbour(torch.device(HERE))):
        found = [TRITON.attend(query=query, pages=given, to=at("attended")) for _ in range(100)]  # no wait between them
        assert all(same_bits(one, wanted) for one in found)
    assert other.result().times, "the other process ended"


@pytest.mark.skipif(not NATIVE, reason="no CUDA device here")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_many_decodes_and_windows_have_the_bits_of_the_other_layouts(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """One and two tiles; with three rows the second tile is half empty."""
    inputs = windows(count, BF16, (*LENGTHS, PART // 2, 3 * PART)).build(HERE).inputs
    launched = launches(monkeypatch, attend_file)
    found = TRITON.attend(**inputs)
    assert launched == ["read_parts_staged", "join_parts"]
    monkeypatch.setattr(attend_file, "staged", None)
    assert same_bits(TRITON.attend(**inputs), found)


@pytest.mark.skipif(not NATIVE, reason="no CUDA device here")
@pytest.mark.parametrize(("known", "count"), [(0, WINDOW + 1), (1147, 64), (70, 300)])
def test_a_prompt_alone_is_one_launch_with_the_bits_of_the_other_layouts(
    monkeypatch: pytest.MonkeyPatch, known: int, count: int
) -> None:
    """In tiles of half as many rows and whole ones, one each and many. Without a slot all rows are 0."""
    draw, needed = Draw(5, HERE), -(-(known + count) // 64)
    keys, values = (draw.normal(needed + 1, 64, 2, 256, dtype=BF16) for _ in range(2))
    for pool in (keys, values):
        pool[1, known + count - 64 * (needed - 1) :] = float("nan")
    table = torch.arange(needed, 0, -1, device=HERE)[None]
    pages = Pages(keys, values, table, *(draw.ints([number]) for number in (0, 0, count, known)), count, full=True)
    query, launched = draw.normal(count, 16, 256, dtype=BF16), launches(monkeypatch, attend_file)
    found = [TRITON.attend(query=query, pages=pages, to=at("attended"))]
    for places in (1, 3, 9999):
        monkeypatch.setattr(attend_file, "multiprocessors", lambda _, places=places: places)
        found.append(TRITON.attend(query=query, pages=pages, to=at("attended")))
    found[0].clone().fill_(float("nan"))  # the memory of the next result
    nobody = replace(pages, slots=draw.ints([-1]), count=draw.ints([0]))
    zero = TRITON.attend(query=query, pages=nobody, to=at("attended"))
    assert launched == 5 * ["read_chunk_staged"] and not zero.any() and zero.isfinite().all()
    monkeypatch.setattr(attend_file, "staged", None)
    right = TRITON.attend(query=query, pages=pages, to=at("attended"))
    assert launched[5:] == ["read_chunk", "read_parts", "join_parts"] and right.isfinite().all() and right.any()
    assert all(same_bits(one, right) for one in found)


@pytest.mark.parametrize(("full", "there"), [(True, WINDOW + 3), (False, WINDOW + 3), (False, 3)])
def test_parts_are_skipped_only_if_the_host_knows_the_rows(
    full: bool, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft extend has as many rows as a window; the device knows how many are valid, perhaps a few."""
    draw, rows, size = Draw(8, HERE), WINDOW + 3, 64
    heads, width = (16, 256) if NATIVE else (2, 16)
    keys, values = (draw.normal(3, size, 2, width, dtype=BF16) for _ in range(2))
    pages = Pages(keys, values, torch.tensor([[2, 1]], device=HERE), *(draw.ints([n]) for n in (0, 0, there, 70)), rows,
                  full=full)  # fmt: skip
    query, launched = draw.normal(rows, heads, width, dtype=BF16), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(attend_file, "staged", None)
        right = TRITON.attend(query=query, pages=pages, to=at("attended"))
    real = attend_file.launch

    def told(kernel: Any, *rest: Any, **more: Any) -> None:
        launched.append(kernel.__name__)
        if NATIVE or kernel is not laid:
            real(kernel, *rest, **more)

    def laid() -> None:
        """Without explicit layouts it replaces the kernel of prompts, and reads nothing."""

    if not NATIVE:
        fitted: Any = lambda query, pages, rows, positions, *of: (  # noqa: E731
            ((), {"MT": rows}) if of == attend_file.CHUNK_STAGED else None)
        monkeypatch.setattr(attend_file, "staged", SimpleNamespace(fitted=fitted))
        monkeypatch.setattr(attend_file, "chunks", SimpleNamespace(read_chunk_staged=laid))
        monkeypatch.setattr(attend_file, "prompts", SimpleNamespace(few_boxes=lambda pool: None))
        monkeypatch.setattr(attend_file, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(attend_file, "launch", told)
    found = TRITON.attend(query=query, pages=pages, to=at("attended"))
    assert ("join_parts" in launched) is not full and bool(right[:there].any())
    if NATIVE or there <= WINDOW:
        assert same_bits(found, right) and not found[there:].any()
