"""Attention over paged KV: prompts, and windows behind a long context. 16 query heads on 2 KV heads of 256.

Leaves out: the linear maps, norms and rotary around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from instep_optimized.layout import Pages
from instep_optimized.ops.base import Ops
from instep_optimized.ops.plain import PLAIN

from ..base import TO, Arm, At, Cell, Ground, Kind, Size
from ..peers import arms as peers
from ..right import off
from ..rows import WIDE

HEADS, KV_HEADS, WIDTH, PAGE = 16, 2, 256, 64
CASES: dict[Size, tuple[tuple[int, int, int], ...]] = {  # batch, rows, positions behind which they stand
    "tiny": ((1, 33, 0), (2, 3, 70)),
    "default": ((1, 2048, 0), (32, 4, 4096), (1, 4, 4096), (1, 1, 4096), (32, 1, 4096), (8, 4, 16384), (1, 512, 4096)),
    "full": tuple((batch, rows, behind) for behind in (0, 512, 4096, 16384) for rows in (1, 4, 8, 512, 2048)
                  for batch in (1, 8, 32, 128) if batch * (rows + behind) <= 600_000 and batch * rows <= 4096
                  and (behind or rows > 8)),
}  # fmt: skip


def cells(ground: Ground, size: Size) -> Iterator[At]:
    for batch, rows, behind in CASES[size]:
        yield {"batch": batch, "rows": rows, "behind": behind}


def make(ground: Ground, at: At) -> Cell:
    heads, width = (4, 16) if ground.tiny else (HEADS, WIDTH)
    batch, rows, behind = at["batch"], at["rows"], at["behind"]
    each = -(-(behind + rows) // PAGE)
    kv = 2.0 * batch * (behind + rows) * KV_HEADS * width * ground.dtype.itemsize
    row = 2.0 * batch * rows * heads * width * ground.dtype.itemsize
    copies = ground.layers(kv + row, least=1, most=16)
    table = ground.ints(range(batch * each, 0, -1)).view(batch, each)
    slots, begin = ground.ints(range(batch)), ground.ints(n * rows for n in range(batch))
    count, before = ground.ints([rows] * batch), ground.ints([behind] * batch)

    def pages() -> Pages:
        keys, values = (ground.drawn(batch * each + 1, PAGE, KV_HEADS, width) for _ in range(2))
        return Pages(keys, values, table, slots, begin, count, before, rows)

    query, every = ground.drawn(batch * rows, heads, width), [pages() for _ in range(copies)]
    wide = replace(every[0], keys=every[0].keys.to(WIDE), values=every[0].values.to(WIDE))
    truth = PLAIN.attend(query=query.to(WIDE), pages=wide, to=TO)
    plain = PLAIN.attend(query=query, pages=every[0], to=TO)

    def arm(name: str, ops: Ops) -> Arm:
        return Arm(
            name, lambda: [ops.attend(query=query, pages=one, to=TO) for one in every],
            lambda: off("attended", ops.attend(query=query, pages=every[0], to=TO), truth, plain, 1), copies,
        )

    seen = behind + (rows + 1) / 2
    cell = Cell([arm(name, ops) for name, ops in ground.sets.items()], read=kv + row / 2, written=row / 2,
                flops=4.0 * batch * rows * seen * heads * width)  # fmt: skip
    linear = (table[:, :, None] * PAGE + ground.ints(range(PAGE))).flatten(1)[:, :rows].flatten()
    packed = {name: pool.flatten(0, 1)[linear] for name, pool in (("key", every[0].keys), ("value", every[0].values))}
    return peers("attend", ground, at, cell, query=query, pages=every, truth=truth, plain=plain, **packed)


KIND = Kind("a layer", cells, make)
