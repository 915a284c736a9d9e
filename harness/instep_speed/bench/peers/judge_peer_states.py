"""Judge windows of peers that keep a state per row: packed pools, read-outs and the states after a commit.

Leaves out: the kernels.
"""

import torch

from instep_optimized.memory_addresses import Part
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.config import ModelConfig

from ..answer_check import first, off
from ..bench_types import TO, At, Ground
from ..drawn_rows import WIDE, Rows, part, states
from ..kinds.strategies import accepted_of


def pools(ground: Ground, config: ModelConfig, layers: int, units: int, stored: torch.dtype) -> torch.Tensor:
    """[layers, units, HV, V, K]"""
    pool = states(ground, config, layers * units, stored).mT
    return pool.view(layers, units, *pool.shape[1:])


def _windows(ground: Ground, at: At, pool: torch.Tensor, count: int) -> Part:
    form = part(ground, "window", list(range(1, at["batch"] + 1)), count, pool)
    begin = ground.ints(range(0, at["batch"] * at["window"], at["window"]))
    return Part("window", begin, form.count, count, form.read, form.fresh, form.store)


def read_out(ground: Ground, at: At, rows: Rows, state: torch.Tensor, core: torch.Tensor, what: str) -> str:
    """Judge a whole window from this state [slots, HV, K, V] in fp64, which becomes that after the accepted tokens."""
    truth, twin, narrow = rows.inputs(PLAIN, wide=True), state.clone(), state.float()
    o = PLAIN.gdn(inputs=truth, parts=(_windows(ground, at, twin, at["window"]),), dtype=WIDE, to=TO)
    r = PLAIN.gdn(inputs=rows.inputs(PLAIN), parts=(_windows(ground, at, narrow, at["window"]),), dtype=core.dtype,
                  to=TO)  # fmt: skip
    PLAIN.gdn(inputs=truth, parts=(_windows(ground, at, state, accepted_of(at["window"])),), dtype=WIDE, to=TO)
    return off(what, core, o, r, 1)


def committed(
    ground: Ground, at: At, rows: Rows, before: torch.Tensor, core: torch.Tensor, after: torch.Tensor,
    slots: torch.Tensor,
) -> str:
    """The read-outs of all rows, and the states of the slots after the accepted tokens; pools as [slots, HV, V, K]."""
    truth, twin = before.mT.to(WIDE), before.mT.clone()
    said = read_out(ground, at, rows, truth, core, "read-out")
    PLAIN.gdn(inputs=rows.inputs(PLAIN), parts=(_windows(ground, at, twin, accepted_of(at["window"])),),
              dtype=core.dtype, to=TO)  # fmt: skip
    return first(said, off("state", after.mT[slots], truth[slots], twin[slots], 1))
