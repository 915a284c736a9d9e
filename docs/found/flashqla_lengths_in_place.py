"""FlashQLA: new lengths in the same `cu_seqlens` tensor are not seen; the launch before is cut into chunks again.

    python flashqla_lengths_in_place.py      needs flash-qla, torch, a GPU from Hopper on

Run: sequences of 65, 5 and 60 tokens, then of 10, 100 and 20, whose bounds are written into the tensor that the first
launch had: a buffer of fixed address, as engines with CUDA graphs have it. Expected: what a new tensor gives. Got: the
second sequence, which needs a chunk more than before, ends in a state that is off by 1.6 times its norm (by 18 times
from a random state on). `tensor_cache` knows a tensor by its identity and keeps the chunks made of it. 0.1.3.
"""

import torch
from flash_qla import chunk_gated_delta_rule

torch.manual_seed(0)
bounds, lengths = torch.zeros(4, device="cuda", dtype=torch.long), ((65, 5, 60), (10, 100, 20))
q, k, v = (torch.randn(1, 130, heads, 128, device="cuda") for heads in (16, 16, 32))
q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
g, beta = -0.1 * torch.rand(1, 130, 32, device="cuda"), torch.rand(1, 130, 32, device="cuda")
given = {"q": q, "k": k, "v": v.bfloat16(), "g": g, "beta": beta, "output_final_state": True}
for one in lengths:
    bounds[1:] = torch.tensor(one).cumsum(0)
    core, state = chunk_gated_delta_rule(**given, cu_seqlens=bounds)
right, other = chunk_gated_delta_rule(**given, cu_seqlens=bounds.clone())
off = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(state, other, strict=True)]
print("states of the three sequences, relatively off:", ", ".join(f"{one:.1e}" for one in off))
raise SystemExit(max(off) > 1e-2)
