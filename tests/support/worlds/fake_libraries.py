"""Small fakes of the libraries that the engines in tests/peers call: `transformers`, mlx-lm and `llama.h`.

Their model is a ledger: a state is the exact fold of its tokens, so a wrong history shows in every number.
Leaves out: every computation of a real model.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

CONFIG = {
    "layer_types": ["linear_attention", "full_attention"], "vocab_size": 4, "hidden_size": 2,
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 2, "linear_value_head_dim": 2,
}  # fmt: skip
HEADS, KEY, VALUE, CHANNELS, WINDOW = 6, 2, 2, 20, 3


def folded(tokens: Sequence[int]) -> int:
    total = 0
    for token in tokens:
        total = 2 * total + token
    return total


def window(tokens: Sequence[int]) -> torch.Tensor:
    """[C, W-1], oldest first, zeros before the first token; no two channels alike."""
    last = torch.tensor([0] * WINDOW + list(tokens), dtype=torch.float32)[-WINDOW:]
    return last * torch.arange(1, CHANNELS + 1)[:, None]


def state(tokens: Sequence[int]) -> torch.Tensor:
    """[HV, K, V]; no two places alike."""
    return folded(tokens) * torch.arange(1.0, HEADS * KEY * VALUE + 1).reshape(HEADS, KEY, VALUE)


def rows(tokens: Sequence[int], first: int) -> torch.Tensor:
    """[n, 2]: the rows of the tokens from `first` on."""
    return torch.tensor([[folded(tokens[: at + 1]), at] for at in range(first, len(tokens))], dtype=torch.float32)


# -- transformers --------------------------------------------------------------------------------


class DynamicCache:
    def __init__(self, config: Any) -> None:
        self.tokens: list[int] = []  # as keys and conv inputs have them
        self.history: list[int] = []  # as the recurrent state has them
        self.recording = False
        self.layers: list[Any] = []

    def activate_past_recording(self) -> None:
        self.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """As the library's: never anything of the recurrent state."""
        self.tokens = self.tokens[: len(self.tokens) + tokens_to_remove]
        self.show()

    def show(self) -> None:
        keys = torch.tensor(self.tokens, dtype=torch.float32)[None, None, :, None]
        inputs = torch.cat([torch.zeros(CHANNELS, 1), window(self.tokens)], dim=1)[None]  # W columns
        gdn = SimpleNamespace(conv_states={0: inputs}, recurrent_states={0: state(self.history)[None]})
        self.layers = [gdn, SimpleNamespace(keys=keys, values=-keys)]


class Qwen3_5ForCausalLM:
    config = SimpleNamespace(linear_conv_kernel_dim=4)
    device = "cpu"

    @classmethod
    def from_pretrained(cls, directory: Any, **options: Any) -> Qwen3_5ForCausalLM:
        return cls()

    def eval(self, *device: str) -> Qwen3_5ForCausalLM:
        return self

    to = eval

    def lm_head(self, final: torch.Tensor) -> torch.Tensor:
        return final.repeat(1, 2)

    def model(self, ids: torch.Tensor, mask: None, positions: None, cache: DynamicCache, use_cache: bool) -> Any:
        first = len(cache.history)
        cache.tokens += ids[0].tolist()
        cache.history += ids[0].tolist()
        cache.show()
        return SimpleNamespace(last_hidden_state=rows(cache.history, first)[None])


# -- mlx-lm --------------------------------------------------------------------------------------


class Cache:
    """The tokens of each row of a batch. kind: the view of them that it shows"""

    def __init__(self, tokens: list[list[int]] | None = None) -> None:
        self.tokens = tokens or [[]]
        self.lengths: list[int] | None = None

    @classmethod
    def merge(cls, caches: Sequence[Cache]) -> Cache:
        return cls([list(cache.tokens[0]) for cache in caches])

    def extract(self, index: int) -> Cache:
        return type(self)([list(self.tokens[index])])

    def prepare(self, *, lengths: list[int], right_padding: list[int]) -> None:
        assert {length + pad for length, pad in zip(lengths, right_padding, strict=True)} == {max(lengths)}
        self.lengths = lengths

    def finalize(self) -> None:
        self.lengths = None

    def add(self, tokens: np.ndarray) -> list[list[int]]:
        counts = self.lengths or [tokens.shape[1]] * len(tokens)
        for kept, new, count in zip(self.tokens, tokens.tolist(), counts, strict=True):
            kept += new[:count]
        return self.tokens


class ArraysCache(Cache):
    def __getitem__(self, index: int) -> np.ndarray:
        (tokens,) = self.tokens
        return (window(tokens).T if index == 0 else state(tokens).mT)[None].numpy()


class KVCache(Cache):
    def keys_and_values(self) -> tuple[np.ndarray, np.ndarray]:
        keys = np.array(self.tokens, dtype=np.float32)[:, None, :, None]
        return keys, -keys


