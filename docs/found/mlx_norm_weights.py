"""mlx-lm: norm weights w of a Qwen3.5 checkpoint become 1 + w in the width of the file, so bf16 loses bits of w.

    python mlx_norm_weights.py      needs mlx and mlx-lm, here 0.32.4 and 0.32.2; a CPU will do

Run: norm weights as bf16 files have them go through `sanitize`, and are then used in fp32. Expected: 1 + w of the
stored w, as transformers computes it. Got: 1 + w rounded to 8 bits, off by up to 0.0039. In a small model in fp32 that
makes logits wrong by 0.0004 to 0.002 of the largest one.
"""

import sys

import mlx.core as mx
from mlx_lm.models.qwen3_5 import Model, ModelArgs

config = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
              head_dim=16, vocab_size=64, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
              linear_value_head_dim=8, tie_word_embeddings=True)  # fmt: skip
model = Model(ModelArgs.from_dict({"model_type": "qwen3_5", **config}))
name = "language_model.model.layers.0.input_layernorm.weight"
stored = (0.1 * mx.random.normal((32,))).astype(mx.bfloat16)
conv = mx.zeros((64, 1, 4), mx.bfloat16)  # in the order of a Hugging Face file, by which `sanitize` knows one
weights = model.sanitize({name: stored, "model.layers.0.linear_attn.conv1d.weight": conv})
off = float(mx.abs(weights[name].astype(mx.float32) - (1 + stored.astype(mx.float32))).max())
sys.exit(f"1 + w is off by {off:.4f}, as {weights[name].dtype}" if off > 1e-6 else 0)
