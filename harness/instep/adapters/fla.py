"""FLA's gated delta rule as the `gdn` op: `fused_recurrent_gated_delta_rule` and `chunk_gated_delta_rule`.

Leaves out: every other op, which `triton` serves, or `plain` if kernels are interpreted. Mirrors: fla-core 0.6.0.

    rows      decode, verify and rerun tokens use the recurrent kernel. If the state after every row is kept
              (`snapshot`, `columns`), each row is a launch, because FLA returns only the state after the last row
    prefill   uses the chunked kernels, or the recurrent one if kernels are interpreted: Triton's interpreter cannot
              autotune, and a loop index has no methods there (`chunk_gated_delta_rule_fwd_h` calls `i_t.to`)
    numbers   the recurrent kernel computes in fp32. The chunked ones store in the dtype of q, k and v, here fp32, but
              multiply fp32 operands as tf32 on a GPU that has it (the default of `tl.dot`), and compute decays as
              differences of running sums over 64 tokens. No component is stored in a narrower dtype, so `rounds` is
              that of the base. `products` declares tf32 in blocks of 64 for `gdn.chunk`; decode and verify are fp32
"""

import warnings
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import pad

from instep_optimized.kernels.runtime import INTERPRETED  # decides whether Triton interprets, before FLA imports it
from instep_optimized.ops import load
from instep_optimized.ops.op_protocols import Types
from instep_reference.contract.declared_rounding import Product, Storage
from instep_reference.contract.errors import Unsupported

from .dense import Kernel, dense

with warnings.catch_warnings(action="ignore"):  # FLA warns on a machine without a GPU, and so do its imports
    FLA: Any = import_module("fla.ops.gated_delta_rule")

BASE = load("plain" if INTERPRETED else "triton")


def kernel(form: Any) -> Kernel:
    """Adapt one of FLA's two functions. Their arguments have the same names but other positions, so names are used.

    Differs from their defaults: q is already scaled, and q and k normalised, so `scale` is 1 and FLA's norm is off.
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
    """The types of the base op set. float64 is refused, because FLA would convert it to float32 silently."""
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
