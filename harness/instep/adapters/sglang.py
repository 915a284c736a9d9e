"""SGLang's kernels of the gated delta rule as the `gdn` op, called as its GDN backend calls them.

Pools: states [slots, HV, V, K]; snapshots of a verify [rows, steps, HV, V, K], by batch row, with all allocated steps.
Leaves out: its scheduler; its conv and scatter (`sglang_commit.py`), its ring (`sglang_ring.py`). Mirrors: sglang
0.5.12 to 0.5.23.

    SIGMOID     `fused_sigmoid_gating_delta_rule_update`: verify and decode, norms and gates inside
    DECODE      the same, and `fused_recurrent_gated_delta_rule_packed_decode` if each request has one row
    CHUNKED     `chunk_gated_delta_rule` for prefill;  CHUNKED_STRIDED: in strided pools
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from instep_optimized.kernels.runtime import INTERPRETED  # decides whether Triton interprets, before SGLang imports it
from instep_optimized.ops import load

from .pooled import Launch, pooled

NOW, THEN = "sglang.kernels.ops", "sglang.srt.layers.attention"  # packages with the kernels since 0.5.23, and before
DEVICE = "cpu" if INTERPRETED else "cuda"
BASE = load("plain" if INTERPRETED else "triton")


def take(name: str, *modules: str) -> Any:
    """`name` in the first of the modules that exists."""
    for module in modules:
        try:
            there = find_spec(module) is not None
        except ModuleNotFoundError:  # its package is missing, too
            there = False
        if there:
            return getattr(import_module(module), name)
    raise ModuleNotFoundError(f"{name}: none of {', '.join(modules)}", name=modules[0].partition(".")[0])


RECURRENCES = (f"{NOW}.attention.fla.fused_recurrent", f"{THEN}.fla.fused_recurrent")
PACKED = take("fused_recurrent_gated_delta_rule_packed_decode", *RECURRENCES)
GATED = take(
    "fused_sigmoid_gating_delta_rule_update",
    f"{NOW}.attention.linear.fused_sigmoid_gating_recurrent", f"{NOW}.attention.fla.fused_sigmoid_gating_recurrent",
    f"{THEN}.fla.fused_sigmoid_gating_recurrent",
)  # fmt: skip


def sigmoid(x: Launch) -> torch.Tensor:
    core: torch.Tensor = GATED(
        A_log=x.A_log, a=x.a, dt_bias=x.dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=x.q[None], k=x.k[None],
        v=x.v[None], b=x.b, initial_state_source=x.pool, initial_state_indices=x.index.int(), cu_seqlens=x.cu_seqlens,
        use_qk_l2norm_in_kernel=True, disable_state_update=not x.stores, intermediate_states_buffer=x.snapshots,
        intermediate_state_indices=x.rows, cache_steps=x.window,
    )  # fmt: skip
    return core[0]


def decode(x: Launch) -> torch.Tensor:
    if not x.stores or x.snapshots is not None or len(x.v) != len(x.index):
        return sigmoid(x)
    out = torch.empty_like(x.v)[:, None]
    PACKED(
        mixed_qkv=torch.cat([rows.flatten(1) for rows in (x.q, x.k, x.v)], dim=1), a=x.a, b=x.b, A_log=x.A_log,
        dt_bias=x.dt_bias, scale=x.k.shape[-1] ** -0.5, initial_state=x.pool, out=out, ssm_state_indices=x.index.int(),
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out[:, 0]


def chunked(x: Launch) -> torch.Tensor:
    """Prefill. `chunk_gated_delta_rule` refuses fp32 rows, but the function that it calls accepts them. In fp32 the
    rounding of 16-bit products does not hide errors."""
    chunk = take("ChunkGatedDeltaRuleFunction", f"{NOW}.attention.fla.chunk", f"{THEN}.fla.chunk")
    core, _ = chunk.apply(
        x.q[None], x.k[None], x.v[None], x.log_decay[None], x.beta[None], 1.0, x.pool, x.index.int(), x.cu_seqlens,
        False,
    )  # fmt: skip
    return torch.as_tensor(core[0])


SIGMOID = pooled(BASE, name="sglang sigmoid", window=sigmoid, raw=True)
DECODE = pooled(BASE, name="sglang packed decode", window=decode, raw=True)
CHUNKED = pooled(BASE, name="sglang chunked", chunk=chunked)
CHUNKED_STRIDED = pooled(BASE, name="sglang chunked, strided pools", chunk=chunked, strided=True)
