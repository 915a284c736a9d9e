"""The recurrence of prompts: `gdn` with chunks, whole sequences that start from a state in their slot.

Every arm reads rows in the bits that a model passes. Truth is fp64 in blocks, which is as exact as token by token, from
rows that were not rounded for that. The yardstick rounds operands as the kernel declares (`Ops.products`; for a peer
bf16 in blocks of 64). The errors of every arm are printed as well, and the row reports an error of ours above FLA's on
the same rows. Leaves out: norms, gates and conv before it.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from instep.subject.declared_rounding import declared
from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.recurrences import Recurrence

from ..answer_check import Judged, errors, first, off
from ..bench_types import HEADS, TO, Arm, At, Cell, Ground, Kind, Size
from ..drawn_rows import Blocks, Rows, handed_over, in_blocks, on, part, redrawn, states, true_rows
from ..kernels_of_peers import arms as peers

SEQUENCES = {
    "tiny": ((1, 70), (2, 33)), "default": ((1, 2048), (1, 8192), (8, 2048), (1, 32768)),
    "full": (*((1, 512 << power) for power in range(7)), (8, 512), (8, 2048), (32, 512)),
}  # fmt: skip
FEW = HEADS["default"][:2]  # in the default grid: for other heads peers tune themselves again, for 20 seconds
PEER = {"gdn.chunk": Product("bf16", block=64)}
Run = Callable[[torch.Tensor], torch.Tensor]


def cells(ground: Ground, size: Size) -> Iterator[At]:
    for number, heads in enumerate(HEADS[size] if size != "default" else FEW):
        for sequences, tokens in SEQUENCES[size][: None if size != "default" or not number else 2]:
            yield {"sequences": sequences, "tokens": tokens, "heads": heads}


def make(ground: Ground, at: At) -> Cell:
    config, count = ground.config(at["heads"], 1), at["sequences"] * at["tokens"]
    rows = Rows.drawn(ground, config, count)
    layers = ground.layers(4.0 * count * at["heads"] * config.value_dim, least=1, most=4)
    slots = list(range(at["sequences"], 0, -1))
    parts = [part(ground, "chunk", slots, at["tokens"], states(ground, config, at["sequences"] + 1, torch.float32))
             for _ in range(layers)]  # fmt: skip
    wide: dict[str, GdnInputs] = {name: rows.inputs(ops) for name, ops in ground.sets.items()}
    own = {name: handed_over(ops, wide[name], (parts[0],), ground.dtype) for name, ops in ground.sets.items()}
    given = next(iter(wide.values()))
    state = 4.0 * at["sequences"] * at["heads"] * config.key_dim * config.value_dim
    core = count * at["heads"] * config.value_dim * ground.dtype.itemsize
    read = state + sum(x.numel() for x in (given.q, given.k, given.v)) * ground.dtype.itemsize
    cell = Cell([], read=read, written=state + core, anew=lambda: redrawn(*(one.read.pool for one in parts)))
    truth = Truth(given, parts[0], config.recurrence)

    def arm(name: str, ops: Ops) -> Arm:
        def run(pool: torch.Tensor) -> torch.Tensor:
            return ops.gdn(inputs=own[name], parts=(on(parts[0], pool),), dtype=ground.dtype, to=TO)

        def work() -> object:
            return [ops.gdn(inputs=own[name], parts=(one,), dtype=ground.dtype, to=TO) for one in parts]

        said = declared(ops, ground.dtype, torch.float32).products
        return Arm(name, work, lambda: truth.judge(run, said), layers)

    cell.arms = [arm(name, ops) for name, ops in ground.sets.items()]

    def judge(run: Run) -> Judged:
        return truth.judge(run, PEER)

    return peers("prefill", ground, at, cell, rows=rows, parts=parts, inputs=given, judge=judge)


class Truth:
    """The read-outs and states of a launch in fp64, made once for all arms; a yardstick is made once per rounding."""

    def __init__(self, inputs: GdnInputs, form: Part, row: Recurrence) -> None:
        self.inputs, self.form, self.start, self.row = inputs, form, form.read.pool.clone(), row
        self.found: Blocks | None = None
        self.yardsticks: dict[tuple[Product | None, torch.dtype], Blocks] = {}

    def judge(self, run: Run, products: Mapping[str, Product]) -> Judged:
        if self.found is None:
            self.found = true_rows(self.inputs, self.form, self.start, self.row)
        o, state = self.found
        declared = products.get(self.row.forms[1])
        own = self.start.mT.clone().mT
        core = run(own)
        if (declared, core.dtype) not in self.yardsticks:
            made = in_blocks(self.inputs, self.form, self.start, declared, core.dtype, self.row)
            self.yardsticks[declared, core.dtype] = made
        r, drawn = self.yardsticks[declared, core.dtype]
        units = self.form.read.units
        said = first(off("read-out", core, o, r, 1), off("state", own[units], state, drawn, 1))
        return Judged(said, errors(core=(core, o), state=(own[units], state)))


KIND = Kind("a layer", cells, make, x="tokens", bar="fla chunked")
