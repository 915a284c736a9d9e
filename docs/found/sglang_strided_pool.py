"""SGLang: in a strided pool the new state is written to a copy, and lost.

    python sglang_strided_pool.py      needs sglang, torch, triton; no GPU (the kernel is interpreted)

Run: one token of one request; its state is in a view of a pool with another component between the slots, as pools of
`page-major` memory are. Expected: the state changes, as in a contiguous pool. Got: it does not. `input_guard` around
the function makes every argument contiguous, so the kernel writes into a copy. `chunk_gated_delta_rule` has the same
guard; since 0.5.16 the GDN backend copies strided pools before it calls that. 0.5.9 to 0.5.23; jet_nemotron.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
import torch

try:
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_update as update
except ImportError:
    from sglang.srt.layers.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_update as update
if not torch.cuda.is_available() and not hasattr(torch.cpu, "device"):
    torch.cpu.device = torch.no_grad  # the guard enters the device of its tensors; a CPU has none
torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 1, 16) for _ in range(3))
one, slot, whole = torch.full((1, 1, 1), 0.5), torch.tensor([1]).int(), torch.randn(3, 2, 1, 16, 16)
states = {"strided": whole[:, 0], "contiguous": whole[:, 0].clone()}
for pool in states.values():
    update(q, k, v, -one, one, None, pool, slot, None, True)
off = (states["strided"][1] - states["contiguous"][1]).norm() / states["contiguous"][1].norm()
print(f"the state in the strided pool is off by {off:.2g} of its norm")
raise SystemExit(not off <= 1e-6)
