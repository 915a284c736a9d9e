"""The work of a GDN layer between its linear maps for one token per request: conv, norms, gates and recurrence.

A peer may compute norms and gates in the conv or in the recurrence, so all arms do the same work here.
Leaves out: the parts alone (`conv.py`, `decode.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from instep_optimized.memory_addresses import Part
from instep_optimized.ops.fused import prefill_gdn
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN

from ..answer_check import first, off, same
from ..bench_types import SEED, TO, Arm, At, Cell, Ground, Kind, batches_and_heads, state_dtype
from ..drawn_rows import CONV_WIDTH, WIDE, Rows, channels_of, like, on, part, redrawn, states
from ..kernels_of_peers import arms as peers


@dataclass(frozen=True)
class Layer:
    """x [B, C] before the conv, weight [C, W]; pools of windows [units, C, W - 1] and of states [units, HV, K, V]."""

    x: torch.Tensor
    weight: torch.Tensor
    windows: torch.Tensor
    states: torch.Tensor
    form: Part  # of both pools, except for the address

    @property
    def slots(self) -> torch.Tensor:
        return self.form.read.units

    def at(self, pool: torch.Tensor) -> Part:
        return on(self.form, pool)

    def to(self, dtype: torch.dtype) -> "Layer":
        """Copies in a wider dtype."""
        x, weight, windows = (one.to(dtype) for one in (self.x, self.weight, self.windows))
        return replace(self, x=x, weight=weight, windows=windows, states=like(self.states, dtype))

    def again(self) -> "Layer":
        """A layer with separate memory."""
        return replace(self, windows=self.windows.clone(), states=like(self.states, self.states.dtype))


Judge = Callable[[Callable[[Layer], torch.Tensor]], str]  # gets a function from layer to read-outs


def make(ground: Ground, at: At) -> Cell:
    config, stored = ground.config(at["heads"], 1), state_dtype(at)
    channels, units, slots = channels_of(config), at["batch"] + 1, list(range(at["batch"], 0, -1))
    window = channels * (CONV_WIDTH - 1) * ground.dtype.itemsize
    moved = float(at["batch"] * (at["heads"] * config.key_dim * config.value_dim * stored.itemsize + window))
    rows, weight = Rows.drawn(ground, config, at["batch"]), ground.drawn(channels, CONV_WIDTH).mul_(0.5)

    def layer() -> Layer:
        windows = ground.drawn(units, channels, CONV_WIDTH - 1)
        return Layer(torch.empty_like(rows.mixed).copy_(rows.mixed), weight, windows,
                     states(ground, config, units, stored), part(ground, "window", slots, 1, windows))  # fmt: skip

    layers = [layer() for _ in range(ground.layers(moved))]

    def run(ops: Ops, one: Layer, dtype: torch.dtype) -> torch.Tensor:
        gates = {name: getattr(rows, name) for name in ("a", "b", "A_log", "dt_bias")}
        if dtype == WIDE:
            gates = {name: x.to(WIDE) for name, x in gates.items()}
        return prefill_gdn(ops, x=one.x, weight=one.weight, windows=(one.at(one.windows),), **gates,
                           key_heads=config.key_heads, key_dim=config.key_dim, parts=(one.at(one.states),), dtype=dtype,
                           to=(TO,) * 7)  # fmt: skip

    def judge(of: Callable[[Layer], torch.Tensor]) -> str:
        own, wide, twin = layers[0].again(), layers[0].to(WIDE), layers[0].again()
        core, o, r = of(own), run(PLAIN, wide, WIDE), run(PLAIN, twin, ground.dtype)
        return first(off("read-out", core, o, r, 1), off("state", own.states, wide.states, twin.states, 1),
                     same("windows", own.windows, twin.windows))  # fmt: skip

    def arm(name: str, ops: Ops) -> Arm:
        return Arm(name, lambda: [run(ops, one, ground.dtype) for one in layers],
                   lambda: judge(lambda one: run(ops, one, ground.dtype)), len(layers))  # fmt: skip

    def anew() -> None:
        redrawn(*(one.states for one in layers))
        redrawn(*(one.windows for one in layers), std=1.0, seed=SEED + 1)

    cell = Cell([arm(name, ops) for name, ops in ground.sets.items()], read=moved, written=moved, anew=anew)
    return peers("mixer", ground, at, cell, rows=rows, layers=layers, judge=judge)


KIND = Kind("a layer", batches_and_heads, make)
