"""llama.cpp: a rollback over the cut in a window that n_ubatch splits is silently wrong.

    python llamacpp_window_cut.py MODEL.gguf      any qwen35 model; needs xllamacpp, here 2026.10.11549 (b11549), CPU

Run: a context with embeddings and n_ubatch 6; 20 tokens, then a window of 8, then `llama_memory_seq_rm` takes back 3 of
it. Expected: the state after 25 tokens, or false. Got: true, and a state that is off by 1.31 of its largest number.
The same in 2026.6.9713; 2026.8.10229 and 2026.9.11063 abort the process, as this release does without embeddings.
"""
# Longer than 30 lines: Python reaches these calls by ctypes alone, so structs, a decode and the state are spelled out.

import ctypes as c
import sys

import xllamacpp.xllamacpp as package

lib = c.CDLL(package.__file__)
Struct = type("Struct", (c.Structure,), {"_fields_": [("of", c.c_int32 * 128)]})  # by value, larger than any here
for made in (lib.llama_model_default_params, lib.llama_context_default_params, lib.llama_batch_get_one):
    made.restype = Struct
lib.llama_model_load_from_file.restype = lib.llama_init_from_model.restype = lib.llama_get_memory.restype = c.c_void_p
model = c.c_void_p(lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params()))
params = lib.llama_context_default_params()
assert list(params.of[:5]) == [512, 2048, 512, 1, 0] and list(params.of[26:28]) == [1, 1], "another layout"
params.of[:5], params.of[26:28] = (1024, 512, 6, 4, 7), (0, 0)  # n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq; KV
params.of[34] |= 1  # embeddings
ctx = c.c_void_p(lib.llama_init_from_model(model, params))
memory = c.c_void_p(lib.llama_get_memory(ctx))


def decode(first, n):  # the next n tokens of sequence 0
    tokens = (c.c_int32 * n)(*[(7 * at * at + 3) % 240 for at in range(first, first + n)])
    assert lib.llama_decode(ctx, lib.llama_batch_get_one(tokens, n)) == 0


def state(s=0):  # conv windows and recurrent states of all layers
    data = c.create_string_buffer(lib.llama_state_seq_get_size_ext(ctx, s, 1))
    lib.llama_state_seq_get_data_ext(ctx, data, c.c_size_t(len(data)), s, 1)
    return (c.c_float * (len(data) // 4)).from_buffer_copy(data)[7:]


def off(found, n):  # the largest difference by the largest number, to n tokens that were never rolled back
    lib.llama_memory_clear(memory, True)
    decode(0, n)
    return max(abs(a - b) for a, b in zip(found, state(), strict=True)) / max(map(abs, state()))


decode(0, 20), decode(20, 8)
told = lib.llama_memory_seq_rm(memory, 0, 25, -1)
sys.exit(f"seq_rm says {bool(told)}, the state is off by {found:.2f}" if (found := off(state(), 25)) > 1e-3 else 0)
