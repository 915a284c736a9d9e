"""`transformers` as an engine: one `DynamicCache` per request, and two ways to roll back after a verify.

`make` keeps a copy of the cache from before the window, and runs the accepted tokens again on it. `cropping` crops the
cache of the model, as the library's assisted decoding does. Leaves out: batches, and the draft head.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, Qwen3_5ForCausalLM

from .cached import Cached


def make(model: Path, room: Any, *, num_steps: int, widest: int, device: str, dtype: torch.dtype) -> "Engine":
    return Engine(_load(model, device, dtype))


def cropping(model: Path, room: Any, *, num_steps: int, widest: int, device: str, dtype: torch.dtype) -> "Engine":
    return Cropping(_load(model, device, dtype))


def _load(directory: Path, device: str, dtype: torch.dtype) -> Any:
    model = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval().to(device)


class Engine(Cached):
    @torch.no_grad()
    def step(self, rows: Any) -> dict[str, dict[str, torch.Tensor]]:
        final = {row.request: self._run(row) for row in rows}
        return {"final": final, "logits": {name: self.model.lm_head(x) for name, x in final.items()}}

    @torch.no_grad()
    def _run(self, row: Any) -> torch.Tensor:
        cache = self.caches.setdefault(row.request, self._empty())
        if row.kind == "verify":
            self.windows[row.request] = row, self._before(cache)
        ids = torch.tensor([row.tokens], device=self.model.device)
        # mask, positions, cache: the cache has another name before transformers 5.24
        return self.model.model(ids, None, None, cache, use_cache=True).last_hidden_state[0]

    def _empty(self) -> Any:
        return DynamicCache(config=self.model.config)

    def _before(self, cache: Any) -> Any:
        return deepcopy(cache)

    def state(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """`conv_states` keeps W columns, of which the last W - 1 are the window; while recording, no zeros before."""
        columns = self.model.config.linear_conv_kernel_dim - 1
        return {
            layer: (pad(kept.conv_states[0][0], (columns, 0))[:, -columns:], kept.recurrent_states[0][0])
            for layer, kept in enumerate(self.caches[request].layers) if hasattr(kept, "recurrent_states")
        }  # fmt: skip

    def kv(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {
            layer: (kept.keys[0].transpose(0, 1), kept.values[0].transpose(0, 1))
            for layer, kept in enumerate(self.caches[request].layers) if not hasattr(kept, "recurrent_states")
        }  # fmt: skip


class Cropping(Engine):
    """Goes back by `DynamicCache.crop`, with the recording of past inputs on, as assisted decoding has it."""

    def _run(self, row: Any) -> torch.Tensor:
        out = super()._run(row)
        if row.kind != "verify":
            self.caches[row.request].crop(0)  # back to W columns
        return out

    def _empty(self) -> Any:
        cache = super()._empty()
        cache.activate_past_recording()
        return cache

    def _before(self, cache: Any) -> Any:
        return None

    def keep(self, request: str, length: int) -> None:
        row, _ = self.windows.pop(request)
        self.caches[request].crop(length - row.first - len(row.tokens))
