"""transformers: `DynamicCache.crop` removes tokens from keys and conv inputs of a hybrid, and none from its state.

Run with torch and transformers, here 5.23.0, on a CPU in fp32, a random model: a cache that records its past, 12
tokens, then 4, then `crop(-3)`, as assisted decoding does. Expected: the cache of 13 tokens, or an error. Got: the
recurrent state still has all 16, and is off by 1.10 of its largest number.
"""

import sys

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

torch.manual_seed(0)
heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**heads, **sizes, linear_num_value_heads=4)).eval()
tokens, (cropped, right) = torch.randint(64, (1, 16)), (DynamicCache(config=model.config) for _ in range(2))
for past, length in ((cropped, 16), (right, 13)):  # 12 tokens, then the rest
    past.activate_past_recording()
    with torch.no_grad():
        model(tokens[:, :12], None, None, past)
        past.crop(0)
        model(tokens[:, 12:length], None, None, past)
        past.crop(13 - length)
found, wanted = cropped.layers[0].recurrent_states[0], right.layers[0].recurrent_states[0]
off = float((found - wanted).abs().max() / wanted.abs().max())
assert torch.allclose(cropped.layers[0].conv_states[0], right.layers[0].conv_states[0], atol=1e-5)
sys.exit(f"keys of {cropped.get_seq_length()} tokens, a recurrent state that is off by {off:.2f}" if off > 1e-3 else 0)
