"""FLA's gated delta rule behind the `gdn` op: `fused_recurrent_gated_delta_rule` and `chunk_gated_delta_rule`.

Leaves out: every other op, which is `triton`'s, or `plain`'s where kernels are interpreted. Mirrors: fla-core 0.6.0.

    rows      decode, verify and tokens run again go through the recurrent kernel; where the state after every row is
              kept (`snapshot`, `columns`), one launch a row, since FLA returns the state after the last row alone
    prefill   the chunked kernels; interpreted, the recurrent one: Triton's interpreter has nothing to autotune them
              with, and no methods on a loop's index (`i_t.to`), which `chunk_gated_delta_rule_fwd_h` calls
    numbers   the recurrent kernel is fp32 throughout. The chunked ones store in the dtype of q, k and v, here fp32, but
              multiply fp32 operands as tf32 on a card that has it (`tl.dot`, whose default allows it), and take decays
              as differences of running sums of 64 tokens. No component is stored narrower for it, so `rounds` is the
              base's, and `products` declares the form `gdn.chunk`: tf32 in blocks of 64. Decode and verify stay fp32
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import pad

from instep_optimized.kernels.runtime import INTERPRETED  # decides whether Triton interprets, before FLA imports it
from instep_optimized.ops import load
from instep_optimized.ops.base import Types
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.rounding import Product, Storage

from .dense import Kernel, dense

with warnings.catch_warnings(action="ignore"):  # FLA warns on a machine without a GPU, and so do its imports
    FLA: Any = import_module("fla.ops.gated_delta_rule")

BASE = load("plain" if INTERPRETED else "triton")


def kernel(form: Any) -> Kernel:
    """One of FLA's two functions. They agree in the names of arguments but not in positions, so names are used.

    Differs from their defaults: q arrives scaled, and q and k normalised, so `scale` is 1 and FLA's norm is off.
    """

    def run(
        *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
        lengths: torch.Tensor, state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        core, state = form(
            q=q[None], k=k[None], v=v[None], g=log_decay[None], beta=beta[None], scale=1.0, initial_state=state,
            output_final_state=True, cu_seqlens=pad(lengths.cumsum(dim=0), (1, 0)),
        )
        return core[0], state

    return run


def types(activation: torch.dtype, state: Storage) -> Types:
    """The types of the base op set. float64 is refused, because FLA would narrow it silently."""
    if torch.float64 in (activation, state):
        raise Unsupported("FLA's kernels compute in float32: float64 activations or states are not served")
    return BASE.types(activation, state)


RECURRENT = kernel(FLA.fused_recurrent_gated_delta_rule)
CHUNKED = kernel(FLA.chunk_gated_delta_rule)
CHUNK = {"gdn.chunk": Product("tf32", block=64)}
OPS = replace(
    BASE, name="fla", types=types, gdn=dense(window=RECURRENT, chunk=RECURRENT if INTERPRETED else CHUNKED),
    keeps="inputs", products={} if INTERPRETED else CHUNK, captures=False, trees=False,
)
