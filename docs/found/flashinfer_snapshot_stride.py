"""FlashInfer: a verify that is narrower than its snapshot buffer stores the states at a wrong row stride.

    python flashinfer_snapshot_stride.py      needs flashinfer-python, torch, a GPU from Hopper on

Run: two requests, windows of 2 tokens, a buffer of 4 steps: its documentation has [B, >= T, HV, V, K], and SGLang
hands over the allocated buffer. Expected: buffer[1, :2] has the states of request 1, as with a buffer of 2 steps.
Got: buffer[0, 2:] has them, for request i begins at step i * T of the buffer, not at i * 4. Read by request, what
request 1 commits was there before. States in fp32 and in bf16. 0.7.2.post1 (pull request 4572 is about such views).
"""

import torch
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as verify

torch.manual_seed(0)
wrong, cuda = 0, {"device": "cuda"}
rows = {name: torch.randn(2, 2, heads, 128, **cuda).bfloat16() for name, heads in (("q", 16), ("k", 16), ("v", 32))}
gates = {name: torch.randn(2, 2, 32, **cuda).bfloat16() for name in "ab"}
given = {**rows, **gates, "A_log": torch.zeros(32, **cuda), "dt_bias": torch.zeros(32, **cuda), "state": None}
for dtype in (torch.float32, torch.bfloat16):
    pool = torch.randn(2, 32, 128, 128, **cuda).to(dtype)
    exact, wider = (torch.zeros(2, steps, 32, 128, 128, dtype=dtype, **cuda) for steps in (2, 4))
    for buffer in (exact, wider):
        verify(**given, initial_state=pool, initial_state_indices=torch.arange(2, **cuda).int(),
               intermediate_states_buffer=buffer, disable_state_update=True)  # fmt: skip
    there, strayed = torch.equal(wider[1, :2], exact[1]), torch.equal(wider[0, 2:], exact[1])
    print(f"{dtype}: states of request 1 where they belong: {there}; in the row of request 0: {strayed}")
    wrong += not there or strayed
raise SystemExit(wrong > 0)