class MlxModel:
    def __init__(self) -> None:
        embedding = SimpleNamespace(as_linear=lambda x: np.tile(x, (1, 2)))
        args = SimpleNamespace(tie_word_embeddings=True)
        self.language_model = SimpleNamespace(args=args, model=SimpleNamespace(embed_tokens=embedding))

    def make_cache(self) -> list[Cache]:
        return [ArraysCache(), KVCache()]

    def model(self, tokens: np.ndarray, caches: Sequence[Cache]) -> np.ndarray:
        for cache in caches:
            seen = cache.add(tokens)
        counts = caches[0].lengths or [tokens.shape[1]] * len(tokens)
        found = np.full((*tokens.shape, 2), np.nan, dtype=np.float32)
        for row, (history, count) in enumerate(zip(seen, counts, strict=True)):
            found[row, :count] = rows(history, len(history) - count).numpy()
        return found

    def set_dtype(self, dtype: Any) -> None:
        assert dtype is np.float32


def modules() -> dict[str, ModuleType]:
    """Modules for `sys.modules` that replace the packages."""
    made = {name: ModuleType(name) for name in ("transformers", "mlx", "mlx.core", "mlx_lm", "mlx_lm.utils")}
    vars(made["transformers"]).update(DynamicCache=DynamicCache, Qwen3_5ForCausalLM=Qwen3_5ForCausalLM)
    vars(made["mlx.core"]).update(array=lambda x, dtype=None: np.array(x, dtype), float32=np.float32)
    vars(made["mlx"]).update(core=made["mlx.core"])
    vars(made["mlx_lm.utils"]).update(load_model=lambda directory, **options: (MlxModel(), {}))
    return made


# -- llama.h -------------------------------------------------------------------------------------

HANDLES = {"llama_model_default_params": None, "llama_model_load_from_file": 1, "llama_init_from_model": 2,
           "llama_get_memory": 3}  # fmt: skip


class Llama:
    """The functions by their names, for `Context`. `asked` lists the calls."""

    def __init__(self, params: Any, batch: Any) -> None:
        self.params, self.batch = params, batch
        self.tokens: dict[int, list[int]] = {}
        self.out: list[torch.Tensor] = []
        self.asked: list[tuple[Any, ...]] = []
        self.held: list[Any] = []  # what a batch points to

    def llama_context_default_params(self) -> Any:
        return self.params

    def __getattr__(self, name: str) -> Any:
        if name in HANDLES:
            return lambda *given: HANDLES[name]
        if name in ("llama_n_ubatch", "llama_n_seq_max", "llama_n_rs_seq"):
            return lambda ctx: getattr(self.params, name.removeprefix("llama_"))
        raise AttributeError(name)

    def llama_batch_init(self, count: int, embd: int, most: int) -> Any:
        batch, ints = self.batch(), ctypes.c_int32 * count
        one = ctypes.POINTER(ctypes.c_int32)
        self.held = [(ctypes.c_int32 * 1)() for _ in range(count)]
        batch.token, batch.pos, batch.n_seq_id, batch.logits = ints(), ints(), ints(), (ctypes.c_int8 * count)()
        batch.seq_id = (one * count)(*(ctypes.cast(own, one) for own in self.held))
        return batch

    def llama_batch_free(self, batch: Any) -> None:
        self.held = []

    def llama_decode(self, ctx: int, batch: Any) -> int:
        self.out = []
        for i in range(batch.n_tokens):
            history = self.tokens.setdefault(batch.seq_id[i][0], [])
            if batch.pos[i] != len(history) or batch.n_seq_id[i] != 1 or not batch.logits[i]:
                return -1
            history.append(batch.token[i])
            self.out.append(rows(history, len(history) - 1)[0])
        return 0

    def llama_get_logits_ith(self, ctx: int, index: int) -> list[float]:
        return self.out[index].repeat(2).tolist()

    def llama_get_embeddings_ith(self, ctx: int, index: int) -> list[float]:
        return self.out[index].tolist()

    def llama_memory_seq_rm(self, memory: int, sequence: int, first: int, last: int) -> bool:
        self.asked.append(("rm", sequence, first))
        history = self.tokens.get(sequence, [])
        if first >= 0 and len(history) - first > self.params.n_rs_seq:
            return False
        self.tokens[sequence] = history[: max(first, 0)]
        return True

    def llama_memory_seq_cp(self, memory: int, source: int, to: int, first: int, last: int) -> None:
        self.asked.append(("cp", source, to))
        self.tokens[to] = list(self.tokens[source])

    def _data(self, sequence: int, flags: int) -> bytes:
        history = self.tokens.get(sequence, [])
        if not flags:
            return struct.pack(f"<{len(history)}i", *history)
        tiled = [3 * (new % 2) + new // 2 for new in range(HEADS)]  # new head j * H + k is the old one k * r + j
        conv = window(history)
        values = conv[2 * 2 * KEY :].reshape(HEADS, VALUE, WINDOW)[tiled].reshape(HEADS * VALUE, WINDOW)
        parts = torch.cat([conv[: 2 * 2 * KEY], values]), state(history)[tiled].mT.contiguous()
        return bytes(28) + b"".join(struct.pack("<iQ", 0, 4 * p.numel()) + p.numpy().tobytes() for p in parts)

    def llama_state_seq_get_size_ext(self, ctx: int, sequence: int, flags: int) -> int:
        return len(self._data(sequence, flags))

    def llama_state_seq_get_data_ext(self, ctx: int, buffer: Any, size: int, sequence: int, flags: int) -> int:
        buffer[:size] = self._data(sequence, flags)
        return size

    def llama_state_seq_set_data_ext(self, ctx: int, data: bytes, size: int, sequence: int, flags: int) -> int:
        self.tokens[sequence] = list(struct.unpack(f"<{size // 4}i", data))
        return size
