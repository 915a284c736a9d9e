"""transformers: a hybrid as the assistant of assisted decoding keeps refused drafts in its state, and drafts from it.

Run with torch and transformers, here 5.23.0, on a CPU in fp32, a random model: the assistant drafts 4 tokens
after a prompt of 12; the target refuses all of them and chooses another token; the assistant drafts again. Expected:
the drafts of an assistant that begins with these 13 tokens. Got: other scores, off by 0.16 of the largest one.
"""

import sys

import torch
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

torch.manual_seed(0)
heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, initializer_range=0.3)
model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**heads, **sizes, linear_num_value_heads=4)).eval()
model.generation_config.update(num_assistant_tokens=4, assistant_confidence_threshold=0.0)
config = GenerationConfig(max_length=60, min_length=0, eos_token_id=None, pad_token_id=0)

prompt = torch.randint(64, (1, 12))
used = AssistedCandidateGenerator(prompt, model, config, {"attention_mask": torch.ones_like(prompt)})
drafts = used.get_candidates(prompt)[0][0, 12:]
after = torch.cat([prompt, (drafts[:1, None] + 1) % 64], dim=1)  # all drafts are refused
new = AssistedCandidateGenerator(after, model, config, {"attention_mask": torch.ones_like(after)})
(_, found), (_, wanted) = used.get_candidates(after), new.get_candidates(after)
off = float((found[0, 0] - wanted[0, 0]).abs().max() / wanted[0, 0].abs().max())
sys.exit(f"scores of the next draft are off by {off:.2f}" if off > 1e-3 else 0)
