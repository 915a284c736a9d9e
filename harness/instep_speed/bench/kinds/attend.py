"""Attention over paged KV: prompts, windows and trees after a long context. 16 query heads on 2 KV heads of 256.

Cells with fp8 KV and a scale per row and head have the axis `kv`, cells with tree windows the axis `tree`; other cells
have neither. Leaves out: the linear maps, norms and rotary around it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from instep.options import FP8
from instep_optimized.memory_addresses import Pages
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.plain.scaled_tiles import opened, packed
from instep_reference.contract.declared_rounding import SCALED_KV

from ..answer_check import off
from ..bench_types import TO, Arm, At, Cell, Ground, Kind, Size
from ..drawn_rows import WIDE
from ..kernels_of_peers import arms as peers

HEADS, KV_HEADS, WIDTH, PAGE = 16, 2, 256, 64
CASES: dict[Size, tuple[tuple[int, int, int], ...]] = {  # batch, rows, positions before them
    "tiny": ((1, 33, 0), (2, 3, 70)),
    "default": ((1, 2048, 0), (32, 4, 4096), (1, 4, 4096), (1, 1, 4096), (32, 1, 4096), (8, 4, 16384), (1, 512, 4096)),
    "full": tuple((batch, rows, behind) for behind in (0, 512, 4096, 16384) for rows in (1, 4, 8, 512, 2048)
                  for batch in (1, 8, 32, 128) if batch * (rows + behind) <= 600_000 and batch * rows <= 4096
                  and (behind or rows > 8)),
}  # fmt: skip
BINARY = "binary"  # node n continues node (n - 1) // 2
MORE: dict[Size, tuple[tuple[int, int, int, dict[str, str]], ...]] = {  # the same, with further axes
    "tiny": ((2, 3, 70, {"kv": FP8}), (2, 5, 70, {"tree": BINARY})),
    "default": ((32, 4, 4096, {"kv": FP8}), (8, 8, 4096, {"tree": BINARY})),
    "full": (*((batch, rows, 4096, {"kv": FP8}) for rows in (1, 4, 512) for batch in (1, 8, 32) if batch * rows <= 512),
             *((batch, rows, 4096, {"tree": BINARY}) for rows in (8, 16, 32) for batch in (1, 8, 32)),
             (8, 8, 4096, {"kv": FP8, "tree": BINARY})),
}  # fmt: skip


def cells(ground: Ground, size: Size) -> Iterator[At]:
    for batch, rows, behind, more in (*((*case, {}) for case in CASES[size]), *MORE[size]):
        yield {"batch": batch, "rows": rows, "behind": behind, **more}


def make(ground: Ground, at: At) -> Cell:
    heads, width = (4, 16) if ground.tiny else (HEADS, WIDTH)
    batch, rows, behind = at["batch"], at["rows"], at["behind"]
    each, narrow = -(-(behind + rows) // PAGE), at.get("kv") == FP8
    entry = width + 4 if narrow else width * ground.dtype.itemsize  # bytes of a key or a value
    kv = 2.0 * batch * (behind + rows) * KV_HEADS * entry
    row = 2.0 * batch * rows * heads * width * ground.dtype.itemsize
    copies = ground.layers(kv + row, least=1, most=16)
    table = ground.ints(range(batch * each, 0, -1)).view(batch, each)
    slots, begin = ground.ints(range(batch)), ground.ints(n * rows for n in range(batch))
    count, before = ground.ints([rows] * batch), ground.ints([behind] * batch)
    paths = _paths(rows) if "tree" in at else []
    tree: dict[str, Any] = {"ancestors": ground.ints(paths * batch), "nodes": rows} if paths else {}

    def pages() -> Pages:
        keys, values = (ground.drawn(batch * each + 1, PAGE, KV_HEADS, width) for _ in range(2))
        form = Pages(keys, values, table, slots, begin, count, before, rows, **tree, full=True)
        return _stored(form) if narrow else form

    query, every = ground.drawn(batch * rows, heads, width), [pages() for _ in range(copies)]
    truth = PLAIN.attend(query=query.to(WIDE), pages=_wide(every[0]), to=TO)
    plain = PLAIN.attend(query=query, pages=every[0], to=TO)

    def arm(name: str, ops: Ops) -> Arm:
        return Arm(
            name, lambda: [ops.attend(query=query, pages=one, to=TO) for one in every],
            lambda: off("attended", ops.attend(query=query, pages=every[0], to=TO), truth, plain, 1), copies,
        )

    seen = behind + (sum(path.bit_count() for path in paths) / rows if paths else (rows + 1) / 2)
    cell = Cell([], read=kv + row / 2, written=row / 2, flops=4.0 * batch * rows * seen * heads * width)
    for name, ops in ground.sets.items():
        if narrow and not ops.tiled:
            cell.absent[name] = "its ops do not read scales"
        elif tree and not ops.trees:
            cell.absent[name] = "it serves no trees"
        else:
            cell.arms.append(arm(name, ops))
    linear = (table[:, :, None] * PAGE + ground.ints(range(PAGE))).flatten(1)[:, :rows].flatten()
    flat = {name: pool.flatten(0, 1)[linear] for name, pool in (("key", every[0].keys), ("value", every[0].values))}
    return peers("attend", ground, at, cell, query=query, pages=every, truth=truth, plain=plain, **flat)


def _paths(nodes: int) -> list[int]:
    """The nodes that each node of a binary tree attends to, as a bit mask."""
    found = [1]
    for node in range(1, nodes):
        found.append(found[(node - 1) // 2] | 1 << node)
    return found


def _stored(form: Pages) -> Pages:
    """The same numbers in fp8, with a scale per row and head."""
    (keys, key_scales), (values, value_scales) = (
        packed(pool, SCALED_KV.dtype, (KV_HEADS, 1)) for pool in (form.keys, form.values))  # fmt: skip
    return replace(form, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)


def _wide(form: Pages) -> Pages:
    """The values read from the pages, in fp64: a product with a scale is exact in fp32."""

    def read(pool: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return (pool if scales is None else opened(pool, scales)).to(WIDE)

    return replace(form, keys=read(form.keys, form.key_scales), values=read(form.values, form.value_scales),
                   key_scales=None, value_scales=None)  # fmt: skip


KIND = Kind("a layer", cells, make)
