"""FlashQLA's prefill as the `gdn` op: `chunk_gated_delta_rule`, for all prompts of a launch at once.

States are gathered from the pool and written back. K = V = 128; needs a Hopper GPU or later. Leaves out: decode and
verify, which are those of the base op set. Mirrors: flash-qla 0.1.3.

    numbers   q, k and v must be bf16 or fp16, and so are the operands of its products: the solution of a chunk of 64
              tokens, the new part of v, the weights between tokens, and the state that a product reads. Sums, decays
              and the state that is carried from chunk to chunk are fp32. `products` declares this for `gdn.chunk`
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.ops import load
from instep_reference.contract.declared_rounding import Product

from .pooled import Launch, pooled

FLASHQLA: Any = import_module("flash_qla")
BASE = load("plain" if INTERPRETED else "triton")


def chunked(x: Launch) -> torch.Tensor:
    """q is already scaled, and q and k normalised; they are rounded to bf16 here."""
    q, k, v = (rows[None].bfloat16() for rows in (x.q, x.k, x.v))
    core, state = FLASHQLA.chunk_gated_delta_rule(
        q=q, k=k, v=v, g=x.log_decay[None], beta=x.beta[None], scale=1.0, initial_state=x.pool[x.index],
        output_final_state=True, cu_seqlens=x.cu_seqlens, state_v_first=True,
    )
    x.pool[x.index] = state
    return torch.as_tensor(core[0])


OPS = replace(
    pooled(BASE, name="flashqla", chunk=chunked), products={**BASE.products, "gdn.chunk": Product("bf16", block=64)}
)
