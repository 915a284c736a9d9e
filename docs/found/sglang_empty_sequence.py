"""SGLang and vLLM: after an empty sequence, chunked prefill computes every later one in the place of its neighbour.

    python sglang_empty_sequence.py      needs sglang (or vllm), torch, triton; no GPU (nothing but the index is made)

Run: the table of chunks for sequences of 5, 0 and 3 tokens. Expected: sequences 0 and 2 have a chunk each. Got: 0
and 1. So the chunks of sequence 2 are taken from the empty range of sequence 1: its outputs and its state are wrong
(off by more than their norm), and the kernels read and write out of bounds. `prepare_chunk_indices` counts sequences
by their first chunks. sglang 0.5.9 to 0.5.23, vllm 0.32.0; fla-core 0.6.0 gives 0 and 2.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
from importlib import import_module

import torch

sglang = ("sglang.kernels.ops.attention.fla", "sglang.srt.layers.attention.fla")
for place in (*sglang, "vllm.third_party.flash_linear_attention.ops", "fla.ops.utils"):
    try:
        prepare = import_module(f"{place}.index").prepare_chunk_indices
        break
    except ImportError:
        continue
of = prepare(torch.tensor([0, 5, 5, 8]), 64)[:, 0].tolist()
print(f"{place}: chunks of sequences {of}; expected [0, 2]")
raise SystemExit(of != [0, 2])
