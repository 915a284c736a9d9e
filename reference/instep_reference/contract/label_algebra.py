"""The algebra of labels: what an op computes when it moves labels instead of numbers.

A label is an unsigned 64-bit number, held as int64. The reference computes labels with Python integers
(`instep_reference.label_ledger`), the optimized side with tensors (`instep_optimized.ops.ledger_label_ops`), and the
harness compares the two. This file has only constants. Leaves out: every computation.

  mix(a, b)     x = a*MIX_A + b*MIX_B + MIX_C;  x ^= x >> 29;  x *= MIX_D;  x ^= x >> 32
                all modulo 2**64, shifts logical
  code(place)   crc32 of "family.layer.component" in ascii; family is "trunk" for the stage trunk and
                "draft" for extend, chain and block; layer as in `Place` (STAGE_LEVEL and AFTER_LAYERS included)
  expand(l, n)  element j of n is l + j*SPREAD modulo 2**64, j over the flattened canonical layout. The label 0
                means empty and expands to n zeros, so that fresh memory reads as 0
  read(x)       l = x[0];  l + sum_j (x[j] - expand(l)[j]) * (2*j + 1). This is the label l for an intact row; if any
                element is wrong it is another number, which no op expects

Labels of results (c = code of the result's place; one label per row):
  embed                    mix(token, c)
  norm, linear, mlp, moe   mix(x, c)
  add, concat, opened, gated norm (two inputs x, y in the order of the op's arguments)   mix(mix(x, y), c)
  conv                     acc = c; for every tap, oldest first (0 before the first token): acc = mix(acc, tap);
                           the taps are the labels of the `qkv` rows, W of them, the row's own last
  skip, gated_group_norm   as add and gated norm: mix(mix(core, v), c), mix(mix(core, z), c)
  selective_inputs         as gdn_inputs, without b
  gdn_inputs               base = mix(mix(mixed, a), b); q, k, v, log_decay, beta are mix(base, their own c)
  gdn                      update = mix(mix(mix(mix(mix(chain, k), v), log_decay), beta), its own c): a token's update
                           depends on all tokens folded in before it;
                           chain <- mix(chain, mix(mix(k, log_decay), update)), chain 0 for a fresh request;
                           core = mix(mix(chain, q), c)
                           (if a decay is kept, its label is that of log_decay)
                           (an update that is no delta is mixed from 0 instead of the chain: it reads no state)
  attention_inputs         query = mix(mix(projected, position), c); key = mix(mix(key_raw, position), c)
                           (value is a linear)
  latent_inputs            as attention_inputs; value = mix(key_raw, c)
  attend                   total = sum over positions p seen, modulo 2**64, of mix(mix(key_p, value_p), p);
                           attended = mix(mix(total, query), c)
                           (in a block of a block drafter a row also sees the positions after its own)
  key_inputs               as key of attention_inputs
  features                 that of the first layer; then mix(mix(features, hidden), c), layer by layer: a concat each
  lm_head                  zeros, and 1.0 at token (mix(x, c) >> 1) % vocab
  topk_tokens              token n, from 0, is (t + n) % vocab, t the token that the logits name; its log-probability is
                           minus the sum of (mix(t, j) >> 1) % SCORES over j = 0 .. n, an exact number of fp32
  draw                     acc = that token; acc = mix(acc, n) for each number n of: the bits of temperature and top_p
                           as fp32 (without top_p: 1.0), top_k (without: 0), uniform of the node and final uniform over
                           UNIFORM, the tokens of the children in window order; then token (acc >> 1) % vocab
Memory: a conv window is expand(tap, C) per column; a state block is expand(chain, HV*K*V) in the order
[HV, K, V]; a key or value entry is expand(label, kv_heads*head_dim); nothing folded in yet reads as 0.
"""

MIX_A = 0x9E3779B97F4A7C15
MIX_B = 0xC2B2AE3D27D4EB4F
MIX_C = 0x165667B19E3779F9
MIX_D = 0xBF58476D1CE4E5B9
SPREAD = 0x94D049BB133111EB
SCORES = 8  # small, so that scores are often equal
