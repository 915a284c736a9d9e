"""SGLang: a verify that is narrower than its snapshot buffer stores the states at a wrong row stride.

    python sglang_snapshot_stride.py      needs sglang, torch, triton; no GPU (the kernel is interpreted)

Run: two requests, windows of 2 tokens, a buffer that is allocated for 4, `cache_steps` = 2, as --speculative-adaptive
calls it after it has stepped down. Expected: buffer[1, :2] has the states of request 1. Got: buffer[0, 2:] has them,
because the row stride is computed from `cache_steps`.
0.5.10 to 0.5.12; right since 0.5.13. `fused_recurrent_gated_delta_rule_update` has it to 0.5.23, but no verify of a GDN
model calls that any more.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
import torch

try:
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as kernels
except ImportError:
    from sglang.srt.layers.attention.fla import fused_sigmoid_gating_recurrent as kernels
torch.manual_seed(0)
q, k, v, pool = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1, 16), torch.randn(2, 1, 16, 16)
a, zero, rows, buffer = torch.rand(4, 1), torch.zeros(1), torch.arange(2).int(), torch.zeros(2, 4, 1, 16, 16)
kernels.fused_sigmoid_gating_delta_rule_update(
    zero, a, zero, 1.0, 20.0, q, k, v, a, pool, rows, None, True, torch.tensor([0, 2, 4]).int(),
    disable_state_update=True, intermediate_states_buffer=buffer, intermediate_state_indices=rows, cache_steps=2)
lost, strayed = not buffer[1, :2].any(), bool(buffer[0, 2:].any())
print(f"states of request 1 where they belong: {not lost}; in the row of request 0: {strayed}")
raise SystemExit(lost or strayed)
