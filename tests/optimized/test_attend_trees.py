"""Attention of trees in two launches: the parts before the windows, and the nodes that each node sees alone.

The first has explicit layouts, which cannot be interpreted: on a CPU chains on a shorter table replace it. Leaves out:
one launch for both (`test_attend_parts.py`, `test_kernels_trees.py`).
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.kit.cases.case import BF16, FP32, Draw, at
from instep.kit.cases.guarded_pools import same_bits
from instep.kit.cases.paged_kv import Reading, attend_case
from instep.kit.cases.trees import ancestors, seen
from instep_optimized.kernels.attention import dispatch as attend_file
from instep_optimized.kernels.attention.dispatch import GROUP, PART
from instep_optimized.memory_addresses import Pages
from instep_optimized.ops.triton import TRITON
from support.kernels.overlapped_launches import same_in_a_graph
from support.kernels.planted import on_device, planted_kernels
from support.running.covering import few
from support.running.recorded_calls import launches

FP8 = torch.float8_e4m3fn
HERE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = HERE == "cuda"
pytestmark = [pytest.mark.gpu if NATIVE else pytest.mark.interpreted]
SIZES: dict[str, Any] = {"page_size": 64, "heads": 16, "kv_heads": 2, "head_dim": 256} if NATIVE else {"page_size": 16}
TREES = ((-1, 0, 0, 1, 2), (-1, 0, 1), (-1, 0, 0, 0, 1, 2, 5), (-1, 0, 1, 2, 3), (-1,))
CHAINS = (1,)
# Windows after parts of a group, on the edge of one, after whole groups, over the edge of a group, in the first part.
BEFORE = (PART * (GROUP + 1) + 5, 3 * PART - 2, PART * (2 * GROUP - 1), 2 * GROUP * PART - 3, 7)
FAULTS = {
    "what was read is forgotten": ("mask=inside & (there & behind)[:, None]", "mask=inside & ~there[:, None]"),
    "it continues in the next unit": (
        "best, total = tl.where(behind, best, float(\"-inf\")), tl.where(behind, total, 0.0)", "pass"),
    "a part too late": ("known // PT * PT\n", "known // PT * PT + PT\n"),
}


def given(dtype: torch.dtype) -> dict[str, Any]:
    """Trees next to a chain."""
    size, tables, page = SIZES["page_size"], [], 0
    for tree, before in zip(TREES, BEFORE, strict=True):
        need = -(-(before + len(tree)) // size)
        tables.append(tuple(range(page + need, page, -1)))
        page += need
    widest = max(map(len, tables))
    lines = tuple((*table, *(widest - len(table)) * [-1]) for table in tables)
    build = attend_case(90, Reading(lines, BEFORE, tuple(map(len, TREES)), **SIZES), dtype)
    return seen(build, TREES, chains=CHAINS)(HERE).inputs


class Parted:
    """In place of `launch`: what it is given, in two launches. The places of both hold NaN before.

    few: as FEW, so that all requests have parts or all have groups
    """

    def __init__(self, pages: Pages, few: int, kernel: Any) -> None:
        self.pages, self.unit, self.kernel, self.launched = pages, PART * (1 if few else GROUP), kernel, 0
        self.run = attend_file.launch

    def __call__(self, kernel: Any, grid: Any, *arguments: Any, **named: Any) -> None:
        if kernel is not attend_file.read_parts:
            return self.run(kernel, grid, *arguments, **named)
        of = dict(zip(kernel.arg_names, arguments, strict=False))
        places, self.launched = (of["means"], of["sums"]), self.launched + 1
        for place in places:
            place.fill_(torch.nan)
        base, held = 0, self.pages.table.shape[1] * SIZES["page_size"]
        for request, before in enumerate(BEFORE):
            tree = request not in CHAINS
            reach = min(before + self.pages.nodes, held) if tree else before + len(TREES[request])
            self.stand_in(of["query"].at, request, before // PART * PART if tree else reach, places, base)
            base += -(-reach // self.unit)
        rows, kv_heads = places[0].shape[1], self.pages.keys.shape[2]
        return self.run(self.kernel, (rows, kv_heads, len(BEFORE)), *arguments, **named)

    def stand_in(self, query: torch.Tensor, request: int, end: int, places: Any, base: int) -> None:
        """The units of a chain of the same rows on as many positions, moved to `base`."""
        one, mine = slice(request, request + 1), self.pages
        table = mine.table[:, : -(-end // SIZES["page_size"])]
        chain = replace(mine, **{name: getattr(mine, name)[one] for name in ("slots", "begin", "count", "before")},
                        table=table, ancestors=None, nodes=0)  # fmt: skip
        units = -(-end // self.unit)

        def kept(kernel: Any, grid: Any, *arguments: Any, **named: Any) -> None:
            if kernel is attend_file.read_parts:
                self.run(kernel, grid, *arguments, **named)
                of = dict(zip(kernel.arg_names, arguments, strict=False))
                rows = min(of["means"].shape[1], places[0].shape[1])
                for place, found in zip(places, (of["means"], of["sums"]), strict=True):
                    place[base : base + units, :rows] = found[:units, :rows]

        if end:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(attend_file, "launch", kept)
                TRITON.attend(query=query, pages=chain, to=at("attended"))


def both(
    inputs: dict[str, Any], few: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of one launch, and of two."""
    monkeypatch.setattr(attend_file, "FEW", few)
    monkeypatch.setattr(attend_file, "staged", None)
    whole = TRITON.attend(**inputs)
    two = Parted(inputs["pages"], few, kernel)
    monkeypatch.setattr(attend_file, "launch", two)
    found = TRITON.attend(**inputs)
    assert two.launched == 1 and bool(whole.isfinite().all())
    return found[: len(whole) - 1], whole[: len(whole) - 1]


