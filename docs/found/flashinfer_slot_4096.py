"""FlashInfer: from slot 4096 on, a verify reads fp32 states of 32 heads of 128 x 128 beyond its pool.

    python flashinfer_slot_4096.py      needs flashinfer-python, torch, a GPU from Hopper on with 10 GB

Run: a window of 2 tokens of a request in slot 4096 of a contiguous fp32 pool. Expected: its read-out. Got: "illegal
memory access". `gated_delta_rule_mtp` multiplies (slot * HV + head) * V * K in int32, which is 2**31 here. One token in
that slot (`gated_delta_rule_decode_pretranspose`) is right, and so are bf16 states. In a pool whose slots are 24 layers
apart slot 160 is right and slot 190 is not. Snapshots die at 520 requests of 8 steps, of fp32 and of bf16 states; at
511 and 512 they are right. 0.7.2.post1.
"""

import torch
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp

torch.manual_seed(0)
cuda, pool = {"device": "cuda"}, torch.empty(4098, 32, 128, 128, device="cuda")
pool[4096] = 1
for window, verify in (1, gated_delta_rule_decode_pretranspose), (2, gated_delta_rule_mtp):
    q, k, v = (torch.randn(1, window, heads, 128, **cuda).bfloat16() for heads in (16, 16, 32))
    gate, vector = torch.zeros(1, window, 32, **cuda).bfloat16(), torch.zeros(32, **cuda)
    given = {"q": q, "k": k, "v": v, "A_log": vector, "a": gate, "dt_bias": vector, "b": gate}
    more = {"state": None} if window == 1 else {"disable_state_update": True}
    try:
        verify(**given, **more, initial_state=pool, initial_state_indices=torch.tensor([4096], **cuda).int())
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise SystemExit(f"slot 4096, {window} tokens: {str(error).splitlines()[0]}") from None
    print(f"slot 4096, {window} token(s): served")
