"""The `mamba2` op with SGLang's kernels, called as its mixer calls them.

The mixer is `srt/layers/attention/mamba/mamba.py` of sglang 0.5.23.

    UPDATE    `selective_state_update` for a verify (line 721) and a decode (line 756)
    EXACT     the same, with a buffer of snapshots that is as wide as the window in force
    CHUNKED   `mamba_chunk_scan_combined` for prefill (line 616), in chunks of 64 tokens

All also add D x by the kernel (`add_skip`): a launch with B = C = 0, whose result is D x. Leaves out: FlashInfer's
backend (`--mamba-backend flashinfer`), which runs natively alone; trees; fp16 states with stochastic rounding.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from instep.adapters.pooled import Launch, pooled
from instep.adapters.stubbed_imports import sglang
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.place_names import Place

sglang()

from instep.adapters.sglang import BASE, NOW, take  # noqa: E402

from .padded_launch import padded, split  # noqa: E402

IDLE = -1  # slot of a request that pads a batch
CHUNK = 64
SCAN = f"{NOW}.mamba.triton_ops"


def _even(x: Launch, run: Any) -> torch.Tensor:
    """Serve windows of one length together, as a verify has them: `run(rows [n, length] of the launch, requests)`."""
    core, lengths = torch.empty_like(x.v), x.cu_seqlens.diff()
    for length in lengths.unique().tolist():
        which = torch.nonzero(lengths == length)[:, 0]
        rows = x.cu_seqlens[which, None] + torch.arange(length, device=which.device)
        core[rows] = run(rows, which)
    return core


def window(x: Launch, exact: bool = False) -> torch.Tensor:
    given = split(x, "vkq")

    def run(rows: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        index = x.index[which].int()
        if x.stores and rows.shape[1] == 1:
            return _updated(x, given, rows[:, 0], index)[:, None]
        kept = x.snapshots[:, : rows.shape[1]].clone() if exact else x.snapshots
        core = _updated(x, given, rows, index, disable_state_update=True, intermediate_states_buffer=kept,
                        cache_steps=rows.shape[1], retrieve_parent_token=None,
                        intermediate_state_indices=x.rows[which].int())  # fmt: skip
        if exact:
            x.snapshots[:, : rows.shape[1]] = kept
        return core

    count, x = len(x.v), padded(x, IDLE)
    given = split(x, "vkq")
    return _even(x, run)[:count]


def _updated(
    x: Launch, given: dict[str, torch.Tensor], rows: torch.Tensor, index: torch.Tensor, **verify: Any
) -> torch.Tensor:
    """The call; rows [n] or [n, length]. A, dt and D are expanded as the mixer does (lines 703 to 708)."""
    _, _, width, states = x.pool.shape
    out = torch.empty_like(x.v[rows])
    take("selective_state_update", f"{SCAN}.mamba_ssm")(
        x.pool, given["v"][rows], x.a[rows][..., None].expand(*rows.shape, -1, width),
        -x.A_log.float().exp()[:, None, None].expand(-1, width, states), given["k"][rows], given["q"][rows],
        D=torch.zeros_like(x.A_log)[:, None].expand(-1, width), z=None, dt_bias=x.dt_bias[:, None].expand(-1, width),
        dt_softplus=True, state_batch_indices=index, pad_slot_id=IDLE, out=out, **verify,
    )  # fmt: skip
    return out


def chunked(x: Launch) -> torch.Tensor:
    plan = import_module("sglang.srt.layers.attention.mamba.mamba2_metadata").Mamba2Metadata
    starts, rows = x.cu_seqlens.int(), split(x, "vkq")
    index, offsets = plan._query_start_loc_to_chunk_indices_offsets(starts, CHUNK, len(x.v))
    out = torch.empty_like(x.v)
    _, states, _ = take("mamba_chunk_scan_combined", f"{SCAN}.ssd_combined")(
        rows["v"][None], x.a[None], -x.A_log.float().exp(), rows["k"][None], rows["q"][None], chunk_size=CHUNK,
        D=torch.zeros_like(x.A_log), z=None, dt_bias=x.dt_bias,
        seq_idx=torch.arange(len(starts) - 1).to(starts).repeat_interleave(starts.diff())[None],
        chunk_indices=index, chunk_offsets=offsets, cu_seqlens=starts, initial_states=x.pool[x.index],
        return_varlen_states=True, return_final_states=False, return_track_states=True, track_seq_idx=None,
        track_end_locs=None, dt_softplus=True, dt_limit=(0.0, float("inf")), out=out[None],
        state_dtype=x.pool.dtype,
    )  # fmt: skip
    x.pool[x.index] = states
    return out


def add_skip(*, core: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor:
    """core + D v, with the product of the kernel."""
    count, heads, width = v.shape
    out, none = torch.zeros_like(v), v.new_zeros(count, 1, 1)
    if count:
        take("selective_state_update", f"{SCAN}.mamba_ssm")(
            v.new_zeros(count, heads, width, 1), v, v.new_zeros(count, heads, 1).expand(-1, -1, width),
            v.new_zeros(heads, 1, 1).expand(-1, width, -1), none, none, D=weight[:, None].expand(-1, width),
            dt_bias=v.new_zeros(heads, 1).expand(-1, width), dt_softplus=True, out=out,
        )  # fmt: skip
    return (core.float() + out).to(core.dtype)


def served(name: str, **kernels: Any) -> Ops:
    return replace(pooled(BASE, name=f"sglang mamba2 {name}", raw=True, op="mamba2", **kernels), add_skip=add_skip)


UPDATE = served("update", window=window)
EXACT = served("update, exact", window=lambda x: window(x, exact=True))
CHUNKED = served("chunked", chunk=chunked)
