"""FlashQLA: a sequence without tokens is refused, or a later one is computed wrongly.

    python flashqla_empty_sequence.py      needs flash-qla, torch, a GPU from Hopper on

Run: sequences of 5, 0, 3 and 70 tokens. Expected: what they give without the empty one. Got: with `auto_cp` (the
default) "invalid sequence lengths"; without it the last state is off by its whole norm. `prepare_chunk_indices` counts
sequences by their first chunks, so after an empty one every chunk belongs to the sequence before. 0.1.3.
"""

import torch
from flash_qla import chunk_gated_delta_rule

torch.manual_seed(0)
q, k, v = (torch.randn(1, 78, heads, 128, device="cuda") for heads in (16, 16, 32))
q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
g, beta = -0.1 * torch.rand(1, 78, 32, device="cuda"), torch.rand(1, 78, 32, device="cuda")
given = {"q": q, "k": k, "v": v.bfloat16(), "g": g, "beta": beta, "output_final_state": True}
_, right = chunk_gated_delta_rule(**given, cu_seqlens=torch.tensor([0, 5, 8, 78], device="cuda"))
bounds = torch.tensor([0, 5, 5, 8, 78], device="cuda")
for auto in (True, False):
    try:
        _, state = chunk_gated_delta_rule(**given, cu_seqlens=bounds, auto_cp=auto)
    except ValueError as error:
        print(f"auto_cp={auto}: {error}")
off = [float((state[i] - right[j]).norm() / right[j].norm()) for i, j in ((0, 0), (2, 1), (3, 2))]
print("auto_cp=False: states with tokens, relatively off:", ", ".join(f"{one:.1e}" for one in off))
raise SystemExit(max(off) > 1e-2)
