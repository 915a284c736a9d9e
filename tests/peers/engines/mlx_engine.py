"""`mlx-lm` as an engine, on a CPU: one cache per request, merged for the rows of an event and split after it.

After a verify the accepted tokens run again on the caches from before it, since an `ArraysCache` cannot be trimmed.
Leaves out: the draft head, which mlx-lm does not read.
"""

import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from shutil import copy
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from safetensors.torch import load_file, save_file

from .cached import Cached


def make(model: Path, room: Any, *, num_steps: int, widest: int, device: str, dtype: torch.dtype) -> "Engine":
    """The checkpoint as it is stored. mlx-lm adds 1 to its norm weights in the width of the file."""
    loaded, _ = load_model(model, model_config={"model_type": "qwen3_5"})  # `qwen3_5_text` is no name that it knows
    loaded.set_dtype(getattr(mx, str(dtype).removeprefix("torch.")))
    return Engine(loaded)


def stored_wide(model: Path, room: Any, *, num_steps: int, widest: int, device: str, dtype: torch.dtype) -> "Engine":
    """The same weights from a file in fp32, in which 1 + w keeps the bits of w."""
    with tempfile.TemporaryDirectory() as directory:
        tensors = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
        save_file(tensors, Path(directory, "model.safetensors"))
        copy(model / "config.json", directory)
        return make(Path(directory), room, num_steps=num_steps, widest=widest, device=device, dtype=dtype)


class Engine(Cached):
    """A cache per layer, for each request."""

    def _empty(self) -> list[Any]:
        empty: list[Any] = self.model.make_cache()
        return empty

    def step(self, rows: Sequence[Any]) -> dict[str, dict[str, torch.Tensor]]:
        for row in rows:
            caches = self.caches.setdefault(row.request, self._empty())
            if row.kind == "verify":
                self.windows[row.request] = row, deepcopy(caches)
        final = self._run(rows[0]) if len(rows) == 1 else self._together(rows)
        text = self.model.language_model
        head = text.model.embed_tokens.as_linear if text.args.tie_word_embeddings else text.lm_head
        return {
            "final": {row.request: _torch(x) for row, x in zip(rows, final, strict=True)},
            "logits": {row.request: _torch(head(x)) for row, x in zip(rows, final, strict=True)},
        }

    def _run(self, row: Any) -> list[mx.array]:
        return [self.model.model(mx.array([row.tokens]), self.caches[row.request])[0]]

    def _together(self, rows: Sequence[Any]) -> list[mx.array]:
        """As its batch generator does it: merged caches, padding on the right, which `finalize` takes out again."""
        both = [self.caches[row.request] for row in rows]
        merged = [layer[0].merge(list(layer)) for layer in zip(*both, strict=True)]
        lengths = [len(row.tokens) for row in rows]
        padding = [max(lengths) - length for length in lengths]
        if any(padding):
            for cache in merged:
                cache.prepare(lengths=lengths, right_padding=padding)
        tokens = mx.array([[*row.tokens, *[0] * pad] for row, pad in zip(rows, padding, strict=True)])
        final = self.model.model(tokens, merged)
        if any(padding):
            for cache in merged:
                cache.finalize()
        for index, row in enumerate(rows):
            self.caches[row.request] = [cache.extract(index) for cache in merged]
        return [final[index, :length] for index, length in enumerate(lengths)]

    def state(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """mlx-lm keeps the window as [1, W-1, C] and the state as [1, HV, V, K]."""
        return {
            layer: (_torch(cache[0][0]).T, _torch(cache[1][0]).mT)
            for layer, cache in enumerate(self.caches[request]) if type(cache).__name__ == "ArraysCache"
        }  # fmt: skip

    def kv(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """A cache that was merged with longer ones is cut out of them with its own length."""
        return {
            layer: (_torch(both[0][0]).transpose(0, 1), _torch(both[1][0]).transpose(0, 1))
            for layer, cache in enumerate(self.caches[request]) if type(cache).__name__ != "ArraysCache"
            for both in (cache.keys_and_values(),)
        }  # fmt: skip


def _torch(x: mx.array) -> torch.Tensor:
    wide = mx.array(x, mx.float32)
    return torch.from_numpy(np.array(wide)).clone().to(getattr(torch, str(x.dtype).rpartition(".")[2]))