@few(1)
@pytest.mark.parametrize("few", [0, 9999], ids=["in groups", "in parts"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_tree_has_the_same_bits_with_a_separate_launch_for_earlier_parts(
    few: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same_bits(*both(given(dtype), few, attend_file.read_alone, monkeypatch))


@few(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_rows_read_alone_is_detected(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = planted_kernels("attention.tree_node_parts", (FAULTS[fault],), tmp_path, monkeypatch)
    assert not same_bits(*both(given(FP32), 0, other.read_alone, monkeypatch))


def mixed(kv: torch.dtype = BF16) -> tuple[torch.Tensor, Pages]:
    """Native: trees, one with many nodes, and chains; an idle request, holes in the table, NaN after the ends."""
    shapes: tuple[tuple[int, ...] | int, ...] = (
        (-1, *(node // 2 for node in range(7))), 4, tuple(range(-1, 6)), (-1,),
        (-1, *(node // 3 for node in range(61))), TREES[0], 3, TREES[2],
    )  # fmt: skip
    before, size, draw = (4096, 4093, 1020, 700, 2040, 127, 1024, 5000), 64, Draw(3, HERE)
    counts = [shape if isinstance(shape, int) else len(shape) for shape in shapes]
    ends = [known + count for known, count in zip(before, counts, strict=True)]
    needed = [-(-end // size) for end in ends]
    table, order = torch.full((len(counts), max(needed) + 1), -1), torch.randperm(sum(needed))
    keys, values = (draw.normal(sum(needed), size, 2, 256, dtype=BF16) for _ in range(2))
    scales = [draw.normal(sum(needed), size, 2, 1).abs() + 0.5 for _ in range(2)] if kv == FP8 else []
    for line, (pages, end) in enumerate(zip(order.split(needed), ends, strict=True)):
        table[line, : len(pages)] = pages
        for pool in (keys, values, *scales):
            pool[pages[-1:], end - size * (len(pages) - 1) :] = float("nan")
    table[0, 3] = table[7, 2] = -1
    bits = [bit for shape in shapes for bit in (shape * [0] if isinstance(shape, int) else ancestors(shape))]
    begin, slots = [sum(counts[:i]) for i in range(len(counts))], [-1 if i == 3 else i for i in range(len(counts))]
    pages = Pages(keys.to(kv), values.to(kv), table.to(HERE), *map(draw.ints, (slots, begin, counts, before)),
                  max(counts), draw.ints(bits), max(counts), *scales)  # fmt: skip
    return draw.normal(sum(counts), 16, 256, dtype=BF16), pages


STAGED_FAULTS = {  # of the entries before a window
    "nothing": None,
    "a part of the window, too": ("known // PT * PT, paged.held)", "known // PT * PT + PT, paged.held)"),
    "units without the window's": ("known + paged.nodes, paged.held), reach)", "known, paged.held), reach)"),
}


@pytest.mark.parametrize(("fault", "kv"), [*((fault, BF16) for fault in STAGED_FAULTS), ("nothing", FP8)], ids=str)
def test_trees_next_to_chains_have_the_bits_of_the_other_layouts(
    fault: str, kv: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = STAGED_FAULTS[fault]
    on_device(("attention.split_kv_work_items_gluon", () if plant is None else (plant,)))
    query, pages = mixed(kv)
    launched = launches(monkeypatch, attend_file)
    with monkeypatch.context() as patch:
        patch.setattr(attend_file, "staged", None)
        wanted = TRITON.attend(query=query, pages=pages, to=at("attended"))
    assert launched[-2:] == ["read_parts", "join_parts"] and bool(wanted.isfinite().all())
    if plant is not None:
        planted_kernels("attention.split_kv_work_items_gluon", (plant,), tmp_path, monkeypatch)
        items = ".split_kv_work_items_gluon", ".planted_split_kv_work_items_gluon"
        other = planted_kernels("attention.split_kv_gluon", (items,), tmp_path, monkeypatch)
        monkeypatch.setattr(attend_file, "windows", other)
    same, as_is, all_places = [], attend_file.FEW, attend_file.multiprocessors
    for places in (2, 9999, None):  # programs; in items of two tiles, of one, and as is
        monkeypatch.setattr(attend_file, "multiprocessors", all_places if places is None else lambda _, n=places: n)
        for each in (0, 9999, as_is):  # in groups, in parts, and as is
            monkeypatch.setattr(attend_file, "FEW", each)
            same.append(same_bits(TRITON.attend(query=query, pages=pages, to=at("attended")), wanted))
    assert launched[-3:] == ["read_parts_staged", "read_alone", "join_parts"]
    assert all(same) is (plant is None), same  # in parts the later launch overwrites what was read too much


@pytest.mark.parametrize("waits", [True, False], ids=["as it is", "nobody waits"])
def test_rows_read_alone_wait_for_the_rows_before(waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph, where launches overlap: queries come from a norm, and attention goes into the next one."""
    edits = () if waits else (
        ("                if EARLY:\n                    wait_alone()\n", ""),
        ("mask=there)\n    if EARLY:\n        wait_alone()\n", "mask=there)\n"),
    )  # fmt: skip
    on_device(("attention.tree_node_parts", edits))
    query, pages = mixed()
    starts = [query, Draw(9, HERE).normal(*query.shape, dtype=BF16)]
    start, scale = query.clone(), Draw(10, HERE).normal(4096, dtype=BF16)

    def chain() -> list[torch.Tensor]:
        made = [start]
        for _ in range(4):
            rows = TRITON.norm(x=made[-1].view(-1, 4096), weight=scale, eps=1e-6, to=at("normed"))
            made.append(TRITON.attend(query=rows.view(query.shape), pages=pages, to=at("attended")))
        return made

    right = []
    with monkeypatch.context() as patch:
        patch.setattr(attend_file, "staged", None)
        for one in starts:
            start.copy_(one)
            right.append([x.clone() for x in chain()])
    if not waits:
        other: Any = planted_kernels("attention.tree_node_parts", edits, tmp_path, monkeypatch)
        monkeypatch.setattr(attend_file, "read_alone", other.read_alone)
    chain()
    same = same_in_a_graph(chain, start, starts, right)
    assert all(same) is waits, f"{same.count(False)} of {len(same)} are other rows"


def test_single_tree_is_read_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit layouts are used for two trees, and for one chain, but not for one tree."""
    inputs, asked = given(BF16), list[tuple[int, bool]]()
    pages = inputs["pages"]

    def fitted(query: torch.Tensor, of: Pages, *rest: Any) -> None:
        asked.append((len(of.begin), of.ancestors is not None))

    monkeypatch.setattr(attend_file, "staged", SimpleNamespace(fitted=fitted))
    for requests, paths in ((1, pages.ancestors), (2, pages.ancestors), (1, None)):
        few = {name: getattr(pages, name)[:requests] for name in ("slots", "begin", "count", "before")}
        TRITON.attend(**inputs | {"pages": replace(
            pages, **few, ancestors=paths, nodes=pages.nodes if paths is not None else 0)})  # fmt: skip
    assert asked == [(2, True), (1, False)]
