"""Cases of windows that are trees, for every op that supports them.

Leaves out: chains (the other tables), and the test that a path has the bits of a chain
(`tests/optimized/test_ops_trees.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from instep_reference.contract.recurrences import RECURRENCES

from .case import BF16, FP32, Build, Call, Case, Draw, drawn_from, seeded
from .conv_and_gdn import HEADS, Shape, conv_case, gdn_case
from .guarded_pools import guarded
from .integer_ops import INT64, Placing, place_rows_case
from .paged_kv import LATENTS, Reading, attend_case, latents_case

Parents = tuple[int, ...]  # of the nodes of a window, the root first: -1, then a lower number than the node's own
NOBODYS = 99  # fills a tensor after a window's end
TREES: dict[str, tuple[Parents, ...]] = {
    "ragged": ((-1, 0, 0, 1, 1, 2, 5), (-1, 0, 1, 2), (-1,), (), (-1, 0, 0, 0, 2, 1)),
    "chain": ((-1, 0, 1, 2, 3),),
    "wide": ((-1, *9 * (0,), *range(1, 10)), (-1,)),
    "widest": ((-1, *(node // 3 for node in range(62))), tuple(range(-1, 62))),
    "none": (),
}


def path(parents: Parents, node: int) -> list[int]:
    """The nodes from the root to `node`."""
    return [*(path(parents, parents[node]) if parents[node] >= 0 else ()), node]


def ancestors(tree: Parents) -> list[int]:
    """For every node, the nodes of its path as bits."""
    return [sum(1 << above for above in path(tree, node)) for node in range(len(tree))]


def padded(draw: Draw, rows: Sequence[Sequence[int]], width: int, behind: int = NOBODYS) -> torch.Tensor:
    """[B, width] int64."""
    return draw.ints([x for row in rows for x in [*row, *(width - len(row)) * [behind]]]).view(len(rows), width)


def packed(draw: Draw, begin: torch.Tensor, rows: Sequence[Sequence[int]], total: int) -> torch.Tensor:
    """[total] int64: the numbers of every request at its packed rows."""
    out = draw.ints(total * [NOBODYS])
    for first, row in zip(begin.tolist(), rows, strict=True):
        out[first : first + len(row)] = draw.ints(row)
    return out


def shaped(build: Build, trees: tuple[Parents, ...], *, over: bool = False) -> Build:
    """Make trees of the only part of a conv or gdn case. over: memory after every row goes to the pool that is read."""

    def built(device: str) -> Call:
        inputs, pools = build(device)
        (part,), rows = inputs["parts"], len(inputs["x"] if "x" in inputs else inputs["inputs"].v)
        part = replace(part, parents=packed(Draw(0, device), part.begin, trees, rows))
        if over:
            part = replace(part, per_row=replace(part.read, column=None))
            for unit, count in zip(part.read.units.tolist(), part.count.tolist(), strict=True):
                for column in range(count if unit >= 0 else 0):
                    pools["memory"].allow(unit, column)
        return Call({**inputs, "parts": (part,)}, pools)

    return built


def window(trees: tuple[Parents, ...], **more: Any) -> Shape:
    """Requests in units 2, 3, .. (the last one idle if there are several), of which the second is fresh."""
    units = [2 + number for number in range(len(trees))]
    if len(units) > 2:
        units[-1] = -1
    count = tuple(map(len, trees))
    fresh = tuple(int(number == 1) for number in range(len(trees)))
    return Shape("window", count, tuple(units), fresh, per_row=tuple(range(len(trees))), **more)


def seen(
    build: Build, trees: tuple[Parents, ...], drafted: Sequence[int] | None = None, chains: Sequence[int] = ()
) -> Build:
    """Make trees of a case of attention. drafted: only the row of this node runs for each request, before others are
    written; chains: requests whose rows have no bits."""

    def built(device: str) -> Call:
        inputs, pools = build(device)
        pages, draw = inputs["pages"], Draw(0, device)
        rows = [[0 if number in chains else bits for bits in ancestors(tree)] for number, tree in enumerate(trees)]
        if drafted is not None:
            rows = [[bits[node]] for bits, node in zip(rows, drafted, strict=True)]
            requests = zip(rows, trees, pages.slots.tolist(), pages.before.tolist(), strict=True)
            for (bits,), tree, slot, before in requests:
                for node in (node for node in range(len(tree)) if not bits >> node & 1):
                    page, entry = divmod(before + node, pages.keys.shape[1])
                    for name in ("keys", "values"):
                        pools[name].view[int(pages.table[slot, page]), entry] = torch.nan
            pages = replace(pages, count=draw.ints(len(trees) * [1]), most=1)
        along = packed(draw, pages.begin, rows, len(inputs["query"]))
        column = torch.stack([along, draw.ints(len(along) * [0])], dim=1)[:, 0]  # of a plan [B, T]
        return Call({**inputs, "pages": replace(pages, ancestors=column, nodes=max(map(len, trees)))}, pools)

    return built


@drawn_from(0)
def plan_tree_case(draw: Draw, trees: tuple[Parents, ...], slots: Sequence[int]) -> Call:
    width = max(map(len, trees), default=3)
    inputs = {"parents": padded(draw, trees, width), "slots": draw.ints(slots),
              "count": draw.ints([len(tree) for tree in trees])}
    return Call(inputs, {})


@seeded
def accept_case(
    draw: Draw, trees: tuple[Parents, ...], forced: Sequence[tuple[int, int]] | None, caps: Sequence[int] = (),
) -> Call:
    """Tokens from a vocabulary of two, so that walks are long, several children match, and padding would match."""
    width, many = max(map(len, trees), default=3), len(trees)
    told = draw.ints([x for pair in forced or many * [(-1, -1)] for x in pair]).view(many, 2)
    numbers = (draw.uniform(many, width, low=0, high=2).long() for _ in range(2))
    inputs = {**dict(zip(("window", "picks"), numbers, strict=True)), "parents": padded(draw, trees, width),
              "count": draw.ints([len(tree) for tree in trees]), "forced_last": told[:, 0],
              "forced_bonus": told[:, 1], **({"caps": draw.ints(caps)} if caps else {})}
    return Call(inputs, {})


PATHS = ((0, 1, 4, 6), (0,), (0, 2, 3), (0, 1, 2), (), (0, 5))
PATH_SLOTS = (4, 2, 1, 3, -1, -1)
LINES = ((0, 0, 0), (9, 8, -1), (2, 3, -1), (4, 6, 7), (5, 1, 10))


@drawn_from(0)
def plan_path_case(draw: Draw, size: int, before: Sequence[int], table: bool) -> Call:
    pool = guarded((len(LINES),), (len(LINES[0]),), INT64, device=draw.device)
    pool.view.copy_(torch.tensor(LINES))
    inputs = {"accept_index": padded(draw, PATHS, 8, -1), "slots": draw.ints(PATH_SLOTS),
              "before": draw.ints(before), "size": size, **({"table": pool.view} if table else {})}
    return Call(inputs, {"table": pool})


@drawn_from(17)
def move_rows_case(draw: Draw, block: tuple[int, ...], dtype: torch.dtype, swap: bool = False) -> Call:
    """Paths whose entries overwrite each other, one across two units, and columns that move nothing."""
    source = ((-1, 3, 5, 9), (-1, -1, -1, -1), (14, 12, -1, 16))
    target = ((-1, 2, 3, 5), (-1, -1, -1, -1), (11, 14, -1, 12))
    entries = 4
    pool = guarded((5, entries), block, dtype, swap=swap, device=draw.device)
    pool.view.copy_(draw.normal(*pool.view.shape, scale=100.0).to(dtype))
    for entry in (entry for row in target for entry in row if entry >= 0):
        pool.allow(entry // entries, entry % entries)
    plan = {"source": padded(draw, source, 4), "target": padded(draw, target, 4)}
    return Call({"pool": pool.view, **plan}, {"pool": pool})


@drawn_from(19)
def nodes_case(draw: Draw, placing: Placing, lead: int) -> Call:
    inputs, pools = place_rows_case(placing)(draw.device)
    depth = draw.uniform(placing.rows, low=0, high=4).long()
    return Call({**inputs, "depth": depth, "lead": lead}, pools)


RAGGED, CHAIN, WIDE = (TREES[name] for name in ("ragged", "chain", "wide"))
OVER = replace(window(RAGGED), per_row=None, column=(6, 1, 0, 0, 3))
WIDE_OVER = replace(window(WIDE), per_row=None, column=(2, 18))  # written before the last rows reach it
FORCED = ((3, -1), (-1, 1), (-1, 0), (2, 5), (60, 4))
READ = Reading(((5, 2, 9), (7, 1, -1), (3, -1, -1), (-1, -1, -1), (6, 8, 4)), before=(5, 2, 0, 0, 3),
               count=tuple(map(len, RAGGED)), skip=1)  # fmt: skip
ENDS = Reading(((3, 1), (2, 4)), before=(5, 1), count=(7, 4), slots=(3, 1))  # nodes beyond the end of the first list
DRAFTED = Reading(((5, 2, 9), (7, 1, -1)), before=(5, 2), count=(7, 6), slots=(3, 1))
DRAFT_TREES = RAGGED[0], RAGGED[4]

TREE_INDEX = [
    *(Case("plan_tree", name, plan_tree_case(trees, [n - (n == 2) * 3 for n in range(1, len(trees) + 1)]), exact=True)
      for name, trees in TREES.items()),
    *(Case("accept", f"{name}-{seed}", accept_case(seed, trees, None), exact=True)
      for name, trees in TREES.items() for seed in (1, 2)),
    Case("accept", "trees-forced", accept_case(3, RAGGED, FORCED), exact=True),
    Case("accept", "trees-capped", accept_case(3, RAGGED, FORCED, (1, 2, -1, 0, 2)), exact=True),
    Case("plan_path", "pages", plan_path_case(4, (3, 0, 5, 2, 1, 0), True), exact=True),
    Case("plan_path", "ring", plan_path_case(10, (13, 7, 5, 9, 0, 2), False), exact=True),
    Case("place_rows", "nodes", nodes_case(Placing((4, -1, 1, 2), (4, 0, 1, 7), (3, 2, 3, 1), 9), 0), exact=True),
    Case("place_rows", "drafted-nodes", nodes_case(Placing((4, -1, 2), (0, 1, 2), (1, 1, 1), 3, shift=2), 1),
         exact=True),
    Case("move_rows", "keys", move_rows_case((2, 16), BF16), exact=True),
    Case("move_rows", "decays", move_rows_case((3,), FP32), exact=True),
    Case("move_rows", "swapped", move_rows_case((6, 5), FP32, swap=True), exact=True),
]  # fmt: skip
TREE_ROWS = [
    *(Case(row.name, name, shaped(gdn_case(800 + i, parts, HEADS[heads], state, state == FP32, state, row), tree))
      for row in RECURRENCES.values() for i, (name, parts, heads, state, tree) in enumerate([
          ("trees-fp32", (window(RAGGED, skip=1),), "r2", FP32, RAGGED),
          ("trees-bf16", (window(RAGGED),), "r3", BF16, RAGGED), ("chain", (window(CHAIN),), "r1", FP32, CHAIN)])),
    Case("conv", "trees", shaped(conv_case(803, (window(RAGGED, skip=2),), 48, 4, FP32, False), RAGGED),
         exact_memory=True),
    Case("conv", "trees-over", shaped(conv_case(804, (OVER,), 48, 3, BF16, True), RAGGED, over=True),
         exact_memory=True),
    Case("conv", "wide-over", shaped(conv_case(805, (WIDE_OVER,), 20, 4, FP32, False), WIDE, over=True),
         exact_memory=True),
    *(Case(op, "trees", shaped(conv_case(813, (window(RAGGED, skip=1),), 40, 3, FP32, True, op), RAGGED),
           exact_memory=True) for op in ("biased_conv", "short_conv")),
    Case("attend", "trees-fp32", seen(attend_case(806, READ, FP32), RAGGED)),
    Case("attend", "trees-bf16", seen(attend_case(807, READ, BF16), RAGGED)),
    Case("attend", "trees-and-chain", seen(attend_case(809, READ, FP32), RAGGED, chains=(1, 4))),
    Case("attend", "trees-ends", seen(attend_case(810, ENDS, FP32), RAGGED[:2])),
    Case("attend", "drafted", seen(attend_case(808, DRAFTED, FP32), DRAFT_TREES, drafted=(6, 5))),
    *(Case("attend_latents", f"trees-{str(dtype)[6:]}", seen(
        latents_case(811, READ, LATENTS["wide keys"], dtype), RAGGED)) for dtype in (FP32, BF16)),
    Case("attend_latents", "drafted", seen(
        latents_case(812, DRAFTED, LATENTS["wide values"], FP32), DRAFT_TREES, drafted=(6, 5))),
]  # fmt: skip
