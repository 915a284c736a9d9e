"""SGLang's kernels around the recurrence, as the ops `conv` and `move`.

    CONV     `causal_conv1d_update` with the windows that a verify keeps, `causal_conv1d_fn` for prefill
    SCATTER  `fused_mamba_state_scatter_with_mask`: the accepted snapshot into the slot

Leaves out: the delta rule of the window (`sglang.py`), and the ring of a verify (`sglang_ring.py`).
"""

from dataclasses import replace
from typing import Any

import torch

from instep_optimized.memory_addresses import Address
from instep_optimized.ops.plain.copy_units import move as plain_move

from .conv import ConvLaunch, pooled_conv
from .sglang import BASE, NOW, THEN, take

MAMBA = (f"{NOW}.mamba", f"{THEN}.mamba")


def _conv(name: str) -> Any:
    return take(name, *(f"{place}.causal_conv1d_triton" for place in MAMBA))


def update(call: ConvLaunch) -> torch.Tensor:
    """Serve sequences of one length, [n, C, length]. A verify shifts the live window; SGLang's commit repairs it."""
    given: torch.Tensor = _conv("causal_conv1d_update")(
        call.even, call.pool, call.weight, None, "silu", conv_state_indices=call.index.int(),
        intermediate_conv_window=call.snapshots,
        intermediate_state_indices=None if call.rows is None else call.rows.int(),
    )
    return given.mT.flatten(0, 1)


def prefill(call: ConvLaunch) -> torch.Tensor:
    given: torch.Tensor = _conv("causal_conv1d_fn")(
        call.x.T.contiguous(), call.weight, None, conv_states=call.pool, cache_indices=call.index.int(),
        activation="silu", query_start_loc=call.cu_seqlens.int(), seq_lens_cpu=call.cu_seqlens.diff().tolist(),
        has_initial_state=~call.fresh,
    )
    return given.T


class OnCard(torch.Tensor):
    """A tensor whose `is_cuda` is true: the scatter requires that, although its kernel also runs on a CPU."""

    is_cuda = True


def scatter(*, source: Address, target: Address) -> None:
    """Copy the snapshots at `column` into the slots. The kernel needs packed pools, so it works on copies of both;
    every byte of them is copied back."""
    if source.column is None or target.column is not None:
        return plain_move(source=source, target=target)
    run = take("fused_mamba_state_scatter_with_mask", *(f"{place}.mamba_state_scatter_triton" for place in MAMBA))
    pool = target.pool.contiguous()[None].clone()
    snapshots = source.pool[source.units.clamp(min=0)].contiguous()[None]
    steps = source.column.where(source.units >= 0, -1)
    run(pool.as_subclass(OnCard), snapshots.as_subclass(OnCard), target.units.int(), steps.int())
    target.pool.copy_(pool[0])
    asked = source.units >= 0
    source.pool[source.units[asked]] = snapshots[0, asked]


CONV = pooled_conv(BASE, name="sglang conv", window=update, chunk=prefill, even=True, shifts=True, strided=True)
SCATTER = replace(BASE, name="sglang scatter", move=scatter, tiled=False)
KERNELS = {  # what a test of SGLang's tree runs: op set -> the strategy that serves it
    "sglang:SIGMOID": "snapshot", "sglang:DECODE": "snapshot",
    "sglang_commit:CONV": "snapshot", "sglang_commit:SCATTER": "snapshot",
}  # fmt: skip
