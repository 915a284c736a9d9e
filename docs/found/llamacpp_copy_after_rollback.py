"""llama.cpp: `llama_memory_seq_cp` after a rollback copies the state that was not rolled back.

    python llamacpp_copy_after_rollback.py MODEL.gguf      any qwen35 model; needs xllamacpp, here 2026.10.11549, CPU

Run: 20 tokens, then 8, then `llama_memory_seq_rm` takes back 3, then `llama_memory_seq_cp` from sequence 0 to 1.
Expected: both have the state after 25 tokens. Got: sequence 0 has it; sequence 1 has the state after 28 tokens
with the KV of 25, off by 1.37 of its largest number.
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
lib.llama_memory_seq_rm(memory, 0, 25, -1)
lib.llama_memory_seq_cp(memory, 0, 1, -1, -1)
both = state(0), state(1)
source, copy = (off(found, 25) for found in both)
sys.exit(f"the source is off by {source:.2f}, the copy by {copy:.2f}" if max(source, copy) > 1e-3 else 0)
