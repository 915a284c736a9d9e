"""llama.cpp: a rollback within a window is silently wrong after some batches of several sequences.

    python llamacpp_rollback_in_a_batch.py MODEL.gguf      any qwen35 model; needs xllamacpp, here 2026.10.11549, CPU

Run: sequences 2, 1 and 0 arrive in this order; then one batch has 2 tokens of sequence 0, and 1 token of each other;
then `llama_memory_seq_rm` takes back one of the two tokens. Expected: the state after 6 tokens. Got: true, and a state
that is off by 1.53 of its largest number. The same since 2026.8.10229; 2026.6.9713 is right. With four sequences that
arrive in random order, windows of equal length show it as well: 7 of 43 random runs.
"""
# Longer than 30 lines: Python reaches these calls by ctypes alone, so structs, a decode and the state are spelled out.

import ctypes as c
import sys

import xllamacpp.xllamacpp as package

lib, Ints = c.CDLL(package.__file__), c.POINTER(c.c_int32)
Params = type("Params", (c.Structure,), {"_fields_": [("of", c.c_int32 * 128)]})
fields = {"n": c.c_int32, "token": Ints, "embd": Ints, "pos": Ints, "n_seq": Ints, "seq": c.POINTER(Ints), "out": Ints}
lib.llama_batch_init.restype = type("Batch", (c.Structure,), {"_fields_": list(fields.items())})
lib.llama_model_default_params.restype = lib.llama_context_default_params.restype = Params
lib.llama_model_load_from_file.restype = lib.llama_init_from_model.restype = lib.llama_get_memory.restype = c.c_void_p
model = c.c_void_p(lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params()))
params = lib.llama_context_default_params()
assert list(params.of[:5]) == [512, 2048, 512, 1, 0] and list(params.of[26:28]) == [1, 1], "another layout"
params.of[:5], params.of[26:28] = (1024, 512, 512, 4, 7), (0, 0)  # n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq; KV
ctx = c.c_void_p(lib.llama_init_from_model(model, params))
memory = c.c_void_p(lib.llama_get_memory(ctx))


def decode(*runs):  # (sequence, first position, how many tokens), in one batch
    batch, rows = lib.llama_batch_init(512, 0, 1), [(s, at) for s, first, n in runs for at in range(first, first + n)]
    for i, (s, at) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq[i], batch.seq[i][0] = (7 * at * at + 3) % 240, at, 1, s
    batch.n, batch.out = len(rows), None
    assert lib.llama_decode(ctx, batch) == 0


def state(s):  # conv windows and recurrent states of all layers
    data = c.create_string_buffer(lib.llama_state_seq_get_size_ext(ctx, s, 1))
    lib.llama_state_seq_get_data_ext(ctx, data, c.c_size_t(len(data)), s, 1)
    return (c.c_float * (len(data) // 4)).from_buffer_copy(data)[7:]


def off(s, right):  # the largest difference by the largest number, to a sequence that was never rolled back
    return max(abs(a - b) for a, b in zip(state(s), state(right), strict=True)) / max(map(abs, state(right)))


decode((2, 0, 1)), decode((1, 0, 1)), decode((0, 0, 1))
decode((0, 1, 4), (1, 1, 4))
decode((0, 5, 2), (1, 5, 1), (2, 1, 1))
told = lib.llama_memory_seq_rm(memory, 0, 6, -1)
decode((3, 0, 6))
sys.exit(f"seq_rm says {bool(told)}, the state is off by {found:.2f}" if (found := off(0, 3)) > 1e-3 else 0)
