"""A Hugging Face model directory: configuration and tensors as stored, verified before anything is loaded.

Leaves out: unpacking and casting (each side does that itself), and every format but safetensors.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .block_drafter import FOLDER, PREFIX, BlockDrafter
from .checkpoint_tensor_shapes import DERIVED, block_shapes, each_shape, ours, released
from .config import ModelConfig, read_json, states_mtp_layers
from .drafters import BLOCK
from .errors import BadInput

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
VISUAL = re.compile(r"^(model\.)?visual\.")
MTP = re.compile(r"^mtp\.")
MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HASHED_AT_ONCE = 1 << 20  # bytes


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    config; tensors by text-model name (`model.*`, `lm_head.weight`, `mtp.*`), each in its stored dtype;
    digest: sha256 of `config.json` and of the tensor files, in the order of their names;
    block_digest: the same of the block drafter, whose tensors are `block.*`; empty: none was opened.
    """

    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]
    digest: str
    block_digest: str = ""

    @classmethod
    def open(cls, directory: Path | str, mode: str = "") -> Checkpoint:
        """Read a directory; any fault in it is a `BadInput` that names the tensor or the field.

        mode: how drafts are made; with "block" the block drafter in its folder is read too
        """
        disk = OnDisk.open(directory)
        opened = cls(disk.config, MappingProxyType(disk.read(disk.stored)), disk.digest())
        return opened._with_block(Path(directory) / FOLDER) if mode == BLOCK else opened

    def _with_block(self, directory: Path) -> Checkpoint:
        """Add the block drafter of this directory."""
        target, file = self.config, directory / "config.json"
        block = BlockDrafter.read(file, target.vocab, target.hidden, len(target.layers))
        config, files = replace(target, block=block), _files(directory)
        stored = {PREFIX + name: where for name, where in _stored(files).items()}
        _must_fit(block_shapes(config).items(), stored)
        tensors = MappingProxyType({**self.tensors, **_load(stored)})
        return Checkpoint(config, tensors, self.digest, _digest((file, *files)))


@dataclass(frozen=True)
class OnDisk:
    """A checkpoint that may be larger than memory: names and shapes are verified; a tensor is read on demand.

    files: `config.json` and the tensor files;  stored: text-model name -> the place of the tensor
    """

    config: ModelConfig
    files: tuple[Path, ...]
    stored: Mapping[str, _Stored]

    @classmethod
    def open(cls, directory: Path | str) -> OnDisk:
        """Read the headers of the tensor files; no tensor is read."""
        directory = Path(directory)
        if not directory.is_dir():
            raise BadInput(str(directory), found="no such directory", expected="a model directory")
        data = read_json(directory / "config.json")
        config = ModelConfig.from_dict(data)
        files = _files(directory)
        stored = _stored(files, config)
        if not states_mtp_layers(data):
            config = replace(config, mtp_layers=_count_mtp_layers(stored))
        _verify(config, stored)
        return cls(config, (directory / "config.json", *files), MappingProxyType(stored))

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read these tensors, in their stored dtypes. All must be finite numbers."""
        return _load({name: self.stored[name] for name in names})

    def rows(self, name: str, spans: Iterable[slice]) -> Iterator[torch.Tensor]:
        """Read these spans of rows of one tensor, one after another, and nothing else of it."""
        where = self.stored[name]
        with _whole(where.file) as opened:
            whole = opened.get_slice(where.name)
            for span in spans:
                part: torch.Tensor = whole[span]
                _usable(name, part)
                yield part

    def digest(self) -> str:
        """Compute `Checkpoint.digest`, which reads every byte of the files."""
        return _digest(self.files)


@dataclass(frozen=True)
class _Stored:
    """The place of a tensor: its file, its name there, its shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


def _files(directory: Path) -> list[Path]:
    """List the tensor files of a directory: one, or those that the index names."""
    if (directory / INDEX).exists() and (directory / SINGLE).exists():
        raise BadInput(str(directory), found=f"both {SINGLE} and {INDEX}", expected="one of them: they may differ")
    if (directory / INDEX).exists():
        return _indexed(directory)
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    pickles = [path.name for pattern in PICKLES for path in directory.glob(pattern)]
    found = f"a pickle ({pickles[0]})" if pickles else "neither"
    hint = "convert it: pickles are never opened" if pickles else ""
    raise BadInput(str(directory), found=found, expected=f"{SINGLE} or {INDEX}", hint=hint)


