"""The `kda` op with vLLM's kernels of Kimi Delta Attention, called as its Kimi layer calls them.

The layer is `model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py` of vllm 0.33.0. Unit 0 of a pool is vLLM's null
block: these kernels skip it.

    RECURRENT  a verify by `fused_recurrent_kda` (line 508): the state before a window is in the column of the last
               accepted token, and the state after row t goes to column t; a decode by
               `fused_recurrent_kda_packed_decode` (line 614)
    CHUNKED    prefill by `chunk_kda_with_fused_gate` (line 572), from gathered states

Leaves out: AMD's copies, and RecoverSSM of Kimi-K3.
"""

from importlib import import_module
from typing import Any

import torch

from instep.adapters.pooled import Launch, pooled
from instep.adapters.stubbed_imports import vllm
from instep_optimized import load
from instep_reference.contract.errors import Unsupported

from .padded_launch import mixed, padded, split

vllm()
KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
NULL = 0


class OnCard(torch.Tensor):
    """A tensor whose `is_cuda` is true, which the gather of states requires."""

    is_cuda = True


def _take(name: str, module: str) -> Any:
    return getattr(import_module(module), name)


def _gates(x: Launch) -> dict[str, Any]:
    return {"raw_g": x.a[None], "raw_beta": x.b[None], "A_log": x.A_log, "lower_bound": x.bound}


def _rows(x: Launch) -> dict[str, torch.Tensor]:
    return {name: view[None] for name, view in split(x).items()}


def recurrent(x: Launch) -> torch.Tensor:
    if (x.index == NULL).any():
        raise Unsupported("unit 0 of a pool is vLLM's null block")
    count, x = len(x.v), padded(x, NULL)
    if x.blocks is not None:
        core, _ = _take("fused_recurrent_kda", f"{KDA}.fused_recurrent")(
            **_rows(x), **_gates(x), dt_bias=x.dt_bias.flatten(), initial_state=x.pool, cu_seqlens=x.cu_seqlens.int(),
            ssm_state_indices=x.blocks.int(), num_accepted_tokens=(x.column + 1).int(), out=None,
        )  # fmt: skip
    elif x.stores and len(x.v) == len(x.index):
        core, _ = _take("fused_recurrent_kda_packed_decode", f"{KDA}.fused_recurrent")(
            mixed(x), **_gates(x), dt_bias=x.dt_bias.flatten(), initial_state=x.pool, state_indices=x.index.int(),
        )  # fmt: skip
    else:
        raise Unsupported("vLLM's kernels store every state: --strategy columns")
    return torch.as_tensor(core[0, :count])


def chunked(x: Launch) -> torch.Tensor:
    gather = _take("gather_initial_states", "vllm.model_executor.layers.mamba.ops.gather_initial_states")
    index, seen = x.index.int(), torch.ones_like(x.index, dtype=torch.bool)
    before = gather(x.pool.as_subclass(OnCard), index, seen).as_subclass(torch.Tensor)
    core, after = _take("chunk_kda_with_fused_gate", f"{KDA}.chunk")(
        **_rows(x), **_gates(x), g_bias=x.dt_bias.flatten(), initial_state=before, output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu_seqlens.int(),
    )  # fmt: skip
    x.pool[x.index] = after
    return torch.as_tensor(core[0])


RECURRENT = pooled(load("plain"), name="vllm kda", window=recurrent, raw=True, op="kda")
CHUNKED = pooled(load("plain"), name="vllm kda chunked", chunk=chunked, raw=True, op="kda")
