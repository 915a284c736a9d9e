"""SGLang: a Mamba2 verify that is narrower than its snapshot buffer stores the states at a wrong row stride.

    python sglang_mamba2_stride.py      needs sglang, torch, triton; no GPU (the kernel is interpreted)

Run: two requests, windows of 2 tokens, a buffer that is allocated for 4, `cache_steps` = 2, as the Mamba2 mixer calls
`selective_state_update` after --speculative-adaptive has stepped down. Expected: buffer[1, :2] has the states of
request 1. Got: buffer[0, 2:] has them, because the row stride is computed from `cache_steps`.
The commit reads buffer[1], so request 1 continues from a state of an earlier round. The kernel of GDN and KDA is right
since 0.5.13: it computes the stride from the buffer.
0.5.12 to 0.5.23. The kernel has it since 0.5.8 at the latest, and adaptive speculation came in 0.5.12.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
import torch

try:
    from sglang.kernels.ops.mamba.triton_ops import mamba_ssm as kernels
except ImportError:
    from sglang.srt.layers.attention.mamba.ops import mamba_ssm as kernels
torch.manual_seed(0)
x, dt, k, out = torch.randn(2, 2, 1, 16), torch.rand(2, 2, 1, 16), torch.randn(2, 2, 1, 16), torch.zeros(2, 2, 1, 16)
rows, buffer, zero = torch.arange(2).int(), torch.zeros(2, 4, 1, 16, 16), torch.zeros(1, 16)
kernels.selective_state_update(
    torch.randn(2, 1, 16, 16), x, dt, -torch.rand(1, 16, 16), k, k, zero, None, zero, state_batch_indices=rows, out=out,
    disable_state_update=True, intermediate_states_buffer=buffer, intermediate_state_indices=rows, cache_steps=2)
lost, strayed = not buffer[1, :2].any(), bool(buffer[0, 2:].any())
print(f"states of request 1 where they belong: {not lost}; in the row of request 0: {strayed}")
raise SystemExit(lost or strayed)
