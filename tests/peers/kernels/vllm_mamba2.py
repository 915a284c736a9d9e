"""The `mamba2` op with vLLM's kernels, called as its mixer calls them.

The mixer is `model_executor/layers/mamba/mamba_mixer2.py` of vllm 0.33.0. Unit 0 of a pool is vLLM's null block.

    UPDATE    `selective_state_update` (line 1090) for a verify, whose states go to the columns of a request, and for a
              decode
    CHUNKED   `mamba_chunk_scan_combined_varlen` for prefill (line 687), in chunks of 64 tokens from the call's first

Leaves out: FlashInfer's backend and ReplaySSM, fp16 states with stochastic rounding; D, which `plain` adds; a first
chunk that is cut after a cached prefix (`mamba_attn.py`), whose sums end elsewhere than those of the yardsticks.
"""

from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import torch

from instep.adapters.pooled import Launch, pooled
from instep.adapters.stubbed_imports import vllm
from instep_optimized import load
from instep_reference.contract.errors import Unsupported

from .padded_launch import padded, split

vllm()
NULL, CHUNK = 0, 64
OPS = "vllm.model_executor.layers.mamba.ops"


def _take(name: str, module: str) -> Any:
    return getattr(import_module(f"{OPS}.{module}"), name)


def window(x: Launch) -> torch.Tensor:
    if x.blocks is None and not x.stores:
        raise Unsupported("vLLM's kernels store every state: --strategy columns")
    if (x.index == NULL).any():
        raise Unsupported("unit 0 of a pool is vLLM's null block")
    count, x = len(x.v), padded(x, NULL)
    rows, out, (width, states) = split(x, "vkq"), torch.empty_like(x.v), x.pool.shape[2:]
    where = (x.index if x.blocks is None else x.blocks).int()
    _take("selective_state_update", "mamba_ssm")(
        x.pool, rows["v"], x.a[..., None].expand(-1, -1, width),
        -x.A_log.float().exp()[:, None, None].expand(-1, width, states), rows["k"], rows["q"],
        torch.zeros_like(x.A_log)[:, None].expand(-1, width), x.dt_bias[:, None].expand(-1, width), dt_softplus=True,
        state_batch_indices=where, dst_state_batch_indices=where, out=out, cu_seqlens=x.cu_seqlens.int(),
        num_accepted_tokens=None if x.column is None else (x.column + 1).int(), is_blackwell=False,
    )  # fmt: skip
    return out[:count]


def chunked(x: Launch) -> torch.Tensor:
    rows, out, bounds = split(x, "vkq"), torch.empty_like(x.v), x.cu_seqlens.tolist()
    lengths = [[min(CHUNK, end - at) for at in range(begin, end, CHUNK)] for begin, end in pairwise(bounds)]
    owner = [request for request, chunks in enumerate(lengths) for _ in chunks]
    starts = [0, *accumulate(size for chunks in lengths for size in chunks)]
    last = [sum(map(len, lengths[: request + 1])) - 1 for request in range(len(lengths))]
    index = [torch.tensor(numbers, dtype=torch.int32, device=out.device) for numbers in (owner, starts, last)]
    _take("mamba_chunk_scan_combined_varlen", "ssd_combined")(
        rows["v"], x.a, -x.A_log.float().exp(), rows["k"], rows["q"], chunk_size=CHUNK, D=torch.zeros_like(x.A_log),
        z=None, dt_bias=x.dt_bias, seq_idx=index[0], cu_seqlens=x.cu_seqlens.int(), cu_chunk_seqlens=index[1],
        last_chunk_indices=index[2], initial_states=x.pool[x.index], return_intermediate_states=False,
        dt_softplus=True, dt_limit=(0.0, float("inf")), out=out, state_dtype=x.pool.dtype, final_states_out=x.pool,
        final_state_indices=x.index.int(),
    )  # fmt: skip
    return out


UPDATE = pooled(load("plain"), name="vllm mamba2", window=window, raw=True, op="mamba2")
CHUNKED = pooled(load("plain"), name="vllm mamba2 chunked", chunk=chunked, raw=True, op="mamba2")
