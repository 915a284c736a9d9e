"""The argmax over a vocabulary of 248,320 logits in fp32, with the lowest token on a tie.

Leaves out: the product that makes the logits (`products.py`), and drawing.
"""

from collections.abc import Iterator

import torch

from instep_optimized.ops.op_protocols import Ops

from ..answer_check import same
from ..bench_types import TO, Arm, At, Cell, Ground, Kind, Size
from ..kernels_of_peers import arms as peers

VOCAB = 248_320
ROWS: dict[Size, tuple[int, ...]] = {"tiny": (1, 3), "default": (1, 4, 32, 128), "full": (1, 2, 4, 8, 32, 128, 512)}


def cells(ground: Ground, size: Size) -> Iterator[At]:
    for rows in ROWS[size]:
        yield {"rows": rows}


def make(ground: Ground, at: At) -> Cell:
    shape = at["rows"], 500 if ground.tiny else VOCAB
    size = 4.0 * shape[0] * shape[1]
    logits = [ground.drawn(*shape, dtype=torch.float32) for _ in range(ground.layers(size, most=128))]
    logits[0][:, shape[1] // 3 :: shape[1] // 3] = 9.0  # ties
    right = torch.tensor([int((row == row.max()).nonzero()[0]) for row in logits[0]], device=ground.device)

    def arm(name: str, ops: Ops) -> Arm:
        return Arm(name, lambda: [ops.pick(logits=one, to=TO) for one in logits],
                   lambda: same("picks", ops.pick(logits=logits[0], to=TO), right), len(logits))  # fmt: skip

    cell = Cell([arm(name, ops) for name, ops in ground.sets.items()], read=size)
    return peers("pick", ground, at, cell, logits=logits)


KIND = Kind("a launch", cells, make, x="rows")
