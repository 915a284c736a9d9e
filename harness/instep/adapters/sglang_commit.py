"""What SGLang does around its recurrent kernels, behind the ops `conv`, `move` and, for what is run again, `gdn`.

    CONV     `causal_conv1d_update` with the windows that a verify keeps, `causal_conv1d_fn` for prefill
    SCATTER  `fused_mamba_state_scatter_with_mask`: the accepted snapshot into the slot
    FOLD     ReplaySSM's commit (since 0.5.23): accepted tokens are run again from what was kept of them

Leaves out: the delta rule of the window (`sglang.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from instep_optimized.layout import Address, Part
from instep_optimized.ops.plain.move import move as plain_move
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place import Place

from .dense import dense
from .pooled import packed_rows
from .sglang import BASE, NOW, THEN, UPDATE, take

MAMBA = (f"{NOW}.mamba", f"{THEN}.mamba")


def conv(*, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place) -> torch.Tensor:
    """Windows [slots, C, W-1] in the engine's own pools. A verify shifts the live window, which its commit repairs;
    here a verify must leave it alone, so it gets a copy. What it writes to other slots of the copy goes back."""
    update, prefill = (take(name, *(f"{place}.causal_conv1d_triton" for place in MAMBA))
                       for name in ("causal_conv1d_update", "causal_conv1d_fn"))  # fmt: skip
    out = torch.zeros_like(x)
    for part in parts:
        if part.read.column is not None:
            raise Unsupported("these kernels keep windows of W-1 inputs: --conv windows")
        pool, kept, alive = part.read.pool, part.per_row, torch.nonzero((part.count > 0) & (part.read.units >= 0))[:, 0]
        counts = part.count[alive]
        # `update` takes rows of one length, [n, C, length]; prefill takes all lengths in one launch.
        groups = [alive[counts == count] for count in set(counts.tolist())] if part.form == "window" else [alive]
        for which in groups if len(alive) else ():
            (ends, rows), units = packed_rows(part, which), part.read.units[which]
            pool[units[part.fresh[which]]] = 0
            if part.form == "window":
                live = pool if part.store else pool.clone()
                out[rows] = update(
                    x[rows].view(len(which), -1, x.shape[1]).mT, live, weight, None, "silu",
                    conv_state_indices=units.int(), intermediate_conv_window=None if kept is None else kept.pool,
                    intermediate_state_indices=None if kept is None else kept.units[which].int(),
                ).mT.flatten(0, 1)  # fmt: skip
                if live is not pool:
                    others = torch.ones(len(pool), dtype=torch.bool, device=x.device).index_fill(0, units, False)
                    pool[others] = live[others]
            else:
                out[rows] = prefill(
                    x[rows].T.contiguous(), weight, None, conv_states=pool, cache_indices=units.int(),
                    activation="silu", query_start_loc=ends.int(), seq_lens_cpu=counts.tolist(),
                    has_initial_state=~part.fresh[which],
                ).T  # fmt: skip
    return out


class OnCard(torch.Tensor):
    """A tensor that says it is on a GPU: the scatter asks, though its kernel would not mind."""

    is_cuda = True


def scatter(*, source: Address, target: Address) -> None:
    """The snapshots at `column` into the slots. It asks for packed pools, so it gets copies; every byte of both goes
    back."""
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
    """Tokens run again go through the fold, rows of a window through the kernel whose bits the fold must give."""
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
        """[M, heads, ..] packed -> [1, n, heads, most, ..], as its rings lie."""
        lines: Any = rows.new_zeros(n, most, *rows.shape[1:])
        lines[inside] = rows
        return lines.transpose(1, 2).contiguous()[None]  # type: ignore[no-any-return]

    commit(pool[None], ring(v), ring(k), ring(log_decay), ring(beta), own, lengths.int(), most,
           k.shape[1], use_qk_l2norm_in_kernel=False)  # fmt: skip
    return v, pool.mT


CONV = replace(BASE, name="sglang conv", conv=conv, trees=False)
SCATTER = replace(BASE, name="sglang scatter", move=scatter)
FOLD = replace(BASE, name="sglang fold", gdn=dense(window=fold, chunk=fold), keeps="inputs", trees=False)
KERNELS = {  # what a test of SGLang's tree runs: op set -> the strategy that serves it
    "sglang:SIGMOID": "snapshot", "sglang:RECURRENT": "snapshot", "sglang:DECODE": "snapshot",
    "sglang_commit:CONV": "snapshot", "sglang_commit:SCATTER": "snapshot",
}  # fmt: skip
