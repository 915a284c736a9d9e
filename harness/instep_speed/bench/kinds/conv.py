"""The causal conv of a GDN layer over all its channels: windows, and rows of a prompt.

Leaves out: the linear map before it and the norms and gates after it.
"""

from collections.abc import Callable, Iterator

import torch

from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN

from ..answer_check import first, off
from ..bench_types import BATCHES, HEADS, TO, Arm, At, Cell, Ground, Kind, Size
from ..drawn_rows import CONV_WIDTH, WIDE, channels_of, on, part, redrawn
from ..kernels_of_peers import arms as peers

ROWS = {"tiny": (1, 4), "default": (1, 4), "full": (1, 2, 3, 4, 5, 6, 7, 8)}
PROMPTS = {"tiny": (9,), "default": (512, 2048), "full": (512, 2048, 8192)}


def cells(ground: Ground, size: Size) -> Iterator[At]:
    for heads in HEADS[size][: None if size == "full" else 1]:
        for rows in ROWS[size]:
            for batch in BATCHES[size]:
                yield {"batch": batch, "rows": rows, "heads": heads}
        for rows in PROMPTS[size]:
            yield {"batch": 1, "rows": rows, "heads": heads}


def make(ground: Ground, at: At) -> Cell:
    channels, count = channels_of(ground.config(at["heads"], 1)), at["batch"] * at["rows"]
    x, weight = ground.drawn(count, channels), ground.drawn(channels, CONV_WIDTH).mul_(0.5)
    window = channels * (CONV_WIDTH - 1)
    moved = float(ground.dtype.itemsize * (x.numel() + at["batch"] * window))
    copies = ground.layers(2 * moved, most=32)
    pools = [ground.drawn(at["batch"] + 1, channels, CONV_WIDTH - 1) for _ in range(copies)]
    inputs = [x, *(torch.empty_like(x).copy_(x) for _ in range(copies - 1))]
    slots = list(range(1, at["batch"] + 1))
    parts = [part(ground, "chunk" if at["rows"] > 16 else "window", slots, at["rows"], pool) for pool in pools]

    def judge(run: Callable[[torch.Tensor], torch.Tensor]) -> str:
        own, twin = pools[0].clone(), pools[0].clone()
        out = run(own)
        o = PLAIN.conv(x=x.to(WIDE), weight=weight.to(WIDE), parts=(on(parts[0], pools[0].to(WIDE)),), to=TO)
        r = PLAIN.conv(x=x, weight=weight, parts=(on(parts[0], twin),), to=TO)
        wrong = "" if torch.equal(own, twin) else "the windows differ from the last inputs"
        return first(off("conv output", out, o, r), wrong)

    def arm(name: str, ops: Ops) -> Arm:
        def run(rows: torch.Tensor, form: Part) -> torch.Tensor:
            return ops.conv(x=rows, weight=weight, parts=(form,), to=TO)

        return Arm(name, lambda: [run(*one) for one in zip(inputs, parts, strict=True)],
                   lambda: judge(lambda pool: run(x, on(parts[0], pool))), copies)  # fmt: skip

    cell = Cell([arm(name, ops) for name, ops in ground.sets.items()], read=moved, written=moved,
                anew=lambda: redrawn(*pools, std=1.0))  # fmt: skip
    return peers("conv", ground, at, cell, inputs=inputs, weight=weight, pools=pools, judge=judge)


KIND = Kind("a layer", cells, make)
