"""llama.cpp: a rollback after a state was loaded returns true and leaves a wrong state.

    python llamacpp_rollback_after_load.py MODEL.gguf      any qwen35 model; needs xllamacpp, here 2026.10.11549, CPU

Run: 20 tokens, then 8; `llama_state_seq_set_data` loads into sequence 1 the data that `llama_state_seq_get_data`
returns for sequence 0; then `llama_memory_seq_rm` takes back 3 of sequence 1. Expected: the state after 25 tokens, or
false, because snapshots are not in the data. Got: true, and a state that is off by 1.00 of its largest number.
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
params.of[:5], params.of[26:28] = (1024, 512, 512, 4, 7), (0, 0)  # n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq; KV
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
data = c.create_string_buffer(lib.llama_state_seq_get_size(ctx, 0))
size = c.c_size_t(lib.llama_state_seq_get_data(ctx, data, c.c_size_t(len(data)), 0))
assert lib.llama_state_seq_set_data(ctx, data, size, 1) == size.value
told = lib.llama_memory_seq_rm(memory, 1, 25, -1)
sys.exit(f"seq_rm says {bool(told)}, the state is off by {found:.2f}" if (found := off(state(1), 25)) > 1e-3 else 0)
