"""Verify and commit of one layer under every commit strategy: states alone, without the round's index ops.

Peers' kernels compute norms and gates inside and move cursors. So every strategy has a second arm for comparison, which
makes its inputs in every layer of every round and from which nothing is subtracted.

Checked before and after the timing, over rounds in which every request accepts another number of drafts: the read-outs
of all rows and the states must have the bits of the one-token kernel. Leaves out: conv windows (`conv.py`), the rest of
a model.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from instep_optimized import commit as strategies
from instep_optimized.commit.base import AcceptedWindows
from instep_optimized.commit.rerun import Rerun
from instep_optimized.commit.strategy_pair import CommitPair
from instep_optimized.memory import Memory
from instep_optimized.memory.budget import Sizes, bytes_per, demands
from instep_optimized.memory.pool import Demand
from instep_optimized.memory.tiled_units import shown
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.packed_batch import Who, windows
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import InstepError

from ..answer_check import first, off, same
from ..bench_types import TO, TOO, WINDOWS, Arm, At, Cell, Ground, Kind, Size, batches_and_heads, state_dtype
from ..drawn_rows import WIDE, Rows, widened
from ..kernels_of_peers import arms as peers

CHECKED_ROUNDS = 5
DRAWN = 2  # sets of rows, which layers use in turn
PAGE = 4096
FEW = (1, 32)  # batches of other windows, heads and states in the default grid: a cell may compile for 10 seconds


def cells(ground: Ground, size: Size) -> Iterator[At]:
    yield from batches_and_heads(ground, size, FEW, window=WINDOWS[size])


def accepted_of(window: int) -> int:
    """Tokens that are committed of every window while it is timed: three of four."""
    return max(1, 3 * window // 4)


def period_of(strategy: str, window: int, ops: Ops) -> int:
    """Rounds after which a strategy stores again, if `accepted_of` tokens are committed in each.

    A strategy with a ring stores states when more tokens are pending than the ring has room for. For strategies of
    external op sets the result is 1.
    """
    made = strategies.known("state", ops)[strategy].make
    if not (isinstance(made, type) and issubclass(made, Rerun)):
        return 1
    return made.spare(made.ring_size(window), window, window) // accepted_of(window) + 1


@dataclass(frozen=True)
class Course:
    """A batch of windows under one strategy, with its inputs, or `rows` that make the inputs in a layer."""

    ops: Ops
    dtype: torch.dtype
    memory: Memory
    commit: CommitPair
    who: Who
    window: int
    inputs: list[GdnInputs]
    layers: int
    kept: tuple[str, ...]
    rows: list[Rows] | None = None

    @classmethod
    def of(
        cls, ground: Ground, ops: Ops, config: ModelConfig, strategy: str, at: At, rows: list[Rows],
        within: bool = False,
    ) -> "Course":
        """Build a course; with `within` the inputs are made in every layer as well."""
        batch, window = at["batch"], at["window"]
        room = Capacity(tuple(range(1, batch + 1)), tuple(range(1, batch + 1)), PAGE, batch * window)
        wanted, kept, sizes = _pools(ground, ops, config, strategy, room, at)
        memory = Memory(wanted + kept, room, guarded=False, poison=None, device=ground.device)
        commit = strategies.make(config, sizes, memory, window, strategy, "windows", ops)
        for number in range(batch):
            memory.claim(str(number))
            memory.grow([(str(number), PAGE)])
            commit.claim(memory.slots.of(str(number)))
        each = range(batch)
        who = Who(ground.ints(memory.slots.of(str(n)) for n in each), ground.ints(each),
                  ground.ints(n * window for n in each), ground.ints([window] * batch))  # fmt: skip
        return cls(ops, ground.dtype, memory, commit, who, window, [one.inputs(ops) for one in rows],
                   len(config.layers), tuple(one.name for one in kept), rows if within else None)  # fmt: skip

    def anew(self) -> None:
        """Reset: every request has no tokens, and its memory is zero."""
        for pool in (self.memory[name] for name in self.kept):
            for layer in pool.demand.layers:
                pool.units(layer).zero_()
        self.memory.slot_table.length.zero_()
        for slot in self.who.slots.tolist():
            self.commit.claim(slot)

    def round(self, lens: torch.Tensor, layers: int | None = None) -> list[torch.Tensor]:
        """Verify in `layers` layers (by default all), commit, and return the read-outs. With 0 layers only index ops
        run.
        """
        tokens = torch.zeros(len(lens) * self.window, dtype=torch.int64, device=lens.device)
        bound = self.commit.bind(self.ops, windows(self.ops, self.memory, self.who, tokens, "verify", self.window))
        count = self.layers if layers is None else layers
        cores = [self._core(layer, bound.state(layer)) for layer in range(count)]
        bound.ran(self.ops)
        before = self.ops.select(x=self.memory.slot_table.length, index=self.who.slots)
        if count:
            accepted = AcceptedWindows(self.who.rows, self.who.slots, lens - 1, lens, before)
            self.commit.of["state"].commit(self.ops, accepted)
        self.ops.advance(length=self.memory.slot_table.length, slots=self.who.slots, by=lens)
        return cores

    def _core(self, layer: int, parts: tuple[Part, ...]) -> torch.Tensor:
        drawn = layer % DRAWN
        if self.rows is not None:
            return self.rows[drawn].core(self.ops, parts, self.dtype)
        return self.ops.gdn(inputs=self.inputs[drawn], parts=parts, dtype=self.dtype, to=TO)

    def check(self, stored: torch.dtype) -> str:
        """Compare with the one-token kernel, whose state is rounded once a round, as a window's is.

        The kernel computes in fp32, and with fp64 activations in fp64. If states are stored in fp32, its bits are the
        truth.
        Otherwise it would be compiled for another pool with possibly different loads, so truth and yardstick come from
        `plain`.
        """
        exact = stored is torch.float32
        judges = [(self.ops, stored)] if exact else [(PLAIN, WIDE), (PLAIN, stored)]
        slots = self.who.slots.tolist()
        each, length = torch.arange(len(slots), device=self.who.slots.device), torch.zeros_like(self.who.slots)
        heads, values, keys = self.inputs[0].v.shape[1], self.inputs[0].v.shape[2], self.inputs[0].k.shape[2]
        zeros = torch.zeros(len(slots), heads, values, keys, device=each.device)
        lines = [[zeros.to(dtype, copy=True).mT for _ in range(DRAWN)] for _, dtype in judges]

        def differs(what: str, found: torch.Tensor, right: list[torch.Tensor]) -> str:
            return same(what, found, right[0]) if exact else off(what, found, right[0], right[1], 1)

        for number in range(CHECKED_ROUNDS):
            lens = (each + number) % self.window + 1
            cores = self.round(lens)
            for drawn in range(DRAWN):
                alone = [self._one_by_one(ops, self.inputs[drawn], kept[drawn], lens, stored)
                         for (ops, _), kept in zip(judges, lines, strict=True)]  # fmt: skip
                said = [differs(f"the read-out of round {number + 1}", core, alone) for core in cores[drawn::DRAWN]]
                if any(said):
                    return first(*said)
            length += lens
        for number, slot in enumerate(slots):
            held = self.commit.of["state"].peek(self.ops, slot, int(length[number]))
            found = (shown(held[layer]).to(stored) for layer in range(self.layers))
            said = [differs(f"the state of request {number}", one, [kept[layer % DRAWN][number] for kept in lines])
                    for layer, one in enumerate(found)]  # fmt: skip
            if any(said):
                return first(*said)
        return ""

    def _one_by_one(
        self, ops: Ops, inputs: GdnInputs, state: torch.Tensor, lens: torch.Tensor, stored: torch.dtype
    ) -> torch.Tensor:
        """The read-outs of a window's rows, one token a launch; `state` becomes the rounded one after the accepted
        tokens.

        Computes in the wider dtype of `state` and activations, at least fp32.
        """
        units, wide = torch.arange(len(lens), device=lens.device), WIDE in (state.dtype, self.dtype)
        running = state.mT.to(WIDE if wide else torch.float32, copy=True).mT
        fresh, ones = torch.zeros(len(lens), dtype=torch.bool, device=lens.device), torch.ones_like(units)
        cores = []
        for token in range(self.window):
            here = Address(running, units)
            one = GdnInputs(*(x[token :: self.window].contiguous() for x in inputs))
            form = Part("window", units, ones, 1, here, fresh, here)
            rows, dtype = (widened(one), WIDE) if wide else (one, self.dtype)
            cores.append(ops.gdn(inputs=rows, parts=(form,), dtype=dtype, to=TO))
            ended = lens == token + 1
            state[ended] = running[ended].to(stored).to(state.dtype)
        return torch.stack(cores, 1).flatten(0, 1)


def _pools(
    ground: Ground, ops: Ops, config: ModelConfig, strategy: str, room: Capacity, at: At
) -> tuple[tuple[Demand, ...], tuple[Demand, ...], Sizes]:
    """The pools of every engine, and those of its strategies."""
    sizes = Sizes(ops.types(ground.dtype, state_dtype(at)), "VK", room, at["window"], keeps=ops.keeps)
    kept = strategies.demands(config, sizes, strategy, "windows", ops)
    return demands(config, sizes), kept, sizes


def beside(ground: Ground, ops: Ops, config: ModelConfig, strategy: str, at: At) -> dict[str, int]:
    """Bytes per request and layer of slots, rings and rows."""
    room = Capacity((1,), (1,), 64, at["window"])
    sizes = Sizes(ops.types(ground.dtype, state_dtype(at)), "VK", room, at["window"], keeps=ops.keeps)
    costs = bytes_per(strategies.demands(config, sizes, strategy, "windows", ops), guarded=False)
    return {kind: cost // len(config.layers) for kind, cost in costs.items() if kind != "page"}


def make(ground: Ground, at: At) -> Cell:
    state = at["heads"] * (one := ground.config(at["heads"], 1)).key_dim * one.value_dim * state_dtype(at).itemsize
    layers = ground.layers(at["batch"] * state, most=24)
    config = ground.config(at["heads"], layers)
    rows = [Rows.drawn(ground, config, at["batch"] * at["window"]) for _ in range(DRAWN)]
    cell = Cell([], read=at["batch"] * state, written=at["batch"] * state)
    for name, ops in ground.sets.items():
        for strategy in strategies.known("state", ops):
            told = strategy if len(ground.sets) == 1 else f"{name} {strategy}"
            computed = WIDE if ground.dtype is WIDE else torch.float32
            if strategy == "lazy_rerun" and state_dtype(at).itemsize < computed.itemsize:
                cell.absent[told] = f"it stores no state narrower than {str(computed).removeprefix('torch.')}"
                continue
            try:
                cell.arms += [_arm(told, ground, ops, config, strategy, at, rows, within)
                              for within in (False, True)[: 1 + ground.peers]]  # fmt: skip
            except InstepError as refused:
                cell.absent[told] = str(refused)
    return peers("strategies", ground, at, cell, rows=rows, config=config)


def _arm(
    told: str, ground: Ground, ops: Ops, config: ModelConfig, strategy: str, at: At, rows: list[Rows], within: bool
) -> Arm:
    """An arm; with `within` norms, gates and the round's index ops are timed as well."""
    lens, course = ground.ints([accepted_of(at["window"])] * at["batch"]), Course.of(
        ground, ops, config, strategy, at, rows, within)
    # Separate requests: binding moves marks, and a round of the course must find its own where it left them.
    apart = None if within else Course.of(ground, ops, ground.config(config.key_heads, 1), strategy, at, [])
    return Arm(
        told + TOO * within, lambda: course.round(lens), lambda: course.check(state_dtype(at)), len(config.layers),
        less=None if apart is None else lambda: apart.round(lens, 0),
        period=period_of(strategy, at["window"], ops), anew=course.anew,
        more=lambda: {"bytes": beside(ground, ops, config, strategy, at)},
    )


KIND = Kind("a layer", cells, make)