def _indexed(directory: Path) -> list[Path]:
    shards = read_json(directory / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise BadInput(f"{INDEX}: weight_map", found=type(shards).__name__, expected="tensor names to file names")
    files = []
    for name in sorted(set(shards.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise BadInput(f"{INDEX}: weight_map", found=name, expected="a safetensors file of the same directory")
        if not (directory / name).is_file():
            raise BadInput(str(directory / name), found="no such file", expected=f"a file, as {INDEX} says")
        files.append(directory / name)
    return files


def _stored(files: Iterable[Path], config: ModelConfig | None = None) -> dict[str, _Stored]:
    """Map text-model names to the places of their tensors. Visual weights are skipped."""
    stored: dict[str, _Stored] = {}
    for file in files:
        with _whole(file) as opened:
            names = list(opened.keys())
            found = [(name, tuple(opened.get_slice(name).get_shape())) for name in names]
        for name, shape in found:
            own = ours(config, _text_name(name))
            if VISUAL.match(own) or own.endswith(DERIVED):
                continue
            if own in stored:
                raise BadInput(own, found=f"twice, as {stored[own].name} and {name}", expected="once")
            stored[own] = _Stored(file, name, shape)
    return stored


@contextmanager
def _whole(file: Path) -> Iterator[Any]:
    """Open the file; any fault in it is bad input."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        found = "a folder" if file.is_dir() else error
        raise BadInput(str(file), found=found, expected="a whole safetensors file") from None


def _text_name(name: str) -> str:
    """Turn the multimodal spellings `model.language_model.x` and `language_model.model.x` into `model.x`.

    Also the names of Nemotron-H: `backbone.x`, `embeddings`, `norm_f`.
    """
    name = re.sub(r"^(model\.language_model|backbone)\.", "model.", name)
    name = re.sub(r"^model\.embeddings\.", "model.embed_tokens.", re.sub(r"^model\.norm_f\.", "model.norm.", name))
    return re.sub(r"^language_model\.(model|lm_head)\.", r"\1.", name)


def _count_mtp_layers(names: Iterable[str]) -> int:
    """Count the different layer numbers of the `mtp.layers.*` tensors.

    If a number is missing, `_verify` reports that layer as missing, and the layer after the last one as unexpected.
    """
    return len({found[1] for name in names if (found := MTP_LAYER.match(name))})


def _verify(config: ModelConfig, stored: Mapping[str, _Stored]) -> None:
    _must_fit(each_shape(config, stored), stored, config)


def _must_fit(
    shapes: Iterable[tuple[str, tuple[int, ...]]], stored: Mapping[str, _Stored], config: ModelConfig | None = None
) -> None:
    expected = set()
    for name, shape in shapes:  # ends at the first missing one, however many are expected
        expected.add(name)
        if name not in stored:
            hint = "without a draft head, config.json must say so: mtp_num_hidden_layers 0" if MTP.match(name) else ""
            spelled = released(config, name)
            raise BadInput(f"tensor {spelled}", found="nothing", expected=f"shape {list(shape)}", hint=hint)
        if stored[name].shape != shape:
            found = f"shape {list(stored[name].shape)}"
            raise BadInput(f"tensor {stored[name].name}", found=found, expected=f"shape {list(shape)}")
    for name in stored:
        if name not in expected:
            found = f"shape {list(stored[name].shape)}"
            raise BadInput(f"tensor {name}", found=found, expected="no such tensor in this configuration")


def _load(stored: Mapping[str, _Stored]) -> dict[str, torch.Tensor]:
    """Load these tensors. Each file is opened once, because opening it reads its whole header."""
    tensors: dict[str, torch.Tensor] = {}
    for file, held in groupby(stored.items(), key=lambda item: item[1].file):
        with _whole(file) as opened:
            tensors |= {name: opened.get_tensor(where.name) for name, where in held}
    for name, tensor in tensors.items():
        _usable(name, tensor)
    return tensors


def _usable(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise BadInput(f"tensor {name}", found=tensor.dtype, expected="float32, bfloat16, float16 or float64")
    # The extremes show a NaN, too, and need no copy as large as the tensor.
    if tensor.numel() and not all(math.isfinite(float(end)) for end in tensor.aminmax()):
        raise BadInput(f"tensor {name}", found="NaN or infinite values", expected="finite values only")


def _digest(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(HASHED_AT_ONCE):
                total.update(block)
    return total.hexdigest()
