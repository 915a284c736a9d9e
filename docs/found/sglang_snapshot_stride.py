"""SGLang: a verify that is narrower than its snapshot buffer stores the states at a wrong row stride.

    python sglang_snapshot_stride.py      needs sglang, torch, triton; no GPU (the kernel is interpreted)

Run: two requests, windows of 2 tokens, a buffer that is allocated for 4, `cache_steps` = 2, as --speculative-adaptive
calls it after it has stepped down. Expected: buffer[1, :2] has the states of request 1. Got: buffer[0, 2:] has them,
because the row stride is computed from `cache_steps`.
0.5.9 to 0.5.23. Its twin `fused_sigmoid_gating_delta_rule_update` had the same in 0.5.10 to 0.5.12, and takes the
stride of the buffer since 0.5.13.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
import torch

try:
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_update as update
except ImportError:
    from sglang.srt.layers.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_update as update
torch.manual_seed(0)
q, k, v, pool = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1, 16), torch.randn(2, 1, 16, 16)
g, beta, rows, buffer = -torch.rand(1, 4, 1), torch.rand(1, 4, 1), torch.arange(2).int(), torch.zeros(2, 4, 1, 16, 16)
update(q, k, v, g, beta, None, pool, rows, torch.tensor([0, 2, 4]).int(), True, True, False, buffer, rows, 2)
lost, strayed = not buffer[1, :2].any(), bool(buffer[0, 2:].any())
print(f"states of request 1 where they belong: {not lost}; in the row of request 0: {strayed}")
raise SystemExit(lost or strayed)
