"""The `kda` op with FLA's kernels of Kimi Delta Attention: states [HV, V, K], norms and sigmoids inside the kernels.

    RECURRENT  decode and windows by `fused_recurrent_kda`, as FLA's layer calls it (line 282 of `fla/layers/kda.py` of
               flash-linear-attention 0.6.0). FLA returns only the last state, so with `snapshot` a row is a launch
    CHUNKED    prefill by `chunk_kda` (line 262)
    GATED      RECURRENT with the gate of `fused_kda_gate` before it, as Kimi's own model files call it

Leaves out: FlashKDA and TileLang, which run natively alone; gradients.
"""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from instep.adapters.pooled import Launch, pooled
from instep.adapters.wheel_modules import mend
from instep_optimized import load
from instep_optimized.kernels.runtime import INTERPRETED  # decides whether Triton interprets, before FLA imports it

with warnings.catch_warnings(action="ignore"):  # FLA warns on a machine without a GPU, and so do its imports
    FLA: Any = import_module("fla.ops.kda")
    GATE: Any = import_module("fla.ops.kda.gate")
for name in [name for name in sys.modules if INTERPRETED and name.startswith("fla.")]:
    mend(sys.modules[name])


def served(form: Callable[..., Any], gated: bool) -> Callable[[Launch], torch.Tensor]:
    """A kernel over pools: states are gathered, and stored again; with snapshots after every row."""

    def run(x: Launch) -> torch.Tensor:
        core, lengths = torch.empty_like(x.v), x.cu_seqlens.diff()
        states = x.pool[x.index]
        for row in range(x.window) if x.snapshots is not None else (None,):
            alive = torch.nonzero(lengths > (row or 0))[:, 0]
            rows = slice(None) if row is None else x.cu_seqlens[alive] + row
            ends = x.cu_seqlens if row is None else torch.arange(len(alive) + 1, device=alive.device)
            core[rows], states[alive] = _call(form, x, rows, states[alive], ends, gated)
            if x.snapshots is not None:
                x.snapshots[x.rows[alive], row] = states[alive]
        if x.stores:
            x.pool[x.index] = states
        return core

    return run


def _call(
    form: Callable[..., Any], x: Launch, rows: Any, states: torch.Tensor, ends: torch.Tensor, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    gate = {"A_log": x.A_log, "dt_bias": x.dt_bias.flatten(), "lower_bound": x.bound}
    g, beta = x.a[rows][None], x.b[rows][None]
    how: dict[str, Any] = gate | {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    if gated:
        g, beta, how = GATE.fused_kda_gate(g=g, **gate), beta.sigmoid(), {}
    if form is FLA.chunk_kda:
        how["safe_gate"] = x.bound is not None
    core, after = form(
        q=x.q[rows][None], k=x.k[rows][None], v=x.v[rows][None], g=g, beta=beta, initial_state=states,
        output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=ends, **how,
    )  # fmt: skip
    return core[0], after


BASE = load("plain" if INTERPRETED else "triton")
RECURRENT = pooled(BASE, name="fla kda", window=served(FLA.fused_recurrent_kda, False), raw=True, op="kda")
GATED = pooled(BASE, name="fla kda gated", window=served(FLA.fused_recurrent_kda, True), raw=True, op="kda")
CHUNKED = pooled(BASE, name="fla kda chunked", chunk=served(FLA.chunk_kda, False), raw=True, op="kda")
