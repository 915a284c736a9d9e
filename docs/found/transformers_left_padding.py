"""transformers: left padding enters the recurrent state if the first chunk of a batch has a single token.

Run with torch and transformers, here 5.23.0, on a CPU in fp32, a random model: two prompts of 5 and 4 tokens, the
second with one token of padding on its left, in chunks of 1 and 4 tokens. Expected: the logits that the second prompt
has in one chunk of 5. Got: others, off by 0.86 of the largest one.
"""

import sys

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

torch.manual_seed(0)
heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, initializer_range=0.3)
model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**heads, **sizes, linear_num_value_heads=4)).eval()
tokens, mask = torch.randint(64, (2, 5)), torch.ones(2, 5, dtype=torch.long)
mask[1, 0] = 0
positions, last = (mask.cumsum(-1) - 1).clamp(min=0), []
for chunks in (((0, 1), (1, 5)), ((0, 5),)):
    past = DynamicCache(config=model.config)
    for begin, end in chunks:
        with torch.no_grad():
            out = model(tokens[:, begin:end], mask[:, :end], positions[:, begin:end], past)
    last.append(out.logits[:, -1])
found, wanted = last
off = ((found - wanted).abs().amax(-1) / wanted.abs().amax(-1)).tolist()
sys.exit(f"without padding off by {off[0]:.4f}, with padding by {off[1]:.4f}" if max(off) > 1e-3 else 0)
