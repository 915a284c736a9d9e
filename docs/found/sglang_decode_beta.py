"""SGLang: plain decode and verify leave different states for the same token, because decode rounds beta to bf16.

    python sglang_decode_beta.py      needs sglang, torch, triton; no GPU (the kernels are interpreted)

Run: one token, bf16 rows, fp32 state; packed decode, and verify. Expected: the same state up to fp32 rounding, because
a request changes from one to the other with the step count. Got: 1.6e-3 apart. Packed decode casts sigmoid(b) to
the dtype of b; verify keeps it in fp32, and so does vLLM's packed decode. 0.5.10 to 0.5.23.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
import torch

try:
    from sglang.kernels.ops.attention.fla import fused_recurrent as decode
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as verify
except ImportError:
    from sglang.srt.layers.attention.fla import fused_recurrent as decode
    from sglang.srt.layers.attention.fla import fused_sigmoid_gating_recurrent as verify
torch.manual_seed(0)
mixed, a, b = (torch.randn(1, width).bfloat16() for width in (48, 1, 1))
A_log, bias, slot, pool = torch.zeros(1), torch.zeros(1), torch.ones(1).int(), torch.zeros(2, 1, 16, 16)
one, two, (q, k, v) = pool.clone(), pool.clone(), mixed.view(3, 1, 1, 1, 16)
out, packed = mixed.new_empty(1, 1, 1, 16), decode.fused_recurrent_gated_delta_rule_packed_decode
packed(mixed, a, b, A_log, bias, 0.25, one, out, slot, True)
verify.fused_sigmoid_gating_delta_rule_update(A_log, a, bias, 1.0, 20.0, q, k, v, b, two, slot, 0.25, True)
off = (one - two).norm() / two.norm()
print(f"the states are {off:.1e} apart")
raise SystemExit(not off <= 1e-5)
