"""The recurrence of one token per request: `gdn` with windows of one, in place in the slots.

Some peers compute norms and gates inside; one of our arms does so too. Leaves out: norms, gates and conv before it.
"""

from collections.abc import Callable, Iterator

import torch

from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.plain import PLAIN

from ..bench_types import TO, TOO, Arm, At, Cell, Ground, Kind, batches_and_heads, state_dtype
from ..drawn_rows import Rows, off_from_plain, on, part, redrawn, states
from ..kernels_of_peers import arms as peers


def make(ground: Ground, at: At) -> Cell:
    config, stored = ground.config(at["heads"], 1), state_dtype(at)
    state = at["heads"] * config.key_dim * config.value_dim * stored.itemsize
    layers = ground.layers(at["batch"] * state)
    pools = [states(ground, config, at["batch"] + 1, stored) for _ in range(layers)]
    parts = [part(ground, "window", list(range(at["batch"], 0, -1)), 1, pool) for pool in pools]
    rows = Rows.drawn(ground, config, at["batch"])
    cell = Cell([], read=at["batch"] * state, written=at["batch"] * state, anew=lambda: redrawn(*pools))
    for name, ops in ground.sets.items():
        cell.arms += _arms(name, ops, rows, parts, ground)
    return peers("decode", ground, at, cell, rows=rows, parts=parts)


def _arms(name: str, ops: Ops, rows: Rows, parts: list[Part], ground: Ground) -> Iterator[Arm]:
    inputs = rows.inputs(ops)

    def arm(
        name: str, core: Callable[[Part], torch.Tensor], given: GdnInputs, truth: GdnInputs | None = None
    ) -> Arm:
        return Arm(name, lambda: [core(form) for form in parts],
                   lambda: off_from_plain(lambda pool: core(on(parts[0], pool)), given, parts[0], truth=truth),
                   len(parts))  # fmt: skip

    yield arm(name, lambda form: ops.gdn(inputs=inputs, parts=(form,), dtype=ground.dtype, to=TO), inputs)
    if ground.peers:
        yield arm(f"{name}{TOO}", lambda form: rows.core(ops, (form,), ground.dtype), rows.inputs(PLAIN),
                  rows.inputs(PLAIN, wide=True))  # fmt: skip


KIND = Kind("a layer", batches_and_heads, make)
