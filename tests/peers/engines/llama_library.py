"""The functions of `llama.h` that the engine calls, through ctypes on a library that exports them.

Structs move between releases. So defaults are taken from the library, and the fields that are set here are held to
their known defaults first. The values that the library adopted are read back. Leaves out: the purpose of the calls.
"""

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

I32, U32, F32, PTR = ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p
FP32 = 0  # of ggml_type
PARTIAL = 1  # a sequence's states without its KV


class Opaque(ctypes.Structure):
    """A struct by value, at least as large as the library's. It goes through memory, so more bytes do no harm."""

    _fields_ = (("bytes", ctypes.c_ubyte * 512),)


class ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", U32), ("n_batch", U32), ("n_ubatch", U32), ("n_seq_max", U32), ("n_rs_seq", U32),
        ("n_outputs_max", U32), ("unknown", U32), ("n_threads", I32), ("n_threads_batch", I32), ("ctx_type", I32),
        ("rope_scaling_type", I32), ("pooling_type", I32), ("attention_type", I32), ("flash_attn_type", I32),
        ("rope_and_yarn", F32 * 6), ("yarn_orig_ctx", U32), ("defrag_thold", F32), ("cb_eval", PTR * 2),
        ("type_k", I32), ("type_v", I32), ("abort_callback", PTR * 3),
        ("embeddings", ctypes.c_bool), ("offload_kqv", ctypes.c_bool), ("rest", ctypes.c_ubyte * 374),
    )  # fmt: skip


DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "n_outputs_max": 0, "n_threads": 4,
    "n_threads_batch": 4, "ctx_type": 0, "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1,
    "flash_attn_type": -1, "yarn_orig_ctx": 0, "defrag_thold": -1.0, "type_k": 1, "type_v": 1, "embeddings": False,
    "offload_kqv": True,
}  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", I32), ("token", ctypes.POINTER(I32)), ("embd", PTR), ("pos", ctypes.POINTER(I32)),
        ("n_seq_id", ctypes.POINTER(I32)), ("seq_id", ctypes.POINTER(ctypes.POINTER(I32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )  # fmt: skip


TYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_model_default_params": (Opaque, ()),
    "llama_model_load_from_file": (PTR, (ctypes.c_char_p, Opaque)),
    "llama_context_default_params": (ContextParams, ()),
    "llama_init_from_model": (PTR, (PTR, ContextParams)),
    "llama_get_memory": (PTR, (PTR,)),
    "llama_batch_init": (Batch, (I32, I32, I32)),
    "llama_batch_free": (None, (Batch,)),
    "llama_decode": (I32, (PTR, Batch)),
    "llama_get_logits_ith": (ctypes.POINTER(F32), (PTR, I32)),
    "llama_get_embeddings_ith": (ctypes.POINTER(F32), (PTR, I32)),
    "llama_memory_seq_rm": (ctypes.c_bool, (PTR, I32, I32, I32)),
    "llama_memory_seq_cp": (None, (PTR, I32, I32, I32, I32)),
    "llama_state_seq_get_size_ext": (ctypes.c_size_t, (PTR, I32, U32)),
    "llama_state_seq_get_data_ext": (ctypes.c_size_t, (PTR, PTR, ctypes.c_size_t, I32, U32)),
    "llama_state_seq_set_data_ext": (ctypes.c_size_t, (PTR, PTR, ctypes.c_size_t, I32, U32)),
    "llama_n_ubatch": (U32, (PTR,)), "llama_n_seq_max": (U32, (PTR,)), "llama_n_rs_seq": (U32, (PTR,)),
    "llama_log_set": (None, (PTR, PTR)),
}  # fmt: skip


def library() -> Any:
    """The library inside the package xllamacpp, silent, with the types of its functions set."""
    found = importlib.util.find_spec("xllamacpp")
    if found is None:
        raise ModuleNotFoundError("No module named 'xllamacpp'", name="xllamacpp")
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort starts a debugger otherwise
    lib = ctypes.CDLL(str(next(Path(str(found.origin)).parent.glob("*.so"))))
    for name, (result, arguments) in TYPES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.quiet = ctypes.CFUNCTYPE(None, I32, ctypes.c_char_p, PTR)(lambda *_: None)  # kept, or it is collected
    lib.llama_log_set(lib.quiet, None)
    return lib


class Context:
    """A model with a context: `decode`, and what a sequence remembers as bytes."""

    def __init__(self, lib: Any, file: Path, **wanted: int) -> None:
        self.lib = lib
        self.model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        moved = {name: getattr(params, name) for name, known in DEFAULTS.items() if getattr(params, name) != known}
        if moved:
            raise RuntimeError(f"llama_context_params has another layout here: {moved}, known are {DEFAULTS}")
        for name, value in wanted.items():
            setattr(params, name, value)
        self.ctx = self.model and lib.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise RuntimeError(f"llama.cpp refuses the model {file.name} or its context of {wanted}")
        for name in ("n_ubatch", "n_seq_max", "n_rs_seq"):
            if name in wanted and getattr(lib, f"llama_{name}")(self.ctx) != wanted[name]:
                raise RuntimeError(f"llama_context_params: {name} did not arrive")
        self.memory = lib.llama_get_memory(self.ctx)

    def decode(self, tokens: Sequence[tuple[int, int, int]]) -> None:
        """Tokens as (sequence, position, token); every one gives an output row."""
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        for i, (sequence, position, token) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = sequence
        batch.n_tokens = len(tokens)
        code = self.lib.llama_decode(self.ctx, batch)
        self.lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def row(self, kind: str, index: int, width: int) -> list[float]:
        found = getattr(self.lib, f"llama_get_{kind}_ith")(self.ctx, index)
        if not found:
            raise RuntimeError(f"llama_get_{kind}_ith has no row {index}")
        return found[:width]

    def remove(self, sequence: int, first: int = -1) -> bool:
        return bool(self.lib.llama_memory_seq_rm(self.memory, sequence, first, -1))

    def read(self, sequence: int, flags: int = 0) -> bytes:
        size = self.lib.llama_state_seq_get_size_ext(self.ctx, sequence, flags)
        buffer = ctypes.create_string_buffer(size)
        written = self.lib.llama_state_seq_get_data_ext(self.ctx, buffer, size, sequence, flags)
        return buffer.raw[:written]

    def write(self, sequence: int, data: bytes, flags: int = 0) -> None:
        if self.lib.llama_state_seq_set_data_ext(self.ctx, data, len(data), sequence, flags) != len(data):
            raise RuntimeError("llama_state_seq_set_data_ext took fewer bytes than were saved")
