"""FlashInfer's gated delta rule as the `gdn` op: decode, verify and prefill, as SGLang calls them.

Pools: states [slots, HV, V, K] in fp32, K = V = 128; rows in bf16; all windows of a launch have one length. Snapshots
are indexed by the place of a sequence in the launch, [n, steps, HV, V, K]; there may be more steps than the window has.
Needs a Hopper GPU or later. Leaves out: bf16 states. Mirrors: flashinfer-python 0.7.2.post1.

    VERIFY   `gated_delta_rule_mtp` with the snapshots at their allocated steps (or, under `columns`, the table), and
             `gated_delta_rule_decode_pretranspose` if each request has one row
    EXACT    the same, with snapshots of as many steps as the window has;  STRIDED: in the engine's own pools
    PREFILL  `chunk_gated_delta_rule`, in the slots of the pool. `products` declares its `gdn.chunk`: operands of
             products are bf16, sums and the states that are carried from chunk to chunk are fp32
"""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.ops import load
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.errors import Unsupported

from .pooled import Launch, pooled

KERNELS: Any = import_module("flashinfer.gdn_decode")
CHUNKED: Any = import_module("flashinfer.gdn_prefill")
BASE = load("plain" if INTERPRETED else "triton")


def verify(x: Launch, exact: bool = False) -> torch.Tensor:
    """Make one call for each sequence length of the launch."""
    if x.v.dtype is not torch.bfloat16:  # fp16 would be rounded to bf16, which no product declares
        raise Unsupported(f"FlashInfer's kernels read rows in bfloat16, not in {x.v.dtype}: --dtype bfloat16")
    core, lengths = torch.empty_like(x.v), x.cu_seqlens.diff()
    for length in sorted(set(lengths.tolist())):
        which = torch.nonzero(lengths == length)[:, 0]
        rows = x.cu_seqlens[which, None] + torch.arange(length, device=which.device)
        core[rows] = _equal(x, which, rows, exact)
    return core


def _equal(x: Launch, which: torch.Tensor, rows: torch.Tensor, exact: bool) -> torch.Tensor:
    """Sequences of one length: `rows` is [n, length]."""
    length, decode, verify = rows.shape[1], KERNELS.gated_delta_rule_decode_pretranspose, KERNELS.gated_delta_rule_mtp
    given = {name: getattr(x, name)[rows] for name in ("q", "k", "v", "a", "b")} | {
        "A_log": x.A_log.float(), "dt_bias": x.dt_bias, "initial_state": x.pool,
        "initial_state_indices": x.index[which].int(),
    }  # fmt: skip
    table = None if x.blocks is None else x.blocks[which, :length].int()
    if x.snapshots is None and length == 1:
        core, _ = decode(**given, state=None, output_state_indices=None if table is None else table[:, 0])
    elif x.snapshots is None:
        core, _ = verify(**given, ssm_state_indices=table, disable_state_update=False)
    else:
        own, steps = x.rows[which], length if exact else x.snapshots.shape[1]
        there = x.snapshots[: len(own), :steps]
        in_place = there.is_contiguous() and own.tolist() == list(range(len(own)))
        kept = there if in_place else x.snapshots[own, :steps].contiguous()
        core, _ = verify(**given, intermediate_states_buffer=kept, disable_state_update=not x.stores)
        if not in_place:
            x.snapshots[own, :steps] = kept
    return torch.as_tensor(core)


def prefill(x: Launch) -> torch.Tensor:
    """q is already scaled, and q and k normalised; they are rounded to bf16 here. Decays are passed without log."""
    q, k, v = (rows.bfloat16() for rows in (x.q, x.k, x.v))
    core, _ = CHUNKED.chunk_gated_delta_rule(
        q=q, k=k, v=v, g=x.log_decay.exp(), beta=x.beta, scale=1.0, initial_state=x.pool, output_state=x.pool,
        output_final_state=True, state_indices=x.index, cu_seqlens=x.cu_seqlens,
    )
    return torch.as_tensor(core)


EXACTLY = partial(verify, exact=True)
VERIFY = pooled(BASE, name="flashinfer", window=verify, raw=True)
EXACT = pooled(BASE, name="flashinfer, exact steps", window=EXACTLY, raw=True)
STRIDED = pooled(BASE, name="flashinfer, strided pools", window=EXACTLY, raw=True, strided=True)
PREFILL = replace(
    pooled(BASE, name="flashinfer prefill", chunk=prefill),
    products={**BASE.products, "gdn.chunk": Product("bf16", block=64)},
)
