"""llama.cpp as an engine: the library in the package `xllamacpp`, fp32 weights and KV, one sequence per request.

After a verify `llama_memory_seq_rm` rolls back, on snapshots that the context keeps (`n_rs_seq`). Leaves out: the draft
head. The model must have K = V.

    make          rolls the rejected tokens of a window back
    again         rolls the whole window back, and decodes its accepted tokens again
    copied        saves and loads by `llama_memory_seq_cp` in place of bytes
    with_rows     shows rows after the final norm, too; llama.cpp then splits a batch by sequences
    cut           as `with_rows`, with a physical batch (`n_ubatch`) that is narrower than a window
    narrow        as `make`, with such a batch
"""

import json
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import gguf_writer
from .llama_library import FP32, PARTIAL, Context, library

HEADER = 28  # bytes before the first layer of a sequence's states
KEPT_COPIES = 8  # sequences for copies, in addition to those of the requests
NARROW = 4


class Engine:
    """Which sequence is whose; the rows of the windows in flight."""

    def __init__(self, model: Path, room: Any, widest: int, **wanted: int) -> None:
        self.config = json.loads((model / "config.json").read_text())
        sequences = len(room.slots) + KEPT_COPIES
        positions = (room.max_positions or len(room.pages) * room.page_size) + widest
        options = {
            "n_ctx": sequences * positions, "n_batch": max(room.max_tokens, positions), "n_seq_max": sequences,
            "n_ubatch": max(room.max_tokens, positions), "n_rs_seq": widest - 1, "n_threads": 1, "n_threads_batch": 1,
            "flash_attn_type": 0, "type_k": FP32, "type_v": FP32, **wanted,
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            gguf_writer.write(model, file := Path(directory, "model.gguf"))
            self.context = self._open(file, options)
        self.shows = ("logits", "final") if wanted.get("embeddings") else ("logits",)
        slots = sorted(room.slots)
        self.order = [*map(slots.index, room.slots), *range(len(slots), sequences)]  # the trace's order of slots
        self.free = set(self.order)
        self.sequences: dict[str, int] = {}
        self.windows: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}

    def _open(self, file: Path, options: dict[str, int]) -> Any:
        return Context(library(), file, **options)

    def step(self, rows: Sequence[Any]) -> dict[str, dict[str, torch.Tensor]]:
        for row in rows:
            if row.request not in self.sequences:
                self.sequences[row.request] = self._take()
            if row.kind == "verify":
                self.windows[row.request] = row
        self._decode(rows)
        widths = {"logits": ("logits", self.config["vocab_size"]), "final": ("embeddings", self.config["hidden_size"])}
        seen: dict[str, dict[str, torch.Tensor]] = {}
        for shown in self.shows:
            index = iter(range(sum(len(row.tokens) for row in rows)))
            seen[shown] = {
                row.request: torch.tensor([self.context.row(widths[shown][0], next(index), widths[shown][1])
                                           for _ in row.tokens])
                for row in rows
            }  # fmt: skip
        return seen

    def _decode(self, rows: Sequence[Any]) -> None:
        self.context.decode([
            (self.sequences[row.request], row.first + i, token) for row in rows for i, token in enumerate(row.tokens)
        ])

    def keep(self, request: str, length: int) -> None:
        row = self.windows.pop(request)
        if length < row.first + len(row.tokens):
            self._roll_back(request, length)

    def _roll_back(self, request: str, length: int) -> None:
        if not self.context.remove(self.sequences[request], length):
            raise RuntimeError(f"llama_memory_seq_rm refuses to roll back to {length} tokens")

    def drop(self, request: str) -> None:
        self.windows.pop(request, None)
        if request in self.sequences:
            self._release(self.sequences.pop(request))

    def _release(self, sequence: int) -> None:
        self.context.remove(sequence)
        self.free.add(sequence)

    def _take(self, last: int = 0) -> int:
        """The first free sequence in order, or in the order of the last ones."""
        sequence = next(one for one in self.order[-last:] if one in self.free)
        self.free.remove(sequence)
        return sequence

    def save(self, request: str, name: str) -> None:
        self.saved[name] = self.context.read(self.sequences[request]) if request in self.sequences else None

    def load(self, request: str, name: str) -> None:
        self.sequences[request] = self._take()
        self.context.write(self.sequences[request], self.saved[name])

    def state(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return states(self.context.read(self.sequences[request], PARTIAL), self.config)


class Again(Engine):
    def __init__(self, model: Path, room: Any, widest: int) -> None:
        super().__init__(model, room, widest, n_rs_seq=widest)

    def keep(self, request: str, length: int) -> None:
        row = self.windows.pop(request)
        self._roll_back(request, row.first)
        self._decode([row._replace(tokens=row.tokens[: length - row.first])])


class Copied(Engine):
    def save(self, request: str, name: str) -> None:
        self.saved[name] = self._take(KEPT_COPIES)
        self._copy(self.sequences[request], self.saved[name])

    def load(self, request: str, name: str) -> None:
        self.sequences[request] = self._take()
        self._copy(self.saved[name], self.sequences[request])

    def _copy(self, source: int, to: int) -> None:
        self.context.lib.llama_memory_seq_cp(self.context.memory, source, to, -1, -1)


def _maker(kind: type[Engine], **wanted: int) -> Callable[..., Engine]:
    def made(model: Path, room: Any, *, num_steps: int, widest: int, device: str, dtype: torch.dtype) -> Engine:
        return kind(model, room, widest, **wanted)

    return made


make, again, copied = _maker(Engine), _maker(Again), _maker(Copied)
with_rows = _maker(Engine, embeddings=True)
cut = _maker(Engine, n_ubatch=NARROW, embeddings=True)
narrow = _maker(Engine, n_ubatch=NARROW)


def states(data: bytes, config: dict[str, Any]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Read the output of `llama_state_seq_get_data_ext` with flag 1: conv windows of all layers, then all states.

    Per layer an int32 type, a uint64 size and the data: conv [C, W-1]; state [HV tiled, V, K].
    """
    keys, heads, wide = (config[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim"))
    values = config["linear_value_head_dim"]
    linear = [i for i, kind in enumerate(config["layer_types"]) if kind == "linear_attention"]
    found, at = [], HEADER
    for _ in range(2 * len(linear)):
        kind, size = struct.unpack_from("<iQ", data, at)
        if kind != FP32:
            raise RuntimeError(f"a state of ggml_type {kind}; known is {FP32} (fp32)")
        found.append(torch.frombuffer(bytearray(data[at + 12 : at + 12 + size]), dtype=torch.float32))
        at += 12 + size
    if at != len(data):
        raise RuntimeError(f"{len(data) - at} bytes more than the states of {len(linear)} layers")
    split = 2 * keys * wide
    windows, memories = found[: len(linear)], found[len(linear) :]
    return {
        layer: (
            torch.cat([(conv := window.unflatten(0, (split + heads * values, -1)))[:split],
                       gguf_writer.grouped(conv[split:].unflatten(0, (heads, values)), keys).flatten(0, 1)]),
            gguf_writer.grouped(memory.unflatten(0, (heads, values, wide)), keys).mT,
        )
        for layer, window, memory in zip(linear, windows, memories, strict=True)
    }  # fmt: skip
