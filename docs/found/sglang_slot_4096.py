"""SGLang: from slot 4096 on, a state of 32 heads of 128 x 128 is read and written at a negative offset.

    python sglang_slot_4096.py      needs sglang, torch, triton; no GPU (the kernel is interpreted)

Run: one token of a request in slot 4096; slots are int32, as SGLang's are. Expected: its state changes. Got: the
kernel multiplies slot * HV * K * V in int32, which is 2**31 here, and leaves the pool: the process dies, or on a card
it writes other memory. The snapshot buffer of a verify does so from 512 requests of 8 steps on. 0.5.9 to 0.5.13;
right in 0.5.23.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
import torch

try:
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as kernels
except ImportError:
    from sglang.srt.layers.attention.fla import fused_sigmoid_gating_recurrent as kernels
pool = torch.empty(4097, 32, 128, 128, dtype=torch.float16)  # untouched pages take no memory
pool[4096] = 1
rows, gate, vector = torch.ones(1, 1, 32, 128).half(), torch.zeros(1, 32), torch.zeros(32)
print("slot 4096 is written", flush=True)
kernels.fused_sigmoid_gating_delta_rule_update(
    vector, gate, vector, 1.0, 20.0, rows, rows, rows, gate, pool, torch.tensor([4096]).int(), None, True
)
changed = bool((pool[4096] != 1).any())
print(f"the state of slot 4096 changed: {changed}")
raise SystemExit(not changed)
