"""SGLang's kernels around the recurrence, as the ops `conv`, `move` and, for rerun tokens, `gdn`.

    CONV     `causal_conv1d_update` with the windows that a verify keeps, `causal_conv1d_fn` for prefill
    SCATTER  `fused_mamba_state_scatter_with_mask`: the accepted snapshot into the slot
    FOLD     ReplaySSM's commit (since 0.5.23): reruns the accepted tokens from their kept inputs

Leaves out: the delta rule of the window (`sglang.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from instep_optimized.layout import Address
from instep_optimized.ops.plain.move import move as plain_move

from .conv import ConvLaunch, pooled_conv
from .dense import dense
from .sglang import BASE, NOW, THEN, UPDATE, take

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


def fold(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
    lengths: torch.Tensor, state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Use the fold for rerun tokens, and for rows of a window the kernel whose bits the fold must reproduce."""
    pool, n = state.mT.contiguous(), len(lengths)
    own = torch.arange(n, device=state.device).int()
    if q is not k:
        core = UPDATE(
            q=q[None], k=k[None], v=v[None], g=log_decay[None], beta=beta[None], scale=1.0, initial_state_source=pool,
            initial_state_indices=own, intermediate_state_indices=own,
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        )  # fmt: skip
        return core[0], pool.mT
    commit = take("commit_gdn_replayssm_fold_all_layers", f"{NOW}.attention.linear.gdn_replayssm_spec_fold")
    most = int(lengths.max())
    inside = torch.arange(most, device=state.device) < lengths[:, None]

    def ring(rows: torch.Tensor) -> torch.Tensor:
        """Packed [M, heads, ..] -> [1, n, heads, most, ..], the layout of its rings."""
        lines: Any = rows.new_zeros(n, most, *rows.shape[1:])
        lines[inside] = rows
        return lines.transpose(1, 2).contiguous()[None]  # type: ignore[no-any-return]

    commit(pool[None], ring(v), ring(k), ring(log_decay), ring(beta), own, lengths.int(), most,
           k.shape[1], use_qk_l2norm_in_kernel=False)  # fmt: skip
    return v, pool.mT


CONV = pooled_conv(BASE, name="sglang conv", window=update, chunk=prefill, even=True, shifts=True, strided=True)
SCATTER = replace(BASE, name="sglang scatter", move=scatter, tiled=False)
FOLD = replace(BASE, name="sglang fold", gdn=dense(window=fold, chunk=fold), keeps="inputs", trees=False,
               products={})
KERNELS = {  # what a test of SGLang's tree runs: op set -> the strategy that serves it
    "sglang:SIGMOID": "snapshot", "sglang:RECURRENT": "snapshot", "sglang:DECODE": "snapshot",
    "sglang_commit:CONV": "snapshot", "sglang_commit:SCATTER": "snapshot",
}  # fmt: skip
